"""Writes `record.jsonl`: a header and one event a line. The format is described in docs/record.md.

`RecordWriter` is made before the scenario children are forked and used by parent and children alike. A line
is one `write(2)` on an `O_APPEND` descriptor. The sequence number lives in memory that all of them share,
behind a POSIX record lock, which the kernel gives up when its holder dies; what a killed writer left half
done is put right by the next one. So a record has no gap, no number twice and no partial line, whoever was
killed when.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno as errno_numbers
import fcntl
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from regrepro import __version__
from regrepro.errors import EnvironmentProblem, RegreproError, UsageError
from regrepro.record.events import EVENTS, SCHEMA

FILE_NAME = "record.jsonl"

# The memory that all writers share, as 64-bit cells: a state, and two pairs of last sequence number and
# length of the file in bytes. The state names the pair that holds (0 or 1) and has _WRITING set while a line
# is written. A writer can be killed between any two stores, so the new numbers go into the other pair and one
# store of the state makes them hold. Each cell is stored whole: struct.pack_into would not, it clears first.
_STATE = 0
_WRITING = 2


def _pair(state: int) -> int:
    """Index of the cell of the sequence number that holds; the file's length is in the next one."""
    return 1 + 2 * (state & 1)


STRICT = "REGREPRO_STRICT_RECORD"
"""The environment variable with which an event that is not as declared raises `UndeclaredError`."""

# Keys that each event may have; None: any.
_KEYS: dict[str, frozenset[str] | None] = {
    name: None if cls.OPEN else frozenset(item.name for item in fields(cls)) - {"seq", "t"}
    for name, cls in EVENTS.items()
}


class UndeclaredError(TypeError):
    """An event, or keys of one, that `record.events` does not declare: an error of whoever writes it."""


class RecordProblem(EnvironmentProblem):
    """The record cannot be written (disk full, quota, I/O error). What was written before stays whole."""


@dataclass(frozen=True)
class Encoded:
    """JSON text made before; goes into a line as it is. For large values that many events share."""

    text: str


