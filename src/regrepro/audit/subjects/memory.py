"""Memory: CMA, ZONE_MOVABLE and page blocks by node and zone, and what of it long-term pins cannot have."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from regrepro.audit.finding import size
from regrepro.audit.reader import Reader, Text
from regrepro.audit.sheet import INFERRED, MISSING, OBSERVED, Sheet
from regrepro.audit.subjects.system import stock_of
from regrepro.kernel.pageblocks import parse_pagetypeinfo
from regrepro.kernel.zones import parse_meminfo, zone_counts

KHO_SINCE = (6, 16)
_PAGE_SIZES = (4096, 16384, 65536)
_ZONE_COUNTS = (
    "free",
    "min",
    "low",
    "high",
    "spanned",
    "present",
    "managed",
    "cma",
    "free_cma",
    "start_pfn",
)


def collect(reader: Reader, sheet: Sheet) -> None:
    """Amounts, zones, page blocks, the memory map of a record, CMA areas."""
    add, state = partial(sheet.add, "memory"), partial(sheet.state, "memory")
    info_text = reader.read("proc/meminfo")
    info = parse_meminfo(info_text.text or "")
    for name, key in (("total", "MemTotal"), ("free", "MemFree"), ("available", "MemAvailable")):
        state(name, info_text, info.get(key))
    for name, key in (("cma-total", "CmaTotal"), ("cma-free", "CmaFree")):
        if "MemTotal" in info and key not in info:
            # Both lines are printed by a kernel with CONFIG_CMA only (fs/proc/meminfo.c).
            add(name, 0, f"{info_text.source} (no {key}: kernel without CONFIG_CMA)", how=INFERRED)
        else:
            state(name, info_text, info.get(key))
    has_cma = "CmaTotal" in info if "MemTotal" in info else None
    add("kernel-has-cma", has_cma, info_text.source, why=info_text.why)
    zones_text, blocks_text = reader.read("proc/zoneinfo"), reader.read("proc/pagetypeinfo")
    zones = [
        {"node": node, "zone": name, **{count: counts.get(count) for count in _ZONE_COUNTS}}
        for node, name, counts in zone_counts(zones_text.text or "")
    ]
    blocks, order = _blocks(blocks_text.text or "")
    recorded, map_source, map_why = reader.memory_map()
    page_size, size_source, size_how = _page_size(reader, info, zones, recorded)
    add("page-size", page_size, size_source, how=size_how, why="no source tells it")
    listed = recorded.get("zones") if recorded is not None else None
    if isinstance(listed, list):
        its_zones = [zone for zone in listed if isinstance(zone, dict)]
        if not zones:
            zones, zones_text = _zones_of_map(its_zones), Text("", map_source)
        if not blocks:
            blocks, blocks_text = _blocks_of_map(its_zones), Text("", map_source)
            found_order = whole((recorded or {}).get("pageblock_order"))
            order = found_order if found_order is not None else order
    add("zones", zones or None, zones_text.source, why=zones_text.why or "no zone in it")
    add("page-blocks", blocks or None, blocks_text.source, why=blocks_text.why or "no count in it")
    add("page-block-order", order, blocks_text.source, why=blocks_text.why or "not in it")
    summary = None
    if recorded is not None:
        summary = {name: recorded.get(name) for name in ("complete", "has_unpinnable", "problems")}
    add("memory-map", summary, map_source or "pageblock map", why=map_why)
    _cma_areas(reader, sheet, page_size)


def whole(value: object) -> int | None:
    """Return a foreign value where it is a whole number that a count can be, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _page_size(
    reader: Reader, info: dict[str, int], zones: list[dict[str, Any]], recorded: dict[str, object] | None
) -> tuple[int | None, str, str]:
    if reader.live:
        return os.sysconf("SC_PAGE_SIZE"), "sysconf(_SC_PAGE_SIZE)", OBSERVED
    if recorded is not None and (found := whole(recorded.get("page_size"))):
        return found, "event memory-map of record.jsonl", OBSERVED
    for text in (reader.command("getconf"), reader.known("page_size")):
        if text.number in _PAGE_SIZES:
            return text.number, text.source, OBSERVED
    managed = sum(zone["managed"] or 0 for zone in zones)
    if managed and info.get("MemTotal"):
        # MemTotal is the sum of the zones' managed pages (si_meminfo, mm/show_mem.c), but for memory
        # that came or went between the two reads.
        ratio = info["MemTotal"] / managed
        for page in _PAGE_SIZES:
            if 0.9 < ratio / page < 1.1:
                return page, "MemTotal over the zones' managed pages", INFERRED
    return None, "getconf PAGESIZE", MISSING


