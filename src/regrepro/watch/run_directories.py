"""Where watch writes: run directories like those of `run`, each of a bounded size, all within a quota.

    DIR/20261130-101500-host/record.jsonl, verdicts.json

A directory is complete once the next one has begun. Whoever moves or removes a record makes watch begin a new
one; nothing is written into a file that has been moved away for longer than one failure.
"""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from regrepro.errors import EnvironmentProblem
from regrepro.record import FILE_NAME, RecordProblem, RecordWriter

MARKER = ".watch"  # in a run directory: it is watch's, and the quota's
_OLD_MARKERS = ("program.bt",)  # of watches before the marker
_RUN = re.compile(r"^\d{8}-\d{6}-[A-Za-z0-9._-]+?(-\d+)?$")


class RunDirectories:
    """The run directory that is written to now.

    `header` makes a record's header; `made_header` is that of the present one. Raises EnvironmentProblem
    where the directory cannot be made or written.
    """

    def __init__(
        self,
        directory: Path,
        header: Callable[[], Mapping[str, Any]],
        *,
        rotate: int,
        quota: int,
        keep_seconds: float = 86400.0,
    ) -> None:
        self.directory = directory
        self._header = header
        self.made_header: Mapping[str, Any] = {}
        self._rotate = rotate
        self._quota = quota
        self._keep_seconds = keep_seconds
        self.path = directory
        self._writer: RecordWriter | None = None
        self._began = 0.0
        self.written = 0  # failures in the present record
        self.removed = 0  # directories that gave way to the quota
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end: Callable[[Path], None] = lambda _path: None
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot make {directory}", why=error.strerror or str(error), hint="give --out another place"
            ) from None

    def begin(self) -> None:
        """Begin a new run directory; the one before is completed."""
        self.end()
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "host"
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{host}"
        number = 1
        while True:
            self.path = self.directory / (name if number == 1 else f"{name}-{number}")
            try:
                self.path.mkdir()
                break
            except FileExistsError:
                number += 1
            except OSError as error:
                raise EnvironmentProblem(
                    f"cannot make {self.path}", why=error.strerror or str(error)
                ) from None
        with suppress(OSError):
            (self.path / MARKER).touch()
        self.made_header = self._header()
        self._writer = RecordWriter(self.path / FILE_NAME, self.made_header)
        self._began = time.monotonic()
        self.written = 0
        self.on_begin()
        self.keep_quota()

    def event(self, event: str, /, **keys: Any) -> int:
        """Write one event. Raises RecordProblem."""
        if self._writer is None:
            self.begin()
        assert self._writer is not None
        return self._writer.event(event, **keys)

    def end(self, outcome: str = "finished") -> None:
        """Complete the present run directory."""
        if self._writer is None:
            return
        with suppress(RecordProblem):
            self._writer.event("run-end", outcome=outcome)
        self._writer.close()
        self._writer = None
        self.on_end(self.path)

    @property
    def size(self) -> int:
        """Bytes of the present record; -1 where it was moved or removed."""
        try:
            return (self.path / FILE_NAME).stat().st_size
        except OSError:
            return -1

    def due(self) -> bool:
        """Whether a new run directory is due: this one is full, a day old, or was moved away."""
        if self._writer is None:
            return False
        size = self.size
        full = size >= self._rotate or (
            self.written > 0 and time.monotonic() - self._began > self._keep_seconds
        )
        return size < 0 or full

    def used(self) -> int:
        """Bytes of all run directories here."""
        return sum(_bytes_of(path) for path in self._runs())

    def keep_quota(self) -> list[Path]:
        """Remove the oldest run directories while all together exceed the quota; never the present one."""
        sizes = {path: _bytes_of(path) for path in self._runs()}
        total, removed = sum(sizes.values()), []
        for path in sorted(sizes, key=_age):
            if total <= self._quota:
                break
            if path == self.path:
                continue
            with suppress(OSError):
                shutil.rmtree(path)
                total -= sizes[path]
                removed.append(path)
        self.removed += len(removed)
        return removed

    def room(self) -> bool:
        """Whether another failure may be written within the quota."""
        return self.used() < self._quota

    def _runs(self) -> list[Path]:
        """Run directories of watch; nothing else here is ours."""
        try:
            entries = list(self.directory.iterdir())
        except OSError:
            return []
        return [
            path
            for path in entries
            if _RUN.match(path.name)
            and not path.is_symlink()
            and any((path / name).exists() for name in (MARKER, *_OLD_MARKERS))
        ]


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _bytes_of(path: Path) -> int:
    total = 0
    with suppress(OSError):
        for item in path.iterdir():
            with suppress(OSError):
                total += item.lstat().st_size
    return total
