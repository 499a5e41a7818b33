"""What a node will hand out next, by the counters of its zones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from regrepro.kernel.zones import PAGE_SIZE, Zone

_ORDER = ("Movable", "Normal", "HighMem", "DMA32", "DMA")  # as movable allocations walk a node's zones


@dataclass(frozen=True)
class Outlook:
    """What the counters say of one node. Counts are pages.

    `before`: ordinary pages that are handed out before unpinnable ones; negative: so many unpinnable pages
    more than ordinary ones are free where they lie, and are handed out first. `kind`: `cma`, `movable-zone`,
    or None where the node has no free unpinnable memory. `reserve`: ordinary pages that stay free.
    """

    node: int
    kind: str | None
    before: int
    free: int
    free_cma: int
    reserve: int

    @property
    def ordinary(self) -> int:
        """Free pages that are not CMA."""
        return self.free - self.free_cma

    @property
    def room(self) -> int:
        """Ordinary pages that can be held and still leave the reserve."""
        return max(0, self.ordinary - self.reserve)


def outlook(zones: Iterable[Zone], node: int) -> Outlook:
    """Return what a node will hand out. The reserve is twice the way from its zones' minimum to their high
    watermark above the latter, and at least 1/64 of the memory.
    """
    its = sorted(
        (zone for zone in zones if zone.node == node and zone.populated and zone.name in _ORDER),
        key=lambda zone: _ORDER.index(zone.name),
    )
    ordinary = [zone for zone in its if zone.name != "Movable"]
    reserve = sum(max(zone.high + 2 * max(0, zone.high - zone.min), zone.managed // 64) for zone in ordinary)
    free, free_cma = sum(zone.free for zone in ordinary), sum(zone.free_cma or 0 for zone in ordinary)
    movable = [zone for zone in its if zone.name == "Movable"]
    if any(zone.free > zone.low for zone in movable):
        return Outlook(node, "movable-zone", 0, free, free_cma, reserve)
    before = 0
    for zone in ordinary:
        if zone.free_cma:
            own = zone.free - 2 * zone.free_cma
            return Outlook(node, "cma", before + own, free, free_cma, reserve)
        # Left alone below this: the kernel walks on to the next zone.
        before += max(0, zone.free - zone.low)
    return Outlook(node, None, before, free, free_cma, reserve)


def nearest_node(zones: Iterable[Zone]) -> Outlook | None:
    """Return the outlook of the node that hands out unpinnable memory soonest; None where none has any."""
    zones = list(zones)
    found = [outlook(zones, node) for node in sorted({zone.node for zone in zones if zone.populated})]
    having = [item for item in found if item.kind is not None]
    return min(having, key=lambda item: (item.before, item.node)) if having else None


def free_large_bytes(text: str, node: int, order: int) -> int:
    """Return bytes of a node's free memory that lie in pieces of at least `order`, from /proc/buddyinfo."""
    pages = 0
    for line in text.splitlines():
        match = re.match(r"Node (\d+), zone\s+(\S+)\s+(.*)", line)
        if match and int(match[1]) == node:
            counts = [int(word) for word in match[3].split()]
            pages += sum(count << index for index, count in enumerate(counts) if index >= order)
    return pages * PAGE_SIZE
