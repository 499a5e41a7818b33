"""Buffers, and the steering of their pages by gathering.

Gathering touches ordinary anonymous memory, looks where each page came to lie, and moves the right ones
together with `mremap`, which keeps the physical page. What does not fit is held until the search ends, or the
kernel would hand out the same pages again, and then given back at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrepro.errors import Unmet, UsageError
from regrepro.options import format_size
from regrepro.stage.backend import ORDINARY, PAGE_SIZE, UNPINNABLE, Backend, Range, Zone, join, readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regrepro.stage import Stage

BACKINGS = ("anonymous", "thp", "memfd", "shm", "hugetlb", "file")
PLACES = ("any", "unpinnable", "ordinary")
Place = str | Mapping[str, Sequence[int]]

_MIB = 1 << 20
_FIRST_CHUNK = 2 * _MIB
_LARGEST_CHUNK = 64 * _MIB
# What a search may hold where nobody asked for pressure: a node has other work to do, a lab guest has none.
_GATHER_LIMIT = 2 << 30
# Searched in any case: some kernels hand out CMA first, whatever the counters say.
_PROBE = 64 * _MIB
# Near the watermarks the kernel reclaims and wakes its daemons: stop before.
_KEEP_FREE = 96 * _MIB

_HOW_TO_PLACE = (
    "use --place online-movable, which makes unpinnable memory of a memory block for this run, "
    "or --place pressure --pressure-limit SIZE, which holds more of the ordinary memory meanwhile"
)


class Buffer:
    """Memory of a scenario. `address` and `length` in bytes, `pages` pages of `page_size` bytes."""

    def __init__(self, stage: Stage, number: int, memory: Range, backing: str, placed: str) -> None:
        self._stage = stage
        self._memory = memory
        self.id = number
        self.address = memory.address
        self.length = memory.length
        self.page_size = PAGE_SIZE
        self.backing = backing
        self.placed = placed
        self.freed = False

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.length // self.page_size

    def _view(self, offset: int, length: int) -> memoryview:
        if self.freed:
            raise UsageError(f"buffer {self.id} is used after it was freed")
        if offset < 0 or length < 0 or offset + length > self.length:
            raise UsageError(
                f"bytes {offset} to {offset + length} are not in buffer {self.id}",
                why=f"it has {self.length} bytes",
            )
        return self._stage.backend.view(self.address + offset, length)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Write bytes; the pages stay where they are unless the kernel must copy them (after a fork)."""
        self._view(offset, len(data))[:] = data

    def read(self, length: int, offset: int = 0) -> bytes:
        """Return a copy of bytes."""
        return bytes(self._view(offset, length))

    def fill(self, seed: int) -> None:
        """Write a pattern over the whole buffer."""
        self._memory.fill(seed)

    def checksum(self) -> int:
        """Return a checksum of the whole buffer."""
        return int(self._memory.checksum())

    def free(self) -> None:
        """Unmap the buffer; what is registered or pinned keeps its pages until it is let go."""
        self._stage._free(self)

    def __len__(self) -> int:
        return self.length


def wanted_places(place: Place, pages: int) -> list[bool | None]:
    """Return for each page: True unpinnable, False ordinary, None any. Raises `UsageError`."""
    if isinstance(place, str):
        if place not in PLACES:
            raise UsageError(
                f"place={place!r} is not known", hint=f'one of {", ".join(PLACES)}, or {{"unpinnable": [3]}}'
            )
        return [{"any": None, "unpinnable": True, "ordinary": False}[place]] * pages
    if set(place) != {"unpinnable"} or not place["unpinnable"]:
        raise UsageError(
            f"place={dict(place)!r} is not known",
            hint='write {"unpinnable": [page, …]}; the others are ordinary',
        )
    wanted: list[bool | None] = [False] * pages
    for index in place["unpinnable"]:
        if not 0 <= index < pages:
            raise UsageError(f"page {index} is not in the buffer", why=f"it has pages 0 to {pages - 1}")
        wanted[index] = True
    return wanted


