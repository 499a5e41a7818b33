"""How many failures are recorded in full: so many a second, and not the same one over and over."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass


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
        if len(self._seen) > 10_000:
            self._seen = {key: seen for key, seen in self._seen.items() if now - seen.since < self._window}
        seen = self._seen.setdefault(kind, _Seen(0, now))
        if now - seen.since >= self._window:
            seen.full, seen.since = 0, now
        if seen.full >= self._each or self._tokens < 1:
            return False
        seen.full += 1
        self._tokens -= 1
        return True
