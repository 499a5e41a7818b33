"""Bulk reads of pagemap, /proc/kpage* and struct page into numpy arrays, and run-length encoding, in C"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro._core import ffi, lib
from regrepro.core.calls import check

PAGE_SIZE: int = os.sysconf("SC_PAGE_SIZE")

NO_PFN = 0  # the PFN that stands for "no page": the kernel maps page 0 to nobody

# Bits of a pagemap entry (Documentation/admin-guide/mm/pagemap.rst).
PM_PFN_MASK = (1 << 55) - 1
PM_EXCLUSIVE = 1 << 56
PM_FILE = 1 << 61
PM_SWAPPED = 1 << 62
PM_PRESENT = 1 << 63

_SECTION = np.dtype([("number", np.uint64), ("coded_map", np.uint64)])
# Entries that one read must give on average; where it gives fewer, sorting them first pays.
_SORT_BELOW = 16
_RUN = np.dtype([("index", np.int64), ("count", np.int64), ("value", np.int64)])


@dataclass(frozen=True)
class PageLayout:
    """Offsets (bytes) of the members of struct page that are read; -1 where the kernel has none.

    `pincount`, `large_mapcount` and `nr_pages` count from the head page and may lie in the pages after it.
    `mapcount_is_entire`: the kernel keeps no sum for a large folio; `large_mapcount` then is how often the
    whole folio is mapped by one entry.
    """

    page_struct_size: int
    section_shift: int
    flags: int
    refcount: int
    mapcount: int
    compound: int
    pincount: int = -1
    large_mapcount: int = -1
    nr_pages: int = -1
    head_bit: int = -1
    compound_may_be_mask: bool = False
    mapcount_is_entire: bool = False


def read_pagemap(fd: int, address: int, pages: int) -> NDArray[np.uint64]:
    """Return the raw pagemap entries of `pages` pages from `address` on. Raises OSError."""
    out = np.empty(pages, dtype=np.uint64)
    check(lib.rr_read_entries(fd, address // PAGE_SIZE, pages, ffi.from_buffer("uint64_t[]", out)), "pagemap")
    return out


def read_pfns(address: int, pages: int, fd: int | None = None) -> NDArray[np.uint64]:
    """Return the PFN of each page of this process; 0: not present, or hidden from this user. Raises
    OSError.
    """
    opened = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
    try:
        entries = read_pagemap(opened, address, pages)
    finally:
        if fd is None:
            os.close(opened)
    return pfns_of(entries, out=entries)


def pfns_of(entries: NDArray[np.uint64], out: NDArray[np.uint64] | None = None) -> NDArray[np.uint64]:
    """Return the PFNs in pagemap entries, 0 for a page that is not present. `out` may be `entries` itself."""
    absent = entries < np.uint64(PM_PRESENT)
    pfns: NDArray[np.uint64] = np.bitwise_and(entries, np.uint64(PM_PFN_MASK), out=out)
    pfns[absent] = NO_PFN
    return pfns


@dataclass(frozen=True)
class KpageFlags:
    """Masks of /proc/kpageflags entries: `struct rr_kpageflags` of csrc/pages.h."""

    zero: int
    nopage: int
    reserved: int
    whole: int
    part: int
    hugetlb: int
    swapcache: int
    has_private: int

    def _as_c(self) -> Any:
        made = ffi.new("struct rr_kpageflags *")
        for name in KpageFlags.__dataclass_fields__:
            setattr(made, name, getattr(self, name))
        return made


@dataclass
class PagemapEntries:
    """Pagemap entries taken apart, one item a page. `pfn`: 0 where the page is not present or its PFN hidden;
    `hidden`: how many are hidden.
    """

    pfn: NDArray[np.uint64]
    state: NDArray[np.uint8]
    file: NDArray[np.bool_]
    exclusive: NDArray[np.bool_]
    hidden: int


@dataclass
class PageCounts:
    """What `Segments.read_counts` gives, one item a page, -1 where it is not known.

    `missing`: of so many present pages there is no readable struct page. `unmapped`: the pages whose map
    count is still to be read.
    """

    refcount: NDArray[np.int64]
    mapcount: NDArray[np.int64]
    pincount: NDArray[np.int64]
    baseline: NDArray[np.int64] | None
    unmapped: NDArray[np.bool_]
    missing: int


def _bytes(values: NDArray[Any]) -> Any:
    return ffi.from_buffer("uint8_t[]", values)


def decode_pagemap(entries: NDArray[np.uint64]) -> PagemapEntries:
    """Take raw pagemap entries apart."""
    count = len(entries)
    pfn, state = np.empty(count, dtype=np.uint64), np.empty(count, dtype=np.uint8)
    file, exclusive = np.empty(count, dtype=np.bool_), np.empty(count, dtype=np.bool_)
    hidden = lib.rr_decode_pagemap(
        ffi.from_buffer("uint64_t[]", entries),
        count,
        ffi.from_buffer("uint64_t[]", pfn),
        _bytes(state),
        _bytes(file),
        _bytes(exclusive),
    )
    return PagemapEntries(pfn, state, file, exclusive, int(hidden))


def locate(
    pfns: NDArray[np.uint64],
    start: NDArray[np.uint64],
    end: NDArray[np.uint64],
    code: NDArray[np.uint8],
    node: NDArray[np.int32],
    *,
    absent: int,
    unknown: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return code and node of the range, of those sorted by `start`, that each PFN lies in; `unknown` and -1
    outside of all. PFN 0 is `absent`.
    """
    pfns = np.ascontiguousarray(pfns, dtype=np.uint64)
    place, nodes = np.empty(len(pfns), dtype=np.uint8), np.empty(len(pfns), dtype=np.int32)
    columns = [
        np.ascontiguousarray(column, dtype=kind)
        for column, kind in ((start, np.uint64), (end, np.uint64), (code, np.uint8), (node, np.int32))
    ]
    table = ffi.new("struct rr_places *")
    table.start, table.end = (ffi.from_buffer("uint64_t[]", column) for column in columns[:2])
    table.code, table.node = _bytes(columns[2]), ffi.from_buffer("int32_t[]", columns[3])
    table.count = len(columns[0])
    lib.rr_locate(
        ffi.from_buffer("uint64_t[]", pfns),
        len(pfns),
        table,
        absent,
        unknown,
        _bytes(place),
        ffi.from_buffer("int32_t[]", nodes),
    )
    return place, nodes


