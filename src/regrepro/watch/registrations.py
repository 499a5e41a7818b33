"""`watch --registrations`: which path the registrations of this node took, counted in the kernel."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Of the maps that registrations.bpf.c counts in: number of the function, path, process, "", its name; of
# sizes number, path, power of two.
KEY, SIZE_KEY, NO_SIZE = struct.Struct("=IIII16s"), struct.Struct("=IHH"), 64

_ROWS = 10_000  # of processes; what others did is one row for each function and path
_OTHERS = 0, "(others)"
# What the program tells apart. A registration that pinned no page through get_user_pages went by a
# peer-memory driver (a device pointer), or is paged on demand.
PATHS = {1: "host", 2: "dma-buf", 3: "peer-memory-or-on-demand"}


@dataclass
class _Row:
    count: int = 0
    bytes: int = 0


@dataclass
class Account:
    """Counts and bytes by driver function, path, process; sizes in powers of two by function and path."""

    rows: dict[tuple[str, str, int, str], _Row] = field(default_factory=dict)
    sizes: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    changed: bool = False
    uncounted: int = 0  # that the kernel had no room to count

    def take_counted(
        self,
        rows: Mapping[bytes, tuple[int, int]],
        sizes: Mapping[bytes, int],
        names: Sequence[str],
    ) -> None:
        """Add what the programs have counted since the last time: counts and bytes, and sizes."""
        for key, (count, size) in rows.items():
            number, path, pid, _, comm = KEY.unpack(key)
            name = comm.partition(b"\0")[0].decode("utf-8", "replace")
            row = self._row(names[number], PATHS[path], pid, name)
            row.count += count
            row.bytes += size
            self.changed = True
        for key, count in sizes.items():
            number, path, power = SIZE_KEY.unpack(key)
            kept = self.sizes.setdefault((names[number], PATHS[path]), {})
            low = 0 if power == NO_SIZE else 1 << power
            kept[low] = kept.get(low, 0) + count

    def _row(self, function: str, path: str, pid: int, comm: str) -> _Row:
        key = function, path, pid, comm
        if key not in self.rows and len(self.rows) >= _ROWS:
            key = function, path, *_OTHERS
        return self.rows.setdefault(key, _Row())

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return (path, driver) → (count, bytes), of all processes together."""
        answer: dict[tuple[str, str], tuple[int, int]] = {}
        for (function, path, _, _), row in self.rows.items():
            driver = re.sub(r"_reg(_user)?_mr(_dmabuf)?$", "", function)
            count, size = answer.get((path, driver), (0, 0))
            answer[path, driver] = count + row.count, size + row.bytes
        return answer

    def as_record(self) -> dict[str, Any]:
        """Return the keys of event `watch`, what = registrations: totals since watch started."""
        return {
            "uncounted": self.uncounted,
            "registrations": [
                {"fn": fn, "path": path, "pid": pid, "comm": comm, "count": row.count, "bytes": row.bytes}
                for (fn, path, pid, comm), row in sorted(self.rows.items())
            ],
            "sizes": [
                {"fn": fn, "path": path, "buckets": sorted([low, count] for low, count in kept.items())}
                for (fn, path), kept in sorted(self.sizes.items())
            ],
        }
