"""The map of the node's memory: which pages Linux refuses to pin for long (unpinnable), and how we know.

Sources in order of trust: the pageblock bitmap (only after its self-check), the kernel's own areas and
counts, /proc/zoneinfo, boot messages. Where no source decides, the answer is UNKNOWN, never a guess. The map
says where pages lie, not what this kernel does about it: kernels before 5.13 pin in place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro.core.pages import PAGE_SIZE, runs
from regrepro.core.pages import locate as locate_pfns
from regrepro.kernel import kallsyms, zones
from regrepro.kernel.btf import Btf, BtfError
from regrepro.kernel.kcore import Kcore, KcoreError
from regrepro.kernel.memoryblocks import block_size, memory_blocks
from regrepro.kernel.pageblocks import (
    BitmapLayout,
    PageTypeInfo,
    PageZones,
    Sections,
    check_areas,
    compare,
    count_blocks,
    migrate_cma,
    read_layout,
    read_pagetypeinfo,
    read_sections,
    read_sections_of,
)
from regrepro.kernel.zones import CmaArea, Zone

ORDINARY, CMA, ISOLATE, MOVABLE_ZONE, UNKNOWN, ABSENT = 0, 1, 2, 3, 254, 255
PLACE_NAMES = {
    ORDINARY: "ordinary",
    CMA: "cma",
    ISOLATE: "isolate",
    MOVABLE_ZONE: "movable-zone",
    UNKNOWN: "unknown",
    ABSENT: "absent",
}
UNPINNABLE = (CMA, ISOLATE, MOVABLE_ZONE)

_RENEWALS = 8  # of the map in one process: each reads /proc/pagetypeinfo

_ATTEMPTS = 4  # of the self-check: Isolate comes and goes while the kernel allocates out of CMA


@dataclass
class _Ranges:
    """Disjoint PFN ranges, ascending, each with a code and a node (-1: not known)."""

    start: NDArray[np.uint64]
    end: NDArray[np.uint64]
    code: NDArray[np.uint8]
    node: NDArray[np.int32]


def _of_rows(rows: Iterable[tuple[int, int, int, int]]) -> _Ranges:
    """Return ranges of (first PFN, last PFN + 1, code, node)."""
    start, end, code, node = np.array(list(rows), dtype=np.int64).reshape(-1, 4).T
    return _Ranges(
        start.astype(np.uint64), end.astype(np.uint64), code.astype(np.uint8), node.astype(np.int32)
    )


_NO_RANGES = _of_rows([])


@dataclass
class Located:
    """Where pages lie at one moment: place (a code of PLACE_NAMES) and node (-1: not known) of each.

    `sections` are those that hold them, as they were read for it; None where kcore is closed.
    `problem` says why places are UNKNOWN, if the kernel's structures could not be read.
    """

    place: NDArray[np.uint8]
    node: NDArray[np.int32]
    sections: Sections | None = None
    problem: str = ""


@dataclass
class MemoryMap:
    """What is known of the node's memory at one moment.

    `complete`: for every present page it is known whether it is unpinnable, by a source that was checked.
    `has_unpinnable`: None where neither "some" nor "none" is proven.
    """

    page_size: int
    pageblock_order: int | None
    complete: bool
    has_unpinnable: bool | None
    zones: list[Zone]
    blocks: dict[tuple[int, str], dict[str, int]] | None
    cma_areas: list[CmaArea]
    cma_config: bool | None  # CONFIG_CMA; None: not known
    unpinnable_ranges: list[tuple[int, int, str]]
    unregistered_cma: list[tuple[int, int]] | None  # MIGRATE_CMA, but in no area; None: not known
    selfcheck: dict[str, Any]
    sources: list[str]
    problems: list[str]
    sections: Sections | None = field(default=None, repr=False)  # for struct page; None where kcore is closed
    _ranges: _Ranges | None = field(default=None, repr=False)
    _page_zones: PageZones | None = field(default=None, repr=False)
    _renewals: int = field(default=0, repr=False)

    def places_now(self, pfns: NDArray[np.uint64], kcore: Kcore | None = None) -> NDArray[np.uint8]:
        """Return the place of each PFN at this moment, read from the kernel again (see `locate_now`)."""
        return self.locate_now(pfns, kcore).place

    def locate_now(self, pfns: NDArray[np.uint64], kcore: Kcore | None = None) -> Located:
        """Return where each PFN lies at this moment; `kcore` is an open one, if there is.

        The bits of these pages' pageblocks and the zone of a page in each are read from kernel memory, by
        the layout whose self-check held when the map was drawn. Where a page lies in a zone or a section that
        the map does not show there (a memory block changed meanwhile), the map is read again first, with its
        self-check. What cannot be read, or not be checked, is UNKNOWN.

        Without the bitmap the map's zones answer as long as /proc/zoneinfo shows the same ones; it does not
        see a pageblock that is isolated later.
        """
        if self.sections is None or self._page_zones is None:
            place, node = self.locate(pfns)
            if self.zones_changed() is not False:
                place[place != ABSENT] = UNKNOWN
                return Located(place, node, problem="memory zones changed since the map was read")
            return Located(place, node)
        try:
            if kcore is None:
                with Kcore() as own:
                    return self._locate_now(pfns, own)
            return self._locate_now(pfns, kcore)
        except (OSError, KcoreError, IndexError, ValueError) as error:
            return _nowhere(pfns, f"the pageblocks of these pages could not be read again: {_why(error)}")

    def _locate_now(self, pfns: NDArray[np.uint64], kcore: Kcore) -> Located:
        assert self.sections is not None and self._page_zones is not None
        layout = self.sections.layout
        # A run of neighbours in one pageblock is looked at once, by one of its pages.
        run = runs(pfns >> np.uint64(layout.pageblock_order))
        blocks, first, of_block = np.unique(run[:, 2], return_index=True, return_inverse=True)
        sample = pfns[run[first, 0]]
        numbers = np.unique(
            blocks.astype(np.uint64) >> np.uint64(layout.section_shift - layout.pageblock_order)
        )
        sections = read_sections_of(kcore, layout, numbers)
        place, node = _place_of(sample, sections, self._page_zones.over(kcore, sections))
        if (place[sample != 0] == UNKNOWN).any():
            kcore.refresh()  # its program headers follow memory that was plugged since it was opened
            sections = read_sections_of(kcore, layout, numbers)
            place, node = _place_of(sample, sections, self._page_zones.over(kcore, sections))
        drawn = self.locate(sample)[0]
        strange = (place != UNKNOWN) & (
            (drawn == UNKNOWN) | ((drawn == MOVABLE_ZONE) != (place == MOVABLE_ZONE))
        )
        strange &= sample != 0
        problem = ""
        if strange.any() and not self._renew_around(sample[strange], place[strange]):
            place[strange] = UNKNOWN
            problem = "memory zones changed, and the pageblock bitmap could not be checked again"
        of_page = of_block.reshape(-1)
        places = np.repeat(place[of_page], run[:, 1])
        places[pfns == 0] = ABSENT
        return Located(places, np.repeat(node[of_page], run[:, 1]), sections, problem)

    def _renew_around(self, pfns: NDArray[np.uint64], places: NDArray[np.uint8]) -> bool:
        """Read the map again, since it does not show these pages where they are. Whether the new one does."""
        if self._renewals >= _RENEWALS or not self.renew():
            return False
        drawn = self.locate(pfns)[0]
        return bool((((drawn == MOVABLE_ZONE) == (places == MOVABLE_ZONE)) & (drawn != UNKNOWN)).all())

    def renew(self) -> bool:
        """Read the whole map again, in place: who holds it has the new one. Whether its self-check held."""
        renewals = self._renewals + 1
        self.__dict__.update(read_memory_map().__dict__)
        self._renewals = renewals
        return self.sections is not None

    def check(self) -> dict[str, Any]:
        """Look whether the map still holds, and bring it up to date: the zones, and where they are the same
        the bits of every pageblock. Return the keys of event `memory-map-check` (docs/record.md).

        /proc/pagetypeinfo is read only where zones changed.
        """
        was = (self.unpinnable_ranges, zones.layout_of(self.zones))
        problems: list[str] = []
        sources = [str(zones.ZONEINFO)]
        same_zones = self.zones_changed() is False
        complete = same_zones
        if not same_zones:
            self.renew()
            complete, problems, sources = self.complete, self.problems, self.sources
        elif self.sections is not None and self._page_zones is not None:
            sources.append(self.placed_by)
            try:
                self._draw_again(self._page_zones)
                complete = self.complete
            except (OSError, KcoreError, IndexError, ValueError) as error:
                complete = False
                problems = [f"the pageblock bitmap could not be read again: {_why(error)}"]
        else:
            complete = self.complete
        return {
            "complete": complete,
            "has_unpinnable": self.has_unpinnable if complete or self.has_unpinnable else None,
            "changed": was != (self.unpinnable_ranges, zones.layout_of(self.zones)),
            "sources": sources,
            "problems": problems,
        }

    def _draw_again(self, page_zones: PageZones) -> None:
        """Draw the map by the bits of every pageblock as they are now; zones must be the same."""
        assert self.sections is not None
        end = max((zone.end_pfn for zone in self.zones if zone.populated), default=0)
        with Kcore() as kcore:
            sections = read_sections(kcore, self.sections.layout, end)
            ranges = _draw(sections, self.zones, page_zones.over(kcore, sections))
        self.sections, self._ranges = sections, ranges
        self.unpinnable_ranges = _unpinnable(ranges)
        self.complete = _all_known(ranges)
        self.has_unpinnable = True if self.unpinnable_ranges else (False if self.complete else None)

    def zones_changed(self) -> bool | None:
        """Whether /proc/zoneinfo shows other zones than when the map was read; None where it cannot be
        read. Changes that were undone in between are not seen.
        """
        try:
            return zones.layout_of(zones.read_zones()) != zones.layout_of(self.zones)
        except OSError:
            return None

    def locate(self, pfns: NDArray[np.uint64]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
        """Return place (a code of PLACE_NAMES) and NUMA node (-1: not known) of each PFN; PFN 0 is ABSENT."""
        ranges = self._ranges if self._ranges is not None else _NO_RANGES
        return locate_pfns(
            pfns, ranges.start, ranges.end, ranges.code, ranges.node, absent=ABSENT, unknown=UNKNOWN
        )

    def classify(self, pfns: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return the place of each PFN as a code of PLACE_NAMES; PFN 0 (no page) is ABSENT."""
        return self.locate(pfns)[0]

    @property
    def placed_by(self) -> str:
        """The source that decides a page's place."""
        return "/proc/zoneinfo" if self.sections is None else "pageblock bitmap by /proc/kcore"

    def as_record(self) -> dict[str, Any]:
        """Return the keys of event `memory-map` (docs/record.md)."""
        listed = []
        for zone in self.zones:
            if not zone.spanned:
                continue
            listed.append(
                {
                    "node": zone.node,
                    "zone": zone.name,
                    "start_pfn": zone.start_pfn,
                    "spanned": zone.spanned,
                    "present": zone.present,
                    "managed": zone.managed,
                    "free": zone.free,
                    "free_cma": zone.free_cma,
                    "cma": zone.cma,
                    "watermarks": {"min": zone.min, "low": zone.low, "high": zone.high},
                    "blocks": None if self.blocks is None else self.blocks.get((zone.node, zone.name)),
                }
            )
        return {
            "page_size": self.page_size,
            "pageblock_order": self.pageblock_order,
            "complete": self.complete,
            "has_unpinnable": self.has_unpinnable,
            "zones": listed,
            "cma_areas": [area.as_record() for area in self.cma_areas],
            "cma_config": self.cma_config,
            "unpinnable_ranges": [list(item) for item in self.unpinnable_ranges],
            "unregistered_cma": None
            if self.unregistered_cma is None
            else [list(item) for item in self.unregistered_cma],
            "selfcheck": self.selfcheck,
            "sources": self.sources,
            "problems": self.problems,
        }


