"""Judges a record as tests of the judge do."""

from __future__ import annotations

import json
from typing import Any

from record_builder import Record, find

from regrepro.judge import judge_record


def judged(record: Record, index: int = 0) -> dict[str, Any]:
    """The verdict of a record's scenario, as it would be read back from verdicts.json."""
    verdicts = json.loads(json.dumps(judge_record(record)))
    return dict(verdicts["verdicts"][index])


def register(record: Record, number: int = 0) -> dict[str, Any]:
    return find(record, "register", number)
