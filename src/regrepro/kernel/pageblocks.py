"""The pageblock bitmap: the migratetype of every pageblock, read from kernel memory and checked by the
kernel's word.

`struct mem_section` leads to `struct mem_section_usage`, whose `pageblock_flags` hold a few bits for each
pageblock of the section (include/linux/mmzone.h, include/linux/pageblock-flags.h). Nothing here is trusted
before `compare()` has held the same walk as `pagetypeinfo_showblockcount_print()` (mm/vmstat.c) against
/proc/pagetypeinfo.
"""

from __future__ import annotations

import copy
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro.core.pages import PAGE_SIZE, PageLayout
from regrepro.kernel import kallsyms
from regrepro.kernel.btf import Btf
from regrepro.kernel.kcore import Kcore, KcoreError
from regrepro.kernel.zones import CmaArea, Zone

PAGETYPEINFO = Path("/proc/pagetypeinfo")

# Low bits of section_mem_map (include/linux/mmzone.h); memmaps are page-aligned: no address bit is lost.
_HAS_MEM_MAP, _IS_ONLINE = 1 << 1, 1 << 2
_MAP_MASK = ~0xFFF & (1 << 64) - 1

_SUBSECTION_SHIFT = 21  # bytes, on every architecture


@dataclass(frozen=True)
class PageTypeInfo:
    """What /proc/pagetypeinfo says: "Number of blocks type" by (node, zone), in the order of `types`."""

    pageblock_order: int
    types: tuple[str, ...]
    blocks: dict[tuple[int, str], dict[str, int]]


def parse_pagetypeinfo(text: str) -> PageTypeInfo:
    """Parse /proc/pagetypeinfo. Raises ValueError when it lacks what we look for."""
    order = re.search(r"Page block order:\s*(\d+)", text)
    header = re.search(r"Number of blocks type\s+(.+)", text)
    if not order or not header:
        raise ValueError("/proc/pagetypeinfo has no page block order or no block counts")
    types = tuple(header[1].split())
    blocks: dict[tuple[int, str], dict[str, int]] = {}
    # Each node has a header of its own; a table of mixed blocks may follow with CONFIG_PAGE_OWNER.
    counting = False
    for line in text[header.start() :].splitlines():
        if line.startswith("Number of blocks type"):
            counting = True
        elif line.startswith("Number of mixed blocks"):
            counting = False
        found = re.match(r"Node\s+(\d+), zone\s+(\S+)\s+([\d\s]+)$", line)
        if counting and found:
            counts = [int(word) for word in found[3].split()]
            if len(counts) == len(types):
                blocks[int(found[1]), found[2]] = dict(zip(types, counts, strict=True))
    return PageTypeInfo(int(order[1]), types, blocks)


def read_pagetypeinfo() -> PageTypeInfo:
    """Read /proc/pagetypeinfo (root). Raises OSError, ValueError.

    The kernel walks its free lists under the zone lock for it: read it once or twice a run, never per step.
    """
    return parse_pagetypeinfo(PAGETYPEINFO.read_text())


@dataclass(frozen=True)
class BitmapLayout:
    """Everything that is needed to find a pageblock's bits. Offsets and sizes in bytes unless said."""

    pageblock_order: int
    section_shift: int  # log2 of pages
    root: int  # address of the array of section roots (or of sections)
    sections_per_root: int  # 1: the array holds the sections themselves (no SPARSEMEM_EXTREME)
    extreme: bool
    section_size: int
    map_offset: int
    usage_offset: int
    subsection_offset: int | None
    flags_offset: int
    usage_size: int  # of struct mem_section_usage, at whose end pageblock_flags[] begins
    bits_per_block: int
    type_bits: int
    isolate_bit: int | None
    cma: int | None
    isolate: int | None
    types: int  # MIGRATE_TYPES: every value is below
    zones_width: int
    zone_names: tuple[str, ...]  # by zone number, as /proc/zoneinfo names them
    nodes_width: int
    pages: PageLayout

    @property
    def blocks_per_section(self) -> int:
        """Pageblocks in one section."""
        return 1 << self.section_shift - self.pageblock_order


