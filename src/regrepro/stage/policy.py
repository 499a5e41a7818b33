"""What the page allocator does: how much of what it hands out is CMA, by how much of what is free is CMA.

The rule to be seen: movable allocations take CMA once free CMA is more than half of a zone's free pages
(`__rmqueue`, mm/page_alloc.c); before that, none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regrepro.errors import Unmet
from regrepro.kernel.zones import Zone
from regrepro.stage.ports import PAGE_SIZE, UNPINNABLE, Range, told

if TYPE_CHECKING:
    from regrepro.stage.stage import Stage

STEP = "placement-policy"
_MIB = 1 << 20
_CMA = UNPINNABLE[0]
# After the rule has begun to work so many more chunks are touched.
_BEYOND = 12
_KEEP_FREE = 160 * _MIB


def measure(stage: Stage, *, chunk: int = 16 * _MIB) -> int:
    """Touch memory, `chunk` bytes at a time, and record for each chunk a step `placement-policy`.

    First ordinary memory grows scarce, until CMA is half of what is free and some way on; then the CMA pages
    that came are given back, so that more than half of what is free is CMA, and more is touched. Each step
    has `phase` (`fill` or `refill`), `node`, `zone`, `free` and `free_cma` of the zone before the chunk,
    `touched` pages and how many of them are `cma`. Returns the number of steps. Raises `Unmet`.
    """
    backend = stage.backend
    held: list[tuple[Range, Any]] = []
    steps = 0
    try:
        beyond = 0
        while beyond < _BEYOND:
            mostly_cma, cma = _touch(stage, chunk, "fill", held)
            steps += 1
            beyond += cma * 20 > chunk // PAGE_SIZE or mostly_cma
        for memory, marks in held:
            backend.give_back(memory.address, marks)
        refill = True
        while refill:
            mostly_cma, _ = _touch(stage, chunk, "refill", held)
            steps += 1
            refill = mostly_cma and steps < 1000
    finally:
        for memory, _ in held:
            memory.close()
    return steps


def _touch(stage: Stage, chunk: int, phase: str, held: list[tuple[Range, Any]]) -> tuple[bool, int]:
    """Touch one chunk and record it. Returns whether more than half of what was free before it was CMA, and
    how many of its pages are.
    """
    backend = stage.backend
    if backend.available_memory() < chunk + _KEEP_FREE:
        raise Unmet(
            "memory",
            f"CMA was not reached before memory ran low ({backend.available_memory() // _MIB} MiB are left)",
            "boot with a larger CMA area, such as cma=512M in a guest of 2 GiB",
        )
    zone = _zone_with_cma(backend.zones())
    memory = backend.allocate(chunk, "anonymous")
    try:
        memory.populate()
        state = told(backend.snapshot(memory.address, memory.length, counts=False))
    except BaseException:
        memory.close()
        raise
    marks = state.place == _CMA
    held.append((memory, marks.astype("uint8")))
    stage.step(
        STEP,
        phase=phase,
        node=zone.node,
        zone=zone.name,
        free=zone.free,
        free_cma=zone.free_cma,
        touched=chunk // PAGE_SIZE,
        cma=int(marks.sum()),
    )
    return (zone.free_cma or 0) * 2 > zone.free, int(marks.sum())


def _zone_with_cma(zones: list[Zone]) -> Zone:
    """Return the zone that has the most free CMA. Raises `Unmet`."""
    zone = max(zones, key=lambda item: item.free_cma or 0, default=None)
    if zone is None or not zone.free_cma:
        raise Unmet("cma", "no zone has free CMA", "boot with cma=512M, on a kernel with CONFIG_CMA")
    return zone
