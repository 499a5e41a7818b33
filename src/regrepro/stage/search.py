"""The steering of pages: a search touches memory, looks where each page came to lie, and keeps what fits.

Gathering moves the right pages together with `mremap`, which keeps the physical page; memory that somebody
else maps is drawn whole until it lies as wanted. What does not fit is held until the search ends, or the
kernel would hand out the same pages again, and then given back at once. With `--place pressure` ordinary
memory is held meanwhile by another process (`kernel/pressure`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrepro.errors import Unmet
from regrepro.kernel.zones import Zone
from regrepro.options import format_size
from regrepro.stage.ports import (
    ORDINARY,
    PAGE_SIZE,
    UNKNOWN,
    UNPINNABLE,
    Backend,
    PageState,
    Range,
    told,
)

KINDS: dict[str, tuple[int, ...]] = {"unpinnable": UNPINNABLE, "cma": (1,), "movable-zone": (3,)}
"""Kinds of memory that a pattern can ask for, and their codes in a page state."""

_CMA = 1
_MIB = 1 << 20
_FIRST_CHUNK = 2 * _MIB
_LARGEST_CHUNK = 64 * _MIB
# What a search may hold where nobody asked for pressure: a node has other work to do, a lab guest has none.
_GATHER_LIMIT = 2 << 30
# Searched in any case: some kernels hand out CMA first, whatever the counters say.
_PROBE = 64 * _MIB
# Touched before memory is drawn whole; of it what is unpinnable is given back.
_EXCESS = 32 * _MIB
# Near the watermarks the kernel reclaims and wakes its daemons: stop before.
_KEEP_FREE = 96 * _MIB
# Under pressure the counters lag and CPUs keep free pages to themselves: so often pressure is renewed.
_PRESSES = 6
# How often a buffer is gathered anew whose pages were moved meanwhile.
_TRIES = 3
# Draws of memory that cannot be put together page by page, before the best of them has to do.
_DRAWS = 12

_HOW_TO_PLACE = (
    "use --place online-movable, which makes unpinnable memory of a memory block for this run, "
    "or --place pressure --pressure-limit SIZE, which holds more of the ordinary memory meanwhile"
)


@dataclass(frozen=True)
class Wanted:
    """Where the pages of a buffer are to lie.

    `pattern`: for each page True: memory of `kind`, False: ordinary memory, None: anywhere. `node`: on this
    NUMA node; None: any.
    """

    pattern: tuple[bool | None, ...]
    kind: str = "unpinnable"
    node: int | None = None

    @property
    def anywhere(self) -> bool:
        """Whether nothing is asked for."""
        return self.pattern[0] is None and self.node is None

    def right(self, state: PageState, unpinnable: bool) -> Any:
        """Return for each page whether it lies in the kind of memory asked for (or in ordinary memory), on
        the node asked for.
        """
        import numpy

        if self.pattern[0] is None:
            right = state.place < UNKNOWN
        elif unpinnable:
            right = numpy.isin(state.place, KINDS[self.kind])
        else:
            right = state.place == ORDINARY
        if self.node is not None:
            node = getattr(state, "node", None)
            right = right & (node == self.node) if node is not None else numpy.zeros_like(right)
        return right


class Search:
    """One search for pages: holds what it touched until it ends, within a limit."""

    def __init__(self, backend: Backend, length: int, wanted: Wanted) -> None:
        import numpy

        self._numpy = numpy
        self._backend = backend
        self._length = length
        self._wanted = wanted
        # Pages that may lie anywhere on a node are sought like the unpinnable ones.
        self._special = numpy.array([item is not False for item in wanted.pattern])
        self._held: list[Range] = []
        self._touched = 0
        self._found = {True: 0, False: 0}
        self._helped = ""
        self._pressure: Any = None
        self._presses = 0
        self._pressing = False
        self._cleanup = ExitStack()
        available = backend.available_memory()
        options = backend.options
        if options.place == "pressure":
            self._limit = min(options.pressure_limit or available, available - _KEEP_FREE)
        elif backend.in_lab:
            self._limit = available * 3 // 4
        else:
            self._limit = min(available // 2, _GATHER_LIMIT)
        self._limit = max(0, self._limit)
        self._check_there()
        self._check_cap(backend.cma_cap())

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        for memory in self._held:
            memory.close()
        self._held.clear()
        self._cleanup.close()

    def facts(self) -> dict[str, Any]:
        """Return what the search did, for the record."""
        facts: dict[str, Any] = {
            "touched": self._touched,
            "limit": self._limit,
            "unpinnable": self._found[True],
            "ordinary": self._found[False],
        }
        if self._helped:
            facts["helped"] = self._helped
        if self._pressure is not None:
            facts["pressure"] = self._pressure.as_record()
        return facts

    @property
    def _wants_unpinnable(self) -> bool:
        return True in self._wanted.pattern

    def gather(self) -> Range:
        """Return a range of anonymous memory whose pages lie as wanted."""
        for _ in range(_TRIES):
            target = self._backend.reserve(self._length)
            try:
                with self._on_best_node():
                    self._fill(target)
                if self._met(target):
                    return target
            except BaseException:
                target.close()
                raise
            target.close()
        raise Unmet(
            self._wanted.kind,
            f"pages were moved away again as soon as they lay right, {_TRIES} times",
            "try again while nothing compacts memory: sysctl vm.compaction_proactiveness=0",
        )

    def _fill(self, target: Range) -> None:
        numpy = self._numpy
        missing = {True: numpy.flatnonzero(self._special), False: numpy.flatnonzero(~self._special)}
        if self._backend.options.place == "pressure" and self._wants_unpinnable:
            # Ordinary pages last: under pressure the kernel hands out the others.
            self._gather({True: missing[True], False: missing[False][:0]}, target)
            self._release_pressure()
            missing[True] = missing[True][:0]
        self._gather(missing, target)

    def _met(self, target: Range) -> bool:
        """Whether the pages lie as wanted still: compaction, for one, may have moved some meanwhile."""
        state = self._state(target)
        special, ordinary = self._wanted.right(state, True), self._wanted.right(state, False)
        return bool(self._numpy.where(self._special, special, ordinary).all())

    def _gather(self, missing: dict[bool, Any], target: Range) -> None:
        chunk = _FIRST_CHUNK
        while len(missing[True]) or len(missing[False]):
            need = (len(missing[True]) + len(missing[False])) * PAGE_SIZE
            if len(missing[True]) and self._wants_unpinnable:
                self._press(need)
            size = min(max(chunk, _round_up(2 * need)), _LARGEST_CHUNK, self._room())
            if size < PAGE_SIZE:
                raise self._unmet(missing)
            memory = self._touch(size)
            for special in (True, False):
                missing[special] = self._take(memory, special, missing[special], target)
            if len(missing[False]) and not self._helped:
                # Ordinary memory is hard to get where movable memory is handed out first.
                self._move_out(memory, len(missing[False]))
                missing[False] = self._take(memory, False, missing[False], target)
            chunk = min(2 * chunk, _LARGEST_CHUNK)

    def draw(self, allocate: Callable[[], Range]) -> Range:
        """Return memory that happens to lie as wanted: drawn whole, again and again.

        Where all of it is to be unpinnable, and no draw of `_DRAWS` was so, the one with the most such pages:
        near the point where the kernel begins to hand out CMA it takes ordinary pages by turns.
        """
        numpy = self._numpy
        whole = all(self._wanted.pattern)
        best: Range | None = None
        most, draws, ballast = 0, 0, _FIRST_CHUNK
        with self._on_best_node():
            if self._wants_unpinnable and self._backend.options.place != "pressure":
                self._exceed()
            while self._room() >= self._length and not (best is not None and draws >= _DRAWS):
                if self._wants_unpinnable:
                    self._press(self._length)
                memory = allocate()
                self._held.append(memory)
                memory.populate()
                self._touched += self._length
                right = self._right(memory)
                if right < len(self._special) and not self._special.any():
                    # Ordinary memory is hard to get where movable memory is handed out first.
                    self._move_out(memory, memory.length // PAGE_SIZE)
                    right = self._right(memory)
                if right == len(self._special):
                    self._held.remove(memory)
                    return memory
                draws += 1
                if whole and right > most:
                    best, most = memory, right
                if not right or not self._wants_unpinnable:
                    ballast = self._move_on(ballast)
        if best is not None:
            self._helped = f"{draws} draws were made, none wholly so; this one has the most pages that are"
            self._held.remove(best)
            return best
        raise self._unmet({True: numpy.flatnonzero(self._special), False: numpy.flatnonzero(~self._special)})

    def _right(self, memory: Range) -> int:
        """Return how many pages of a draw lie as wanted, and count what was found."""
        state = self._state(memory)
        special, ordinary = self._wanted.right(state, True), self._wanted.right(state, False)
        self._found[True] += int(self._numpy.isin(state.place, UNPINNABLE).sum())
        self._found[False] += int((state.place == ORDINARY).sum())
        return int(self._numpy.where(self._special, special, ordinary).sum())

    def _exceed(self) -> None:
        """Have more unpinnable memory free than the kernel hands out in turn with ordinary memory.

        Where CMA and ordinary memory are equally scarce each second page is of either, and memory that is
        drawn whole would hardly ever lie in one alone: keep the ordinary pages, and give the others back.
        """
        size = min(max(_EXCESS, _round_up(8 * self._length)), self._room() // 2) // PAGE_SIZE * PAGE_SIZE
        if size < PAGE_SIZE:
            return
        memory = self._touch(size)
        marks = self._numpy.isin(self._state(memory).place, UNPINNABLE)
        self._backend.give_back(memory.address, marks.astype("uint8"))

    def _move_on(self, ballast: int) -> int:
        """Take `ballast` bytes of what is handed out before what is wanted; return how many to take next."""
        if self._room() > ballast:
            self._touch(ballast)
        return min(2 * ballast, _LARGEST_CHUNK)

    def _room(self) -> int:
        """Return how many more bytes the search may touch now."""
        free = self._backend.available_memory() - _KEEP_FREE
        held = self._pressure.held if self._pressure is not None and self._pressing else 0
        return max(0, min(self._limit - self._touched - held, free)) // PAGE_SIZE * PAGE_SIZE

    def _press(self, need: int) -> None:
        """With `--place pressure`: see to it that what is touched next comes out of unpinnable memory."""
        if self._backend.options.place != "pressure" or self._presses >= _PRESSES:
            return
        if not self._pressing:
            self._cleanup.callback(self._release_pressure)
            self._pressing = True
        self._presses += 1
        node = self._wanted.node if self._wanted.node is not None else self._nearest
        report = self._backend.press(4 * need + 2 * _FIRST_CHUNK, node)
        self._pressure = report or self._pressure

    def _release_pressure(self) -> None:
        if self._pressing:
            self._pressing = False
            self._presses = 0
            self._backend.release_pressure()

    def _touch(self, size: int) -> Range:
        memory = self._backend.allocate(size, "anonymous")
        self._held.append(memory)
        memory.populate(threads=min(4, os.cpu_count() or 1) if size >= 16 * _MIB else 1)
        self._touched += size
        return memory

    def _state(self, memory: Range) -> PageState:
        return told(self._backend.snapshot(memory.address, memory.length, counts=False))

    def _take(self, memory: Range, special: bool, missing: Any, target: Range) -> Any:
        """Move pages of one kind out of a chunk to the places that lack one; return those still lacking."""
        if not len(missing):
            return missing
        numpy = self._numpy
        found = numpy.flatnonzero(self._wanted.right(self._state(memory), special))
        self._found[special] += len(found)
        take = found[: len(missing)]
        self._check_map_count(take)
        sources = (memory.address + take * PAGE_SIZE).astype(numpy.uint64)
        slots = missing[: len(take)]
        # One call for each run of neighbouring slots.
        for run in numpy.split(numpy.arange(len(slots)), numpy.flatnonzero(numpy.diff(slots) != 1) + 1):
            if len(run):
                self._backend.gather(sources[run], target.address + int(slots[run[0]]) * PAGE_SIZE)
        return missing[len(take) :]

    def _check_map_count(self, take: Any) -> None:
        """Each run of pages that is moved makes about two mappings; the kernel allows so many."""
        runs = 1 + int((self._numpy.diff(take) != 1).sum()) if len(take) else 0
        if runs < 1000:
            return
        with suppress(OSError, ValueError):
            allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
            have = Path("/proc/self/maps").read_bytes().count(b"\n")
            if have + 2 * runs > allowed - 100:
                raise Unmet(
                    "max_map_count",
                    f"gathering {len(take)} pages makes about {2 * runs} mappings, "
                    f"vm.max_map_count is {allowed}",
                    f"sysctl vm.max_map_count={2 * (have + 2 * runs)}, or ask for a smaller buffer",
                )

    def _check_there(self) -> None:
        """Say at once that a kind of memory is not there, instead of looking for it."""
        memory_map = self._backend.memory_map
        if self._wanted.kind == "unpinnable" or memory_map is None or not memory_map.complete:
            return
        ranges = memory_map.as_record().get("unpinnable_ranges") or []
        if not any(item[2] == self._wanted.kind for item in ranges):
            how = {"cma": "boot with cma=512M or hugetlb_cma=2G, on a kernel with CONFIG_CMA"}
            raise Unmet(
                self._wanted.kind,
                f"no memory of this node is of the kind {self._wanted.kind}, by its complete memory map",
                how.get(self._wanted.kind, "boot with movablecore=512M, or use --place online-movable"),
            )

    def _check_cap(self, cap: int | None) -> None:
        """Refuse what would take more of CMA than a run may: drivers live on it, too."""
        if cap is None or self._wanted.kind == "movable-zone":
            return
        wanted = self._wanted.pattern.count(True) * PAGE_SIZE
        if wanted > cap and not self._movable_zone():
            raise Unmet(
                "cma-cap",
                f"{format_size(wanted)} of CMA are asked for, and a run may hold {format_size(cap)}: half of "
                "what was free, since drivers allocate from it",
                "a smaller buffer, a larger CMA area, or --place online-movable",
            )

    def _movable_zone(self) -> bool:
        return any(zone.name == "Movable" and zone.present for zone in self._backend.zones())

    def _move_out(self, memory: Range, pages: int) -> None:
        """Have the kernel move pages to ordinary memory: it does so for a long-term pin, released at once."""
        length = min(memory.length, 2 * pages * PAGE_SIZE)
        self._helped = "moved out of unpinnable memory by a long-term pin that was released at once"
        try:
            self._backend.hold("longterm", memory.address, length).release()
        except OSError as error:
            self._helped = f"a long-term pin to move pages out was refused: {error.strerror or error}"

    @contextmanager
    def _on_best_node(self) -> Iterator[None]:
        """Run on the node asked for, or where unpinnable memory is nearest; consume what is handed out
        before it.
        """
        before = os.sched_getaffinity(0)
        node = self._wanted.node
        try:
            if node is not None:
                self._go_to(node, before)
            if self._wants_unpinnable:
                self._approach(before)
            yield
        finally:
            if node is not None:
                self._backend.allocate_on_node(None)
            with suppress(OSError):
                os.sched_setaffinity(0, before)

    def _go_to(self, node: int, allowed: set[int]) -> None:
        """Have this process allocate on one node."""
        try:
            self._backend.allocate_on_node(node)
        except OSError as error:
            raise Unmet(
                f"node {node}",
                f"memory of NUMA node {node} cannot be asked for: {error.strerror or error}",
                "ask for a node that is there; numactl --hardware shows them",
            ) from None
        cpus = self._backend.node_cpus(node) & allowed
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)

    def _approach(self, allowed: set[int]) -> None:
        outlook = consume_first(self._backend.zones())
        if self._wanted.node is not None:
            outlook = {node: pages for node, pages in outlook.items() if node == self._wanted.node}
        cpus = {node: self._backend.node_cpus(node) & allowed for node in outlook}
        # A node without CPUs of ours cannot be asked for first.
        reachable = {node: pages for node, pages in outlook.items() if cpus[node]} or outlook
        if not reachable:
            return
        node = min(reachable, key=lambda candidate: (reachable[candidate], candidate))
        if cpus[node]:
            with suppress(OSError):
                os.sched_setaffinity(0, cpus[node])
        self._nearest = node
        if self._backend.options.place == "pressure":
            return
        ballast = reachable[node] * PAGE_SIZE - _PROBE
        if ballast <= 0:
            return
        if ballast + _PROBE + 2 * self._length > self._limit:
            # Out of reach: touch no more than the probe, and say so.
            self._out_of_reach = ballast + _PROBE
            self._limit = min(self._limit, _PROBE + 2 * self._length)
            return
        while ballast > 0 and self._room() > 0:
            size = min(_round_up(ballast), 4 * _LARGEST_CHUNK, self._room())
            memory = self._backend.allocate(size, "ballast")
            self._held.append(memory)
            memory.populate(threads=min(4, os.cpu_count() or 1))
            self._touched += size
            ballast -= size

    _out_of_reach = 0
    _nearest: int | None = None  # the node that this process runs on while it searches

    def _unmet(self, missing: Mapping[bool, Any]) -> Unmet:
        kind = self._wanted.kind if len(missing[True]) and self._wants_unpinnable else "ordinary"
        lacking = len(missing[True]) or len(missing[False])
        wanted = int(self._special.sum() if len(missing[True]) else (~self._special).sum())
        where = f" of node {self._wanted.node}" if self._wanted.node is not None else ""
        why = (
            f"{lacking} of {wanted} {kind} pages{where} could not be had: {format_size(self._touched)} were "
            f"touched (limit {format_size(self._limit)})"
        )
        if self._pressure is not None:
            why += f" while pressure held {format_size(self._pressure.held)}"
        if self._out_of_reach:
            why += (
                f"; by the kernel's counters it hands out unpinnable memory only after "
                f"{format_size(self._out_of_reach)} more of the ordinary memory are taken"
            )
        if kind == "ordinary":
            return Unmet("ordinary", why, "free memory on this machine, or use --place pressure")
        return Unmet(kind, why, _HOW_TO_PLACE)


def consume_first(zones: Iterable[Zone]) -> dict[int, int]:
    """Return for each node that has unpinnable memory: pages that are handed out before it is.

    Movable allocations take ZONE_MOVABLE first, then the zones downward; within one they take CMA once free
    CMA is more than half of the free pages (`__rmqueue`, mm/page_alloc.c).
    """
    order = ("Movable", "Normal", "HighMem", "DMA32", "DMA")
    nodes: dict[int, list[Zone]] = {}
    for zone in zones:
        if zone.name in order:
            nodes.setdefault(zone.node, []).append(zone)
    result: dict[int, int] = {}
    for node, its_zones in nodes.items():
        before = 0
        for zone in sorted(its_zones, key=lambda item: order.index(item.name)):
            usable = max(0, zone.free - zone.low)
            if zone.name == "Movable" and usable:
                result[node] = before
                break
            if zone.free_cma:
                result[node] = before + max(0, zone.free - 2 * zone.free_cma)
                break
            before += usable
    return result


def _round_up(size: int) -> int:
    return -(-size // PAGE_SIZE) * PAGE_SIZE