def migrate_cma(btf: Btf) -> bool | None:
    """Whether this kernel knows MIGRATE_CMA (CONFIG_CMA); None when BTF has no `enum migratetype`."""
    values = btf.enum("migratetype")
    return None if values is None else "MIGRATE_CMA" in values


_ZONE_NAMES = {
    "ZONE_DMA": "DMA",
    "ZONE_DMA32": "DMA32",
    "ZONE_NORMAL": "Normal",
    "ZONE_HIGHMEM": "HighMem",
    "ZONE_MOVABLE": "Movable",
    "ZONE_DEVICE": "Device",
}


def read_layout(kcore: Kcore, btf: Btf, pageblock_order: int) -> BitmapLayout:
    """Find the layout of the running kernel. Raises KcoreError with what is missing."""

    def need(value: int | None, what: str) -> int:
        if value is None:
            raise KcoreError(f"this kernel does not tell {what}")
        return value

    section_size = need(btf.size("mem_section"), "the size of struct mem_section (BTF)")
    section_bits = kcore.number("NUMBER(SECTION_SIZE_BITS)")
    if section_bits is None:
        section_bits = need(_section_bits_of_arch(), "SECTION_SIZE_BITS")
    section_shift = section_bits - (PAGE_SIZE.bit_length() - 1)
    root, extreme = _section_root(kcore, section_bits)
    pageblock_bits = btf.enum("pageblock_bits")
    migratetype = btf.enum("migratetype")
    zone_type = btf.enum("zone_type")
    if pageblock_bits is None or migratetype is None or zone_type is None:
        raise KcoreError("this kernel's BTF lacks enum pageblock_bits, migratetype or zone_type")
    bits = pageblock_bits.get("NR_PAGEBLOCK_BITS", pageblock_bits.get("__NR_PAGEBLOCK_BITS"))
    bits = need(bits, "NR_PAGEBLOCK_BITS (BTF)")
    if "PB_migrate_end" in pageblock_bits:
        type_bits = pageblock_bits["PB_migrate_end"] - pageblock_bits["PB_migrate"] + 1
    else:
        type_bits = sum(bool(re.fullmatch(r"PB_migrate_\d", name)) for name in pageblock_bits)
    numbered = sorted((value, name) for name, value in zone_type.items() if name in _ZONE_NAMES)
    return BitmapLayout(
        pageblock_order=pageblock_order,
        section_shift=section_shift,
        root=root,
        sections_per_root=PAGE_SIZE // section_size if extreme else 1,
        extreme=extreme,
        section_size=section_size,
        map_offset=need(btf.offset("mem_section", "section_mem_map"), "mem_section.section_mem_map (BTF)"),
        usage_offset=need(btf.offset("mem_section", "usage"), "mem_section.usage (BTF)"),
        subsection_offset=btf.offset("mem_section_usage", "subsection_map"),
        flags_offset=need(btf.offset("mem_section_usage", "pageblock_flags"), "pageblock_flags (BTF)"),
        usage_size=need(btf.size("mem_section_usage"), "the size of struct mem_section_usage (BTF)"),
        bits_per_block=1 << (bits - 1).bit_length(),  # rounded up so that no block's bits cross a word
        type_bits=type_bits,
        isolate_bit=pageblock_bits.get("PB_migrate_isolate"),
        cma=migratetype.get("MIGRATE_CMA"),
        isolate=migratetype.get("MIGRATE_ISOLATE"),
        types=need(migratetype.get("MIGRATE_TYPES"), "MIGRATE_TYPES (BTF)"),
        zones_width=max(need(zone_type.get("__MAX_NR_ZONES"), "MAX_NR_ZONES (BTF)") - 1, 0).bit_length(),
        zone_names=tuple(_ZONE_NAMES[name] for _, name in numbered),
        nodes_width=_nodes_width(kcore),
        pages=_page_layout(btf, section_shift),
    )


