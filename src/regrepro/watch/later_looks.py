"""Failures whose frames are looked at again for half a minute: does what holds them outlast I/O?

Nothing is done to the process, and little is kept: how many wait, and of how many pages, has a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from regrepro.watch import evidence as look
from regrepro.watch.evidence import LOOKS, Evidence
from regrepro.watch.failed_registration import FailedRegistration

KEPT, KEPT_PAGES = 64, 131_072
ONES_SHARE = 0.75  # of these, that one user or container may take
EVENT = "look"


@dataclass
class CaughtFailure:
    """A failure that was recorded as `name`, and what later looks saw (the keys of their events)."""

    failure: FailedRegistration
    evidence: Evidence
    trace: dict[str, Any]
    name: str
    looks: list[dict[str, Any]] = field(default_factory=list)
    looked: float = float("-inf")  # when that was last (time.monotonic())

    @property
    def due(self) -> float:
        """When it is to be looked at next (time.monotonic()): late after a look that was late, so that they
        stay apart.
        """
        done = len(self.looks)
        if not done:
            return self.failure.since + LOOKS[0]
        return max(self.failure.since + LOOKS[done], self.looked + LOOKS[done] - LOOKS[done - 1])

    @property
    def pages(self) -> int:
        """Pages that are kept of it."""
        return sum(state.pages for state in (self.evidence.pages, self.evidence.again) if state is not None)

    def add(self, seen: dict[str, Any]) -> None:
        """Keep what a look saw."""
        self.looks.append(self.event(seen)[1])
        self.looked = self.failure.since + (seen["after_seconds"] or 0.0)

    def event(self, seen: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the event of a look."""
        return EVENT, {**look.labels(self.name), "registration": 1, **seen}

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of its whole pass."""
        yield from look.record_events(self.evidence, self.trace, self.name)
        for keys in self.looks:
            yield EVENT, keys


class LaterLooks:
    """Those that wait for their next look."""

    def __init__(self) -> None:
        self.waiting: list[CaughtFailure] = []
        self.left_out = 0

    def take(self, item: CaughtFailure) -> str:
        """Keep a failure for later looks; return why not, where there are too many."""
        own = [one for one in self.waiting if one.failure.owner == item.failure.owner]
        for others, share in ((self.waiting, 1.0), (own, ONES_SHARE)):
            pages = sum(one.pages for one in others) + item.pages
            if len(others) >= KEPT * share or (others and pages > KEPT_PAGES * share):
                self.left_out += 1
                return f"{len(others)} other failures were being looked at again"
        self.waiting.append(item)
        return ""

    def due(self, now: float) -> list[CaughtFailure]:
        """Return those whose next look is due."""
        return [item for item in self.waiting if now >= item.due]

    @property
    def next_due(self) -> float | None:
        """When the next look is due, None where none is."""
        return min((item.due for item in self.waiting), default=None)


def no_look(ended: str) -> dict[str, Any]:
    """Return the keys of a look that there was not, with the reason."""
    return {
        "after_seconds": None,
        "address": None,
        "length": None,
        "pages": None,
        "lists": None,
        "ended": ended,
        "pins": None,
    }
