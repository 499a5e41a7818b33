"""The record: run directories with `record.jsonl`, each judged once it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from regrepro.errors import RegreproError
from regrepro.record import RecordProblem
from regrepro.watch.happenings import (
    Caught,
    Happening,
    Looked,
    Notice,
    RotationAsked,
    Stopped,
    Surroundings,
)
from regrepro.watch.later_looks import EVENT, CaughtFailure, no_look

_COMPLETED = "this record was completed before; the next one has this failure, too"


class RecordSink:
    """Writes events into the present run directory, and begins the next one when that is due.

    A failure whose frames are still looked at when a record is completed stands in the next one once more.
    Raises EnvironmentProblem where no run directory can be made.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._counts = surroundings.counts
        self._say = surroundings.say
        self._beginning = surroundings.beginning
        self._directories = surroundings.directories
        self._directories.on_begin = self._begin
        self._directories.on_end = _judge
        self._open: list[CaughtFailure] = []  # failures whose frames are looked at again
        self._directories.begin()

    def take(self, happening: Happening) -> None:
        """Write what belongs into a record."""
        if isinstance(happening, Notice):
            if not happening.what:
                return
            self._write([("watch", {"what": happening.what, **happening.keys})])
        elif isinstance(happening, Caught):
            before = self._directories.size
            if self._write(happening.item.events()):
                self._directories.written += 1
            self._counts.recorded_bytes += max(0, self._directories.size - before)
            if happening.waits:
                self._open.append(happening.item)
        elif isinstance(happening, Looked):
            self._write([(EVENT, happening.item.looks[-1])])
            if happening.last and happening.item in self._open:
                self._open.remove(happening.item)
        elif isinstance(happening, Stopped):
            self._directories.end(happening.outcome)
            return
        if isinstance(happening, RotationAsked) or self._directories.due():
            self._begin_next()

    def _begin_next(self) -> None:
        for item in self._open:
            self._write([item.event(no_look(_COMPLETED))])
        self._directories.begin()

    def _begin(self) -> None:
        self._write(self._beginning())
        for item in self._open:
            self._write(item.events())

    def _write(self, events: Iterable[tuple[str, Mapping[str, Any]]]) -> bool:
        """Write events into the record; return whether that could be done."""
        try:
            for kind, keys in events:
                self._directories.event(kind, **keys)
        except RecordProblem as problem:
            self._counts.record_problems += 1
            self._say(str(problem))
            return False
        return True


def _judge(path: Path) -> None:
    """Judge a record that is complete, so that its directory is like any other run's."""
    from regrepro import judge
    from regrepro.record import read_record

    with suppress(RegreproError, OSError):
        verdicts = judge.judge_record(read_record(path))
        (path / "verdicts.json").write_text(json.dumps(verdicts, indent=2) + "\n", encoding="utf-8")
