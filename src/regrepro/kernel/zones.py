"""Zones and CMA areas as the kernel reports them: /proc/zoneinfo, sysfs, debugfs, boot log."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
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


_ZONE_LINE = re.compile(r"Node (\d{1,6}), zone\s+(\S+)")
# Words of zoneinfo_show_print() (mm/vmstat.c) that another name is kept by.
_ZONE_NAMES = {"nr_free_cma": "free_cma"}
_ZONE_COUNTS = ("free", "min", "low", "high", "spanned", "present", "managed", "cma", "free_cma", "start_pfn")


def zone_counts(text: str) -> Iterator[tuple[int, str, dict[str, int]]]:
    """Yield node, name and counts (pages) of each zone of /proc/zoneinfo, empty ones too; what is not
    told, or has another shape, is left out. `free_pages_per_cpu` is the sum of the per-CPU lists.
    """
    for part in re.split(r"^(?=Node \d)", text, flags=re.M):
        header = _ZONE_LINE.match(part)
        if not header:
            continue
        counts: dict[str, int] = {}
        for line in part.splitlines()[1:]:
            words = line.replace(":", " ").split()
            words = words[1:] if words[:2] == ["pages", "free"] else words
            if len(words) != 2 or not re.fullmatch(r"[0-9]{1,24}", words[1]):
                continue
            name, number = _ZONE_NAMES.get(words[0], words[0]), int(words[1])
            if name == "count":
                counts["free_pages_per_cpu"] = counts.get("free_pages_per_cpu", 0) + number
            elif name in _ZONE_COUNTS:
                # The first of each name: "high" and "min" come again among the per-CPU lists.
                counts.setdefault(name, number)
        yield int(header[1]), header[2], counts


def parse_zoneinfo(text: str) -> list[Zone]:
    """Parse /proc/zoneinfo: every zone of every online node, empty ones too."""
    return [Zone(node, name, **counts) for node, name, counts in zone_counts(text)]


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
    """Parse /proc/meminfo, or a node's: bytes by name (plain numbers for the lines without a unit)."""
    pattern = r"^[ \t]*(?:Node \d+ )?([A-Za-z0-9_()]+):[ \t]+(\d{1,20})( kB)?[ \t\r]*$"
    found = re.findall(pattern, text, re.M | re.A)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in found}


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


def kernel_messages(limit: int = 1 << 22) -> list[tuple[float, str]]:
    """Return (seconds since boot, text) of what is in the kernel's log buffer. Raises OSError where it
    cannot be read (kernel.dmesg_restrict).
    """
    fd = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found: list[tuple[float, str]] = []
    total = 0
    try:
        while total < limit:
            try:
                record = os.read(fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten while we read: the next one is still there
                continue
            if not record:
                break
            total += len(record)
            head, _, text = record.decode(errors="replace").split("\n", 1)[0].partition(";")
            fields = head.split(",")
            stamp = fields[2] if len(fields) > 2 else ""
            found.append((int(stamp) / 1e6 if stamp.isdecimal() else 0.0, text))
    finally:
        os.close(fd)
    return found


def kernel_log() -> list[str] | None:
    """Return the lines of the kernel's log buffer, None where it cannot be read."""
    try:
        return [text for _, text in kernel_messages()]
    except OSError:
        return None


_SIZE_UNITS = "KMGTPE"
_SIZE = re.compile(r"(0[xX][0-9a-fA-F]+|[0-9]+)([KMGTPEkmgtpe]?)")


def memparse(text: str) -> int | None:
    """Read a size as the kernel's memparse() does (lib/cmdline.c), in bytes: "6G", "0x4000"; of "512M@4G" the
    beginning. None where it does not begin with a number.
    """
    found = _SIZE.match(text.strip())
    if not found:
        return None
    shift = 10 * (_SIZE_UNITS.index(found[2].upper()) + 1) if found[2] else 0
    return int(found[1], 16 if found[1][:2] in ("0x", "0X") else 10) << shift


def parse_size(text: str) -> int | None:
    """Read a size that is nothing else ("512M", "0x20000000"); None for anything more."""
    return memparse(text) if _SIZE.fullmatch(text.strip()) else None


def parse_cma_lines(lines: Iterable[str]) -> list[tuple[int, int]]:
    """Return (address, bytes) of the CMA areas whose boot message names an address."""
    found = []
    for line in lines:
        match = re.search(r"cma: Reserved (\d+) (MiB|KiB|GiB) at (0x[0-9a-fA-F]+)", line)
        if match:
            unit = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[match[2]]
            found.append((int(match[3], 16), int(match[1]) * unit))
    return found