def _section_root(kcore: Kcore, section_bits: int) -> tuple[int, bool]:
    """Return the address of the array `mem_section`, and whether it holds pointers (SPARSEMEM_EXTREME)."""
    length = kcore.number("LENGTH(mem_section)")
    physical = kcore.number("NUMBER(MAX_PHYSMEM_BITS)")
    address = kcore.symbol("mem_section")
    if address is not None and length is not None and physical is not None:
        return address, length < 1 << physical - section_bits
    found = kallsyms.find(["mem_section"], kcore).get("mem_section")
    if found is None:
        raise KcoreError("the address of mem_section is hidden (kernel.kptr_restrict) and not in vmcoreinfo")
    # Without vmcoreinfo: 64-bit kernels with vmemmap are SPARSEMEM_EXTREME; the self-check finds any other.
    return kcore.u64(found), True


def _section_bits_of_arch() -> int | None:
    """SECTION_SIZE_BITS of arch/*/include/asm/sparsemem.h, for kernels that do not tell."""
    machine = platform.machine()
    if machine == "x86_64":
        return 27
    if machine == "aarch64":
        return 29 if PAGE_SIZE == 65536 else 27
    return None


def _nodes_width(kcore: Kcore) -> int:
    """NODES_SHIFT: MAX_NUMNODES is the length of node_data[], or the bits of nodemask_t (rounded up)."""
    nodes = kcore.number("LENGTH(node_data)")
    if nodes is None:
        nodes = (kcore.number("SIZE(nodemask_t)") or 0) * 8
    return max(nodes - 1, 0).bit_length()


def _page_layout(btf: Btf, section_shift: int) -> PageLayout:
    size = btf.size("page")
    members = {
        "flags": btf.offset("page", "flags"),
        "refcount": btf.offset("page", "_refcount"),
        "mapcount": btf.offset("page", "_mapcount"),
        "compound": btf.offset("page", "compound_head", "compound_info"),
    }
    if not size or any(offset is None for offset in members.values()):
        raise KcoreError("this kernel's BTF lacks struct page or one of its members")
    folio_pincount = btf.offset("folio", "_pincount")
    first_tail_pincount = btf.offset("page", "compound_pincount")
    second_tail_pincount = btf.offset("page", "hpage_pinned_refcount")
    if folio_pincount is None and first_tail_pincount is not None:
        folio_pincount = size + first_tail_pincount
    elif folio_pincount is None and second_tail_pincount is not None:
        folio_pincount = 2 * size + second_tail_pincount
    large = btf.offset("folio", "_large_mapcount")
    entire = None
    if large is None:
        first_tail = btf.offset("page", "compound_mapcount")
        entire = btf.offset("folio", "_entire_mapcount")
        if entire is None and first_tail is not None:
            entire = size + first_tail
    number = btf.offset("folio", "_nr_pages", "_folio_nr_pages")
    first_tail_number = btf.offset("page", "compound_nr")
    if number is None and first_tail_number is not None:
        number = size + first_tail_number
    flags = btf.enum("pageflags") or {}
    return PageLayout(
        page_struct_size=size,
        section_shift=section_shift,
        flags=members["flags"] or 0,
        refcount=members["refcount"] or 0,
        mapcount=members["mapcount"] or 0,
        compound=members["compound"] or 0,
        pincount=-1 if folio_pincount is None else folio_pincount,
        large_mapcount=next((at for at in (large, entire) if at is not None), -1),
        nr_pages=-1 if number is None else number,
        head_bit=flags.get("PG_head", -1),
        compound_may_be_mask=btf.offset("page", "compound_info") is not None,
        mapcount_is_entire=large is None,
    )


