"""Zones and CMA areas as the kernel reports them: /proc/zoneinfo, sysfs, debugfs, boot log."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE_SIZE: int = os.sysconf("SC_PAGE_SIZE")

ZONEINFO = Path("/proc/zoneinfo")
MEMINFO = Path("/proc/meminfo")
KMSG = Path("/dev/kmsg")
CMA_SYSFS = Path("/sys/kernel/mm/cma")
CMA_DEBUGFS = Path("/sys/kernel/debug/cma")


@dataclass
class Zone:
    """One zone of one node. Counts are pages; `start_pfn` is None for a zone that spans nothing."""

    node: int
    name: str
    start_pfn: int | None = None
    spanned: int = 0
    present: int = 0
    managed: int = 0
    free: int = 0
    min: int = 0
    low: int = 0
    high: int = 0
    cma: int | None = None  # pages of registered CMA areas; a kernel without the line has no CMA
    free_cma: int | None = None
    free_pages_per_cpu: int = 0

    @property
    def end_pfn(self) -> int:
        """One past the last PFN of the span."""
        return (self.start_pfn or 0) + self.spanned

    @property
    def populated(self) -> bool:
        """Whether the zone has any page."""
        return self.present > 0 and self.start_pfn is not None


_ZONE_LINE = re.compile(r"Node (\d+), zone\s+(\S+)")
# Lines of zoneinfo_show_print() (mm/vmstat.c) and the attribute that each fills.
_FIELDS = {
    "min": "min",
    "low": "low",
    "high": "high",
    "spanned": "spanned",
    "present": "present",
    "managed": "managed",
    "cma": "cma",
    "nr_free_cma": "free_cma",
}


def parse_zoneinfo(text: str) -> list[Zone]:
    """Parse /proc/zoneinfo: every zone of every online node, empty ones too."""
    zones: list[Zone] = []
    zone: Zone | None = None
    in_pagesets = False
    for line in text.splitlines():
        header = _ZONE_LINE.match(line)
        if header:
            zone = Zone(int(header[1]), header[2])
            zones.append(zone)
            in_pagesets = False
            continue
        if zone is None:
            continue
        words = line.replace(":", " ").split()
        if words[:2] == ["pages", "free"]:
            zone.free = int(words[2])
        elif words and words[0] == "pagesets":
            in_pagesets = True
        elif words and words[0] == "start_pfn":
            zone.start_pfn = int(words[1])
        elif in_pagesets:
            # The per-CPU lists have fields of the same names ("high"); only "count" is of interest.
            if len(words) == 2 and words[0] == "count":
                zone.free_pages_per_cpu += int(words[1])
        elif len(words) == 2 and words[0] in _FIELDS and words[1].isdigit():
            setattr(zone, _FIELDS[words[0]], int(words[1]))
    return zones


def read_zones() -> list[Zone]:
    """Read /proc/zoneinfo; readable by every user. Raises OSError."""
    return parse_zoneinfo(ZONEINFO.read_text())


def layout_of(zones: Iterable[Zone]) -> set[tuple[int, str, int | None, int, int]]:
    """Return what memory hotplug changes: node, name, first PFN, spanned and present pages of each populated
    zone.
    """
    return {
        (zone.node, zone.name, zone.start_pfn, zone.spanned, zone.present) for zone in zones if zone.populated
    }


def parse_meminfo(text: str) -> dict[str, int]:
    """Parse /proc/meminfo: bytes by name (plain numbers for the lines without a unit)."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if len(words) > 1 else 1)
    return values


def read_meminfo() -> dict[str, int]:
    """Read /proc/meminfo. `CmaTotal` is there exactly when the kernel has CONFIG_CMA. Raises OSError."""
    return parse_meminfo(MEMINFO.read_text())


@dataclass
class CmaArea:
    """One registered CMA area. Counts are pages; `ranges`: (first PFN, last PFN + 1), None where not
    known.
    """

    name: str
    pages: int
    available: int | None = None
    ranges: list[tuple[int, int]] | None = None
    node: int | None = None
    sources: list[str] = field(default_factory=list)

    def as_record(self) -> dict[str, Any]:
        """Return the item of event `memory-map`."""
        return {
            "name": self.name,
            "pages": self.pages,
            "available_pages": self.available,
            "ranges": None if self.ranges is None else [list(r) for r in self.ranges],
            "node": self.node,
            "sources": self.sources,
        }


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[0], 0)
    except (OSError, ValueError, IndexError):
        return None


def cma_areas_of_sysfs() -> list[CmaArea]:
    """Read names and sizes (CONFIG_CMA_SYSFS; `total_pages` since 6.10). Empty where there are none."""
    areas = []
    try:
        folders = sorted(CMA_SYSFS.iterdir())
    except OSError:
        return []
    for folder in folders:
        pages = _number(folder / "total_pages")
        available = _number(folder / "available_pages")
        areas.append(CmaArea(folder.name, pages or 0, available, sources=[str(CMA_SYSFS)]))
    return areas


def cma_areas_of_debugfs() -> list[CmaArea]:
    """Read names, sizes and ranges (CONFIG_CMA_DEBUGFS, root). Empty where there are none."""
    areas = []
    try:
        folders = sorted(CMA_DEBUGFS.iterdir())
    except OSError:
        return []
    for folder in folders:
        pages = _number(folder / "count")
        if pages is None:
            continue
        used = _number(folder / "used")
        order = _number(folder / "order_per_bit") or 0
        ranges = []
        for part in sorted(folder.glob("ranges/*")) or [folder]:  # multi-range areas since 6.15
            base = _number(part / "base_pfn")
            length = _number(part / "count") if part != folder else pages
            if base is not None and (length or part == folder):
                ranges.append((base, base + (length or pages)))
        covered = sum(end - first for first, end in ranges)
        areas.append(
            CmaArea(
                folder.name.removeprefix("cma-"),
                pages,
                None if used is None else pages - (used << order),
                ranges if covered == pages else None,
                sources=[str(CMA_DEBUGFS)],
            )
        )
    return areas


def kernel_log(limit: int = 1 << 22) -> list[str] | None:
    """Return the lines of the kernel's log buffer, None where it cannot be read (kernel.dmesg_restrict)."""
    try:
        fd = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    lines: list[str] = []
    total = 0
    try:
        while total < limit:
            try:
                record = os.read(fd, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while we read
                    continue
                return lines or None
            if not record:
                break
            total += len(record)
            text = record.decode(errors="replace").split("\n", 1)[0]
            lines.append(text.split(";", 1)[-1])
    finally:
        os.close(fd)
    return lines


_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50, "E": 1 << 60}


def parse_size(text: str) -> int | None:
    """Read a size as the kernel's memparse() does ("512M", "0x20000000"); None for anything else."""
    found = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)([KMGTPE]?)", text.strip(), re.IGNORECASE)
    if not found:
        return None
    return int(found[1], 16 if found[1][:2] in ("0x", "0X") else 10) * _SIZE_UNITS[found[2].upper()]


def parse_cma_lines(lines: Iterable[str]) -> list[tuple[int, int]]:
    """Return (address, bytes) of the CMA areas whose boot message names an address."""
    found = []
    for line in lines:
        match = re.search(r"cma: Reserved (\d+) (MiB|KiB|GiB) at (0x[0-9a-fA-F]+)", line)
        if match:
            unit = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[match[2]]
            found.append((int(match[3], 16), int(match[1]) * unit))
    return found
