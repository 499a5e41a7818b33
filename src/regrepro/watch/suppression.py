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
_OWNERS_AT_ONCE = 8  # whose rates all failures together may reach
_DAY = 86400.0


@dataclass
class _Seen:
    full: int = 0
    since: float = 0.0


class _Tokens:
    """So many a second, and so many at once."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst, self.left, self._at = rate, burst, burst, now

    def refill(self, now: float) -> _Tokens:
        self.left = min(self._burst, self.left + (now - self._at) * self._rate)
        self._at = now
        return self


class Limiter:
    """Lets `rate` a second of each owner through, `burst` at once, `each` of one kind within `window` seconds
    and `share` bytes of each owner a day: nobody's failures keep those of others from being recorded, or push
    their records out.
    """

    def __init__(
        self, rate: float, burst: int, each: int, window: float, *, share: int, now: Callable[[], float]
    ) -> None:
        self._rate, self._burst, self._each, self._window, self._share = rate, burst, each, window, share
        self._now = now
        self._all = _Tokens(rate * _OWNERS_AT_ONCE, burst * _OWNERS_AT_ONCE, now())
        self._owners: dict[Hashable, _Tokens] = {}
        self._seen: dict[Hashable, _Seen] = {}
        self._spent: dict[Hashable, int] = {}
        self._day = now()

    def allows(self, kind: Hashable, owner: Hashable) -> bool:
        """Whether a failure of this kind and owner may be recorded in full now."""
        now = self._now()
        if now - self._day >= _DAY:
            self._day, self._spent = now, {}
        for kept in (self._seen, self._owners):
            if len(kept) > _KINDS_KEPT:
                for old in list(kept)[: _KINDS_KEPT // 2]:
                    del kept[old]
        seen = self._seen.setdefault(kind, _Seen(0, now))
        if now - seen.since >= self._window:
            seen.full, seen.since = 0, now
        tokens = [
            self._all.refill(now),
            self._owners.setdefault(owner, _Tokens(self._rate, self._burst, now)).refill(now),
        ]
        if seen.full >= self._each or any(one.left < 1 for one in tokens):
            return False
        if self._spent.get(owner, 0) >= self._share:
            return False
        seen.full += 1
        for one in tokens:
            one.left -= 1
        return True

    def spent(self, owner: Hashable, size: int) -> None:
        """Count the bytes of a failure that was recorded."""
        self._spent[owner] = self._spent.get(owner, 0) + size


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
