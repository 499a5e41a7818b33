"""Page states: of this process' own pages as far as this user may see, and of arrays written by hand."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from regrepro._core import lib

from regrepro.core import pages
from regrepro.core.memory import PAGE_SIZE, Range
from regrepro.kernel import pagestate
from regrepro.kernel.memorymap import ABSENT, CMA, ORDINARY, UNKNOWN, MemoryMap, read_memory_map
from regrepro.kernel.pagestate import (
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


def test_what_is_in_a_page_table_entry_is_called_alike_in_c() -> None:
    assert (lib.RR_PAGE_ABSENT, lib.RR_PAGE_PRESENT) == (NOT_PRESENT, PRESENT)
    assert (lib.RR_PAGE_SWAPPED, lib.RR_PAGE_ZERO, lib.RR_PAGE_SPECIAL) == (SWAPPED, ZERO_PAGE, SPECIAL)


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