def _plain(value: Any) -> Any:
    """Turn what json does not know into what it does: numpy scalars and arrays, paths, sets, bytes."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    raise TypeError(f"a record cannot hold a {type(value).__name__}: {value!r}")


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_plain, allow_nan=False)


def encode(value: Any) -> str:
    """Return the JSON text of a value as the record writes it."""
    return value.text if isinstance(value, Encoded) else _ENCODER.encode(value)


def encoded(value: Any) -> Encoded:
    """Encode a value once, for use in several events."""
    return Encoded(encode(value))


class RecordWriter:
    """Writes a new record. Raises `UsageError` where one lies already, `RecordProblem` where it cannot be
    written.

    `header` holds `run`, `node`, `lab` and `stand_ins`; schema, version and start time are added here.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._monotonic_start = time.monotonic()
        started = datetime.now(timezone.utc).astimezone().isoformat(timespec="milliseconds")
        line = encode({"schema": SCHEMA, "version": __version__, "started": started, **header}) + "\n"
        try:
            # O_RDWR and not O_WRONLY: putting right what a killed writer left needs to read it.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o644)
        except FileExistsError:
            raise UsageError(
                f"{self.path} exists already", hint="give --out a directory that holds no run"
            ) from None
        except OSError as error:
            raise self._cannot_write(error) from None
        # The lock lies on a memory file: a lock on the record itself would travel over 9p or NFS.
        self._lock_fd = os.memfd_create("regrepro-record", os.MFD_CLOEXEC)
        os.ftruncate(self._lock_fd, mmap.PAGESIZE)
        self._shared = mmap.mmap(self._lock_fd, mmap.PAGESIZE)
        self._cells = memoryview(self._shared).cast("Q")
        self._thread_lock = threading.RLock()
        try:
            self._write_line(line.encode("ascii"), size=0)
        except RegreproError:
            os.close(self._fd)
            self.path.unlink(missing_ok=True)
            raise
        self._now_holds(0, len(line))

    def event(self, event: str, /, **keys: Any) -> int:
        """Append one event and return its `seq`. Raises `RecordProblem`; the record is whole then, too.

        What `record.events` does not declare raises `UndeclaredError` where the environment has `STRICT`, as
        tests do. Elsewhere it is written all the same, and `undeclared` names it: a node's record is worth
        more than its form.
        """
        allowed = _KEYS.get(event, frozenset())
        if event not in _KEYS or (allowed is not None and not keys.keys() <= allowed):
            unknown = sorted(keys.keys() - (allowed or ())) if event in _KEYS else [event]
            if os.environ.get(STRICT):
                raise UndeclaredError(f"{event}: {', '.join(unknown)} is not declared in record/events.py")
            keys["undeclared"] = unknown
        # Encode outside the lock; only `seq` and `t` must be taken within.
        tail = "".join(f",{_ENCODER.encode(key)}:{encode(value)}" for key, value in keys.items())
        with self._locked():
            cells = self._cells
            if cells[_STATE] & _WRITING:
                self._put_right()
            state = cells[_STATE]
            seq, size = cells[_pair(state)] + 1, cells[_pair(state) + 1]
            t = round(time.monotonic() - self._monotonic_start, 6)
            line = f'{{"seq":{seq},"t":{t!r},"event":{_ENCODER.encode(event)}{tail}}}\n'.encode("ascii")
            cells[_STATE] = state | _WRITING
            try:
                self._write_line(line, size)
            except RegreproError:
                cells[_STATE] = state
                raise
            self._now_holds(seq, size + len(line))
            return seq

    @contextlib.contextmanager
    def handle(self) -> Iterator[tuple[int, int, int, int]]:
        """Lend the record to C code that writes lines as `event` does (csrc/series.c).

        Yields descriptor, descriptor of the lock, address of the shared memory and the monotonic clock in ns
        at `t` 0. Other threads of this process wait meanwhile.
        """
        with self._thread_lock:
            shared = ctypes.c_char.from_buffer(self._shared)
            try:
                start = round(self._monotonic_start * 1e9)
                yield self._fd, self._lock_fd, ctypes.addressof(shared), start
            finally:
                del shared  # or the map could not be closed

    def refused(self, number: int) -> RecordProblem:
        """Return what to raise where C code could not write a line, with its errno."""
        return self._cannot_write(OSError(number, os.strerror(number)))

    def close(self) -> None:
        """Close this process' descriptors. Other processes' stay usable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._cells.release()
            self._shared.close()
            os.close(self._lock_fd)
            self._fd = -1

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # A POSIX lock excludes processes, not threads of one process: hence the second one.
        with self._thread_lock:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_UN)

    def _now_holds(self, seq: int, size: int) -> None:
        other = ~self._cells[_STATE] & 1
        self._cells[_pair(other)] = seq
        self._cells[_pair(other) + 1] = size
        self._cells[_STATE] = other

    def _put_right(self) -> None:
        """A writer was killed between taking a number and noting that its line lies there: find out."""
        pair = _pair(self._cells[_STATE])
        seq, size = self._cells[pair], self._cells[pair + 1]
        actual = os.fstat(self._fd).st_size
        written = os.pread(self._fd, actual - size, size) if actual > size else b""
        whole = written.rfind(b"\n") + 1
        if size + whole != actual:
            os.ftruncate(self._fd, size + whole)
        self._now_holds(seq + written.count(b"\n"), size + whole)

    def _write_line(self, line: bytes, size: int) -> None:
        """Write a line whole or not at all; `size` is the file's length before it."""
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                # A short write to a regular file: the disk took a part. A second try gives the reason.
                try:
                    written += os.write(self._fd, line[written:])
                finally:
                    if written != len(line):
                        os.ftruncate(self._fd, size)
                if written != len(line):
                    raise OSError(errno_numbers.ENOSPC, os.strerror(errno_numbers.ENOSPC))
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> RecordProblem:
        hint = "what was recorded before is whole"
        if error.errno in (errno_numbers.ENOSPC, errno_numbers.EDQUOT):
            hint = "make room or give --out another place; " + hint
        elif error.errno in (errno_numbers.EACCES, errno_numbers.EROFS, errno_numbers.ENOENT):
            hint = "give --out a directory that can be written"
        return RecordProblem(f"cannot write {self.path}", why=error.strerror or str(error), hint=hint)