@dataclass
class Sections:
    """All online sections, ascending, and the migratetype of each of their pageblocks."""

    layout: BitmapLayout
    numbers: NDArray[np.uint64]
    coded_maps: NDArray[np.uint64]
    types: NDArray[np.uint8]  # (sections, blocks per section)
    valid: NDArray[Any] | None  # (sections, subsections): memory there; None: not known

    def row_of(self, pfns: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row of each PFN's section, -1 where no online section holds it."""
        wanted = pfns >> np.uint64(self.layout.section_shift)
        rows = np.searchsorted(self.numbers, wanted)
        rows[rows == len(self.numbers)] = 0
        if not len(self.numbers):
            return np.full(len(pfns), -1, dtype=np.int64)
        return np.where(self.numbers[rows] == wanted, rows, -1).astype(np.int64)

    def online(self, pfns: NDArray[np.uint64], rows: NDArray[np.int64]) -> NDArray[Any]:
        """Whether each PFN has a struct page, as pfn_to_online_page() answers."""
        answer = rows >= 0
        if self.valid is not None and len(self.numbers):
            shift = max(_SUBSECTION_SHIFT - (PAGE_SIZE.bit_length() - 1), 0)
            answer = answer & self.valid[rows, self._inside(pfns, shift)]
        return answer

    def _inside(self, pfns: NDArray[np.uint64], shift: int) -> NDArray[np.int64]:
        """Return in which part of its section, of 2**shift pages, each PFN lies."""
        mask = np.uint64((1 << self.layout.section_shift) - 1)
        inside: NDArray[np.int64] = (pfns & mask).astype(np.int64) >> shift
        return inside

    def types_of(self, pfns: NDArray[np.uint64], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the migratetype of each PFN's pageblock; meaningless where rows is -1."""
        if not len(self.numbers):
            return np.zeros(len(pfns), dtype=np.uint8)
        types: NDArray[np.uint8] = self.types[rows, self._inside(pfns, self.layout.pageblock_order)]
        return types


def read_sections(kcore: Kcore, layout: BitmapLayout, end_pfn: int) -> Sections:
    """Read every online section below `end_pfn` and its bitmap. Raises KcoreError, OSError."""
    count = -(-end_pfn // (1 << layout.section_shift))
    return _sections_of(kcore, layout, *_read_section_structs(kcore, layout, count))


def read_sections_of(kcore: Kcore, layout: BitmapLayout, numbers: NDArray[np.uint64]) -> Sections:
    """Read of these sections (numbers ascending) the ones that are online, and their bitmaps, as they are
    now. Raises KcoreError, OSError.

    Root, section and usage are followed anew: memory that is hot-plugged brings new ones
    (sparse_add_section(), mm/sparse.c), and SECTION_IS_ONLINE follows every memory block
    (offline_mem_sections()).
    """
    size, per_root = layout.section_size, np.uint64(layout.sections_per_root)
    if layout.extreme:
        words, ok = kcore.gather(np.uint64(layout.root) + numbers // per_root * np.uint64(8), 8)
        roots = words.view(np.uint64).reshape(-1)
        there = ok & (roots != 0)
        numbers, roots = numbers[there], roots[there]
        addresses = roots + numbers % per_root * np.uint64(size)
    else:
        addresses = np.uint64(layout.root) + numbers * np.uint64(size)
    raw, ok = kcore.gather(addresses, size)
    return _sections_of(kcore, layout, np.ascontiguousarray(raw[ok]), numbers[ok])


def _sections_of(
    kcore: Kcore, layout: BitmapLayout, raw: NDArray[np.uint8], numbers: NDArray[np.uint64]
) -> Sections:
    """Decode `struct mem_section` (n, size) and read the bitmaps that they lead to."""
    words = raw.view(np.uint64)
    maps = words[:, layout.map_offset // 8]
    usages = words[:, layout.usage_offset // 8]
    wanted = np.uint64(_HAS_MEM_MAP | _IS_ONLINE)
    online = (maps & wanted == wanted) & (usages != 0)
    numbers, maps, usages = numbers[online], maps[online], usages[online]
    bitmap_bytes = layout.blocks_per_section * layout.bits_per_block // 8
    if not bitmap_bytes or layout.bits_per_block not in (4, 8):
        raise KcoreError(f"a pageblock bitmap of {layout.bits_per_block} bits a block is not known here")
    usage, ok = kcore.gather(usages, layout.flags_offset + bitmap_bytes)
    if not ok.all():
        raise KcoreError(f"{int((~ok).sum())} pageblock bitmaps are outside /proc/kcore")
    bitmap = usage[:, layout.flags_offset :]
    if layout.bits_per_block == 4:
        bits = np.empty((len(bitmap), 2 * bitmap_bytes), dtype=np.uint8)
        bits[:, 0::2], bits[:, 1::2] = bitmap & 15, bitmap >> 4
    else:
        bits = bitmap
    types = bits & np.uint8((1 << layout.type_bits) - 1)
    if layout.isolate_bit is not None and layout.isolate is not None:
        types = np.where(bits >> np.uint8(layout.isolate_bit) & 1, np.uint8(layout.isolate), types)
    valid = None
    subsections = 1 << max(layout.section_shift + (PAGE_SIZE.bit_length() - 1) - _SUBSECTION_SHIFT, 0)
    if layout.subsection_offset is not None:
        last = layout.subsection_offset + (subsections + 7) // 8
        if last <= usage.shape[1]:
            bytes_ = np.ascontiguousarray(usage[:, layout.subsection_offset : last])
            valid = np.unpackbits(bytes_, axis=1, bitorder="little")[:, :subsections].astype(bool)
    return Sections(
        layout, numbers, maps & np.uint64(_MAP_MASK), np.ascontiguousarray(types, dtype=np.uint8), valid
    )


def _read_section_structs(
    kcore: Kcore, layout: BitmapLayout, count: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Return (n, size of mem_section) raw structs and their section numbers, for sections below `count`."""
    size, per_root = layout.section_size, layout.sections_per_root
    if size % 8 or layout.map_offset % 8 or layout.usage_offset % 8:
        raise KcoreError("struct mem_section is not made of whole words")
    if not layout.extreme:
        raw = np.frombuffer(kcore.read(layout.root, count * size), dtype=np.uint8).reshape(-1, size)
        return raw, np.arange(count, dtype=np.uint64)
    roots = np.frombuffer(kcore.read(layout.root, -(-count // per_root) * 8), dtype=np.uint64)
    used = np.flatnonzero(roots)
    pages, ok = kcore.gather(roots[used], per_root * size)
    if not ok.all():
        raise KcoreError("a section root is outside /proc/kcore")
    numbers = (used[:, None] * per_root + np.arange(per_root)).reshape(-1).astype(np.uint64)
    return pages.reshape(-1, size), numbers


class PageZones:
    """Zone and node of a page from its own flags (page_zonenum(), page_to_nid() of include/linux/mm.h)."""

    def __init__(self, kcore: Kcore, sections: Sections, zones: list[Zone]) -> None:
        """Find where in page->flags the two fields lie, by pages whose zone is certain. Raises KcoreError."""
        self._kcore = kcore
        self._sections = sections
        layout = sections.layout
        self._zones_width = layout.zones_width
        samples, expected_zones, expected_nodes = _certain_pages(sections, zones)
        flags, ok = self._flags(samples)
        flags, expected_zones, expected_nodes = flags[ok], expected_zones[ok], expected_nodes[ok]
        if not len(flags):
            raise KcoreError("no page whose zone is certain could be read")
        best = (-1.0, 0)
        for nodes_width in [layout.nodes_width, *range(11)]:
            self.nodes_width = nodes_width
            zone, node = self._decode(flags)
            score = float(np.mean((zone == expected_zones) & (node == expected_nodes)))
            if score > best[0]:
                best = (score, nodes_width)
        # Struct pages of holes are zeroed before 5.12, so that a few samples may not match.
        if best[0] < 0.9:
            raise KcoreError("the zone field of page->flags could not be found")
        self.nodes_width = best[1]

    def over(self, kcore: Kcore, sections: Sections) -> PageZones:
        """Return the same fields, read through another handle and by sections as they are now."""
        twin = copy.copy(self)
        twin._kcore, twin._sections = kcore, sections
        return twin

    def _flags(self, pfns: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[Any]]:
        layout = self._sections.layout.pages
        rows = self._sections.row_of(pfns)
        if not len(self._sections.numbers):
            return np.zeros(len(pfns), dtype=np.uint64), np.zeros(len(pfns), dtype=bool)
        addresses = self._sections.coded_maps[rows] + pfns * np.uint64(layout.page_struct_size)
        raw, ok = self._kcore.gather(addresses + np.uint64(layout.flags), 8)
        return raw.view(np.uint64).reshape(-1), ok & (rows >= 0)

    def _decode(self, flags: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        shift = 64 - self.nodes_width
        node = flags >> np.uint64(shift) if self.nodes_width else np.zeros_like(flags)
        zone = flags >> np.uint64(shift - self._zones_width) & np.uint64((1 << self._zones_width) - 1)
        return zone.astype(np.int64), node.astype(np.int64)

    def of(self, pfns: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return zone number and node of each PFN, -1 where the struct page cannot be read."""
        flags, ok = self._flags(pfns)
        zone, node = self._decode(flags)
        return np.where(ok, zone, -1), np.where(ok, node, -1)


def _certain_pages(
    sections: Sections, zones: list[Zone]
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """Choose PFNs that lie in the span of one zone only: PFNs, zone numbers, nodes."""
    names = sections.layout.zone_names
    populated = [zone for zone in zones if zone.populated and zone.name in names]
    chosen, numbers, nodes = [], [], []
    for zone in populated:
        pfns = np.unique(np.linspace(zone.start_pfn or 0, zone.end_pfn - 1, 64).astype(np.uint64))
        alone = ~np.any(
            [
                (pfns >= (other.start_pfn or 0)) & (pfns < other.end_pfn)
                for other in populated
                if other is not zone
            ]
            or [np.zeros(len(pfns), dtype=bool)],
            axis=0,
        )
        pfns = pfns[alone]
        pfns = pfns[sections.online(pfns, sections.row_of(pfns))]
        chosen.append(pfns)
        numbers.append(np.full(len(pfns), names.index(zone.name), dtype=np.int64))
        nodes.append(np.full(len(pfns), zone.node, dtype=np.int64))
    if not chosen:
        raise KcoreError("/proc/zoneinfo has no populated zone")
    return np.concatenate(chosen), np.concatenate(numbers), np.concatenate(nodes)


def count_blocks(
    sections: Sections, zones: list[Zone], page_zones: PageZones
) -> dict[tuple[int, str], NDArray[np.int64]]:
    """Repeat the kernel's walk: for each populated zone the blocks by migratetype (last: impossible values).

    As pagetypeinfo_showblockcount_print(): from the zone's first PFN on in steps of a pageblock, without
    pages that have no online struct page or are of another zone. A page's own zone is looked up where the
    spans of zones overlap and for the blocks that matter (CMA, Isolate); elsewhere the span decides.
    """
    layout = sections.layout
    populated = [zone for zone in zones if zone.populated]
    counts = {}
    for zone in populated:
        pfns = np.arange(zone.start_pfn or 0, zone.end_pfn, 1 << layout.pageblock_order, dtype=np.uint64)
        rows = sections.row_of(pfns)
        pfns, rows = pfns[rows >= 0], rows[rows >= 0]
        online = sections.online(pfns, rows)
        pfns, rows = pfns[online], rows[online]
        types = sections.types_of(pfns, rows).astype(np.int64)
        ask = np.zeros(len(pfns), dtype=bool)
        for special in (layout.cma, layout.isolate):
            if special is not None:
                ask |= types == special
        for other in populated:
            if other is not zone:
                ask |= (pfns >= (other.start_pfn or 0)) & (pfns < other.end_pfn)
        keep = np.ones(len(pfns), dtype=bool)
        if ask.any():
            number, node = page_zones.of(pfns[ask])
            wanted = layout.zone_names.index(zone.name) if zone.name in layout.zone_names else -1
            keep[ask] = (number == wanted) & (node == zone.node)
        types = np.minimum(types[keep], layout.types)
        counts[zone.node, zone.name] = np.bincount(types, minlength=layout.types + 1)
    return counts


def check_areas(sections: Sections, areas: list[CmaArea]) -> list[dict[str, Any]]:
    """Hold the bitmap against the ranges of registered CMA areas: each pageblock in one is CMA or isolated.

    The count of blocks says how many there are, this says where.
    """
    layout = sections.layout
    differences: list[dict[str, Any]] = []
    size = 1 << layout.pageblock_order
    for area in areas:
        for first, end in area.ranges or []:
            pfns = np.arange(-(-first // size) * size, end - size + 1, size, dtype=np.uint64)
            rows = sections.row_of(pfns)
            types = sections.types_of(pfns, rows)
            wrong = (rows < 0) | ((types != (layout.cma or -1)) & (types != (layout.isolate or -1)))
            if wrong.any():
                differences.append(
                    {
                        "node": area.node,
                        "zone": f"CMA area {area.name}",
                        "type": "CMA",
                        "map": int(len(pfns) - wrong.sum()),
                        "pagetypeinfo": len(pfns),
                    }
                )
    return differences


def compare(
    counts: dict[tuple[int, str], NDArray[np.int64]], kernel: PageTypeInfo, layout: BitmapLayout
) -> list[dict[str, Any]]:
    """Hold our counts against the kernel's; empty means that the bitmap is read as the kernel reads it.

    CMA and Isolate must be equal, per node and zone. The other types change under load between two looks, so
    that they need only agree roughly: enough to see a wrong offset or width where there is neither CMA nor
    Isolate.
    """
    differences: list[dict[str, Any]] = []

    def differ(where: tuple[int, str], kind: str, ours: int, theirs: int) -> None:
        differences.append(
            {"node": where[0], "zone": where[1], "type": kind, "map": ours, "pagetypeinfo": theirs}
        )

    if layout.types != len(kernel.types):
        differ((-1, "all"), "migratetypes", layout.types, len(kernel.types))
        return differences
    # pageblock_flags[] is a flexible array: where it begins, the struct ends.
    if layout.flags_offset != layout.usage_size:
        differ((-1, "all"), "offset of pageblock_flags", layout.flags_offset, layout.usage_size)
    if layout.types > 1 << layout.type_bits:
        differ((-1, "all"), "values of the type bits", 1 << layout.type_bits, layout.types)
    # migratetype_names[] is in the order of the enum.
    for kind, value in (("CMA", layout.cma), ("Isolate", layout.isolate)):
        said = kernel.types.index(kind) if kind in kernel.types else None
        if said != value:
            differ(
                (-1, "all"), f"number of {kind}", -1 if value is None else value, -1 if said is None else said
            )
    for where, theirs in kernel.blocks.items():
        ours = counts.get(where)
        if ours is None:
            differ(where, "all", 0, sum(theirs.values()))
            continue
        if ours[layout.types]:
            differ(where, "impossible values", int(ours[layout.types]), 0)
        total = sum(theirs.values())
        off = 0
        for number, kind in enumerate(kernel.types):
            if kind in ("CMA", "Isolate"):
                if ours[number] != theirs[kind]:
                    differ(where, kind, int(ours[number]), theirs[kind])
            else:
                off += abs(int(ours[number]) - theirs[kind])
        if off > 8 + total // 4:
            differ(where, "other types", off, 0)
    return differences
