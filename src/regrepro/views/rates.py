"""How often registrations failed beside a checkpoint (scenario `checkpoint_fork`): the rates of a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regrepro.record import key_of

STEP = "checkpoint-rate"
HEAD = ("setting", "failed", "rate", "95 % interval", "rounds in unpinnable memory")


@dataclass(frozen=True)
class Rate:
    """One setting: rounds that failed of all, and the interval of that rate (0 to 1) as recorded."""

    setting: str
    failed: int
    rounds: int
    low: float
    high: float
    unpinnable: int | None

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The row of a table, under `HEAD`."""
        return (
            self.setting,
            f"{self.failed} of {self.rounds}",
            f"{self.failed / self.rounds:.0%}",
            f"{self.low:.1%} to {self.high:.1%}",
            "unknown" if self.unpinnable is None else str(self.unpinnable),
        )


def rates(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Rate]]:
    """Return the rates of each scenario of a record (not of its controls) that counted, in their order."""
    found: dict[tuple[str, str], list[Rate]] = {}
    for event in events:
        if event.get("event") != "step" or event.get("name") != STEP or event.get("control") is not None:
            continue
        failed, rounds, around = event.get("failed"), event.get("rounds"), event.get("interval_95")
        if not (type(failed) is int and type(rounds) is int and 0 <= failed <= rounds > 0):
            continue
        if not (isinstance(around, list) and len(around) == 2 and all(map(_is_share, around))):
            continue
        count = event.get("rounds_with_unpinnable_pages")
        unpinnable = count if type(count) is int else None
        key = key_of(event)
        low, high = around
        rate = Rate(str(event.get("setting")), failed, rounds, low, high, unpinnable)
        found.setdefault(key, []).append(rate)
    return found


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def as_text(found: Sequence[Rate], width: int = 76) -> list[str]:
    """Return the rates as a table of at most `width` columns; the bar shows the interval."""
    name = max(len(rate.setting) for rate in found)
    count = max(len(rate.cells[1]) for rate in found)
    lines = []
    for rate in found:
        _, failed, share, around, _ = rate.cells
        row = f"{rate.setting:<{name}}  {failed:>{count}}  {share:>4}  ({around})"
        lines.append(row)
    columns = width - max(map(len, lines)) - 4
    if columns < 10:
        return lines
    size = max(map(len, lines))
    return [f"{row:<{size}}  |{_bar(rate, columns)}|" for row, rate in zip(lines, found, strict=True)]


def _bar(rate: Rate, columns: int) -> str:
    """Draw 0 to 1 as so many columns: `-` the interval, `#` the rate."""
    last = columns - 1
    marks = [" "] * columns
    for column in range(round(rate.low * last), round(rate.high * last) + 1):
        marks[column] = "-"
    marks[round(rate.failed / rate.rounds * last)] = "#"
    return "".join(marks)
