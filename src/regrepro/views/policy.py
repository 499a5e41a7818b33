"""What the page allocator did (scenario `placement_policy`): made of a record alone, drawn as text.

How much of the memory that was handed out is CMA, over how much of what was free was CMA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regrepro.record import key_of

STEP = "placement-policy"
BIN = 0.05


@dataclass(frozen=True)
class Point:
    """One chunk: the share of CMA in what was free before it, and in its pages."""

    phase: str
    free: float
    handed: float


def points(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Point]]:
    """Return the points of each scenario of a record (not of its controls) that measured."""
    found: dict[tuple[str, str], list[Point]] = {}
    for event in events:
        if event.get("event") != "step" or event.get("name") != STEP or event.get("control") is not None:
            continue
        numbers = [event.get(key) for key in ("free", "free_cma", "touched", "cma")]
        if not all(type(number) is int and number >= 0 for number in numbers):
            continue
        free, free_cma, touched, cma = (number for number in numbers if isinstance(number, int))
        if free and touched:
            key = key_of(event)
            point = Point(str(event.get("phase")), min(1.0, free_cma / free), min(1.0, cma / touched))
            found.setdefault(key, []).append(point)
    return found


def bins(found: Sequence[Point]) -> list[tuple[float, int, float]]:
    """Return (lower edge, points, mean share handed out) of each bin that has points."""
    made: dict[int, list[float]] = {}
    for point in found:
        made.setdefault(min(int(point.free / BIN), int(1 / BIN) - 1), []).append(point.handed)
    return [(number * BIN, len(its), sum(its) / len(its)) for number, its in sorted(made.items())]


def as_text(found: Sequence[Point], width: int = 76) -> list[str]:
    """Draw the bins as bars, at most `width` columns wide."""
    columns = max(10, width - 34)
    lines = ["CMA in free   chunks   CMA in what was handed out"]
    for edge, count, share in bins(found):
        bar = "#" * round(share * columns)
        lines.append(f"{edge:4.0%} to {edge + BIN:4.0%}  {count:6}   {share:4.0%} {bar}")
    return lines
