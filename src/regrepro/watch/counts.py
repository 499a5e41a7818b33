"""What is counted while a node is watched."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class WatchCounts:
    """What watch counts. Counters start at 0 with each start of watch."""

    watching: int = 0
    failures: dict[tuple[str, str], int] = field(default_factory=dict)  # (layer, class) → count
    proven: int = 0  # failures of this bug, by later looks; they are in `failures` as what they were at first
    not_looked_at: int = 0  # failures of this bug for which there were no later looks
    suppressed: int = 0  # failures that were counted and not recorded in full
    lost: int = 0
    missed: int = 0  # hits of probes
    engine_restarts: int = 0
    attach_failures: int = 0
    copies: int = 0
    copies_not_followed: int = 0
    record_problems: int = 0
    recorded_bytes: int = 0  # of failures
    started: float = 0.0
    last_failure: float = 0.0
    registrations: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def failed(self, layer: str, bug_class: str = "", number: int = 1) -> None:
        """Count failures."""
        key = layer, bug_class
        self.failures[key] = self.failures.get(key, 0) + number

    @property
    def total(self) -> int:
        """All failures."""
        return sum(self.failures.values())
