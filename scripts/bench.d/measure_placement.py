"""Placement: full page states, filling memory for pressure, the map of the node."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from measuring import Row, Work, least, measurement, ratio

LENGTH, TIMES = 1 << 30, 4  # a memfd of 1 GiB, mapped four times: page states of 4 GiB in a guest of 4 GiB
FILL = 1 << 30


@measurement("full page state of 4 GiB over bare C preads of pagemap and kpage files", where="guest")
def page_state(work: Work) -> list[Row]:
    """Both processes map 4 GiB and read their states by turns."""
    from regrepro.core.memory import Range
    from regrepro.kernel.memorymap import read_memory_map
    from regrepro.kernel.pagestate import PageReader

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    reader = PageReader(read_memory_map())
    pairs = []
    with (
        Range.memfd(LENGTH) as memory,
        Range.anonymous(LENGTH * TIMES, reserve_only=True) as whole,
        work.bare("read_pagestate", str(LENGTH), str(TIMES)) as bare,
    ):
        for number in range(TIMES):
            at = whole.address + number * LENGTH
            # PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE
            if libc.mmap(at, LENGTH, 3, 0x1 | 0x10 | 0x8000, memory.fd, 0) != at:
                raise SystemExit("bench: a memfd cannot be mapped again")
        state = reader.snapshot(whole.address, LENGTH * TIMES)
        if state.problems or not state.pfn.all():
            raise SystemExit(f"bench: the page state is not complete: {state.problems}")
        bare.seconds(1)
        for _ in range(work.rounds):
            bare_seconds = bare.seconds(1)
            started = time.perf_counter()
            reader.snapshot(whole.address, LENGTH * TIMES)
            pairs.append((time.perf_counter() - started, bare_seconds))
    return [least("full page state of 4 GiB / bare C pread of pagemap, kpageflags, kpagecount", pairs, 1.5)]


@measurement("filling 1 GiB for pressure over stress-ng --vm-populate and a bare MAP_POPULATE", where="guest")
def fill(work: Work) -> list[Row]:
    """By turns; stress-ng, where it is installed, less what it takes for 64 KiB."""
    from regrepro.kernel.pressure.holder import map_for

    threads = len(os.sched_getaffinity(0))

    def ours() -> float:
        started = time.perf_counter()
        with map_for(FILL, huge=True) as memory:
            memory.populate(threads=threads)
            return time.perf_counter() - started

    def stress(size: int) -> float:
        command = ["stress-ng", "--vm", "1", "--vm-bytes", str(size), "--vm-populate", "--vm-keep"]
        command += ["--vm-ops", "1", "--vm-method", "zero-one", "--temp-path", tempfile.gettempdir()]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise SystemExit(f"bench: stress-ng failed: {done.stderr}")
        return time.perf_counter() - started

    mapped, stressed = [], []
    installed = shutil.which("stress-ng") is not None
    with work.bare("fill_memory", str(FILL)) as bare:
        bare.seconds(1)
        ours()
        for _ in range(work.rounds):
            seconds = ours()
            mapped.append((seconds, bare.seconds(1)))
            if installed:
                stressed.append((seconds, stress(FILL) - stress(1 << 16)))
    # Where there is no stress-ng, what it does is the closest stock option.
    bound = None if stressed else 1.0
    rows = [ratio(f"fill 1 GiB for pressure by {threads} threads / bare mmap(MAP_POPULATE)", mapped, bound)]
    if stressed:
        rows.append(ratio("fill 1 GiB for pressure / stress-ng --vm-populate", stressed, 1.0))
    return rows


@measurement("the map of the node's memory: seconds for each TiB, from the cost of a section", where="guest")
def memory_map(work: Work) -> list[Row]:
    """The node's sections are read, counted and drawn 16, 64 and 256 times over, as if it had so much more
    memory in its last zone; the slopes give the cost of a TiB, and whether it grows with what is there.
    """
    import numpy

    from regrepro.kernel import memorymap, pageblocks
    from regrepro.kernel.kcore import Kcore

    seen = memorymap.read_memory_map()
    if seen.sections is None:
        raise SystemExit(f"bench: no pageblock bitmap: {seen.problems}")
    layout = seen.sections.layout
    populated = [zone for zone in seen.zones if zone.populated]
    end = max(zone.end_pfn for zone in populated)
    span = -(-end // (1 << layout.section_shift))  # sections from one copy to the next
    structs = pageblocks._read_section_structs

    def read(kcore: Kcore, copies: int) -> float:
        def repeated(kcore: Kcore, layout: pageblocks.BitmapLayout, count: int) -> tuple[Any, Any]:
            raw, numbers = structs(kcore, layout, span)
            shifts = numpy.arange(copies, dtype=numpy.uint64) * numpy.uint64(span)
            return numpy.tile(raw, (copies, 1)), (numbers[None, :] + shifts[:, None]).reshape(-1)

        *others, last = sorted(populated, key=lambda zone: zone.end_pfn)
        whole = copies * span << layout.section_shift
        zones = [*others, replace(last, spanned=whole - (last.start_pfn or 0))]
        best = 1e9
        pageblocks._read_section_structs = repeated
        try:
            for _ in range(max(3, work.rounds)):
                started = time.perf_counter()
                sections = pageblocks.read_sections(kcore, layout, whole)
                pageblocks.count_blocks(sections, zones, page_zones)
                memorymap._draw(sections, zones, page_zones)
                best = min(best, time.perf_counter() - started)
        finally:
            pageblocks._read_section_structs = structs
        return best

    with closing(Kcore()) as kcore:
        page_zones = pageblocks.PageZones(kcore, seen.sections, seen.zones)
        few, more, most = (read(kcore, copies) for copies in (16, 64, 256))
    in_a_tib = (1 << 40) / (span * (1 << layout.section_shift) * os.sysconf("SC_PAGE_SIZE"))
    first, second = (more - few) / 48, (most - more) / 192
    return [
        Row("map of the node, seconds for each TiB", second * in_a_tib, unit="s", bound=1.0),
        Row("map of the node: cost of a section, of many / of few", second / first, bound=1.5),
    ]
