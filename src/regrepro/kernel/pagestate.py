"""The state of a range's pages at one moment: where each lies, and who refers to it.

Sources: /proc/PID/pagemap (PFN), the bits and zones of their pageblocks at that moment (place, node),
/proc/kpageflags and /proc/kpagecount (flags, map count), struct page through /proc/kcore (reference and pin
counts). All are read in bulk, by C. What this user may not read is None, and `problems` says so.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro.core.memory import Range
from regrepro.core.pages import (
    NO_PFN,
    PAGE_SIZE,
    KpageFlags,
    PagemapEntries,
    decode_pagemap,
    flag_pages,
    read_entries_at,
    read_pagemap,
    runs,
)
from regrepro.kernel.kcore import Kcore, KcoreError
from regrepro.kernel.memorymap import ABSENT, PLACE_NAMES, UNKNOWN, MemoryMap
from regrepro.kernel.pageblocks import Sections

# What a page table entry holds: `PageState.state`, `enum rr_page_state` of csrc/pages.h.
NOT_PRESENT, PRESENT, SWAPPED, ZERO_PAGE, SPECIAL = 0, 1, 2, 3, 4
STATE_NAMES = {
    NOT_PRESENT: "absent",
    PRESENT: "present",
    SWAPPED: "swapped",
    ZERO_PAGE: "zero-page",
    SPECIAL: "special",
}

# Bits of /proc/kpageflags (include/uapi/linux/kernel-page-flags.h, include/linux/kernel-page-flags.h).
KPF_SWAPCACHE, KPF_ANON, KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_HUGE = 13, 12, 15, 16, 17
KPF_NOPAGE, KPF_KSM, KPF_THP, KPF_ZERO_PAGE = 20, 21, 22, 24
KPF_RESERVED, KPF_PRIVATE, KPF_PRIVATE_2 = 32, 35, 36

GUP_PIN_COUNTING_BIAS = (
    1024  # what one FOLL_PIN adds to the reference count of a small page (include/linux/mm.h)
)

UNKNOWN_COUNT = -1

_NO_RUN = 1 << 62  # stands for absent pages while PFNs are run-length encoded


_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")


def _overlaps(line: str, first: int, end: int) -> bool:
    """Whether a line of /proc/PID/maps is of a mapping that overlaps [first, end)."""
    low, _, high = line.split(maxsplit=1)[0].partition("-")
    return int(low, 16) < end and int(high, 16) > first


def _is_device(line: str) -> bool:
    """Whether a mapping may be a PFN map: of a device, of sysfs, or one that the kernel itself made."""
    path = line.split(maxsplit=5)[5]
    return path.startswith(("/dev/", "/sys/", "/proc/", "[v", "anon_inode:")) and not path.startswith(
        "/dev/shm/"
    )


_BITS = KpageFlags(
    zero=1 << KPF_ZERO_PAGE,
    nopage=1 << KPF_NOPAGE,
    reserved=1 << KPF_RESERVED,
    whole=1 << KPF_THP | 1 << KPF_HUGE,
    part=1 << KPF_COMPOUND_HEAD | 1 << KPF_COMPOUND_TAIL,
    hugetlb=1 << KPF_HUGE,
    swapcache=1 << KPF_SWAPCACHE,
    has_private=1 << KPF_PRIVATE | 1 << KPF_PRIVATE_2,
)


@dataclass
class PageState:
    """One item a page in every array; None where it could not be read (see `problems`).

    `pfn` is 0 for a page that is not present, or whose PFN is hidden. `refcount`, `pincount` and `baseline`
    are those of the page's folio (its head page), UNKNOWN_COUNT where not known. `pincount` is 0 for small
    pages, whose pins are in `refcount`, GUP_PIN_COUNTING_BIAS each. `baseline` is the number of references
    that mappings, page cache, swap cache and private data account for (folio_expected_ref_count(),
    include/linux/mm.h).
    """

    address: int
    pfn: NDArray[np.uint64]
    place: NDArray[np.uint8]
    state: NDArray[np.uint8]
    node: NDArray[np.int32] | None = None
    flags: NDArray[np.uint64] | None = None
    refcount: NDArray[np.int64] | None = None
    mapcount: NDArray[np.int64] | None = None
    pincount: NDArray[np.int64] | None = None
    baseline: NDArray[np.int64] | None = None
    large: NDArray[np.bool_] | None = None
    file: NDArray[np.bool_] | None = None  # of the page cache or shared memory, not anonymous
    exclusive: NDArray[np.bool_] | None = None  # mapped by this process alone
    source: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.pfn)

    def references_above_baseline(self) -> NDArray[np.int64] | None:
        """Return for each page the references that nothing ordinary explains, UNKNOWN_COUNT where not known.

        One FOLL_GET is 1, one FOLL_PIN of a small page GUP_PIN_COUNTING_BIAS (of a large folio 1, and 1 in
        `pincount`). A page that was touched a moment ago may sit in a per-CPU batch on its way to the LRU
        lists and then counts 1 more; it is no sign of a holder. A count never names its holder.
        """
        if self.refcount is None or self.baseline is None:
            return None
        known = (self.refcount >= 0) & (self.baseline >= 0)
        above = np.where(known, self.refcount - self.baseline, UNKNOWN_COUNT)
        # A count below its baseline was read while it changed: not known rather than negative.
        return np.where(above < 0, UNKNOWN_COUNT, above)

    def as_record(self) -> dict[str, Any]:
        """Return a page state of docs/record.md, run-length encoded."""
        return {
            "pages": self.pages,
            "pfn": self._pfn_runs(),
            "place": [[i, n, PLACE_NAMES[v]] for i, n, v in runs(self.place).tolist()],
            "refcount": _count_runs(self.refcount),
            "pincount": self._pincount_runs(),
            "mapcount": _count_runs(self.mapcount),
            "baseline": _count_runs(self.baseline),
            "node": _count_runs(self.node),
            "traits": self._traits(),
            "how": "observed",
            "source": self.source,
            "problems": self.problems,
        }

    def _pfn_runs(self) -> list[list[int]]:
        absent = self.pfn == NO_PFN
        values = self.pfn.astype(np.int64)
        if absent.any():
            values[absent] = np.flatnonzero(absent) - _NO_RUN
        return [[i, v, n] for i, n, v in runs(values, 1).tolist() if v > 0]

    def _pincount_runs(self) -> list[list[int]] | None:
        if self.pincount is None or self.large is None or not self.large.any():
            return None
        return _count_runs(np.where(self.large, self.pincount, UNKNOWN_COUNT))

    def _traits(self) -> list[list[Any]]:
        """Runs of what is neither place nor count: `[first, count, "anonymous exclusive large"]`; absent
        pages in none.
        """
        code = self.state.astype(np.int64)
        ksm = None if self.flags is None else (self.flags & np.uint64(1 << KPF_KSM)) != 0
        for bit, trait in ((8, self.large), (16, self.file), (32, self.exclusive), (64, ksm)):
            if trait is not None:
                code |= np.where(trait, bit, 0)
        # Which of them is known is the same for all pages.
        answer: list[list[Any]] = []
        for i, n, value in runs(code).tolist():
            state = value & 7
            if state == NOT_PRESENT:
                continue
            words = [STATE_NAMES[state]] if state != PRESENT else []
            if state == PRESENT:
                if self.file is not None:
                    words.append("file" if value & 16 else "anonymous")
                if self.exclusive is not None:
                    words.append("exclusive" if value & 32 else "shared")
                if self.large is not None and value & 8:
                    words.append("large")
                if value & 64:
                    words.append("ksm")
            answer.append([i, n, " ".join(words)])
        return answer


def _count_runs(values: NDArray[Any] | None) -> list[list[int]] | None:
    """Runs of the known values; None where none is known."""
    if values is None:
        return None
    return [[i, n, v] for i, n, v in runs(values).tolist() if v >= 0] or None


class PageReader:
    """Reads page states of one process, by default this one. A forked child may go on using its parent's
    reader.
    """

    def __init__(self, memory_map: MemoryMap, pid: int | None = None) -> None:
        self.memory_map = memory_map
        self._pid = pid
        self._opened_by = -1
        self._pagemap = self._flags = self._counts = -1
        self._kcore: Kcore | None = None
        self._tells_ksm = False
        self.problems: list[str] = []

    def close(self) -> None:
        """Close the files."""
        for fd in (self._pagemap, self._flags, self._counts):
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)
        self._pagemap = self._flags = self._counts = -1
        if self._kcore is not None:
            self._kcore.close()
            self._kcore = None
        self._opened_by = -1

    def _open(self) -> None:
        """Open the files once in each process: /proc/self/pagemap shows the memory of whoever opened it."""
        if self._opened_by == os.getpid():
            return
        self.close()
        self.problems = []
        self._pagemap = self._open_one(f"/proc/{self._pid or 'self'}/pagemap")
        self._flags = self._open_one("/proc/kpageflags")
        self._counts = self._open_one("/proc/kpagecount")
        if self.memory_map.sections is None:
            self.problems.append("no reference counts, since the kernel's memory map is not known")
        else:
            try:
                self._kcore = Kcore()
            except OSError as error:
                self.problems.append(f"/proc/kcore: {error.strerror}")
            except KcoreError as error:
                self.problems.append(f"/proc/kcore: {error}")
        self._opened_by = os.getpid()
        self._tells_ksm = self._flags >= 0 and self._fresh_page_is_unmerged()

    def _fresh_page_is_unmerged(self) -> bool:
        """Whether a page that this process has just touched is not said to be merged by KSM.

        From 6.10 on kernels set KPF_KSM for every anonymous page (`stable_page_flags`, fs/proc/page.c, tested
        PAGE_MAPPING_KSM, which holds PAGE_MAPPING_ANON's bit): seen on 6.12, no more on 7.3.
        """
        pagemap = self._open_one("/proc/self/pagemap")
        if pagemap < 0:
            return False
        try:
            with Range.anonymous(PAGE_SIZE, huge=False) as memory:
                memory.populate()
                entries = decode_pagemap(read_pagemap(pagemap, memory.address, 1))
                if entries.hidden:
                    return False
                return not int(read_entries_at(self._flags, entries.pfn)[0]) >> KPF_KSM & 1
        except OSError:
            return False
        finally:
            os.close(pagemap)

    def _open_one(self, path: str) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.problems.append(f"{path}: {error.strerror}")
            return -1

    def snapshot(self, address: int, length: int, *, counts: bool = True) -> PageState:
        """Read the pages that [address, address + length) touches; `counts` False leaves all but PFN and
        place out.

        Raises OSError only for a file that was open and then failed.
        """
        self._open()
        first = address // PAGE_SIZE
        pages = (address + length + PAGE_SIZE - 1) // PAGE_SIZE - first if length > 0 else 0
        problems = list(self.problems)
        if self._pagemap < 0:
            unknown = np.full(pages, UNKNOWN, dtype=np.uint8)
            empty = np.zeros(pages, dtype=np.uint64)
            return PageState(
                first * PAGE_SIZE, empty, unknown, np.zeros(pages, dtype=np.uint8), problems=problems
            )
        entries = decode_pagemap(read_pagemap(self._pagemap, first * PAGE_SIZE, pages))
        located = self.memory_map.locate_now(entries.pfn, self._kcore)
        place, node = located.place, located.node
        if located.problem:
            problems.append(located.problem)
        if entries.hidden:
            place[(entries.state == PRESENT) & (entries.pfn == NO_PFN)] = UNKNOWN
            problems.append("PFNs are hidden from this user: reading them takes CAP_SYS_ADMIN")
        result = PageState(first * PAGE_SIZE, entries.pfn, place, entries.state, problems=problems)
        sources = [f"/proc/{self._pid or 'self'}/pagemap"]
        if not entries.hidden:
            sources.append(self.memory_map.placed_by)
            node[entries.pfn == NO_PFN] = -1
            result.node = node
        if counts:
            result.file, result.exclusive = entries.file, entries.exclusive
            if not entries.hidden:
                self._add_counts(result, entries, located.sections, sources)
            if (entries.state == NOT_PRESENT).any():
                self._mark_pfn_maps(result)
        result.source = ", ".join(sources)
        return result

    def same_places(self, state: PageState) -> bool:
        """Whether the frames of a state that was read before still lie in the same places, by the bits and
        zones of their pageblocks as they are now.
        """
        self._open()
        located = self.memory_map.locate_now(state.pfn, self._kcore)
        hidden = (state.place == UNKNOWN) & (state.pfn == NO_PFN)
        return bool(((located.place == state.place) | hidden).all())

    def _mark_pfn_maps(self, result: PageState) -> None:
        """Tell pages of a PFN map, which pagemap shows as absent (walk_page_test(), mm/pagewalk.c), from
        absent ones.

        Only mappings of device files are looked at, since the flags of a mapping cost a walk over its pages.
        """
        folder = Path(f"/proc/{self._pid or 'self'}")
        end = result.address + result.pages * PAGE_SIZE
        try:
            lines = (folder / "maps").read_text(errors="replace").splitlines()
            devices = [
                line
                for line in lines
                if _overlaps(line, result.address, end) and line.split(maxsplit=5)[5:] and _is_device(line)
            ]
            if not devices:
                return
            smaps = (folder / "smaps").read_text(errors="replace").splitlines()
        except OSError as error:
            result.problems.append(f"{folder}/smaps: {error.strerror}")
            return
        current: tuple[int, int] | None = None
        for line in smaps:
            if _MAPPING.match(line):
                first, last = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
                current = (first, last) if first < end and last > result.address else None
            elif current is not None and line.startswith("VmFlags:") and "pf" in line.split():
                low = max(current[0] - result.address, 0) // PAGE_SIZE
                high = (min(current[1], end) - result.address) // PAGE_SIZE
                absent = result.state[low:high] == NOT_PRESENT
                result.state[low:high][absent] = SPECIAL
                result.place[low:high][absent] = UNKNOWN

    def _add_counts(
        self, result: PageState, entries: PagemapEntries, sections: Sections | None, sources: list[str]
    ) -> None:
        if self._flags >= 0:
            result.flags = read_entries_at(self._flags, entries.pfn)
            if not self._tells_ksm:
                result.flags &= ~np.uint64(1 << KPF_KSM)
            sources.append("/proc/kpageflags")
            result.large = flag_pages(entries, result.flags, _BITS, result.place, UNKNOWN)
        if self._kcore is None or sections is None:
            self._add_mapcount(result, entries.pfn != NO_PFN, sources)
            return
        if result.large is None:
            result.large = np.zeros(result.pages, dtype=np.bool_)
        layout = sections.layout.pages
        found = self._kcore.segments.read_counts(
            self._kcore.fd,
            sections.numbers,
            sections.coded_maps,
            layout,
            entries,
            result.flags,
            _BITS,
            result.large,
        )
        if found.missing:
            result.problems.append(f"struct page of {found.missing} pages could not be read")
        sources.append("struct page by /proc/kcore")
        result.refcount, result.pincount = found.refcount, found.pincount
        result.mapcount, result.baseline = found.mapcount, found.baseline
        self._add_mapcount(result, found.unmapped, sources)

    def _add_mapcount(self, result: PageState, wanted: NDArray[np.bool_], sources: list[str]) -> None:
        """Read the map counts of the wanted pages from /proc/kpagecount."""
        if self._counts < 0 or not wanted.any():
            return
        if result.mapcount is None:
            result.mapcount = np.full(result.pages, UNKNOWN_COUNT, dtype=np.int64)
        result.mapcount[wanted] = read_entries_at(self._counts, result.pfn[wanted]).astype(np.int64)
        sources.append("/proc/kpagecount")


__all__ = [
    "ABSENT",
    "GUP_PIN_COUNTING_BIAS",
    "STATE_NAMES",
    "UNKNOWN_COUNT",
    "PageReader",
    "PageState",
]
