"""Reads `record.jsonl`, those of older schemas, too: what is above the reader knows the present one alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro import __version__
from regrepro.errors import UsageError
from regrepro.foreign import visible_value
from regrepro.record.events import SCHEMA
from regrepro.record.writer import FILE_NAME

_SCHEMA_1 = "regrepro.record/1"
VALUES_LIMIT = 5_000_000  # of a record: in memory each takes some 70 bytes
_FAILURE = re.compile(r"failure-\d+")


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
    keys and event types that are not known are kept. Texts are made `visible`. Raises `UsageError` for what
    is no record or has another schema.
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
    if header["schema"] not in (SCHEMA, _SCHEMA_1):
        raise UsageError(
            f"{file} has schema {header['schema']!r}",
            why=f"this version of regrepro ({__version__}) reads {SCHEMA}",
            hint=f"it was written by regrepro {header.get('version', 'of unknown version')}: use that one",
        )
    events: list[dict[str, Any]] = []
    values = 0
    expected = 1
    for number, line in enumerate(lines[1:], start=2):
        values += sum(line.count(sign) for sign in b"[{,")
        if values > VALUES_LIMIT:
            raise UsageError(
                f"{file} is not read",
                why=f"it holds more than {VALUES_LIMIT} values, far more than a run makes",
            )
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
    if header["schema"] == _SCHEMA_1:
        upgrade(header, events)
    _resolve(events, problems)
    if cut:
        problems.append(f"the last line (line {len(lines) + 1}) is cut and was left out")
    if not any(event["event"] == "run-end" for event in events):
        problems.append("the record ends without run-end: the run was killed or is still going on")
    return Record(header, events, problems)


def upgrade(header: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """Make a record of schema 1 one of the present schema: `variant` named the failures of `watch`, too."""
    header["schema"] = SCHEMA
    for event in events:
        name = event.get("variant")
        if event.get("scenario") == "watch" and isinstance(name, str) and _FAILURE.fullmatch(name):
            event["variant"], event["failure"] = "default", name


def part_of(item: Mapping[str, Any]) -> str:
    """Return which part of a scenario an event or a verdict is of: the failure that `watch` caught, else the
    scenario's variant.
    """
    return str(item.get("failure") or item.get("variant") or "default")


def key_of(item: Mapping[str, Any]) -> tuple[str, str]:
    """Return scenario and part: what tells a verdict and the events of its passes from others of the run."""
    return str(item.get("scenario")), part_of(item)


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
        # What a text may hide is written as an escape, or in bytes that are no ASCII, or is DEL.
        if b"\\" in line or b"\x7f" in line or not line.isascii():
            value = visible_value(value)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
