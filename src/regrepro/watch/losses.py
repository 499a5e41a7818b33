"""What did not reach `watch`, and when: events that were lost, and hits of probes that the kernel missed."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from regrepro.watch.counts import WatchCounts
from regrepro.watch.happenings import Notice

_NEAR_SECONDS = 2.0
_SAID_SECONDS = 10.0
_MISSED_SECONDS = 1.0  # between two looks at what was missed


class Losing(Protocol):
    """An engine, as far as losses go. `missed()`: hits so far, None where the kernel does not say."""

    @property
    def lost(self) -> int:
        """Events that it lost so far."""

    def missed(self) -> int | None:
        """Return how many hits of its probes the kernel says it missed so far."""


class Lately:
    """What was counted between two looks, some time ago; `reach`: seconds around it that count, too."""

    def __init__(self, reach: float) -> None:
        self._reach = reach
        self._looked = time.monotonic()
        self._kept: deque[tuple[float, float, int]] = deque(maxlen=1000)  # from, to, how many

    def add(self, now: float, count: int) -> None:
        """Keep what was counted since the last look."""
        if count:
            self._kept.append((self._looked, now, count))
        self._looked = now

    def near(self, *moments: float) -> int:
        """Return how many were counted around any of these moments (time.monotonic())."""
        return sum(
            count
            for begin, end, count in self._kept
            if any(begin - self._reach < moment < end + self._reach for moment in moments)
        )


class Losses:
    """Looks at one engine after another. Each look returns what is to be told."""

    def __init__(self, counts: WatchCounts) -> None:
        self._counts = counts
        self._engine: Losing | None = None
        self._before = 0  # lost by engines that are gone
        self._lost_seen = 0
        self._lost = Lately(_NEAR_SECONDS)
        self._told, self._said = 0, float("-inf")  # how many were said to be lost, and when
        self._missed_seen: int | None = None
        self._missed = Lately(_NEAR_SECONDS)
        self._missed_due = 0.0

    def follow(self, engine: Losing | None) -> None:
        """Look at this engine from now on, None while there is none; what the last one lost stays counted."""
        self._before = self.lost
        self._engine = engine
        self._missed_seen = None

    @property
    def lost(self) -> int:
        """All events that were lost so far."""
        return self._before + (self._engine.lost if self._engine is not None else 0)

    def lost_near(self, *moments: float) -> int:
        """Events that were lost around moments: one of them may have been of that failure."""
        return self._lost.near(*moments) + self.lost - self._lost_seen

    def missed_near(self, *moments: float) -> int | None:
        """Hits that were missed around moments; None where the kernel does not say."""
        return None if self._missed_seen is None else self._missed.near(*moments)

    def look_for_lost(self) -> list[Notice]:
        """Count what was lost since the last look. The record has it at once; it is said seldom."""
        lost, now = self.lost, time.monotonic()
        new = lost - self._lost_seen
        self._lost.add(now, max(0, new))
        notices = []
        if new > 0:
            notices.append(Notice("", "lost", {"events": new}))
            self._lost_seen = self._counts.lost = lost
        if lost > self._told and now - self._said > _SAID_SECONDS:
            notices.append(
                Notice(f"{lost - self._told} events were lost: more came at once than could be told")
            )
            self._told, self._said = lost, now
        return notices

    def look_for_missed(self, *, at_once: bool = False) -> list[Notice]:
        """Look how often the kernel passed the probes over: at most once a second, or at once."""
        now = time.monotonic()
        if self._engine is None or (now < self._missed_due and not at_once):
            return []
        self._missed_due = now + _MISSED_SECONDS
        missed, before = self._engine.missed(), self._missed_seen
        new = max(0, (missed or 0) - (before or 0))
        self._missed_seen = missed
        self._missed.add(now, new)
        if not new:
            return []
        self._counts.missed += new
        return [Notice(f"the kernel missed {new} hits of probes", "missed", {"hits": new})]
