"""The record: `record.jsonl`, a header and one event a line. The format is described in docs/record.md.

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
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from regrepro import __version__
from regrepro.errors import EnvironmentProblem, RegreproError, UsageError

SCHEMA = "regrepro.record/1"
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
        """Append one event and return its `seq`. Raises `RecordProblem`; the record is whole then, too."""
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


@dataclass
class Record:
    """A record as read: `header`, `events` in the order of the file, `problems` (sentences)."""

    header: dict[str, Any]
    events: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)

    def of(self, *types: str) -> Iterator[dict[str, Any]]:
        """Yield the events of the given types."""
        return (event for event in self.events if event.get("event") in types)


def record_path(path: str | os.PathLike[str]) -> Path:
    """Return the record of a run directory, or the file itself. Raises `UsageError` where there is none."""
    given = Path(path)
    try:
        file = given / FILE_NAME if given.is_dir() else given
        if file.is_file():
            return file
        exists = given.exists()
    except OSError as error:
        raise UsageError(f"cannot read {given}", why=error.strerror or str(error)) from None
    if exists:
        raise UsageError(
            f"{given} holds no {FILE_NAME}", hint="name a run directory, as `regrepro run` makes them"
        )
    raise UsageError(f"{given} does not exist", hint="name a run directory, as `regrepro run` makes them")


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read a record: a run directory or the file itself.

    A cut last line (the writer was killed), a line that is no JSON and a gap in `seq` are told in `problems`;
    keys and event types that are not known are kept. Raises `UsageError` for what is no record or has another
    schema.
    """
    file = record_path(path)
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {file}", why=error.strerror or str(error)) from None
    problems: list[str] = []
    cut = lines.pop()  # what follows the last newline: nothing, in a whole record
    if not lines:
        why = "its first line is cut" if cut else "it is empty"
        raise UsageError(f"{file} is no record", why=why)
    header = _parse(lines[0])
    if header is None or "schema" not in header:
        raise UsageError(
            f"{file} is no record", why="its first line is no header", hint=f"expected schema {SCHEMA}"
        )
    if header["schema"] != SCHEMA:
        raise UsageError(
            f"{file} has schema {header['schema']!r}",
            why=f"this version of regrepro ({__version__}) reads {SCHEMA}",
            hint=f"it was written by regrepro {header.get('version', 'of unknown version')}: use that one",
        )
    events: list[dict[str, Any]] = []
    expected = 1
    for number, line in enumerate(lines[1:], start=2):
        event = _parse(line)
        if event is None or not isinstance(event.get("event"), str):
            problems.append(f"line {number} is no event and was left out")
            expected += 1
            continue
        seq = event.get("seq")
        if isinstance(seq, int) and not isinstance(seq, bool):
            if seq != expected:
                problems.append(f"line {number} has seq {seq} where {expected} was due: lines are missing")
            expected = seq + 1
        else:
            problems.append(f"line {number} has no seq")
        events.append(event)
    _resolve(events, problems)
    if cut:
        problems.append(f"the last line (line {len(lines) + 1}) is cut and was left out")
    if not any(event["event"] == "run-end" for event in events):
        problems.append("the record ends without run-end: the run was killed or is still going on")
    return Record(header, events, problems)


# The keys of events that hold page states.
_STATE_KEYS = ("pages", "before", "after")


def _resolve(events: list[dict[str, Any]], problems: list[str]) -> None:
    """Put page states in the place of references to them (`same_as`): a large one is written once."""
    whole: dict[tuple[Any, Any], dict[str, Any]] = {}
    for event in events:
        seq = event.get("seq")
        for key in _STATE_KEYS:
            state = event.get(key)
            if not isinstance(state, dict):
                continue
            place = state.get("same_as")
            if not isinstance(place, dict):
                if isinstance(seq, int):
                    whole[seq, key] = state
                continue
            found = whole.get((place.get("seq", seq), place.get("key", "")))
            if found is None:
                problems.append(f"seq {seq}: {key} refers to a page state that is not there")
                event[key] = None
                event.setdefault("pages_unknown", "the record refers to a page state that is not there")
            else:
                event[key] = found | {name: value for name, value in state.items() if name != "same_as"}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
