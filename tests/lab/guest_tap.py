"""TAP lines of a guest program: one for each check. `results`: what they were."""

from __future__ import annotations

import time
from collections.abc import Callable

results: list[bool] = []


def check(name: str, good: bool, note: str = "") -> bool:
    results.append(good)
    line = f"{'ok' if good else 'not ok'} {len(results)} - {name}"
    print(f"{line} # {' '.join(note.split())[:400]}" if note else line, flush=True)
    return good


def until(true: Callable[[], object], seconds: float) -> bool:
    """Wait until something is true, so many seconds at most."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.3)
    return True
