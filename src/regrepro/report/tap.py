"""Verdicts in the Test Anything Protocol, version 13."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regrepro.judge.names import name_of
from regrepro.views import words


def render(verdicts: Mapping[str, Any], *, expect_declared: bool = False) -> str:
    """Return the verdicts as TAP: `not ok` where the bug or another failure was seen.

    What is undecided is a skip with its reason. A run in which nothing was decided, or that did not reach its
    end, bails out: a consumer must not take it for a success. With `expect_declared`, `ok` is what the
    scenario file declares.
    """
    return "\n".join(_lines(verdicts, expect_declared)) + "\n"


def _lines(verdicts: Mapping[str, Any], expect_declared: bool) -> Iterator[str]:
    items = words.mappings_of(verdicts.get("verdicts"))
    yield "TAP version 13"
    yield f"1..{len(items)}"
    for problem in words.list_of(verdicts.get("problems")):
        yield f"# {_line(problem)}"
    skipped = 0
    for number, item in enumerate(items, start=1):
        passed = _passed(item, expect_declared)
        skipped += passed is None
        skip = f" # SKIP {_line(item.get('reason'))}" if passed is None else ""
        yield f"{'not ok' if passed is False else 'ok'} {number} - {_name(name_of(item))}{skip}"
        yield from _details(item)
    if skipped and skipped == len(items):
        yield "Bail out! nothing was decided"
    elif not items:
        yield "Bail out! the record holds no scenario"
    elif verdicts.get("complete") is False:
        yield "Bail out! the run did not reach its end"


def _passed(item: Mapping[str, Any], expect_declared: bool) -> bool | None:
    verdict = item.get("verdict")
    if expect_declared:
        declared = item.get("as_declared")
        return declared if isinstance(declared, bool) else False if verdict == "error" else None
    if verdict == "unmet":
        return None
    return verdict == "not-reproduced"


def _details(item: Mapping[str, Any]) -> Sequence[str]:
    """The YAML block; JSON strings are YAML, so nothing in a reason can break it."""
    lines = ["  ---"]
    for key in (
        "verdict",
        "reason",
        "pin_owner",
        "driver",
        "basis",
        "errno",
        "layer",
        "declared",
        "as_declared",
    ):
        if key in item:
            lines.append(f"  {key}: {json.dumps(item[key], ensure_ascii=False)}")
    missing = [
        {key: entry.get(key) for key in ("need", "why", "how")}
        for entry in words.mappings_of(item.get("unmet"))
    ]
    if missing:
        lines.append(f"  unmet: {json.dumps(missing, ensure_ascii=False)}")
    return [*lines, "  ..."]


def _name(text: str) -> str:
    return _line(text).replace("#", "\\#")


def _line(text: object) -> str:
    return " ".join(str(text or "").split())
