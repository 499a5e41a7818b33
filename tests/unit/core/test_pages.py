"""Bulk reads of pagemap, kpage files and struct page, out of files written by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrepro.core import pages
from regrepro.kernel import pagestate
from regrepro.kernel.memorymap import UNKNOWN
from regrepro.kernel.pagestate import (
    KPF_COMPOUND_TAIL,
    KPF_NOPAGE,
    KPF_PRIVATE,
    KPF_RESERVED,
    KPF_SWAPCACHE,
    KPF_THP,
    KPF_ZERO_PAGE,
    NOT_PRESENT,
    PRESENT,
    SPECIAL,
    SWAPPED,
    ZERO_PAGE,
)

BASE = 0xFFFFEA0000000000
# Of a kernel on paper, which keeps all of a folio's counts in its head page.
LAYOUT = pages.PageLayout(
    page_struct_size=64,
    section_shift=15,
    flags=0,
    refcount=52,
    mapcount=48,
    compound=8,
    pincount=28,
    large_mapcount=16,
    nr_pages=56,
    head_bit=6,
    compound_may_be_mask=True,
)


class Memmap:
    """Struct pages from PFN 0 on, all free and mapped nowhere."""

    def __init__(self, count: int, layout: pages.PageLayout = LAYOUT) -> None:
        self.layout = layout
        self.memory = np.zeros(count * 64, dtype=np.uint8)
        for pfn in range(count):
            self.put(pfn, 48, -1)

    def put(self, pfn: int, at: int, value: int, width: int = 4) -> None:
        self.memory[pfn * 64 + at : pfn * 64 + at + width] = list(
            (value % (1 << 8 * width)).to_bytes(width, "little")
        )

    def page(
        self, pfn: int, refcount: int, mapcount: int = 0, *, large: int = 0, pincount: int = 0, pages: int = 1
    ) -> None:
        """A page; `large`: how often it is mapped, which makes it a large folio of so many `pages`."""
        self.put(pfn, 0, (1 << 6) * (large > 0), 8)
        for at, value in ((52, refcount), (48, mapcount - 1), (28, pincount), (16, large - 1), (56, pages)):
            self.put(pfn, at, value)

    def counts(
        self, entries: pages.PagemapEntries, flags: np.ndarray | None, large: np.ndarray
    ) -> pages.PageCounts:
        fd = os.memfd_create("kcore")
        try:
            os.write(fd, self.memory.tobytes())
            sections = np.array([0], dtype=np.uint64), np.array([BASE], dtype=np.uint64)
            segments = pages.Segments([(BASE, len(self.memory), 0)])
            return segments.read_counts(fd, *sections, self.layout, entries, flags, pagestate._BITS, large)
        finally:
            os.close(fd)


NO_SUM = replace(LAYOUT, mapcount_is_entire=True)
NOT_READ = replace(LAYOUT, large_mapcount=-1)


@pytest.mark.parametrize(
    ("what", "flags", "file", "page", "layout", "expected"),
    [
        ("anonymous", 0, False, {"refcount": 1}, LAYOUT, 1),
        ("anonymous in the swap cache", 1 << KPF_SWAPCACHE, False, {"refcount": 2}, LAYOUT, 2),
        ("page cache with buffers", 1 << KPF_PRIVATE, True, {"refcount": 3}, LAYOUT, 3),
        ("shared memory in two mappings", 0, True, {"refcount": 3, "mapcount": 2}, LAYOUT, 3),
        ("huge page", 1 << KPF_THP, False, {"large": 1, "pages": 512}, LAYOUT, 1),
        ("huge page of shmem", 1 << KPF_THP, True, {"large": 1, "pages": 512}, LAYOUT, 513),
        ("huge page, mapped by page, no sum kept", 1 << KPF_THP, False, {"large": 1}, NO_SUM, -1),
        ("huge page, its counts not read", 1 << KPF_THP, False, {"large": 1}, NOT_READ, -1),
    ],
)
def test_baseline(
    *,
    what: str,
    flags: int,
    file: bool,
    page: dict[str, int],
    layout: pages.PageLayout,
    expected: int,
) -> None:
    memmap = Memmap(8, layout)
    memmap.page(5, **{"refcount": 1, "mapcount": 1, **page})
    found, _ = counted(memmap, [pages.PM_PRESENT | int(file) << 61 | 5], [flags])
    assert found.baseline is not None and found.baseline.tolist() == [expected], what


def counted(
    memmap: Memmap, entries: list[int], flags: list[int] | None
) -> tuple[pages.PageCounts, np.ndarray]:
    taken = pages.decode_pagemap(np.array(entries, dtype=np.uint64))
    large = np.zeros(len(entries), dtype=bool)
    known = None if flags is None else np.array(flags, dtype=np.uint64)
    if known is not None:
        place = np.zeros(len(entries), dtype=np.uint8)
        large = pages.flag_pages(taken, known, pagestate._BITS, place, UNKNOWN)
    return memmap.counts(taken, known, large), large


def test_pagemap_entries_are_taken_apart() -> None:
    taken = pages.decode_pagemap(
        np.array(
            [
                pages.PM_PRESENT | pages.PM_EXCLUSIVE | 77,
                pages.PM_PRESENT | pages.PM_FILE | 1 << 55 | 78,  # soft-dirty is no part of the PFN
                pages.PM_SWAPPED | 5,
                0,
                pages.PM_PRESENT,
            ],
            dtype=np.uint64,
        )
    )
    assert taken.pfn.tolist() == [77, 78, 0, 0, 0] and taken.hidden == 1
    assert taken.state.tolist() == [PRESENT, PRESENT, SWAPPED, NOT_PRESENT, PRESENT]
    assert taken.file.tolist() == [False, True, False, False, False]
    assert taken.exclusive.tolist() == [True, False, False, False, False]


def test_zero_and_special_pages_are_told_by_their_flags_and_have_no_baseline() -> None:
    entries = [pages.PM_PRESENT | pfn for pfn in (1, 2, 3, 4, 5)] + [0]
    flags = [1 << KPF_ZERO_PAGE | 1 << KPF_THP, 1 << KPF_RESERVED, 1 << KPF_NOPAGE, 0, 1 << KPF_COMPOUND_TAIL]
    taken = pages.decode_pagemap(np.array(entries, dtype=np.uint64))
    place = np.zeros(6, dtype=np.uint8)
    bits = np.array([*flags, 1 << KPF_NOPAGE], dtype=np.uint64)
    large = pages.flag_pages(taken, bits, pagestate._BITS, place, UNKNOWN)
    assert taken.state.tolist() == [ZERO_PAGE, SPECIAL, SPECIAL, PRESENT, PRESENT, NOT_PRESENT]
    assert place.tolist() == [0, 0, UNKNOWN, 0, 0, 0]
    assert large.tolist() == [False, False, False, False, True, False]
    memmap = Memmap(8)
    for pfn, references in enumerate((9, 9, 9, 2, 3), start=1):
        memmap.page(pfn, references, 1)
    found = memmap.counts(taken, bits, large)
    assert found.baseline is not None and found.baseline.tolist() == [-1, -1, -1, 1, 1, -1]
    assert found.mapcount.tolist() == [-1, -1, -1, 1, 1, -1]
    assert found.unmapped.tolist() == [True, True, True, False, False, False] and found.missing == 0


def test_counts_of_small_and_large_pages_and_of_what_could_not_be_read() -> None:
    entries = [pages.PM_PRESENT | pfn for pfn in (1, 2, 3)]
    memmap = Memmap(8)
    memmap.page(1, 5, 2, pincount=9)
    memmap.page(2, 600, large=1, pincount=7)
    found, large = counted(memmap, entries, [0, 0, 0])
    assert found.refcount.tolist() == [5, 600, -1] and found.pincount.tolist() == [0, 7, -1]
    assert found.mapcount.tolist() == [2, -1, -1] and found.unmapped.tolist() == [False, True, True]
    assert found.missing == 1 and large.tolist() == [False, True, False]
    without, _ = counted(memmap, entries, None)
    assert without.baseline is None and without.refcount.tolist() == [5, 600, -1]


@given(st.lists(st.integers(0, 60), max_size=40), st.lists(st.integers(1, 9), max_size=6))
def test_pfns_are_located_in_ranges(pfns: list[int], gaps: list[int]) -> None:
    """As many ranges as gaps, each of three pages, the gaps between them."""
    starts, at = [], 0
    for gap in gaps:
        starts.append(at + gap)
        at += gap + 3
    start = np.array(starts, dtype=np.uint64)
    place, node = pages.locate(
        np.array(pfns, dtype=np.uint64),
        start,
        start + np.uint64(3),
        np.arange(len(starts), dtype=np.uint8),
        np.arange(len(starts), dtype=np.int32) + 10,
        absent=255,
        unknown=254,
    )
    for pfn, found, its_node in zip(pfns, place.tolist(), node.tolist(), strict=True):
        within = [i for i, first in enumerate(starts) if first <= pfn < first + 3]
        expected = within[0] if within else 254
        assert found == (255 if pfn == 0 else expected)
        assert its_node == (within[0] + 10 if within else -1)


@given(st.lists(st.integers(-3, 3), max_size=60), st.sampled_from([0, 1]))
def test_runs_decode_to_what_was_encoded(values: list[int], step: int) -> None:
    encoded = pages.runs(np.array(values, dtype=np.int64), step).tolist()
    decoded = [value + step * i for _, count, value in encoded for i in range(count)]
    assert decoded == values
    assert [index for index, _, _ in encoded] == list(np.cumsum([0] + [count for _, count, _ in encoded]))[
        :-1
    ]
    for (_, count, value), (_, _, following) in pairwise(encoded):
        assert following != value + step * count  # as few runs as can be


def test_many_runs() -> None:
    assert len(pages.runs(np.arange(20000) % 2)) == 20000


@given(st.lists(st.integers(0, 5000), max_size=300))
def test_entries_at_any_indexes(indexes: list[int]) -> None:
    content = (np.arange(4000, dtype=np.uint64) * np.uint64(3) + np.uint64(1)).tobytes()
    fd = os.memfd_create("entries")
    try:
        os.write(fd, content)
        found = pages.read_entries_at(fd, np.array(indexes, dtype=np.uint64))
    finally:
        os.close(fd)
    assert found.tolist() == [0 if i == 0 or i >= 4000 else 3 * i + 1 for i in indexes]


def test_only_what_is_scattered_is_sorted_first() -> None:
    """Sorting costs more than the reads that it saves where PFNs stand in runs, up or down."""
    up = np.arange(1, 2001, dtype=np.uint64)
    in_runs = np.concatenate([up + 9000, up[::-1], up + 5000, np.zeros(50, dtype=np.uint64), up])
    assert pages._order(in_runs) is None and pages._order(up[:3]) is None
    scattered = np.random.default_rng(1).permutation(in_runs)
    order = pages._order(scattered)
    assert order is not None and scattered[order].tolist() == sorted(in_runs.tolist())


def test_reads_that_fail_raise_the_errno() -> None:
    with pytest.raises(OSError, match="pagemap"):
        pages.read_pagemap(-1, 0, 4)
    with pytest.raises(OSError, match="kpage"):
        pages.read_entries_at(-1, np.array([1], dtype=np.uint64))


def test_struct_pages_of_a_kernel_on_paper() -> None:
    """Small, head and tail pages; a tail by pointer and by mask; a page outside; a freed one."""
    memmap = Memmap(1024, replace(LAYOUT, pincount=64 + 28, large_mapcount=64 + 16, nr_pages=64 + 56))
    memmap.page(5, 1025, 1)
    memmap.put(512, 0, 1 << 6, 8)
    memmap.put(512, 52, 3)
    for pfn in range(513, 1024):
        memmap.put(pfn, 8, -(512 * 64) % (1 << 64) | 1 if pfn % 2 else (BASE + 512 * 64) | 1, 8)
    for at, value in ((16, 0), (28, 2), (56, 512)):
        memmap.put(513, at, value)

    def counts(pfns: np.ndarray) -> tuple[pages.PageCounts, np.ndarray]:
        entries = np.where(pfns > 0, pfns | np.uint64(pages.PM_PRESENT | pages.PM_FILE), np.uint64(0))
        large = np.zeros(len(pfns), dtype=bool)
        return memmap.counts(pages.decode_pagemap(entries), np.zeros_like(pfns), large), large

    found, large = counts(np.array([1023, 5, 0, 512, 700, 9, 701, 5000, 1 << 20], dtype=np.uint64))
    assert found.refcount.tolist() == [3, 1025, -1, 3, 3, -1, 3, -1, -1]
    assert found.pincount.tolist() == [2, 0, -1, 2, 2, -1, 2, -1, -1]
    assert found.mapcount.tolist() == [-1, 1, -1, -1, -1, -1, -1, -1, -1]
    assert found.baseline is not None
    assert found.baseline.tolist() == [513, 2, -1, 513, 513, -1, 513, -1, -1]
    assert large.tolist() == [True, False, False, True, True, False, True, False, False]
    assert found.missing == 3
    in_runs = np.tile(np.arange(1024, dtype=np.uint64), 10)  # more than are looked at together
    for pfns in (in_runs, np.random.default_rng(3).permutation(in_runs), in_runs[:0]):
        found, large = counts(pfns)
        assert np.array_equal(found.refcount, np.where(pfns >= 512, 3, np.where(pfns == 5, 1025, -1)))
        assert np.array_equal(large, pfns >= 512)
