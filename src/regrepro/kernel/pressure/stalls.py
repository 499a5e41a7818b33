"""How much processes wait for memory, and whether any was killed for want of it."""

from __future__ import annotations

import re
import time
from pathlib import Path

from regrepro.kernel import procfs

PSI = Path("/proc/pressure/memory")

_STALL_WINDOW = 1.0


class Stalls:
    """Watches pressure stall information: the share of time in which all waited for memory.

    None of it where the kernel keeps none (no CONFIG_PSI, psi=0).
    """

    def __init__(self, path: Path = PSI) -> None:
        self._path = path
        self._since = time.monotonic()
        self._total = self._read()
        self.worst: float | None = None if self._total is None else 0.0

    def _read(self) -> int | None:
        found = re.search(r"^full .*total=(\d+)", procfs.text(self._path) or "", re.M)
        return int(found[1]) if found else None

    def share(self) -> float:
        """Return the share of the last second or more; of a shorter time 0."""
        now = time.monotonic()
        if self._total is None or now - self._since < _STALL_WINDOW:
            return 0.0
        total = self._read()
        if total is None:
            return 0.0
        share = (total - self._total) / 1e6 / (now - self._since)
        self._since, self._total = now, total
        self.worst = max(self.worst or 0.0, share)
        return share


def oom_kills() -> int | None:
    """Return how often the OOM killer has ended a process since boot; None before Linux 4.13."""
    return procfs.counts(procfs.text(procfs.VMSTAT) or "").get("oom_kill")