class _Builder:
    """Collects the sources, then draws the map."""

    def __init__(self, alter: Callable[[BitmapLayout], BitmapLayout] | None) -> None:
        self.alter = alter
        self.sources: list[str] = []
        self.problems: list[str] = []
        self.zones: list[Zone] = []
        self.meminfo: dict[str, int] = {}
        self.info: PageTypeInfo | None = None
        self.btf: Btf | None = None
        self.cma_config: bool | None = None
        self.areas: list[CmaArea] = []
        self.sections: Sections | None = None
        self.page_zones: PageZones | None = None
        self.selfcheck: dict[str, Any] = {"passed": None, "differences": []}

    def read(self) -> None:
        """Read everything that this user may read."""
        try:
            self.zones = zones.read_zones()
            if not any(zone.populated for zone in self.zones):
                self.problems.append(f"{zones.ZONEINFO} shows no zone that has pages")
            self.sources.append(str(zones.ZONEINFO))
        except OSError as error:
            self.problems.append(f"{zones.ZONEINFO}: {error.strerror}")
        try:
            self.meminfo = zones.read_meminfo()
        except OSError as error:
            self.problems.append(f"{zones.MEMINFO}: {error.strerror}")
        try:
            self.btf = Btf.of_running_kernel()
        except OSError as error:
            self.problems.append(f"the kernel's types (BTF) cannot be read: {error.strerror}")
        except BtfError as error:
            self.problems.append(f"the kernel's types (BTF) cannot be read: {error}")
        self.cma_config = self._find_cma_config()
        try:
            self.info = read_pagetypeinfo()
            self.sources.append("/proc/pagetypeinfo")
        except OSError as error:
            self.problems.append(f"/proc/pagetypeinfo: {error.strerror}{_root_hint(error)}")
        except ValueError as error:
            self.problems.append(str(error))
        self._read_kernel_memory()
        self._read_cma_areas_elsewhere()

    def _find_cma_config(self) -> bool | None:
        """CONFIG_CMA, by the enum that the kernel was built with, else by a line that only such a kernel
        prints.
        """
        if self.btf is not None:
            try:
                known = migrate_cma(self.btf)
            except BtfError as error:
                self.problems.append(f"the kernel's types (BTF) cannot be read: {error}")
                known = None
            if known is not None:
                self.sources.append("enum migratetype (BTF)")
                return known
        if self.meminfo:
            self.sources.append(str(zones.MEMINFO))
            return "CmaTotal" in self.meminfo
        return None

    def _read_kernel_memory(self) -> None:
        if self.btf is None or not self.zones:
            return
        try:
            kcore = Kcore()
        except OSError as error:
            self.problems.append(f"/proc/kcore: {error.strerror}{_root_hint(error)}")
            return
        except KcoreError as error:
            self.problems.append(f"/proc/kcore: {error}")
            return
        with kcore:
            if self.info is None:
                self.problems.append("the pageblock bitmap was not read, since nothing could check it")
                return
            if self.meminfo.get("CmaTotal"):
                self._read_cma_areas_of_kernel(kcore, self.btf)
            try:
                self._read_bitmap(kcore, self.btf, self.info)
            except (KcoreError, BtfError) as error:
                self.problems.append(f"the pageblock bitmap could not be read: {error}")
            except (IndexError, ValueError, OverflowError) as error:
                self.problems.append(f"the kernel's structures are not as expected: {error}")
            except OSError as error:
                self.problems.append(f"/proc/kcore: {error.strerror}")

    def _read_bitmap(self, kcore: Kcore, btf: Btf, info: PageTypeInfo) -> None:
        layout = read_layout(kcore, btf, info.pageblock_order)
        if self.alter is not None:
            layout = self.alter(layout)
        end = max((zone.end_pfn for zone in self.zones if zone.populated), default=0)
        differences: list[dict[str, Any]] = []
        attempt = 0
        for attempt in range(1, _ATTEMPTS + 1):
            if attempt > 1:
                time.sleep(0.02 * attempt)
                info = read_pagetypeinfo()
                self.zones = zones.read_zones()
            self.info = info
            sections = read_sections(kcore, layout, end)
            page_zones = PageZones(kcore, sections, self.zones)
            differences = compare(count_blocks(sections, self.zones, page_zones), info, layout)
            differences += check_areas(sections, self.areas)
            if not differences:
                break
        self.selfcheck = {
            "passed": not differences,
            "differences": differences[:32],
            "attempts": attempt,
            "by": "pagetypeinfo_showblockcount_print()'s walk, /proc/pagetypeinfo, CMA areas' ranges",
        }
        if differences:
            first = differences[0]
            self.problems.append(
                "the pageblock bitmap as read here does not agree with /proc/pagetypeinfo "
                f"(node {first['node']}, zone {first['zone']}, {first['type']}: "
                f"{first['map']} against {first['pagetypeinfo']}), so it is not used"
            )
            return
        self.sources.append("pageblock bitmap by /proc/kcore")
        self.sections = sections
        # Zones of single pages, asked for while kcore is open.
        self.page_zones = page_zones
        self.ranges = _draw(sections, self.zones, page_zones)

    def _read_cma_areas_of_kernel(self, kcore: Kcore, btf: Btf) -> None:
        """Read `cma_areas[]` (mm/cma.c): name, size and exact ranges."""
        try:
            symbols = kallsyms.find(["cma_areas", "cma_area_count"], kcore)
            size = btf.size("cma")
            if len(symbols) < 2 or not size:
                return
            count = min(kcore.u32(symbols["cma_area_count"]), 256)
            for i in range(count):
                area = _read_cma_area(kcore, btf, symbols["cma_areas"] + i * size)
                if area is not None:
                    self.areas.append(area)
            if count:
                self.sources.append("cma_areas[] by /proc/kcore")
        except (OSError, KcoreError, BtfError) as error:
            self.problems.append(f"the kernel's list of CMA areas could not be read: {error}")
            self.areas = []

    def _read_cma_areas_elsewhere(self) -> None:
        if not self.meminfo.get("CmaTotal"):
            return
        if not self.areas:
            self.areas = zones.cma_areas_of_debugfs()
            if self.areas:
                self.sources.append(str(zones.CMA_DEBUGFS))
        in_sysfs = zones.cma_areas_of_sysfs()
        if in_sysfs:
            self.sources.append(str(zones.CMA_SYSFS))
        if not self.areas:
            self.areas = in_sysfs
            self._ranges_from_boot_messages()
        else:
            available = {area.name: area for area in in_sysfs}
            for area in self.areas:
                twin = available.get(area.name)
                if twin is not None:
                    area.sources += twin.sources
                    if twin.available is not None:
                        area.available = twin.available

    def _ranges_from_boot_messages(self) -> None:
        found = zones.parse_cma_lines(zones.kernel_log() or [])
        for area in self.areas:
            same = [(a, b) for a, b in found if b == area.pages * PAGE_SIZE]
            twins = [other for other in self.areas if other.pages == area.pages]
            if area.ranges is None and len(same) == 1 and len(twins) == 1:
                first = same[0][0] // PAGE_SIZE
                area.ranges = [(first, first + area.pages)]
                area.sources.append("boot messages")

    ranges: _Ranges | None = None

    def _draw_from_zones(self) -> None:
        """Without the bitmap: what zones, block counts and known CMA areas prove."""
        populated = [zone for zone in self.zones if zone.populated]
        edges = sorted({edge for zone in populated for edge in (zone.start_pfn or 0, zone.end_pfn)})
        rows = []
        for first, end in pairwise(edges):
            over = [zone for zone in populated if (zone.start_pfn or 0) <= first and end <= zone.end_pfn]
            if not over:
                continue
            places, owners = {self._place_of_zone(zone) for zone in over}, {zone.node for zone in over}
            place = places.pop() if len(places) == 1 else UNKNOWN
            rows.append((first, end, place, owners.pop() if len(owners) == 1 else -1))
        ranges = _of_rows(rows)
        ranges = self._settle_overlaps(ranges)
        for area in self.areas:
            for first, end in area.ranges or []:
                ranges = _overlay(ranges, first, end, CMA)
        self.ranges = ranges

    def _place_of_zone(self, zone: Zone) -> int:
        if zone.name == "Movable":
            return MOVABLE_ZONE
        if self.cma_config is False:
            return ORDINARY
        counts = None if self.info is None else self.info.blocks.get((zone.node, zone.name))
        if counts is not None and not counts.get("CMA") and not counts.get("Isolate"):
            return ORDINARY
        if counts is not None and not counts.get("Isolate") and self.info is not None:
            known = self._area_blocks(zone, self.info.pageblock_order)
            if known == counts.get("CMA"):
                return ORDINARY  # but for the areas, which are drawn over it
        return UNKNOWN

    def _area_blocks(self, zone: Zone, order: int) -> int | None:
        """Pageblocks of this zone that known CMA areas fill; None where an area's range is not known."""
        total = 0
        for area in self.areas:
            if area.ranges is None:
                return None
            for first, end in area.ranges:
                if first >= (zone.start_pfn or 0) and end <= zone.end_pfn:
                    total += end - first
        return total >> order

    def _settle_overlaps(self, ranges: _Ranges) -> _Ranges:
        """Where spans of zones overlap, the memory blocks' `valid_zones` tell (drivers/base/memory.c)."""
        if not (ranges.code == UNKNOWN).any() or not any(
            zone.name == "Movable" and zone.populated for zone in self.zones
        ):
            return ranges
        try:
            block_pages = block_size() // PAGE_SIZE
            blocks = memory_blocks()
        except (OSError, ValueError):
            return ranges
        used = False
        places = {zone.name: self._place_of_zone(zone) for zone in self.zones if zone.populated}
        for block in blocks:
            first = block.number * block_pages
            at = int(np.searchsorted(ranges.start, np.uint64(first), side="right")) - 1
            last = int(np.searchsorted(ranges.start, np.uint64(first + block_pages - 1), side="right")) - 1
            if not (ranges.code[max(at, 0) : last + 1] == UNKNOWN).any():
                continue
            try:
                zone_name = block.zone
            except OSError:
                continue
            if zone_name in places:
                ranges = _overlay(ranges, first, first + block_pages, places[zone_name], only=UNKNOWN)
                used = True
        if used:
            self.sources.append("valid_zones of the memory blocks")
        return ranges

    def build(self) -> MemoryMap:
        """Draw the conclusions."""
        if self.ranges is None:
            self._draw_from_zones()
        ranges = self.ranges
        assert ranges is not None
        unpinnable = _unpinnable(ranges)
        complete = _all_known(ranges) and self.selfcheck["passed"] is not False
        has: bool | None
        if self._some_unpinnable() or unpinnable:
            has = True
        else:
            has = False if complete else None
        return MemoryMap(
            page_size=PAGE_SIZE,
            pageblock_order=None if self.info is None else self.info.pageblock_order,
            complete=complete,
            has_unpinnable=has,
            zones=self.zones,
            blocks=None if self.info is None else self.info.blocks,
            cma_areas=self.areas,
            cma_config=self.cma_config,
            unpinnable_ranges=unpinnable,
            unregistered_cma=self._unregistered(unpinnable),
            selfcheck=self.selfcheck,
            sources=self.sources,
            problems=self.problems,
            sections=self.sections,
            _ranges=ranges,
            _page_zones=self.page_zones,
        )

    def _some_unpinnable(self) -> bool:
        """One proven page is enough."""
        if any(zone.name == "Movable" and zone.populated for zone in self.zones):
            return True
        if self.info is not None and any(counts.get("CMA") for counts in self.info.blocks.values()):
            return True
        return any(zone.free_cma for zone in self.zones)

    def _unregistered(self, unpinnable: list[tuple[int, int, str]]) -> list[tuple[int, int]] | None:
        """MIGRATE_CMA memory outside every registered area, as kexec handover's scratch is."""
        if self.sections is None or any(area.ranges is None for area in self.areas):
            return None
        left = [(first, end) for first, end, kind in unpinnable if kind == "cma"]
        for area in self.areas:
            for a, b in area.ranges or []:
                left = [
                    part
                    for first, end in left
                    for part in ((first, min(end, a)), (max(first, b), end))
                    if part[0] < part[1]
                ]
        return left


