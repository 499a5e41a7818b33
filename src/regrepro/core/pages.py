"""Bulk reads of pagemap, /proc/kpage* and struct page into numpy arrays, and run-length encoding, in C"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro._core import ffi, lib

PAGE_SIZE: int = os.sysconf("SC_PAGE_SIZE")

NO_PFN = 0  # the PFN that stands for "no page": the kernel maps page 0 to nobody

# Bits of a pagemap entry (Documentation/admin-guide/mm/pagemap.rst).
PM_PFN_MASK = (1 << 55) - 1
PM_EXCLUSIVE = 1 << 56
PM_FILE = 1 << 61
PM_SWAPPED = 1 << 62
PM_PRESENT = 1 << 63

# What C writes for each PFN: `struct rr_page` of csrc/pages.h. The counts are those of the head page.
STRUCT_PAGE = np.dtype(
    [
        ("flags", np.uint64),
        ("head", np.uint64),
        ("refcount", np.int32),
        ("mapcount", np.int32),
        ("pincount", np.int32),
        ("large_mapcount", np.int32),
        ("nr_pages", np.int32),
        ("known", np.uint32),
        ("large", np.uint32),
        ("unused", np.uint32),
    ]
)
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


def _check(error: int, what: str) -> None:
    if error < 0:
        raise OSError(-error, f"{what}: {os.strerror(-error)}")


def read_pagemap(fd: int, address: int, pages: int) -> NDArray[np.uint64]:
    """Return the raw pagemap entries of `pages` pages from `address` on. Raises OSError."""
    out = np.empty(pages, dtype=np.uint64)
    error = lib.rr_read_entries(fd, address // PAGE_SIZE, pages, ffi.from_buffer("uint64_t[]", out))
    _check(error, "pagemap")
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


def read_entries_at(fd: int, indexes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the entries of a /proc/kpage* file at these PFNs, in any order; 0 for PFN 0. Raises OSError."""
    order = _order(indexes)
    if order is None:
        return _read_entries_in_order(fd, indexes)
    answer = np.empty(len(indexes), dtype=np.uint64)
    answer[order] = _read_entries_in_order(fd, indexes[order])
    return answer


def _order(indexes: NDArray[np.uint64]) -> NDArray[np.intp] | None:
    """Return the order in which scattered PFNs lie close enough together to be read many at a time; None
    where they are read as they stand.
    """
    indexes = np.ascontiguousarray(indexes, dtype=np.uint64)
    reads = int(lib.rr_reads(ffi.from_buffer("uint64_t[]", indexes), len(indexes), NO_PFN))
    if reads <= 4 or reads * _SORT_BELOW <= len(indexes):
        return None
    # Stable: it makes use of the runs that are there.
    return np.argsort(indexes, kind="stable")


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
    _check(error, "kpage file")
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
        _check(error, "/proc/kcore")
        return out, ok.astype(bool)

    def struct_pages(
        self,
        fd: int,
        section_numbers: NDArray[np.uint64],
        coded_maps: NDArray[np.uint64],
        layout: PageLayout,
        pfns: NDArray[np.uint64],
    ) -> NDArray[Any]:
        """Read struct page of each PFN: an array of dtype STRUCT_PAGE. `section_numbers` must be sorted."""
        sections = np.empty(len(section_numbers), dtype=_SECTION)
        sections["number"], sections["coded_map"] = section_numbers, coded_maps
        order = _order(pfns)
        pfns = np.ascontiguousarray(pfns if order is None else pfns[order], dtype=np.uint64)
        out = np.empty(len(pfns), dtype=STRUCT_PAGE)
        c_layout = ffi.new("struct rr_page_layout *")
        for name in PageLayout.__dataclass_fields__.keys() - {"mapcount_is_entire"}:
            setattr(c_layout, name, int(getattr(layout, name)))
        error = lib.rr_struct_pages(
            fd,
            self._c,
            len(self.list),
            ffi.from_buffer("struct rr_section[]", sections),
            len(sections),
            c_layout,
            ffi.from_buffer("uint64_t[]", pfns),
            len(pfns),
            ffi.from_buffer("struct rr_page[]", out),
        )
        _check(error, "/proc/kcore")
        if order is None:
            return out
        answer = np.empty_like(out)
        answer[order] = out
        return answer
