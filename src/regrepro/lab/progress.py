"""What `lab` tells while it works: a download, a boot, each scenario as the record grows."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from typing import Any, Protocol, TextIO

from regrepro import progress
from regrepro.options import format_size


class LabProgress(progress.Progress, Protocol):
    """A run's progress, and a download's."""

    def download(self, what: str, done: int, total: int) -> None:
        """Bytes so far, a few times a second; `done == total` at the end."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Silent(progress.Silent):
    """Tells nothing."""

    def download(self, what: str, done: int, total: int) -> None: ...

    def close(self) -> None: ...


class Lines(progress.Lines):
    """Plain lines; a download is told at its start, every ten seconds, and at its end."""

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file)
        self._told: dict[str, float] = {}

    def download(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total:
            if self._told.get(what) != float("inf"):
                self.say(f"{what}: {format_size(total)} downloaded")
            self._told[what] = float("inf")
        elif now - self._told.get(what, float("-inf")) >= 10:
            self._told[what] = now
            self.say(f"{what}: downloading, {100 * done // max(total, 1)} % of {format_size(total)}")

    def close(self) -> None: ...


class Terminal(Lines):
    """On a terminal: a bar for a download, then plain lines."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._bar: Any = None
        self._task: Any = None

    def download(self, what: str, done: int, total: int) -> None:
        from rich import progress as rich_progress
        from rich.console import Console

        if self._bar is None:
            self._bar = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}"),
                rich_progress.BarColumn(),
                rich_progress.DownloadColumn(),
                rich_progress.TransferSpeedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(what, total=total)
        self._bar.update(self._task, completed=done)
        if done >= total:
            self.close()

    def say(self, text: str) -> None:
        self.close()
        super().say(text)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.stop()
            self._bar = None


def choose(*, quiet: bool) -> LabProgress:
    """Return what fits: nothing, a terminal with rich, or plain lines."""
    if quiet:
        return Silent()
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return Terminal()
    return Lines()
