"""Memory policy: huge pages, compaction, overcommit, pressure, control group limits."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from regrepro.audit import parse
from regrepro.audit.reader import Reader
from regrepro.audit.sheet import Sheet

_SYSCTLS = (
    "compaction_proactiveness",
    "compact_unevictable_allowed",
    "overcommit_memory",
    "overcommit_ratio",
    "min_free_kbytes",
    "max_map_count",
    "zone_reclaim_mode",
    "swappiness",
    "unprivileged_userfaultfd",
)


def collect(reader: Reader, sheet: Sheet) -> None:
    """What decides how memory is placed and given back."""
    state = partial(sheet.state, "policy")
    for name in ("enabled", "defrag", "shmem_enabled"):
        text = reader.read(f"sys/kernel/mm/transparent_hugepage/{name}")
        state(f"thp-{name}", text, parse.choice(text.text or ""))
    for name in _SYSCTLS:
        text = reader.read(f"proc/sys/vm/{name}")
        state(f"vm.{name}", text, text.number)
    pressure = reader.read("proc/pressure/memory")
    match = re.search(r"some avg10=[0-9.]{1,10} avg60=(\d{1,8}(?:\.\d{1,8})?)(?![0-9.])", pressure.text or "")
    state("psi-memory-avg60", pressure, float(match[1]) if match else None)
    groups = reader.read("proc/self/cgroup")
    path = next((line[3:] for line in groups.lines if line.startswith("0::")), None)
    if path is None:
        sheet.add("policy", "memory-cgroup", None, groups.source, why=groups.why or "no cgroup v2 in it")
        return
    found: dict[str, Any] = {"path": path}
    base = "sys/fs/cgroup" + (path if path != "/" else "")
    for name in ("memory.max", "memory.high", "memory.current", "rdma.max"):
        text = reader.read(f"{base}/{name}")
        if text.value is not None:
            found[name] = text.value if text.number is None else text.number
    sheet.add("policy", "memory-cgroup", found, f"/{base}")
