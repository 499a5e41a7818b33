"""Faults of the memory that pages are moved to: there is none that fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from regrepro.errors import Unmet
from regrepro.stage import hugepages
from regrepro.stage.faults.base import Base
from regrepro.stage.ports import ORDINARY, PAGE_SIZE, UNPINNABLE, HeldPin, Range, readable, told

if TYPE_CHECKING:
    from regrepro.stage.buffers import Buffer

# Of the memory, while huge pages are made of all the rest: for small pages, and for the guest to live on.
_LEAVE_SMALL, _KEEP_FREE = 512 << 20, 128 << 20


class Targets(Base):
    """Pages that cannot be moved, since there is nowhere to move them to."""

    @contextmanager
    def no_huge_page_to_move_to(self) -> Iterator[Buffer]:
        """Make a buffer of one huge page in ZONE_MOVABLE while there is none outside, and none to be made.

        First most of the memory is made into huge pages. Of what is left, one page in each stretch of a huge
        page's size is pinned for long, so that no huge page can be made of it any more. Then the last ones
        are made, and all of them are mapped. In the control the others are given back first, and nothing is
        pinned. Lab only.
        """
        self._in_lab("taking all memory as huge pages")
        size = hugepages.default_size()
        pool = hugepages.Pool(self._stage.backend, size)
        scattered: list[Range] = []
        pins: list[HeldPin] = []
        try:
            pool.grow(max(0, self._stage.backend.available_memory() - _LEAVE_SMALL) // size)
            chosen = next((memory for memory in pool.mapped if self._is_movable_zone(memory)), None)
            if chosen is None:
                why = f"none of {len(pool.mapped)} huge pages lies in ZONE_MOVABLE"
                raise Unmet("movable-zone", why, "boot with movablecore=512M on a kernel with hugetlbfs")
            pool.mapped.remove(chosen)
            if self.planted:
                scattered = self._scatter(size)
                pins += [self._stage.backend.hold("longterm", one.address, one.length) for one in scattered]
                pool.exhaust()
                self._move_out_in_vain(pool)
            else:
                pool.give_back()
            self._step("huge-pages", size=size, mapped=len(pool.mapped) + 1, free=pool.free())
            yield self._stage.adopt(chosen, "hugetlb", place="unpinnable", placed="gather")
        finally:
            for pin in pins:
                pin.release()
            for one in scattered:
                one.close()
            pool.close()

    def _move_out_in_vain(self, pool: hugepages.Pool) -> None:
        """Have the kernel move huge pages out of ZONE_MOVABLE, by long-term pins, until it can no more.

        It gets memory for that which it has no other huge page of: of blocks that are not for movable pages.
        """
        refused = 0
        for memory in pool.mapped:
            if refused < 3 and self._is_movable_zone(memory):
                try:
                    self._stage.backend.hold("longterm", memory.address, PAGE_SIZE).release()
                except OSError:
                    refused += 1

    def _scatter(self, size: int) -> list[Range]:
        """Return pages of which one lies in each stretch of `size` bytes of ordinary memory, gathered."""
        import numpy

        backend = self._stage.backend
        pages = max(0, backend.available_memory() - _KEEP_FREE) // PAGE_SIZE
        memory = backend.allocate(pages * PAGE_SIZE, "anonymous")
        try:
            memory.populate()
            state = told(backend.snapshot(memory.address, memory.length, counts=False))
            ordinary = numpy.flatnonzero((state.place == ORDINARY) & (state.pfn != 0))
            _, first = numpy.unique(state.pfn[ordinary] // (size // PAGE_SIZE), return_index=True)
            chosen = memory.address + ordinary[first].astype(numpy.uint64) * PAGE_SIZE
            target = backend.reserve(max(1, len(chosen)) * PAGE_SIZE)
            backend.gather(chosen.astype(numpy.uint64), target.address)
            return [target]
        finally:
            memory.close()

    def _is_movable_zone(self, memory: Range) -> bool:
        state = self._stage.backend.snapshot(memory.address, PAGE_SIZE, counts=False)
        return state is not None and readable(state) and bool((state.place == UNPINNABLE[-1]).all())
