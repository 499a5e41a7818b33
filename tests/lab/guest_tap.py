"""TAP lines of a guest program: one for each check. `results`: what they were."""

from __future__ import annotations

results: list[bool] = []


def check(name: str, good: bool, note: str = "") -> bool:
    results.append(good)
    line = f"{'ok' if good else 'not ok'} {len(results)} - {name}"
    print(f"{line} # {' '.join(note.split())[:400]}" if note else line, flush=True)
    return good
