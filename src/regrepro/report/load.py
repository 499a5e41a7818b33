"""Open a run for a report: whatever is readable is kept, whatever is wrong with it is said."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro import judge
from regrepro.errors import UsageError
from regrepro.judge.names import name_of
from regrepro.record import SCHEMA, Record, read_record, record_path

VERDICTS_FILE = "verdicts.json"
KNOWN_VERDICTS = ("reproduced", "caught", "not-reproduced", "other-failure", "unmet", "error")


@dataclass
class Run:
    """A run directory as read. `problems` are sentences about what is wrong with its files."""

    directory: Path
    record: Record
    verdicts: dict[str, Any]
    problems: list[str] = field(default_factory=list)


def load(path: str | Path) -> Run:
    """Read the record of a run directory and judge it anew.

    A record that another version wrote cannot be judged; then the verdicts that lie beside it are shown, and
    that nobody has checked them. Raises `UsageError` where there is nothing to show.
    """
    file = record_path(path)
    directory = file.parent
    kept, kept_problems = _kept_verdicts(directory / VERDICTS_FILE)
    try:
        record = read_record(file)
    except UsageError as error:
        header = _header(file)
        if kept is None or header is None:
            raise
        problems = [str(error), "the verdicts below are those of verdicts.json and could not be judged again"]
        return Run(
            directory,
            Record(header, [], problems),
            {**kept, "complete": False, "problems": problems},
            kept_problems,
        )
    verdicts = judge.judge_record(record)
    return Run(directory, record, verdicts, kept_problems + _differences(kept, verdicts))


def _header(file: Path) -> dict[str, Any] | None:
    """Return the first line of a record of another schema, if it is a header at all."""
    try:
        with file.open("rb") as opened:
            value = json.loads(opened.readline(1 << 24))
    except (OSError, ValueError, RecursionError):
        return None
    good = isinstance(value, dict) and isinstance(value.get("schema"), str) and value["schema"] != SCHEMA
    return value if good else None


def _kept_verdicts(file: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the verdicts that a run directory holds, None where it holds none that can be read."""
    if not file.is_file():
        return None, []
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return None, [f"{file.name} cannot be read ({type(error).__name__}); the record was judged anew"]
    if not isinstance(value, dict) or value.get("schema") != judge.SCHEMA:
        found = value.get("schema") if isinstance(value, dict) else None
        return None, [
            f"{file.name} has schema {found!r}, this version reads {judge.SCHEMA}; the record was judged anew"
        ]
    items = value.get("verdicts")
    value["verdicts"] = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    unknown = sorted({str(item.get("verdict")) for item in value["verdicts"]} - set(KNOWN_VERDICTS))
    return value, [
        f"{file.name} holds the verdict {name!r}, which this version does not know" for name in unknown
    ]


def _differences(kept: dict[str, Any] | None, verdicts: dict[str, Any]) -> list[str]:
    """Say where the verdicts in the directory are not those that the record gives."""
    if kept is None:
        return []
    now = {name_of(item): item.get("verdict") for item in verdicts["verdicts"]}
    before = {name_of(item): item.get("verdict") for item in kept["verdicts"]}
    return [
        f"{VERDICTS_FILE} says {before.get(name) or 'nothing'} of {name}; judged again by this version it "
        f"is {now.get(name) or 'nothing'}, and this report shows that"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