def flag_pages(
    entries: PagemapEntries,
    flags: NDArray[np.uint64],
    bits: KpageFlags,
    place: NDArray[np.uint8],
    unknown: int,
) -> NDArray[np.bool_]:
    """Mark zero and special pages in `entries.state`, those without a struct page as `unknown` in `place`.
    Return which pages are large.
    """
    large = np.empty(len(flags), dtype=np.bool_)
    lib.rr_flag_pages(
        ffi.from_buffer("uint64_t[]", entries.pfn),
        ffi.from_buffer("uint64_t[]", flags),
        len(flags),
        bits._as_c(),
        unknown,
        _bytes(place),
        _bytes(entries.state),
        _bytes(large),
    )
    return large


def read_entries_at(fd: int, indexes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the entries of a /proc/kpage* file at these PFNs, in any order; 0 for PFN 0. Raises OSError."""
    order = _order(indexes)
    if order is None:
        return _read_entries_in_order(fd, indexes)
    answer = np.empty(len(indexes), dtype=np.uint64)
    answer[order] = _read_entries_in_order(fd, indexes[order])
    return answer


def _order(indexes: NDArray[np.uint64]) -> NDArray[np.int64] | None:
    """Return the order in which scattered PFNs lie close enough together to be read many at a time; None
    where they are read as they stand.
    """
    indexes = np.ascontiguousarray(indexes, dtype=np.uint64)
    reads = int(lib.rr_reads(ffi.from_buffer("uint64_t[]", indexes), len(indexes), NO_PFN))
    if reads <= 4 or reads * _SORT_BELOW <= len(indexes):
        return None
    # Stable: it makes use of the runs that are there.
    return np.argsort(indexes, kind="stable").astype(np.int64, copy=False)


def _read_entries_in_order(fd: int, indexes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    indexes = np.ascontiguousarray(indexes, dtype=np.uint64)
    out = np.empty(len(indexes), dtype=np.uint64)
    error = lib.rr_read_entries_at(
        fd,
        ffi.from_buffer("uint64_t[]", indexes),
        len(indexes),
        NO_PFN,
        ffi.from_buffer("uint64_t[]", out),
    )
    check(error, "kpage file")
    return out


def runs(values: NDArray[Any], step: int = 0) -> NDArray[np.int64]:
    """Run-length encode: an (n, 3) array of first index, count, first value.

    With `step` 0 a run holds equal values; with `step` 1 each value is one more than the value before it.
    """
    values = np.ascontiguousarray(values, dtype=np.int64)
    room = min(len(values), 4096)
    source = ffi.from_buffer("int64_t[]", values)
    while True:
        out = np.empty(room, dtype=_RUN)
        n = int(lib.rr_runs(source, len(values), step, ffi.from_buffer("struct rr_run[]", out), room))
        if n <= room:
            return out.view(np.int64).reshape(-1, 3)[:n]
        room = n


class Segments:
    """The memory that /proc/kcore offers: (kernel address, length, file offset) of each program header."""

    def __init__(self, segments: Sequence[tuple[int, int, int]]) -> None:
        self.list = list(segments)
        self._c = ffi.new("struct rr_segment[]", max(len(self.list), 1))
        for i, (address, length, offset) in enumerate(self.list):
            self._c[i].address, self._c[i].length, self._c[i].offset = address, length, offset

    def gather(self, fd: int, addresses: NDArray[np.uint64], width: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Read `width` bytes at each kernel address: a (n, width) uint8 array, and which could be read."""
        addresses = np.ascontiguousarray(addresses, dtype=np.uint64)
        out = np.empty((len(addresses), width), dtype=np.uint8)
        ok = np.empty(len(addresses), dtype=np.uint8)
        error = lib.rr_kcore_gather(
            fd,
            self._c,
            len(self.list),
            ffi.from_buffer("uint64_t[]", addresses),
            len(addresses),
            width,
            ffi.from_buffer("uint8_t[]", out),
            ffi.from_buffer("uint8_t[]", ok),
        )
        check(error, "/proc/kcore")
        return out, ok.astype(bool)

    def read_counts(  # noqa: PLR0917 - where struct pages lie, and what is known of the pages already
        self,
        fd: int,
        section_numbers: NDArray[np.uint64],
        coded_maps: NDArray[np.uint64],
        layout: PageLayout,
        entries: PagemapEntries,
        flags: NDArray[np.uint64] | None,
        bits: KpageFlags,
        large: NDArray[np.bool_],
    ) -> PageCounts:
        """Return the counts that struct pages tell; a baseline only with `flags`. `large` is added to.

        `section_numbers` must be sorted. Raises OSError.
        """
        sections = np.empty(len(section_numbers), dtype=_SECTION)
        sections["number"], sections["coded_map"] = section_numbers, coded_maps
        c_layout = ffi.new("struct rr_page_layout *")
        for name in PageLayout.__dataclass_fields__.keys() - {"mapcount_is_entire"}:
            setattr(c_layout, name, int(getattr(layout, name)))
        count = len(entries.pfn)
        order = _order(entries.pfn)
        refcount, mapcount, pincount, baseline = (np.empty(count, dtype=np.int64) for _ in range(4))
        unmapped = np.empty(count, dtype=np.bool_)
        out = ffi.new("struct rr_counts *")
        out.state, out.is_large, out.unmapped = _bytes(entries.state), _bytes(large), _bytes(unmapped)
        out.refcount, out.mapcount, out.pincount, out.baseline = (
            ffi.from_buffer("int64_t[]", values) for values in (refcount, mapcount, pincount, baseline)
        )
        missing = ffi.new("size_t *")
        error = lib.rr_read_counts(
            fd,
            self._c,
            len(self.list),
            ffi.from_buffer("struct rr_section[]", sections),
            len(sections),
            c_layout,
            ffi.from_buffer("uint64_t[]", entries.pfn),
            ffi.NULL if order is None else ffi.from_buffer("int64_t[]", order),
            ffi.NULL if flags is None else ffi.from_buffer("uint64_t[]", flags),
            _bytes(entries.file),
            count,
            bits._as_c(),
            int(layout.mapcount_is_entire),
            out,
            missing,
        )
        check(error, "/proc/kcore")
        return PageCounts(
            refcount, mapcount, pincount, None if flags is None else baseline, unmapped, int(missing[0])
        )
