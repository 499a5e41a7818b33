"""Which failures are recorded in full: so many a second, and not the same one over and over. The others are
counted, under the layer of those of their kind that were judged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from regrepro.watch.counts import WatchCounts
from regrepro.watch.evidence import UNKNOWN_ERRNO
from regrepro.watch.failed_registration import FailedRegistration

_KINDS_KEPT = 10_000


@dataclass
class _Seen:
    full: int = 0
    since: float = 0.0


class Limiter:
    """Lets `rate` a second through, `burst` at once, and `each` of one kind within `window` seconds."""

    def __init__(self, rate: float, burst: int, each: int, window: float, now: Callable[[], float]) -> None:
        self._rate, self._burst, self._each, self._window = rate, burst, each, window
        self._now = now
        self._tokens = float(burst)
        self._at = now()
        self._seen: dict[Hashable, _Seen] = {}

    def allows(self, kind: Hashable) -> bool:
        """Whether a failure of this kind may be recorded in full now."""
        now = self._now()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if len(self._seen) > _KINDS_KEPT:
            self._seen = {key: seen for key, seen in self._seen.items() if now - seen.since < self._window}
        seen = self._seen.setdefault(kind, _Seen(0, now))
        if now - seen.since >= self._window:
            seen.full, seen.since = 0, now
        if seen.full >= self._each or self._tokens < 1:
            return False
        seen.full += 1
        self._tokens -= 1
        return True


class Suppression:
    """Counts failures that are not recorded in full."""

    def __init__(self, counts: WatchCounts) -> None:
        self._counts = counts
        self._layers: dict[Hashable, tuple[str, str]] = {}  # kind of failure → layer and class of the last
        self._suppressed: dict[tuple[str, str, str], int] = {}
        # Counted before the first of their kind was judged.
        self._unjudged: dict[Hashable, tuple[FailedRegistration, int]] = {}

    @property
    def some(self) -> bool:
        """Whether there is something that was not told yet."""
        return bool(self._suppressed or self._unjudged)

    def judged(self, failure: FailedRegistration, layer: str, kind: str) -> None:
        """Keep what a failure that was recorded in full was."""
        if len(self._layers) > _KINDS_KEPT:
            self._layers.clear()
        self._layers[failure.key()] = layer, kind

    def suppress(self, failure: FailedRegistration) -> None:
        """Count a failure that is not recorded in full."""
        key = failure.key()
        if key in self._layers:
            self._count(failure, *self._layers[key], 1)
        else:
            _, before = self._unjudged.get(key, (failure, 0))
            self._unjudged[key] = failure, before + 1

    def _count(self, failure: FailedRegistration, layer: str, kind: str, number: int) -> None:
        self._counts.failed(layer, kind, number)
        self._counts.suppressed += number
        key = (layer, failure.errno or UNKNOWN_ERRNO, failure.comm)
        self._suppressed[key] = self._suppressed.get(key, 0) + number

    def count_unjudged(self, coming: set[tuple[Any, ...]]) -> None:
        """Count failures that came before the first of their kind was judged, once it is or none will be.

        `coming`: kinds of which one is going to be judged.
        """
        for key in [key for key in self._unjudged if key in self._layers or key not in coming]:
            failure, number = self._unjudged.pop(key)
            self._count(failure, *self._layers.get(key, ("not-judged", "")), number)

    def take(self) -> list[dict[str, Any]]:
        """Return what was counted since the last time, as the record has it."""
        told = [
            {"layer": layer, "errno": errno, "comm": comm, "count": count}
            for (layer, errno, comm), count in sorted(self._suppressed.items())
        ]
        self._suppressed.clear()
        return told