def _zones_of_map(zones: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bring a record's zones into the shape of /proc/zoneinfo; what the record does not hold is None."""
    return [
        {
            "node": whole(zone.get("node")) or 0,
            "zone": zone["zone"],
            **{name: whole(zone.get(name)) for name in _ZONE_COUNTS},
        }
        for zone in zones
        if isinstance(zone.get("zone"), str)
    ]


def _blocks(text: str) -> tuple[list[dict[str, Any]], int | None]:
    """Return the counts of page blocks by node and zone in /proc/pagetypeinfo, and their order."""
    try:
        info = parse_pagetypeinfo(text)
    except ValueError:
        return [], None
    blocks = [{"node": node, "zone": name, "blocks": its} for (node, name), its in info.blocks.items()]
    return blocks, info.pageblock_order


def _blocks_of_map(zones: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "node": whole(zone.get("node")) or 0,
            "zone": str(zone.get("zone")),
            "blocks": {
                str(name): count for name, count in zone["blocks"].items() if whole(count) is not None
            },
        }
        for zone in zones
        if isinstance(zone.get("blocks"), dict)
    ]


def _cma_areas(reader: Reader, sheet: Sheet, page_size: int | None) -> None:
    """CMA areas by name, from sysfs (CONFIG_CMA_SYSFS) or debugfs (CONFIG_CMA_DEBUGFS)."""

    def pages(count: int | None) -> int | None:
        return count * page_size if count is not None and page_size else None

    areas = []
    folder = "sys/kernel/mm/cma"
    for name in reader.names(folder):
        total, available, success, released = (
            reader.read(f"{folder}/{name}/{key}").number
            for key in ("total_pages", "available_pages", "alloc_pages_success", "release_pages_success")
        )
        areas.append(
            {
                "name": name,
                "bytes": pages(total),
                "used": pages(total - available) if total is not None and available is not None else None,
                "ever_used": None if success is None else success > 0,
                "released": released,
                "base_pfn": None,
            }
        )
    if not areas:
        folder = "sys/kernel/debug/cma"
        for name in reader.names(folder):
            count, used, base = (
                reader.read(f"{folder}/{name}/{key}").number for key in ("count", "used", "base_pfn")
            )
            areas.append(
                {
                    "name": name,
                    "bytes": pages(count),
                    "used": pages(used),
                    "ever_used": None,
                    "released": None,
                    "base_pfn": base,
                }
            )
    if areas:
        sheet.add("memory", "cma-areas", areas, f"/{folder}")
    elif sheet.value("memory", "cma-total") == 0:
        sheet.add("memory", "cma-areas", [], sheet.source("memory", "cma-total"), how=INFERRED)
    else:
        why = "neither CONFIG_CMA_SYSFS nor a readable CONFIG_CMA_DEBUGFS"
        sheet.add("memory", "cma-areas", None, "/sys/kernel/mm/cma, /sys/kernel/debug/cma", why=why)


@dataclass
class Unpinnable:
    """How much unpinnable memory there is, in bytes (None: not known), and whether there is any at all."""

    present: bool | None
    reason: str
    cma: int | None
    movable: int | None
    blocks_cma: int | None


def block_pages(sheet: Sheet) -> int | None:
    """Return how many pages a page block has, None where that is not known."""
    order = sheet.value("memory", "page-block-order")
    return 1 << order if isinstance(order, int) and 0 <= order < 40 else None


def unpinnable(sheet: Sheet) -> Unpinnable:
    """Decide whether this node has memory that movable allocations can take and long-term pins cannot
    have.
    """
    value = partial(sheet.value, "memory")
    page, zones, blocks, in_block = (
        value("page-size"),
        value("zones"),
        value("page-blocks"),
        block_pages(sheet),
    )
    total, free, recorded = value("cma-total"), value("cma-free"), value("memory-map")
    recorded = recorded if isinstance(recorded, dict) else {}
    count = None if blocks is None else sum(entry["blocks"].get("CMA", 0) for entry in blocks)
    blocks_cma = 0 if count == 0 else count * in_block * page if count and in_block and page else None
    cma = blocks_cma if blocks_cma is not None else max(total, free) if None not in (total, free) else total
    movable_pages = movable = None
    if zones is not None:
        movable_pages = sum(zone["managed"] or 0 for zone in zones if zone["zone"] == "Movable")
        movable = 0 if movable_pages == 0 else movable_pages * page if page else None

    def none(reason: str, blocks_cma: int | None = 0) -> Unpinnable:
        return Unpinnable(False, reason, 0, 0, blocks_cma)

    found = []
    if (count or 0) > 0 or (total or 0) > 0 or (free or 0) > 0:
        found.append(f"{size(cma)} of CMA")
    if movable_pages:
        found.append(f"{size(movable)} of ZONE_MOVABLE" if movable else "ZONE_MOVABLE")
    if not found and recorded.get("has_unpinnable") is True:
        found.append("unpinnable page blocks in the memory map")
    if found:
        return Unpinnable(True, f"there is {' and '.join(found)}", cma, movable, blocks_cma)
    if recorded.get("complete") is True and recorded.get("has_unpinnable") is False:
        return none("the complete memory map has no CMA block and no ZONE_MOVABLE page", blocks_cma)
    if movable_pages is None:
        why = "/proc/zoneinfo was not read, so ZONE_MOVABLE is not known"
        return Unpinnable(None, why, cma, movable, blocks_cma)
    if value("kernel-has-cma") is False:
        return none("the kernel has no CMA and ZONE_MOVABLE is empty")
    if count == 0:
        return none("no page block is CMA and ZONE_MOVABLE is empty")
    if total == 0 and free == 0 and all((zone["cma"] or 0) == 0 for zone in zones or []):
        without = _without_kho(sheet)
        if without:
            return none(f"CmaTotal is 0, ZONE_MOVABLE is empty, and {without}", None)
        why = (
            "CmaTotal is 0, but kexec handover keeps CMA blocks that it does not count, and only root can "
            "read /proc/pagetypeinfo"
        )
        return Unpinnable(None, why, None, 0, None)
    return Unpinnable(None, "the CMA counts were not read", cma, movable, blocks_cma)


