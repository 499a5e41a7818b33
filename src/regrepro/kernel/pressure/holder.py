"""The process that holds the memory: a child that ends with its parent, first in line for the OOM killer."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrepro.errors import Unmet
from regrepro.kernel import procfs
from regrepro.kernel.parent import die_with_parent
from regrepro.kernel.pressure.cgroup import Cgroup
from regrepro.kernel.pressure.outlook import Outlook, free_large_bytes, outlook
from regrepro.kernel.pressure.stalls import Stalls
from regrepro.kernel.zones import PAGE_SIZE, read_zones

if TYPE_CHECKING:
    from regrepro.core.memory import Range
    from regrepro.kernel.memorymap import MemoryMap

BUDDYINFO = Path("/proc/buddyinfo")

MIB = 1 << 20
_CHUNK = 128 * MIB
# Free memory in large pieces that huge pages leave alone: they must not make the kernel compact.
_HUGE_SPARE = 16 * MIB
# So near to the balance of ordinary memory and CMA single pages are looked at.
_NEAR = 4 * MIB
# What the counters of /proc/zoneinfo may lag behind (per-CPU differences, lists of freed pages), and what a
# search touches beside the pages that it wants.
_MARGIN = 16 * MIB
# Page tables and the holder's own pages count towards its control group.
_OVERHEAD = 4 * MIB
_MOST_THREADS = 16
# Share of the time in which everybody waited for memory, above which pressure ends.
_MOST_STALLED = 0.4


@dataclass
class PressureReport:
    """What pressure did. Sizes in bytes.

    `excess`: how many more bytes of CMA than of ordinary memory are free where CMA lies: so much is handed
    out out of CMA from now on. `stalled`: the worst share of a second in which all waited for memory, None
    where the kernel does not tell.
    """

    node: int
    held: int = 0
    huge: int = 0
    wanted: int = 0
    excess: int = 0
    limit: int = 0
    reserve: int = 0
    free: int = 0
    free_cma: int = 0
    threads: int = 1
    seconds: float = 0.0
    stalled: float | None = None
    cgroup: str | None = None
    no_cgroup: str = ""

    def as_record(self) -> dict[str, Any]:
        """Return the value of `search.pressure` of event `buffer` (docs/record.md)."""
        return asdict(self)


class _Refused(Exception):
    """It cannot be done: why, and what would help."""

    def __init__(self, why: str, how: str) -> None:
        super().__init__(why)
        self.why = why
        self.how = how


def mib(size: int) -> str:
    """Return a size in words."""
    return f"{size / MIB:.0f} MiB"


def map_for(length: int, *, huge: bool) -> Range:
    """Map memory to be held, in huge pages where that moves no others; not populated. Raises OSError."""
    from regrepro.core.memory import Range as Memory
    from regrepro.core.placement import quiet_huge_pages

    return Memory.anonymous(length, huge=quiet_huge_pages() if huge else False)


class Holder:
    """The child: holds memory as it is told, until the socket closes."""

    def __init__(
        self,
        link: socket.socket,
        parent: int,
        cgroup: Cgroup,
        limit: int,
        memory_map: MemoryMap | None,
    ) -> None:
        self._link = link
        self._parent = parent
        self._cgroup = cgroup
        self._limit = limit
        self._memory_map = memory_map
        self._reader: Any = None
        self._ranges: list[Any] = []
        self._held = 0
        self._huge = 0
        self._node = -1
        self._goal = 0
        self._told = 0.0

    def serve(self) -> None:
        """Answer questions until nobody asks any more."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        if not die_with_parent(self._parent):
            return
        procfs.end_first_when_memory_runs_out()
        with suppress(OSError):
            self._cgroup.enter()
        while True:
            data = self._link.recv(1 << 12)
            if not data:
                return
            question = json.loads(data)
            if question["do"] == "release":
                answer: dict[str, Any] = {"released": self._release()}
            else:
                try:
                    report = self._press(question["node"], question["wanted"], question["seconds"])
                    answer = {"report": report}
                except _Refused as refused:
                    self._release()
                    answer = {"why": refused.why, "how": refused.how}
                except (OSError, Unmet) as error:
                    held = self._release()
                    answer = {
                        "why": f"{getattr(error, 'strerror', None) or error}, with {mib(held)} held",
                        "how": "a smaller --pressure-limit",
                    }
            self._link.send(json.dumps(answer).encode())

    def _release(self) -> int:
        held = self._held
        for memory in self._ranges:
            memory.close()
        self._ranges.clear()
        self._held = self._huge = 0
        return held

    def _press(self, node: int, wanted: int, seconds: float) -> dict[str, Any]:
        from regrepro.core.placement import allocate_on_node

        if node != self._node:
            allocate_on_node(node)
            self._node = node
        self._stalls = Stalls()
        self._deadline = time.monotonic() + seconds
        self._began = time.monotonic()
        self._seconds = seconds
        self._threads = max(1, min(len(os.sched_getaffinity(0)), _MOST_THREADS))
        excess = (wanted + max(_MARGIN, wanted // 4)) // PAGE_SIZE
        reached = 0
        first = self._look()
        if first.kind is None:
            raise _Refused(
                f"node {node} has no free CMA or ZONE_MOVABLE memory that pressure could bring out",
                "boot with cma=512M or hugetlb_cma=2G, or use --place online-movable",
            )
        if first.kind == "cma":
            self._check_possible(first, wanted, excess)
            self._goal = self._held + max(0, first.before + excess) * PAGE_SIZE
            self._fill()
            reached = self._exceed(excess)
        last = self._look()
        if first.kind == "cma" and reached * PAGE_SIZE < wanted:
            raise _Refused(
                f"with {mib(self._held)} held, {mib(reached * PAGE_SIZE)} would come out of CMA first, "
                f"where {mib(wanted)} are wanted",
                "try again on a quieter node, or --place online-movable",
            )
        return PressureReport(
            node=node,
            held=self._held,
            huge=self._huge,
            wanted=wanted,
            excess=reached * PAGE_SIZE,
            limit=self._limit,
            reserve=last.reserve * PAGE_SIZE,
            free=last.free * PAGE_SIZE,
            free_cma=last.free_cma * PAGE_SIZE,
            threads=self._threads,
            seconds=round(time.monotonic() - self._began, 6),
            stalled=None if self._stalls.worst is None else round(self._stalls.worst, 3),
            cgroup=None if self._cgroup.path is None else str(self._cgroup.path),
            no_cgroup=self._cgroup.why,
        ).as_record()

    def _look(self) -> Outlook:
        return outlook(read_zones(), self._node)

    def _most(self) -> int:
        """How many bytes may be held altogether; page tables and the like count towards the limit."""
        return max(0, self._limit - _OVERHEAD - self._limit // 256)

    def _check_possible(self, seen: Outlook, wanted: int, excess: int) -> None:
        """Say no before anything is touched where the numbers rule it out."""
        must = (seen.before + excess) * PAGE_SIZE
        if must <= 0:
            return
        numbers = (
            f"node {seen.node} has {mib(seen.free_cma * PAGE_SIZE)} of free CMA and "
            f"{mib(seen.ordinary * PAGE_SIZE)} of free ordinary memory, so {mib(must)} "
            f"would have to be held for {mib(wanted)} to come out of CMA"
        )
        if self._held + must > self._most():
            raise _Refused(
                f"{numbers}; the limit is {mib(self._limit)}",
                f"--pressure-limit {-(-(self._held + must + _OVERHEAD + must // 128) // MIB)}M, "
                "or --place online-movable",
            )
        if must > seen.room * PAGE_SIZE:
            raise _Refused(
                f"{numbers}; {mib(seen.reserve * PAGE_SIZE)} stay free for the kernel",
                "free CMA first (drop caches), a larger CMA area, or --place online-movable",
            )

    def _fill(self) -> None:
        """Hold ordinary memory until it is as scarce as CMA."""
        from regrepro.core.memory import thp_size
        from regrepro.core.placement import quiet_huge_pages

        huge_size = (thp_size() or 0) if quiet_huge_pages() is not False else 0
        while True:
            seen = self._look()
            before = seen.before * PAGE_SIZE
            # Around the balance the kernel hands out both in turn: the rest is for _exceed.
            if seen.kind != "cma" or before < _NEAR:
                return
            self._check_going(seen)
            size = min(before, _CHUNK * self._threads, self._most() - self._held, seen.room * PAGE_SIZE)
            size = size // PAGE_SIZE * PAGE_SIZE
            if size < PAGE_SIZE:
                return
            large = self._huge_bytes(huge_size, size, seen)
            self._huge += large
            memory = map_for(large or size, huge=bool(large))
            self._ranges.append(memory)
            memory.populate(threads=self._threads)
            self._held += memory.length
            self._tell()

    def _huge_bytes(self, huge_size: int, size: int, seen: Outlook) -> int:
        """How much of a chunk to take in huge pages: at most what lies about in such pieces outside CMA."""
        if not huge_size or size < 4 * huge_size:
            return 0
        try:
            order = (huge_size // PAGE_SIZE).bit_length() - 1
            large = free_large_bytes(BUDDYINFO.read_text(), self._node, order)
        except OSError:
            return 0
        large -= seen.free_cma * PAGE_SIZE + _HUGE_SPARE
        usable = min(size - huge_size, large) // huge_size * huge_size
        return usable if usable >= 4 * huge_size else 0

    def _exceed(self, excess: int) -> int:
        """Have `excess` pages more of free CMA than of ordinary memory. Returns how many there are.

        Near the balance the kernel hands out both in turn: what is ordinary stays held, what is CMA is given
        back at the end. Not before: freed pages wait on a list of this CPU and would be handed out again.
        """
        import numpy

        from regrepro.core.memory import Range
        from regrepro.core.placement import drop_pages
        from regrepro.kernel.memorymap import ORDINARY

        taken: list[tuple[int, Any]] = []
        spare = 0  # CMA pages that are held for now
        while True:
            seen = self._look()
            lacking = seen.before - spare + excess
            if seen.kind != "cma" or lacking <= 0:
                break
            self._check_going(seen)
            left = (self._most() - self._held) // PAGE_SIZE - spare
            if lacking > min(seen.room, left):
                raise _Refused(
                    f"{mib(lacking * PAGE_SIZE)} more of the ordinary memory of node {self._node} "
                    f"would have to be held; {mib(self._held)} are, the limit is {mib(self._limit)}, "
                    f"{mib(seen.reserve * PAGE_SIZE)} stay free for the kernel",
                    "a larger --pressure-limit, or --place online-movable",
                )
            # Before the balance every page is an ordinary one, after it every other.
            pages = min(lacking if seen.before > 0 else 2 * lacking, left, _CHUNK // PAGE_SIZE)
            memory = Range.anonymous(pages * PAGE_SIZE, huge=False)
            self._ranges.append(memory)
            memory.populate(threads=self._threads)
            marks = (self._places(memory) != ORDINARY).astype(numpy.uint8)
            taken.append((memory.address, marks))
            special = int(marks.sum())
            spare += special
            self._held += (pages - special) * PAGE_SIZE
            self._tell()
        for address, marks in taken:
            drop_pages(address, marks)
        return excess - lacking if seen.kind == "cma" else 0

    def _places(self, memory: Any) -> Any:
        if self._reader is None:
            if self._memory_map is None:
                raise _Refused("where pages lie cannot be read here", "run as root")
            from regrepro.kernel.pagestate import PageReader

            self._reader = PageReader(self._memory_map)
        return self._reader.snapshot(memory.address, memory.length, counts=False).place

    def _check_going(self, seen: Outlook) -> None:
        """Give up in good time."""
        numbers = (
            f"{mib(self._held)} were held, {mib(seen.ordinary * PAGE_SIZE)} of ordinary memory and "
            f"{mib(seen.free_cma * PAGE_SIZE)} of CMA were free"
        )
        if time.monotonic() > self._deadline:
            raise _Refused(
                f"CMA was not reached in {self._seconds:.0f} s: {numbers}",
                "try again on a quieter node, or --place online-movable",
            )
        share = self._stalls.share()
        if share > _MOST_STALLED:
            raise _Refused(
                f"in {share:.0%} of the last second every process waited for memory: {numbers}",
                "a smaller --pressure-limit, or --place online-movable",
            )

    def _tell(self) -> None:
        """Tell how far it is, at most twice a second."""
        now = time.monotonic()
        if now - self._told >= 0.5:
            self._told = now
            message = {"held": self._held, "goal": max(self._goal, self._held)}
            self._link.send(json.dumps(message).encode())