def _draw(sections: Sections, zones_: list[Zone], page_zones: PageZones) -> _Ranges:
    """Give every pageblock its code and node."""
    layout = sections.layout
    blocks = layout.blocks_per_section
    first = (
        (sections.numbers[:, None] << np.uint64(layout.section_shift))
        + (np.arange(blocks, dtype=np.uint64) << np.uint64(layout.pageblock_order))
    ).reshape(-1)
    size = np.uint64(1 << layout.pageblock_order)
    zone_of = np.full(len(first), -1, dtype=np.int32)
    several = np.zeros(len(first), dtype=bool)
    populated = [zone for zone in zones_ if zone.populated]
    for i, zone in enumerate(populated):
        inside = (first + size > np.uint64(zone.start_pfn or 0)) & (first < np.uint64(zone.end_pfn))
        several |= inside & (zone_of >= 0)
        zone_of[inside & (zone_of < 0)] = i
    if several.any():
        number, node = page_zones.of(first[several])
        by_number = np.full(len(number), -1, dtype=np.int32)
        for i, zone in enumerate(populated):
            if zone.name in layout.zone_names:
                by_number[(number == layout.zone_names.index(zone.name)) & (node == zone.node)] = i
        zone_of[several] = by_number
    inside_zone = zone_of >= 0
    first, zone_of = first[inside_zone], zone_of[inside_zone]
    types = sections.types.reshape(-1)[inside_zone]
    movable = np.array([zone.name == "Movable" for zone in populated])
    node_of_zone = np.array([zone.node for zone in populated], dtype=np.int32)
    code = _codes(layout, types, movable[zone_of])
    return _merge(first, first + size, code, node_of_zone[zone_of])