def _without_kho(sheet: Sheet) -> str:
    """Return why kexec handover cannot have left CMA blocks, or ""."""
    config = sheet.value("system", "kernel-config")
    if isinstance(config, dict) and config.get("KEXEC_HANDOVER") == "n":
        return "the kernel has no kexec handover"
    arguments = sheet.boot_arguments()
    if arguments.get("kho", [""])[-1].lower() in ("off", "0", "n", "no", "false"):
        return f"kexec handover is off (kho={arguments['kho'][-1]})"
    stock = stock_of(sheet)
    if stock is not None and stock < KHO_SINCE:
        return f"Linux {stock[0]}.{stock[1]} has no kexec handover"
    return ""


def likelihood(sheet: Sheet) -> list[dict[str, Any]]:
    """Per node and zone: does a movable allocation take unpinnable memory now, or what must be used up
    first?

    The stock rule (`__rmqueue`, mm/page_alloc.c): movable allocations take CMA once the zone's free CMA
    pages are more than half of its free pages. ZONE_MOVABLE stands first in the zone list and is taken
    first.
    """
    page = sheet.value("memory", "page-size")
    found = []
    for zone in sheet.value("memory", "zones") or []:
        free, free_cma, movable = zone["free"], zone["free_cma"], zone["zone"] == "Movable"
        if not (zone["managed"] if movable else free_cma):
            continue
        share = left = None
        if movable:
            theirs, now = free, free > (zone["high"] or 0) if free is not None else None
            left = 0 if now else None
        else:
            theirs, now = free_cma, free_cma > free // 2 if free is not None else None
            share = round(free_cma / free, 4) if free else None
            # It begins once ordinary free pages are fewer than free CMA pages.
            if free is not None and page is not None:
                left = max(free - 2 * free_cma, 0) * page
        found.append(
            {
                "node": zone["node"],
                "zone": zone["zone"],
                "kind": "ZONE_MOVABLE" if movable else "CMA",
                "free_bytes": theirs * page if theirs is not None and page else None,
                "share": share,
                "now": now,
                "to_go_bytes": left,
            }
        )
    return found


def likely(entries: list[dict[str, Any]]) -> str:
    """Say it in words, "" where nothing is known."""
    parts = []
    for entry in entries:
        place = f"node {entry['node']} {entry['zone']}"
        if entry["now"]:
            share = "" if entry["share"] is None else f" ({entry['share']:.0%} of its free pages are CMA)"
            parts.append(f"{place}: movable allocations take {entry['kind']} now{share}")
        elif entry["to_go_bytes"] is not None:
            left = size(entry["to_go_bytes"])
            parts.append(f"{place}: after {left} more of ordinary memory are used up, by the stock rule")
    return "; ".join(parts)


def per_node(sheet: Sheet) -> list[dict[str, Any]]:
    """Sum up per NUMA node in bytes: CMA (page blocks where they are known), free CMA, ZONE_MOVABLE,
    free memory.
    """
    page, in_block = sheet.value("memory", "page-size"), block_pages(sheet)
    nodes: dict[int, dict[str, Any]] = {}
    if not page:
        return []
    for zone in sheet.value("memory", "zones") or []:
        nothing = {"node": zone["node"], "cma": 0, "cma_free": 0, "movable": 0, "free": 0}
        node = nodes.setdefault(zone["node"], nothing)
        for name, key in (("cma", "cma"), ("cma_free", "free_cma"), ("free", "free")):
            node[name] += (zone[key] or 0) * page
        if zone["zone"] == "Movable":
            node["movable"] += (zone["managed"] or 0) * page
    blocks = sheet.value("memory", "page-blocks")
    if blocks and in_block:
        for number, node in nodes.items():
            theirs = [entry["blocks"].get("CMA", 0) for entry in blocks if entry["node"] == number]
            if theirs:
                node["cma"] = sum(theirs) * in_block * page
    return [nodes[number] for number in sorted(nodes)]


def slack(sheet: Sheet) -> int:
    """CMA areas are whole page blocks; a difference below one block per node is rounding."""
    return (sheet.value("memory", "page-size") or 0) * (block_pages(sheet) or 0)
