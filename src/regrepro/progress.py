"""What a run tells of its progress while it goes on."""

from __future__ import annotations

import contextlib
import sys
from typing import Protocol, TextIO


class Progress(Protocol):
    """Receives what happens. Each method gets a sentence or names, never a record."""

    def say(self, text: str) -> None:
        """Something that a waiting person wants to know."""

    def scenario(self, name: str, control: str | None, number: int, total: int) -> None:
        """Pass `number` of `total` begins."""

    def scenario_ended(self, name: str, control: str | None, outcome: str, seconds: float) -> None:
        """The pass ended with the outcome of the record's scenario-end."""


class Silent:
    """Tells nothing."""

    def say(self, text: str) -> None: ...

    def scenario(self, name: str, control: str | None, number: int, total: int) -> None: ...

    def scenario_ended(self, name: str, control: str | None, outcome: str, seconds: float) -> None: ...


class Lines:
    """One line for each thing that happens; for terminals, logs and the lab's console alike."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file if file is not None else sys.stderr

    def _line(self, text: str) -> None:
        # Nobody reading the progress any more is no reason to end the run.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._file, flush=True)

    def say(self, text: str) -> None:
        self._line(text)

    def scenario(self, name: str, control: str | None, number: int, total: int) -> None:
        what = f"control {control} of {name}" if control else name
        self._line(f"[{number}/{total}] {what} …")

    def scenario_ended(self, name: str, control: str | None, outcome: str, seconds: float) -> None:
        what = f"control {control} of {name}" if control else name
        self._line(f"      {what}: {outcome} after {seconds:.1f} s")