def make(
    backend: Backend, length: int, place: Place, backing: str, fill: int
) -> tuple[Range, str, dict[str, Any]]:
    """Make a buffer's memory: populated, placed and filled. Returns it, how it was placed, and facts of the
    search.

    Raises `Unmet` where the pages could not be placed or their places not be read, OSError where the kernel
    refuses the memory itself.
    """
    wanted = wanted_places(place, length // PAGE_SIZE)
    memory_map = backend.memory_map
    facts: dict[str, Any] = {}
    if wanted[0] is None:
        memory = _plain(backend, length, backing)
        placed = "as-allocated"
    else:
        if memory_map is None or memory_map.has_unpinnable is None:
            problems = join(memory_map.problems) if memory_map is not None else ""
            raise Unmet(
                "page-state",
                problems or "where pages lie cannot be read here",
                "run as root on a kernel with /proc/kcore and BTF",
            )
        if not memory_map.has_unpinnable and memory_map.complete:
            memory = _plain(backend, length, backing)
            placed = "none-on-node" if True in wanted else "as-allocated"
        else:
            search = _Search(backend, length, wanted)
            with search:
                memory = search.gather() if backing == "anonymous" else search.draw(backing)
            placed = "online-movable" if backend.options.place == "online-movable" else "gather"
            if backend.options.place == "pressure":
                placed = "pressure"
            facts = search.facts()
    try:
        memory.fill(fill)
    except BaseException:
        memory.close()
        raise
    return memory, placed, facts


def _plain(backend: Backend, length: int, backing: str) -> Range:
    memory = backend.allocate(length, backing)
    try:
        memory.populate()
    except BaseException:
        memory.close()
        raise
    return memory


class _Search:
    """One search for pages: holds what it touched until it ends, within a limit."""

    def __init__(self, backend: Backend, length: int, wanted: list[bool | None]) -> None:
        import numpy

        self._numpy = numpy
        self._backend = backend
        self._length = length
        self._unpinnable = numpy.array([item is True for item in wanted])
        self._held: list[Range] = []
        self._touched = 0
        self._found = {True: 0, False: 0}
        self._helped = ""
        available = backend.available_memory()
        options = backend.options
        if options.place == "pressure":
            self._limit = min(options.pressure_limit or available, available - _KEEP_FREE)
        elif backend.in_lab:
            self._limit = available * 3 // 4
        else:
            self._limit = min(available // 2, _GATHER_LIMIT)
        self._limit = max(0, self._limit)

    def __enter__(self) -> _Search:
        return self

    def __exit__(self, *_: object) -> None:
        for memory in self._held:
            memory.close()
        self._held.clear()

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
        return facts

    def gather(self) -> Range:
        """Return a range of anonymous memory whose pages lie as wanted."""
        numpy = self._numpy
        target = self._backend.reserve(self._length)
        try:
            missing = {
                True: numpy.flatnonzero(self._unpinnable),
                False: numpy.flatnonzero(~self._unpinnable),
            }
            with self._on_best_node(bool(len(missing[True]))):
                chunk = _FIRST_CHUNK
                while len(missing[True]) or len(missing[False]):
                    need = (len(missing[True]) + len(missing[False])) * PAGE_SIZE
                    size = min(max(chunk, _round_up(2 * need)), _LARGEST_CHUNK, self._room())
                    if size < PAGE_SIZE:
                        raise self._unmet(missing)
                    memory = self._touch(size)
                    for unpinnable in (True, False):
                        missing[unpinnable] = self._take(memory, unpinnable, missing[unpinnable], target)
                    if len(missing[False]) and not self._helped:
                        # Ordinary memory is hard to get where movable memory is handed out first.
                        self._move_out(memory, len(missing[False]))
                        missing[False] = self._take(memory, False, missing[False], target)
                    chunk = min(2 * chunk, _LARGEST_CHUNK)
        except BaseException:
            target.close()
            raise
        return target

    def draw(self, backing: str) -> Range:
        """Return memory of another backing that happens to lie as wanted: drawn whole, again and again."""
        with self._on_best_node(bool(self._unpinnable.any())):
            while self._room() >= self._length:
                memory = self._backend.allocate(self._length, backing)
                self._held.append(memory)
                memory.populate()
                self._touched += self._length
                place = self._places(memory)
                unpinnable = self._numpy.isin(place, UNPINNABLE)
                self._found[True] += int(unpinnable.sum())
                self._found[False] += int((place == ORDINARY).sum())
                right = self._numpy.where(self._unpinnable, unpinnable, place == ORDINARY)
                if right.all():
                    self._held.remove(memory)
                    return memory
        numpy = self._numpy
        raise self._unmet(
            {True: numpy.flatnonzero(self._unpinnable), False: numpy.flatnonzero(~self._unpinnable)}
        )

    def _room(self) -> int:
        """Return how many more bytes the search may touch now."""
        free = self._backend.available_memory() - _KEEP_FREE
        return max(0, min(self._limit - self._touched, free)) // PAGE_SIZE * PAGE_SIZE

    def _touch(self, size: int) -> Range:
        memory = self._backend.allocate(size, "anonymous")
        self._held.append(memory)
        memory.populate(threads=min(4, os.cpu_count() or 1) if size >= 16 * _MIB else 1)
        self._touched += size
        return memory

    def _places(self, memory: Range) -> Any:
        state = self._backend.snapshot(memory.address, memory.length, counts=False)
        if state is None or not readable(state):
            why = join(state.problems) if state is not None else ""
            raise Unmet("page-state", why or "where pages lie cannot be read here", "run as root")
        return state.place

    def _take(self, memory: Range, unpinnable: bool, missing: Any, target: Range) -> Any:
        """Move pages of one kind out of a chunk to the places that lack one; return those still lacking."""
        if not len(missing):
            return missing
        numpy = self._numpy
        place = self._places(memory)
        right = numpy.isin(place, UNPINNABLE) if unpinnable else place == ORDINARY
        found = numpy.flatnonzero(right)
        self._found[unpinnable] += len(found)
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

    def _move_out(self, memory: Range, pages: int) -> None:
        """Have the kernel move pages to ordinary memory: it does so for a long-term pin, released at once."""
        length = min(memory.length, 2 * pages * PAGE_SIZE)
        self._helped = "moved out of unpinnable memory by a long-term pin that was released at once"
        try:
            self._backend.hold("longterm", memory.address, length).release()
        except OSError as error:
            self._helped = f"a long-term pin to move pages out was refused: {error.strerror or error}"

    @contextmanager
    def _on_best_node(self, unpinnable: bool) -> Iterator[None]:
        """Run on the node where unpinnable memory is nearest, and consume what is handed out before it."""
        before = os.sched_getaffinity(0)
        try:
            if unpinnable:
                self._approach(before)
            yield
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, before)

    def _approach(self, allowed: set[int]) -> None:
        outlook = consume_first(self._backend.zones())
        cpus = {node: self._backend.node_cpus(node) & allowed for node in outlook}
        # A node without CPUs of ours cannot be asked for first.
        reachable = {node: pages for node, pages in outlook.items() if cpus[node]} or outlook
        if not reachable:
            return
        node = min(reachable, key=lambda candidate: (reachable[candidate], candidate))
        if cpus[node]:
            with suppress(OSError):
                os.sched_setaffinity(0, cpus[node])
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
            # Huge pages: this memory is only held, and they are had faster.
            memory = self._backend.allocate(size, "thp")
            self._held.append(memory)
            memory.populate(threads=min(4, os.cpu_count() or 1))
            self._touched += size
            ballast -= size

    _out_of_reach = 0

    def _unmet(self, missing: Mapping[bool, Any]) -> Unmet:
        kind = "unpinnable" if len(missing[True]) else "ordinary"
        lacking = len(missing[True]) or len(missing[False])
        wanted = int(self._unpinnable.sum() if len(missing[True]) else (~self._unpinnable).sum())
        why = (
            f"{lacking} of {wanted} {kind} pages could not be had: {format_size(self._touched)} were touched "
            f"(limit {format_size(self._limit)})"
        )
        if self._out_of_reach:
            why += (
                f"; by the kernel's counters it hands out unpinnable memory only after "
                f"{format_size(self._out_of_reach)} more of the ordinary memory are taken"
            )
        if kind == "ordinary":
            return Unmet("ordinary", why, "free memory on this machine, or use --place pressure")
        return Unmet("unpinnable", why, _HOW_TO_PLACE)


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
