"""Writes run directories of records that tests build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regrepro import judge


def write(directory: Path, record: Any, *, verdicts: bool = True) -> Path:
    """Write a run directory as `run` does."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [record.header, *record.events]
    (directory / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if verdicts:
        (directory / "verdicts.json").write_text(json.dumps(judge.judge_record(record)))
    return directory
