"""What a run tells of its progress while it goes on."""

from __future__ import annotations

import contextlib
import sys
from typing import Protocol, TextIO

from regrepro.foreign import visible


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
    """One line for each thing that happens; for terminals, logs and the lab's console alike.

    A pass' line begins when the pass does, so that a hang shows where it is, and ends with its outcome.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file if file is not None else sys.stderr
        self._open = False

    def _write(self, text: str) -> None:
        # Nobody reading the progress any more is no reason to end the run.
        with contextlib.suppress(OSError, ValueError):
            self._file.write(visible(text, "\n"))
            self._file.flush()

    def say(self, text: str) -> None:
        self._write(f"\n{text}\n" if self._open else f"{text}\n")
        self._open = False

    def scenario(self, name: str, control: str | None, number: int, total: int) -> None:
        what = f"{name}, control {control}" if control else name
        self._write(f"[{number}/{total}] {what} … ")
        self._open = True

    def scenario_ended(self, name: str, control: str | None, outcome: str, seconds: float) -> None:
        end = f"{outcome} ({seconds:.1f} s)\n"
        what = f"{name}, control {control}" if control else name
        self._write(end if self._open else f"{what}: {end}")
        self._open = False
