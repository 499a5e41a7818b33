"""A comparison of two runs as text for a terminal, a mail or a log."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from regrepro.judge.names import name_of
from regrepro.views import words

_HEADLINES = {
    0: "The same as before, or better.",
    10: "Worse than before.",
    125: "It cannot be told.",
}
_MARKS = {"better": "better", "worse": "WORSE", "same": "same", "cannot-tell": "cannot tell"}


def show(comparison: Mapping[str, Any], file: TextIO, width: int | None = None) -> None:
    """Write a comparison (`Comparison.as_json()`): the answer, the changed facts, then each scenario."""
    for line in lines(comparison, width or min(shutil.get_terminal_size((100, 24)).columns, 110)):
        print(line, file=file)


def lines(comparison: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield the lines of `show`."""
    yield _HEADLINES.get(comparison["exit_code"], "It cannot be told.")
    yield ""
    facts = comparison["facts"]
    yield "What differs between the two:" if facts else "No recorded fact differs between the two."
    for fact in facts:
        yield from _wrapped(
            f"{fact['fact']}: {words.fact(fact['before'])} → {words.fact(fact['after'])}", width, "  "
        )
    yield ""
    names = [name_of(change) for change in comparison["changes"]]
    if not names:
        yield "No scenario ran in either."
    size = max((len(name) for name in names), default=0)
    for name, change in zip(names, comparison["changes"], strict=True):
        verdicts = f"{_verdict(change['before'])} → {_verdict(change['after'])}"
        yield f"{name:<{size}}  {_MARKS[change['direction']]:<11}  {verdicts}"
        yield from _wrapped(change["reason"], width, "    ")
    for problem in comparison["problems"]:
        yield from _wrapped(f"Note: {problem}", width, "")


def _verdict(side: Mapping[str, Any] | None) -> str:
    if side is None:
        return "not run"
    detail = side.get("basis") or side.get("layer")
    text = (
        f"{side['verdict']} ({detail})"
        if detail and side["verdict"] != "reproduced"
        else str(side["verdict"])
    )
    return f"{text} by {side['pin_owner']}" if side.get("pin_owner") not in (None, "none") else text


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ") or [indent]
