"""Facts of the node that stand in the same text as a failure: the limit of locked memory, and CMA."""

from __future__ import annotations

import re

from regrepro.options import format_size

NEEDLES = (b"ax locked memory", b"ulimit -l", b"CmaTotal:", b"CmaFree:")
# /proc/PID/limits in bytes, `ulimit -a` in KiB, /proc/meminfo.
_LIMIT = re.compile(r"^\s*Max locked memory\s+(unlimited|\d{1,20})\s+(?:unlimited|\d{1,20})\b")
_ULIMIT = re.compile(r"^\s*max locked memory\s+\(kbytes,(?: -l)?\)\s+(?:\(-l\) )?(unlimited|\d{1,18})\s*$")
_INLINE = re.compile(r"\bulimit -l\)?\s*[:=]?\s*(unlimited|\d{1,18})\b")
_CMA = re.compile(r"\b(CmaTotal|CmaFree):\s+(\d{1,18}) kB")
# The kernel's counters of free pages drift by what each CPU keeps back (mm/vmstat.c).
_DRIFT, _MUCH = 64 << 20, 64 << 20


class Said:
    """What was said so far. `memlock`: bytes of the smallest limit, None where each was unlimited."""

    def __init__(self) -> None:
        self._limits: list[int | None] = []
        self._cma: dict[str, int] = {}

    def look_at(self, text: str) -> bool:
        """Take a line; whether it was such a fact."""
        limit = _LIMIT.match(text) or _ULIMIT.match(text) or _INLINE.search(text)
        if limit and len(self._limits) < 4096:
            unit = 1 if limit.re is _LIMIT else 1024
            self._limits.append(None if limit[1] == "unlimited" else int(limit[1]) * unit)
        cma = _CMA.findall(text)
        self._cma.update({name: int(size) << 10 for name, size in cma})
        return bool(cma or (limit and limit.re is not _INLINE))

    def supports(self) -> dict[str, str]:
        """Return the causes that this speaks for, and why."""
        found = {}
        finite = [limit for limit in self._limits if limit is not None]
        if finite:
            size = format_size(min(finite))
            found["memlock-accounting"] = f"the text shows a limit of locked memory of {size}"
        total, free = self._cma.get("CmaTotal"), self._cma.get("CmaFree", 0)
        if total is not None and free > total + _DRIFT:
            found["page-migration"] = (
                f"CmaFree ({format_size(free)}) is more than CmaTotal ({format_size(total)}): scratch memory "
                "of kexec handover is unpinnable and is not counted; boot with kho=off, unless kdump or live "
                "update needs it"
            )
        elif free >= _MUCH:
            found["page-migration"] = f"{format_size(free)} of CMA are free, where buffers may come to lie"
        return found

    def excludes(self) -> dict[str, str]:
        """Return the causes that this speaks against, and why."""
        if self._limits and all(limit is None for limit in self._limits):
            return {"memlock-accounting": "the limit of locked memory that the text shows is unlimited"}
        return {}