def _unpinnable(ranges: _Ranges) -> list[tuple[int, int, str]]:
    chosen = np.isin(ranges.code, UNPINNABLE)
    columns = (ranges.start[chosen], ranges.end[chosen], ranges.code[chosen])
    return [(int(first), int(end), PLACE_NAMES[int(code)]) for first, end, code in zip(*columns, strict=True)]


def _all_known(ranges: _Ranges) -> bool:
    return bool(len(ranges.start)) and not (ranges.code == UNKNOWN).any()


def _codes(layout: BitmapLayout, types: NDArray[np.uint8], movable: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the place of pageblocks by migratetype and whether they lie in ZONE_MOVABLE."""
    code = np.where(movable, MOVABLE_ZONE, ORDINARY).astype(np.uint8)
    if layout.cma is not None:
        # Without CONFIG_CMA an isolated block may be pinned: folio_is_longterm_pinnable(),
        # include/linux/mm.h.
        code[types == layout.cma] = CMA
        if layout.isolate is not None:
            code[types == layout.isolate] = ISOLATE
    return code


def _place_of(
    pfns: NDArray[np.uint64], sections: Sections, page_zones: PageZones
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return place and node of each PFN by its pageblock's bits and its own flags; UNKNOWN where it has no
    online struct page, lies in no zone of pages (ZONE_DEVICE), or shows an impossible value.
    """
    layout = sections.layout
    rows = sections.row_of(pfns)
    online = sections.online(pfns, rows)
    types = sections.types_of(pfns, rows)
    number, node = page_zones.of(pfns)
    # Looked up and not searched for: this is done around each registration. The last answers for no zone, -1.
    names = (*layout.zone_names, "")
    zone = np.minimum(number, len(names) - 1)
    code = _codes(layout, types, np.array([name == "Movable" for name in names])[zone])
    certain = online & np.array([name not in ("Device", "") for name in names])[zone] & (types < layout.types)
    return np.where(certain, code, np.uint8(UNKNOWN)), np.where(certain, node, -1).astype(np.int32)


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _nowhere(pfns: NDArray[np.uint64], problem: str) -> Located:
    place = np.where(pfns == 0, np.uint8(ABSENT), np.uint8(UNKNOWN))
    return Located(place, np.full(len(pfns), -1, dtype=np.int32), None, problem)


def _root_hint(error: OSError) -> str:
    if not isinstance(error, PermissionError):
        return ""
    if os.geteuid():
        return " (root would give it)"
    return " (kernel lockdown, or a container without the capability)"


def _merge(
    first: NDArray[np.uint64], end: NDArray[np.uint64], code: NDArray[np.uint8], node: NDArray[np.int32]
) -> _Ranges:
    """Join neighbours of the same code and node."""
    if not len(first):
        return _Ranges(first, end, code, node)
    new = np.ones(len(first), dtype=np.int64)
    new[1:] = (first[1:] != end[:-1]) | (code[1:] != code[:-1]) | (node[1:] != node[:-1])
    group = runs(np.cumsum(new))
    starts = group[:, 0]
    lasts = starts + group[:, 1] - 1
    return _Ranges(first[starts], end[lasts], code[starts], node[starts])


def _overlay(ranges: _Ranges, first: int, end: int, code: int, only: int | None = None) -> _Ranges:
    """Give [first, end) another code, where ranges cover it (and have code `only`, if given)."""
    rows: list[tuple[int, int, int, int]] = []
    for a, b, c, n in zip(
        ranges.start.tolist(), ranges.end.tolist(), ranges.code.tolist(), ranges.node.tolist(), strict=True
    ):
        low, high = max(a, first), min(b, end)
        if low >= high or (only is not None and c != only):
            rows.append((a, b, c, n))
            continue
        if a < low:
            rows.append((a, low, c, n))
        rows.append((low, high, code, n))
        if high < b:
            rows.append((high, b, c, n))
    drawn = _of_rows(rows)
    return _merge(drawn.start, drawn.end, drawn.code, drawn.node)


def _read_cma_area(kcore: Kcore, btf: Btf, address: int) -> CmaArea | None:
    """Read one `struct cma` (mm/cma.h): one range up to 6.14, several since."""
    count_at, name = btf.offset("cma", "count"), btf.member("cma", "name")
    if count_at is None or name is None:
        return None
    pages = kcore.u64(address + count_at)
    length = btf.array_length(name)
    raw = kcore.read(address + name.offset, length) if length else b""
    base_at, ranges_at, number_at = (
        btf.offset("cma", member) for member in ("base_pfn", "ranges", "nranges")
    )
    ranges: list[tuple[int, int]] = []
    if base_at is not None:
        base = kcore.u64(address + base_at)
        ranges = [(base, base + pages)]
    elif ranges_at is not None and number_at is not None:
        size = btf.size("cma_memrange")
        first_at, length_at = btf.offset("cma_memrange", "base_pfn"), btf.offset("cma_memrange", "count")
        if size and first_at is not None and length_at is not None:
            for i in range(min(kcore.u32(address + number_at), 64)):
                at = address + ranges_at + i * size
                base = kcore.u64(at + first_at)
                ranges.append((base, base + kcore.u64(at + length_at)))
    if sum(end - first for first, end in ranges) != pages or not pages:
        return None
    node_at, available_at = btf.offset("cma", "nid"), btf.offset("cma", "available_count")
    node = None if node_at is None else kcore.u32(address + node_at)
    return CmaArea(
        raw.split(b"\0", 1)[0].decode(errors="replace"),
        pages,
        None if available_at is None else kcore.u64(address + available_at),
        ranges,
        node if node is not None and node < 1 << 31 else None,
        ["cma_areas[] by /proc/kcore"],
    )


def read_memory_map(*, alter: Callable[[BitmapLayout], BitmapLayout] | None = None) -> MemoryMap:
    """Read the map of this node's memory. What is closed to this user is said in `problems`, not raised.

    `alter` changes the layout before it is used: a test plants a wrong one and sees the self-check catch it.
    """
    builder = _Builder(alter)
    builder.read()
    return builder.build()
