"""Page states: of this process' own pages as far as this user may see, and of arrays written by hand."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from regrepro._core import lib

from regrepro.core import pages
from regrepro.core.memory import PAGE_SIZE, Range
from regrepro.kernel import pagestate
from regrepro.kernel.memorymap import ABSENT, CMA, ORDINARY, UNKNOWN, MemoryMap, read_memory_map
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
    PageReader,
    PageState,
)

SEES_PFNS = os.geteuid() == 0


@pytest.fixture(scope="module")
def memory_map() -> MemoryMap:
    return read_memory_map()


@pytest.fixture
def reader(memory_map: MemoryMap) -> Iterator[PageReader]:
    made = PageReader(memory_map)
    yield made
    made.close()


def test_absent_then_present(reader: PageReader) -> None:
    with Range.anonymous(8 * PAGE_SIZE, huge=False) as buffer:
        before = reader.snapshot(buffer.address, buffer.length)
        assert before.pages == 8 and set(before.place) == {ABSENT} and not before.pfn.any()
        buffer.write(3 * PAGE_SIZE, b"x")
        state = reader.snapshot(buffer.address, buffer.length)
        assert (state.state != pagestate.NOT_PRESENT).tolist() == [False] * 3 + [True] + [False] * 4
        record = state.as_record()
        assert record["pages"] == 8
        assert sum(count for _, count, _ in record["place"]) == 8
        if SEES_PFNS:
            assert record["pfn"] == [[3, int(state.pfn[3]), 1]]
        else:
            assert state.place[3] == UNKNOWN and any("CAP_SYS_ADMIN" in text for text in state.problems)
        json.dumps(record)


def test_a_range_within_pages_covers_whole_pages(reader: PageReader) -> None:
    with Range.anonymous(4 * PAGE_SIZE, huge=False) as buffer:
        buffer.populate()
        state = reader.snapshot(buffer.address + 100, PAGE_SIZE)
        assert state.pages == 2 and state.address == buffer.address
        assert reader.snapshot(buffer.address, 0).pages == 0
        assert reader.snapshot(buffer.address, 0).as_record()["place"] == []


@pytest.mark.skipif(not SEES_PFNS, reason="PFNs are hidden without root")
def test_bulk_reads_agree_with_one_by_one(reader: PageReader) -> None:
    with Range.anonymous(512 * PAGE_SIZE, huge=False) as buffer:
        buffer.populate()
        state = reader.snapshot(buffer.address, buffer.length)
        fds = [os.open(path, os.O_RDONLY) for path in ("/proc/self/pagemap", "/proc/kpagecount")]
        try:
            for page in (0, 1, 77, 511):
                entry = os.pread(fds[0], 8, (buffer.address // PAGE_SIZE + page) * 8)
                pfn = int.from_bytes(entry, "little") & pages.PM_PFN_MASK
                assert state.pfn[page] == pfn
                assert state.mapcount is not None
                assert state.mapcount[page] == int.from_bytes(os.pread(fds[1], 8, pfn * 8), "little") == 1
        finally:
            for fd in fds:
                os.close(fd)


@pytest.mark.skipif(not SEES_PFNS, reason="PFNs are hidden without root")
def test_a_forked_child_reads_its_own_memory(reader: PageReader) -> None:
    with Range.anonymous(PAGE_SIZE, huge=False) as buffer:
        buffer.write(0, b"parent")
        mine = reader.snapshot(buffer.address, PAGE_SIZE)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            buffer.write(0, b"child")  # breaks copy-on-write
            seen = reader.snapshot(buffer.address, PAGE_SIZE)
            os.write(write_end, b"%d" % int(seen.pfn[0]))
            os._exit(0)
        os.waitpid(child, 0)
        assert int(os.read(read_end, 32)) != int(mine.pfn[0])
        os.close(read_end)
        os.close(write_end)
        assert reader.snapshot(buffer.address, PAGE_SIZE).pfn[0] == mine.pfn[0]


@pytest.mark.skipif(not SEES_PFNS, reason="PFNs are hidden without root")
def test_shared_memory_is_file_and_the_zero_page_is_told(reader: PageReader) -> None:
    with Range.memfd(2 * PAGE_SIZE) as shared, Range.anonymous(PAGE_SIZE, huge=False) as fresh:
        shared.populate()
        assert "file" in reader.snapshot(shared.address, PAGE_SIZE).as_record()["traits"][0][2]
        fresh.read(0, 1)
        assert reader.snapshot(fresh.address, PAGE_SIZE).as_record()["traits"] == [[0, 1, "zero-page"]]


def test_a_snapshot_is_quick(reader: PageReader) -> None:
    with Range.anonymous(8 * PAGE_SIZE, huge=False) as buffer:
        buffer.populate()
        spent = []
        for _ in range(50):
            began = time.perf_counter()
            reader.snapshot(buffer.address, buffer.length).as_record()
            spent.append(time.perf_counter() - began)
        assert min(spent) < 0.001


def test_files_that_are_closed_are_said(memory_map: MemoryMap, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def closed(path: object, *rest: object, **more: object) -> int:
        if "kpage" in str(path) or "pagemap" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", closed)
    reader = PageReader(memory_map)
    state = reader.snapshot(1 << 20, 4 * PAGE_SIZE)
    assert set(state.place) == {UNKNOWN} and state.mapcount is None
    assert any("pagemap" in text for text in state.problems)
    assert state.as_record()["pfn"] == []


def made(**arrays: object) -> PageState:
    count = 4
    defaults: dict[str, object] = {
        "address": 0,
        "pfn": np.arange(100, 100 + count, dtype=np.uint64),
        "place": np.array([ORDINARY, CMA, CMA, ABSENT], dtype=np.uint8),
        "state": np.ones(count, dtype=np.uint8),
    }
    return PageState(**(defaults | arrays))  # type: ignore[arg-type]


def test_the_record_is_run_length_encoded() -> None:
    state = made(
        pfn=np.array([100, 101, 0, 50], dtype=np.uint64),
        refcount=np.array([1, 1, -1, 1025]),
        pincount=np.zeros(4, dtype=np.int64),
        large=np.zeros(4, dtype=bool),
    )
    record = state.as_record()
    assert record["pfn"] == [[0, 100, 2], [3, 50, 1]]
    assert record["place"] == [[0, 1, "ordinary"], [1, 2, "cma"], [3, 1, "absent"]]
    assert record["refcount"] == [[0, 2, 1], [3, 1, 1025]]
    assert record["pincount"] is None and record["mapcount"] is None
    large = dataclasses.replace(
        state, large=np.array([False, False, False, True]), pincount=np.array([0, 0, 0, 7])
    )
    assert large.as_record()["pincount"] == [[3, 1, 7]]


def test_a_page_that_ksm_merged_is_told() -> None:
    """KPF_KSM is bit 21 (include/uapi/linux/kernel-page-flags.h); a merged page may be mapped once."""
    flags = np.array([0, 1 << 21, 1 << 20, 0], dtype=np.uint64)
    traits = made(flags=flags, file=np.zeros(4, dtype=bool)).as_record()["traits"]
    assert traits == [[0, 1, "anonymous"], [1, 1, "anonymous ksm"], [2, 2, "anonymous"]]


@pytest.mark.parametrize(
    ("flags", "hidden", "told"), [(1 << 12, False, True), (1 << 12 | 1 << 21, False, False), (0, True, False)]
)
def test_the_ksm_flag_counts_only_where_a_fresh_page_lacks_it(
    memory_map: MemoryMap, monkeypatch: pytest.MonkeyPatch, *, flags: int, hidden: bool, told: bool
) -> None:
    """6.12 sets it for every anonymous page (`stable_page_flags`, fs/proc/page.c)."""
    entries = SimpleNamespace(hidden=hidden, pfn=np.array([5], dtype=np.uint64))
    monkeypatch.setattr(pagestate, "decode_pagemap", lambda _: entries)
    monkeypatch.setattr(pagestate, "read_entries_at", lambda *_: np.array([flags], dtype=np.uint64))
    assert PageReader(memory_map)._fresh_page_is_unmerged() is told


def test_references_above_the_baseline() -> None:
    state = made(refcount=np.array([1, 1026, 2, 1]), baseline=np.array([1, 1, -1, 2]))
    found = state.references_above_baseline()
    assert found is not None and found.tolist() == [0, 1025, -1, -1]
    assert made().references_above_baseline() is None


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


def test_what_is_in_a_page_table_entry_is_called_alike_in_c() -> None:
    assert (lib.RR_PAGE_ABSENT, lib.RR_PAGE_PRESENT) == (NOT_PRESENT, PRESENT)
    assert (lib.RR_PAGE_SWAPPED, lib.RR_PAGE_ZERO, lib.RR_PAGE_SPECIAL) == (SWAPPED, ZERO_PAGE, SPECIAL)


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


def test_mmap_module_pages_too(reader: PageReader) -> None:
    with mmap.mmap(-1, 2 * PAGE_SIZE) as region:
        region[0] = 1
        address = np.frombuffer(region, dtype=np.uint8).ctypes.data
        assert reader.snapshot(address, PAGE_SIZE).pages == 1


def test_a_pfn_map_is_not_absent(reader: PageReader) -> None:
    """vvar holds kernel pages in a mapping that pagemap passes over on most kernels."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[vvar]")]
    smaps = Path("/proc/self/smaps").read_text()
    if not lines or " pf " not in smaps[smaps.index("[vvar]") :].split("VmFlags:", 1)[1].split("\n")[0] + " ":
        pytest.skip("this kernel has no [vvar] that is a PFN map")
    first, end = (int(part, 16) for part in lines[0].split()[0].split("-"))
    state = reader.snapshot(first, end - first)
    assert set(state.state) == {pagestate.SPECIAL} and set(state.place) == {UNKNOWN}
    beside = reader.snapshot(first, end - first, counts=False)
    assert beside.pages == state.pages
