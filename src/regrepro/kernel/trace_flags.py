"""The FOLL_* flags of get_user_pages() and pin_user_pages(), named for the running kernel.

The values were renumbered in 6.3. The kernel's own BTF answers where it has them (its two anonymous enums);
elsewhere a table does, chosen by what BTF has, or by version for a kernel of kernel.org or Debian.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass, field

from regrepro.kernel import procfs
from regrepro.kernel.btf import Btf, BtfError
from regrepro.kernel.procfs import BTF_PATH
from regrepro.kernel.release import kernel_series, stock_series

# include/linux/mm.h, v5.6 (which brought FOLL_PIN) to v6.2. Names that only some of these versions have keep
# one value in all that have them; 0x80 was FOLL_SPLIT up to 5.13 and is FOLL_NOFAULT since 5.16.
_FROM_5_6 = {
    "FOLL_WRITE": 0x01,
    "FOLL_TOUCH": 0x02,
    "FOLL_GET": 0x04,
    "FOLL_DUMP": 0x08,
    "FOLL_FORCE": 0x10,
    "FOLL_NOWAIT": 0x20,
    "FOLL_POPULATE": 0x40,
    "FOLL_HWPOISON": 0x100,
    "FOLL_NUMA": 0x200,
    "FOLL_MIGRATION": 0x400,
    "FOLL_TRIED": 0x800,
    "FOLL_MLOCK": 0x1000,
    "FOLL_REMOTE": 0x2000,
    "FOLL_COW": 0x4000,
    "FOLL_ANON": 0x8000,
    "FOLL_LONGTERM": 0x10000,
    "FOLL_SPLIT_PMD": 0x20000,
    "FOLL_PIN": 0x40000,
    "FOLL_FAST_ONLY": 0x80000,
    "FOLL_PCI_P2PDMA": 0x100000,
    "FOLL_INTERRUPTIBLE": 0x200000,
}
# include/linux/mm_types.h and mm/internal.h since v6.3 (commit 2c2241081f7d moved the private half).
_FROM_6_3 = {
    "FOLL_WRITE": 1 << 0,
    "FOLL_GET": 1 << 1,
    "FOLL_DUMP": 1 << 2,
    "FOLL_FORCE": 1 << 3,
    "FOLL_NOWAIT": 1 << 4,
    "FOLL_NOFAULT": 1 << 5,
    "FOLL_HWPOISON": 1 << 6,
    "FOLL_ANON": 1 << 7,
    "FOLL_LONGTERM": 1 << 8,
    "FOLL_SPLIT_PMD": 1 << 9,
    "FOLL_PCI_P2PDMA": 1 << 10,
    "FOLL_INTERRUPTIBLE": 1 << 11,
    "FOLL_HONOR_NUMA_FAULT": 1 << 12,
    "FOLL_TOUCH": 1 << 16,
    "FOLL_TRIED": 1 << 17,
    "FOLL_REMOTE": 1 << 18,
    "FOLL_PIN": 1 << 19,
    "FOLL_FAST_ONLY": 1 << 20,
    "FOLL_UNLOCKABLE": 1 << 21,
    "FOLL_MADV_POPULATE": 1 << 22,
}


@dataclass(frozen=True)
class FlagNames:
    """FOLL_* values of one kernel, and where they come from (`source`, a phrase)."""

    values: dict[str, int]
    source: str
    _decoded: dict[int, list[str]] = field(default_factory=dict, compare=False, repr=False)

    def decode(self, bits: int) -> list[str]:
        """Return the names of the flags in `bits`, lowest bit first; a bit without a name comes as `0x…`."""
        if bits not in self._decoded:
            order = sorted(self.values.items(), key=lambda item: item[1])
            names = [name for name, bit in order if bits & bit]
            rest = bits & ~sum(set(self.values.values()))
            self._decoded[bits] = [*names, hex(rest)] if rest else names
        return list(self._decoded[bits])


def from_version(release: str) -> FlagNames:
    """Return the names by the kernel's version; without any for versions before FOLL_PIN (5.6) or unknown."""
    series = kernel_series(release)
    if series is None or series < (5, 6):
        return FlagNames({}, f"no table for kernel {release}")
    if series < (6, 3):
        values = dict(_FROM_5_6)
        values["FOLL_NOFAULT" if series >= (5, 14) else "FOLL_SPLIT"] = 0x80
        return FlagNames(values, "include/linux/mm.h of Linux 5.6 to 6.2, by version")
    return FlagNames(
        dict(_FROM_6_3), "include/linux/mm_types.h and mm/internal.h since Linux 6.3, by version"
    )


def from_btf(blob: bytes) -> FlagNames | None:
    """Return the names from a kernel's BTF, None where it has no FOLL_* enum.

    The enums are anonymous, and known by their first members.
    """
    values: dict[str, int] = {}
    with suppress(BtfError):
        btf = Btf(blob)
        for first in ("FOLL_WRITE", "FOLL_TOUCH"):
            values |= btf.enum_from(first) or {}
    return FlagNames(values, "BTF of the running kernel") if "FOLL_LONGTERM" in values else None


def of_running_kernel() -> FlagNames:
    """Return the running kernel's flags: public ones from BTF, what BTF lacks from the table."""
    try:
        blob = BTF_PATH.read_bytes()
    except OSError:
        blob = b""
    uname = os.uname()
    banner = procfs.text("/proc/version") or ""
    return of_kernel(blob, uname.release, stock_series(uname.release, uname.version, banner) is not None)


def of_kernel(blob: bytes, release: str, stock: bool) -> FlagNames:
    """Return the flags of a kernel by its BTF ("" for none), and by its version where that decides (`stock`).

    The enums came with the values of 6.3, so that BTF tells of any vendor's kernel which values it has: with
    the enums those of 6.3, without them the macros of 5.6 to 6.2, one value in all of them but 0x80.
    """
    known = from_btf(blob)
    if stock:
        table = from_version(release)
    elif known is not None:
        table = from_version("6.3")
    elif has_btf(blob):
        table = FlagNames(dict(_FROM_5_6), "include/linux/mm.h of Linux 5.6 to 6.2: BTF has no FOLL_* enum")
    else:
        table = FlagNames({}, f"no BTF, and {release} is no kernel whose number decides")
    if known is None:
        return table
    taken = set(known.values.values())
    private = {
        name: bit for name, bit in table.values.items() if name not in known.values and bit not in taken
    }
    source = known.source + (" (private flags by version)" if private else "")
    return FlagNames({**known.values, **private}, source)


def has_btf(blob: bytes) -> bool:
    """Tell BTF from bytes that are none, by the magic of its header (Documentation/bpf/btf.rst)."""
    return len(blob) >= 24 and bool(struct.unpack_from("=H", blob)[0] == 0xEB9F)
