"""The kernel room against a real kernel: memory map, page states, memory blocks. Run as root in a lab guest.

Prints TAP: `python tests/lab/guest_kernel.py [--churn SECONDS] [--only WORD …]`; exit code 0 when no line is
`not ok`. What a boot lacks (swap, huge pages, a newer kernel) is a `# SKIP` that names it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from regrepro import reservations
from regrepro.core import memory, pins
from regrepro.errors import Unmet
from regrepro.kernel import node, reclaim, zones
from regrepro.kernel.journal import Journal, journal_directory
from regrepro.kernel.memoryblocks import MemoryBlock, block_size, candidates, online_movable
from regrepro.kernel.memorymap import (
    ABSENT,
    CMA,
    MOVABLE_ZONE,
    PLACE_NAMES,
    UNPINNABLE,
    MemoryMap,
    read_memory_map,
)
from regrepro.kernel.pageblocks import BitmapLayout, read_pagetypeinfo
from regrepro.kernel.pagestate import GUP_PIN_COUNTING_BIAS, STATE_NAMES, PageReader, PageState
from regrepro.kernel.pressure.stalls import oom_kills

PAGE = memory.PAGE_SIZE
PIN_TAKERS: dict[str, Callable[[int, int], pins.HeldPin]] = {
    "pin": pins.pin_process_vm,
    "get": pins.pin_vmsplice,
    "longterm": pins.pin_io_uring,
}
PR_SET_DUMPABLE = 4  # include/uapi/linux/prctl.h
MADV_PAGEOUT = 21  # include/uapi/asm-generic/mman-common.h
results: list[bool] = []
kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split("+")[0].split(".")[:2])


def check(name: str, good: bool, note: object = "") -> bool:
    results.append(bool(good))
    line = f"{'ok' if good else 'not ok'} {len(results)} - {name}"
    text = " ".join(str(note).split())
    print(f"{line} # {text}" if text else line, flush=True)
    return bool(good)


def skip(name: str, missing: str) -> None:
    results.append(True)
    print(f"ok {len(results)} - {name} # SKIP {missing}", flush=True)


def quiet(*sysctls: str) -> None:
    """Turn off what else moves pages."""
    for name in sysctls:
        path = Path("/proc/sys") / name
        if path.exists():
            path.write_text("0")


def drain() -> None:
    """Empty the per-CPU LRU batches, in which a page counts one reference more.

    Each of these ends in lru_add_drain_all(), the second on newer kernels only. Compaction drains first and
    may itself put a pinned page of shared memory back into a batch; dropping the page cache, and moving a
    page of our own that lies right already, drain and move nothing.
    """
    Path("/proc/sys/vm/compact_memory").write_text("1")
    Path("/proc/sys/vm/drop_caches").write_text("1")
    with memory.Range.anonymous(PAGE) as scratch:
        scratch.populate()
        number = {"x86_64": 237, "aarch64": 235}[os.uname().machine]
        default_policy, move = 0, 2  # MPOL_DEFAULT, MPOL_MF_MOVE: do_mbind(), mm/mempolicy.c
        libc = ctypes.CDLL(None, use_errno=True)
        address, length = ctypes.c_ulong(scratch.address), ctypes.c_ulong(PAGE)
        libc.syscall(ctypes.c_long(number), address, length, default_policy, None, ctypes.c_ulong(0), move)


# --- the map ---


def the_map() -> MemoryMap:
    began = time.monotonic()
    memory_map = read_memory_map()
    spent = time.monotonic() - began
    print(f"# {json.dumps(memory_map.as_record())}")
    check(
        "map: complete, self-check passed",
        memory_map.complete and memory_map.selfcheck["passed"] is True,
        memory_map.problems,
    )
    sections = 0 if memory_map.sections is None else len(memory_map.sections.numbers)
    print(f"# the map took {spent * 1e3:.0f} ms for {sections} sections")
    again = [zone for zone in zones.read_zones() if zone.populated]
    same = all(
        any(
            (z.node, z.name, z.start_pfn, z.spanned, z.present)
            == (o.node, o.name, o.start_pfn, o.spanned, o.present)
            for o in memory_map.zones
        )
        for z in again
    )
    check("map: zones equal /proc/zoneinfo", same)
    counts = read_pagetypeinfo()
    size = 1 << counts.pageblock_order
    told = sum(block.get("CMA", 0) for block in counts.blocks.values())
    drawn = sum(end - first for first, end, kind in memory_map.unpinnable_ranges if kind == "cma") // size
    movable = any(zone.name == "Movable" for zone in again)
    if not movable:
        check(
            "map: CMA ranges hold as many blocks as /proc/pagetypeinfo counts",
            told == drawn,
            f"{told}, {drawn}",
        )
    total = zones.read_meminfo().get("CmaTotal", 0) // PAGE
    areas = sum(area.pages for area in memory_map.cma_areas)
    check("map: areas add up to CmaTotal", areas == total, f"{areas}, {total}")
    if total:
        codes = {
            int(code)
            for area in memory_map.cma_areas
            for first, end in area.ranges or []
            for code in memory_map.classify(np.arange(first, end, size, dtype=np.uint64))
        }
        check(
            "map: every area's range is CMA in the bitmap",
            codes == {CMA},
            [a.ranges for a in memory_map.cma_areas],
        )
        check("map: no CMA block outside the areas", memory_map.unregistered_cma == [])
    if movable:
        zone = next(zone for zone in again if zone.name == "Movable")
        inside = np.array([zone.start_pfn, zone.end_pfn - 1], dtype=np.uint64)
        check("map: ZONE_MOVABLE by its span", set(memory_map.classify(inside)) == {MOVABLE_ZONE})
    expected = bool(total or movable)
    check(f"map: has_unpinnable is {expected}", memory_map.has_unpinnable is expected)
    for item in reservations.read():
        check(f"map: reservation {item.argument} noticed", item.ok is not None, item)
    return memory_map


def plant_wrong_layouts(memory_map: MemoryMap) -> None:
    def wrong(**changes: Callable[[BitmapLayout], object]) -> Callable[[BitmapLayout], BitmapLayout]:
        return lambda layout: dataclasses.replace(
            layout, **{key: value(layout) for key, value in changes.items()}
        )

    planted = {
        f"bitmap {shift:+d} bytes": wrong(flags_offset=lambda layout, s=shift: layout.flags_offset + s)
        for shift in (-16, -8, -4, -2, -1, 1, 2, 4, 8, 16, 32, 64)
    }
    planted |= {
        "bits per block": wrong(bits_per_block=lambda layout: 12 - layout.bits_per_block),
        "two type bits": wrong(type_bits=lambda layout: 1),
        "section size halved": wrong(section_shift=lambda layout: layout.section_shift - 1),
        "section size doubled": wrong(section_shift=lambda layout: layout.section_shift + 1),
        "pageblock order + 1": wrong(pageblock_order=lambda layout: layout.pageblock_order + 1),
        "memmap offset": wrong(map_offset=lambda layout: layout.usage_offset),
        "sections not extreme": wrong(extreme=lambda layout: False, sections_per_root=lambda layout: 1),
        "value of Isolate": wrong(isolate=lambda layout: (layout.isolate or 0) - 1),
        "value of CMA": wrong(cma=lambda layout: 3),
    }
    # The same shifts with the size of the struct shifted too: only the walk and the CMA areas can tell.
    both = {
        f"bitmap and struct {shift:+d} bytes": wrong(
            flags_offset=lambda layout, s=shift: layout.flags_offset + s,
            usage_size=lambda layout, s=shift: layout.usage_size + s,
        )
        for shift in (-16, -8, -4, -1, 1, 2, 4, 8, 16, 32, 64)
    }
    for name, alter in {**planted, **both}.items():
        seen = read_memory_map(alter=alter)
        caught = seen.selfcheck["passed"] is not True and seen.sections is None
        note = (seen.problems or [""])[-1][:160]
        if name in both and not memory_map.cma_config:
            # Without CMA no placement rests on the bitmap.
            print(f"# planted wrong {name}: {'caught' if caught else 'not caught'} {note}")
        else:
            check(f"planted wrong {name}: caught", caught, note)


def churn(seconds: float) -> None:
    """Self-check under load: allocation and freeing, compaction, CMA filled by pages, cache dropped."""
    stop = multiprocessing.Event()
    # One counter for each kind of work, written by its own process only.
    done = {name: multiprocessing.RawValue("L", 0) for name in ("allocations", "compactions", "fills")}
    sizes = [16 << 20, 32 << 20, 64 << 20]
    workers: list[multiprocessing.Process] = []

    def hog() -> None:
        while not stop.is_set():
            for number, size in enumerate(sizes):
                with memory.Range.anonymous(size, huge=bool(number % 2)) as buffer:
                    buffer.populate()
                done["allocations"].value += 1

    def stir() -> None:
        while not stop.is_set():
            drain()
            Path("/proc/sys/vm/drop_caches").write_text("3")
            done["compactions"].value += 1
            time.sleep(0.2)

    def fill() -> None:
        """Take what the others leave, so that most of the unpinnable memory is used, too; give it back."""
        while not stop.is_set():
            left = zones.read_meminfo()["MemAvailable"] - max(sizes) - (160 << 20)
            if left > 0:
                with memory.Range.anonymous(left // PAGE * PAGE, huge=False) as buffer:
                    buffer.populate()
                    done["fills"].value += free_unpinnable() < before // 2
            time.sleep(0.1)

    for work in (hog, stir, fill):
        workers.append(multiprocessing.Process(target=work, daemon=True))
    before = free_unpinnable()
    kills = oom_kills()
    for worker in workers:
        worker.start()
    passed = attempts = rounds = compared = moved_zones = 0
    differences: list[object] = []
    began = time.monotonic()
    try:
        while time.monotonic() < began + seconds or rounds < 5:
            seen = read_memory_map()
            rounds += 1
            passed += seen.selfcheck["passed"] is True
            differences += seen.selfcheck["differences"]
            attempts += seen.selfcheck.get("attempts", 0)
            compared += 2 * len(seen.blocks or ())
            spans = {(z.node, z.name): (z.start_pfn, z.spanned, z.present) for z in zones.read_zones()}
            moved_zones += any(
                spans.get((z.node, z.name)) != (z.start_pfn, z.spanned, z.present) for z in seen.zones
            )
    finally:
        stop.set()
        for worker in workers:
            worker.join(30)
            worker.kill()
    counts = ", ".join(f"{value.value} {name}" for name, value in done.items())
    note = f"{time.monotonic() - began:.0f} s: {counts}, {compared} counts compared, {attempts} attempts"
    check(f"churn: self-check passed in all of {rounds} maps", passed == rounds, f"{note} {differences[:4]}")
    check("churn: zones equal /proc/zoneinfo in each", moved_zones == 0, f"{moved_zones} did not")
    check("churn: no process was ended for want of memory", oom_kills() == kills)


def free_unpinnable() -> int:
    """Return the free pages of CMA and of ZONE_MOVABLE."""
    return sum(zone.free if zone.name == "Movable" else zone.free_cma or 0 for zone in zones.read_zones())


def witness_by_moving(memory_map: MemoryMap, reader: PageReader) -> None:
    """Another word on placement: a LONGTERM pin moves exactly the pages that Linux calls unpinnable."""
    if kernel < (5, 13):
        skip("witness: a LONGTERM pin moves the unpinnable pages", "a kernel from 5.13 on")
        return
    available = zones.read_meminfo()["MemAvailable"]
    with memory.Range.anonymous(int(available * 0.6) // PAGE * PAGE, huge=False) as sea:
        sea.populate(threads=2)
        whole = reader.snapshot(sea.address, sea.length, counts=False)
        places = {name: int((whole.place == code).sum()) for code, name in PLACE_NAMES.items()}
        print(f"# {sea.pages} pages touched lie in {places}")
        check("witness: every touched page is classified", places["unknown"] == 0 and places["absent"] == 0)
        chosen: list[int] = []
        for code in sorted(set(whole.place.tolist())):
            chosen += np.flatnonzero(whole.place == code)[:: max(1, places[PLACE_NAMES[code]] // 96)][
                :96
            ].tolist()
        wrong = 0
        moved = 0
        for page in chosen:
            address = sea.address + page * PAGE
            before = reader.snapshot(address, PAGE, counts=False)
            with_pin = pins.pin_io_uring(address, PAGE)
            after = reader.snapshot(address, PAGE, counts=False)
            with_pin.release()
            did = before.pfn[0] != after.pfn[0]
            moved += did
            wrong += did != (int(before.place[0]) in UNPINNABLE) or int(after.place[0]) in UNPINNABLE
        check(
            f"witness: of {len(chosen)} pages a LONGTERM pin moved exactly the unpinnable",
            wrong == 0,
            f"{moved} moved, {wrong} wrong",
        )


# --- page states ---


def above(state: PageState) -> set[int]:
    found = state.references_above_baseline()
    return set() if found is None else set(found.tolist())


def settle(reader: PageReader, buffer: memory.Range, tries: int = 50) -> set[int]:
    for _ in range(tries):
        seen = above(reader.snapshot(buffer.address, buffer.length))
        if seen == {0}:
            break
        drain()
        time.sleep(0.05)
    return seen


def reference_counts(reader: PageReader) -> None:
    thp = memory.thp_size() or 2 << 20
    kinds: dict[str, tuple[Callable[[], memory.Range], bool]] = {
        "anonymous": (lambda: memory.Range.anonymous(16 * PAGE, huge=False), False),
        "shm": (lambda: memory.Range.shm(16 * PAGE), False),
        "memfd": (lambda: memory.Range.memfd(16 * PAGE), False),
        "thp": (lambda: memory.Range.anonymous(thp, huge=True), True),
        "hugetlb": (lambda: memory.Range.hugetlb(thp, thp), True),
    }
    Path("/proc/sys/vm/nr_hugepages").write_text("8")
    for name, (make, huge) in kinds.items():
        try:
            buffer = make()
            buffer.populate()
        except OSError as error:
            skip(f"references: {name}", str(error))
            continue
        with buffer:
            baseline = settle(reader, buffer)
            state = reader.snapshot(buffer.address, buffer.length)
            if huge and (state.large is None or not state.large.all()):
                skip(f"references: {name}", "a huge page, which the kernel did not give")
                continue
            check(f"references: {name}, no pin: 0 above the baseline", baseline == {0}, baseline)
            span = 16 * PAGE if huge else buffer.length
            pages = span // PAGE
            for kind, take in PIN_TAKERS.items():
                held: list[pins.HeldPin] = []
                try:
                    for number in range(1, 4):
                        try:
                            held.append(take(buffer.address, span))
                            drain()  # pages that were moved or touched again wait in a batch
                        except OSError as error:
                            skip(f"references: {name}, {number} {kind}", str(error))
                            break
                        state = reader.snapshot(buffer.address, buffer.length)
                        seen = above(state)
                        each = GUP_PIN_COUNTING_BIAS if kind != "get" and not huge else 1
                        units = number * pages if huge else number
                        pinned = set() if state.pincount is None else set(state.pincount.tolist())
                        note = f"above {seen}, pincount {pinned}"
                        label = f"references: {name}, {number} {kind}"
                        if huge and kind == "longterm" and seen == {number}:
                            # Newer io_uring keeps one a folio: io_coalesce_buffer(), io_uring/rsrc.c.
                            check(f"{label}: one a folio", pinned == {number}, note)
                            continue
                        expected_pins = {0} if kind == "get" or not huge else {units}
                        if kernel < (5, 13) and name == "thp" and state.pincount is None:
                            expected_pins = pinned
                        check(
                            f"{label}: as planted", seen == {units * each} and pinned == expected_pins, note
                        )
                finally:
                    for pin in held:
                        pin.release()
                check(f"references: {name}, {kind} released: 0 again", settle(reader, buffer) == {0})
    Path("/proc/sys/vm/nr_hugepages").write_text("0")
    with memory.Range.anonymous(8 * PAGE, huge=False) as buffer:
        buffer.populate()
        settle(reader, buffer)
        one = pins.pin_process_vm(buffer.address + 3 * PAGE, PAGE)
        found = reader.snapshot(buffer.address, buffer.length).references_above_baseline()
        check(
            "references: one page of eight",
            found is not None and found.tolist() == [0, 0, 0, 1024, 0, 0, 0, 0],
            found,
        )
        one.release()


def states(reader: PageReader) -> None:
    with memory.Range.anonymous(8 * PAGE, huge=False) as buffer:
        first = reader.snapshot(buffer.address, buffer.length)
        check("states: untouched pages are absent", set(first.place) == {ABSENT} and not first.pfn.any())
        buffer.read(0, 1)
        zero = reader.snapshot(buffer.address, PAGE)
        check(
            "states: a page only read is the zero page",
            STATE_NAMES[int(zero.state[0])] == "zero-page",
            zero.as_record()["traits"],
        )
        buffer.populate()
        alone = reader.snapshot(buffer.address, buffer.length)
        check(
            "states: anonymous, exclusive",
            alone.as_record()["traits"] == [[0, 8, "anonymous exclusive"]],
            alone.as_record()["traits"],
        )
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            mine = reader.snapshot(buffer.address, buffer.length)
            os.write(ready[1], b"%d" % int(mine.pfn[0]))
            os.read(done[0], 1)
            os._exit(0)
        seen_by_child = int(os.read(ready[0], 32))
        shared = reader.snapshot(buffer.address, buffer.length)
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        check(
            "states: shared with a child",
            set(shared.mapcount) == {2} and not shared.exclusive.any() and above(shared) <= {0, 1},
            shared.mapcount,
        )
        check("states: a forked child may go on using the reader", seen_by_child == int(shared.pfn[0]))
    with memory.Range.memfd(4 * PAGE) as buffer:
        buffer.populate()
        check(
            "states: memfd is file",
            "file" in reader.snapshot(buffer.address, PAGE).as_record()["traits"][0][2],
        )
    pfn_map(reader)
    swapped(reader)


def pfn_map(reader: PageReader) -> None:
    """Device memory has a PFN and no struct page: a PCI BAR, which sysfs maps at once."""
    for path in sorted(Path("/sys/bus/pci/devices").glob("*/resource[0-5]")):
        try:
            with path.open("r+b") as file, mmap.mmap(file.fileno(), PAGE) as region:
                address = ctypes.addressof(ctypes.c_char.from_buffer(region))
                seen = reader.snapshot(address, PAGE)
                del seen.problems[:]
                names = [STATE_NAMES[int(code)] for code in seen.state]
                check(
                    "states: device memory is special, its place unknown",
                    names == ["special"] and seen.as_record()["place"] == [[0, 1, "unknown"]],
                    (path, names),
                )
                return
        except (OSError, ValueError, BufferError):
            continue
    skip("states: device memory is special", "a PCI BAR that can be mapped")


def swapped(reader: PageReader) -> None:
    subprocess.run(["modprobe", "zram"], check=False, capture_output=True)
    device = Path("/sys/block/zram0")
    if not device.exists():
        skip("states: swapped", "zram (for swap)")
        return
    (device / "disksize").write_text("64M")
    if subprocess.run(
        "mkswap /dev/zram0 && swapon /dev/zram0", shell=True, check=False, capture_output=True
    ).returncode:
        skip("states: swapped", "swap")
        return
    with memory.Range.anonymous(8 * PAGE, huge=False) as buffer:
        buffer.populate()
        buffer.fill(3)
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.madvise(buffer.address, buffer.length, MADV_PAGEOUT)
        seen = reader.snapshot(buffer.address, buffer.length)
        names = [STATE_NAMES[int(code)] for code in seen.state]
        check(
            "states: swapped out is swapped, without a PFN",
            "swapped" in names and not seen.pfn[seen.state == 2].any(),
            names,
        )
        buffer.checksum()
        back = reader.snapshot(buffer.address, buffer.length)
        check("states: read in from swap: swap cache counts as baseline", above(back) <= {0, 1}, above(back))
    subprocess.run(["swapoff", "/dev/zram0"], check=False)


def speed(reader: PageReader) -> None:
    for pages in (8, 16384):
        with memory.Range.anonymous(pages * PAGE, huge=False) as buffer:
            buffer.populate()
            best = bare = 1e9
            for _ in range(5):
                began = time.perf_counter()
                state = reader.snapshot(buffer.address, buffer.length)
                best = min(best, time.perf_counter() - began)
                began = time.perf_counter()
                state.as_record()
                bare = min(bare, time.perf_counter() - began)
            print(f"# {pages} pages: snapshot {best * 1e3:.2f} ms, as_record {bare * 1e3:.2f} ms")


# --- memory blocks, and what killed runs leave ---


def block_states() -> dict[int, str]:
    return {
        int(path.name[6:]): (path / "state").read_text().strip()
        + " "
        + ((path / "valid_zones").read_text().split() or ["?"])[0]
        for path in Path("/sys/devices/system/memory").glob("memory[0-9]*")
    }


def movable_blocks(memory_map: MemoryMap) -> None:
    before = block_states()
    journal = Journal()
    steps: list[dict[str, object]] = []
    try:
        began = time.monotonic()
        onlined = online_movable(journal, memory_map=memory_map, report=steps.append)
    except Unmet as error:
        check("blocks: a block turned movable", False, str(error))
        check("blocks: refused, and all is what it was", block_states() == before)
        return
    print(f"# block {onlined.block.number} took {time.monotonic() - began:.2f} s: {steps}")
    check(
        "blocks: steps are offline, online_movable",
        [s["step"] for s in steps] == ["offline", "online_movable"] or "failed" in [s["step"] for s in steps],
        steps,
    )
    now = read_memory_map()
    first, end = onlined.range
    check("blocks: the map stays complete", now.complete and now.selfcheck["passed"] is True, now.problems)
    check(
        "blocks: the map shows the block as ZONE_MOVABLE",
        set(now.classify(np.arange(first, end, 64, dtype=np.uint64))) == {MOVABLE_ZONE},
    )
    outside = np.array([first - 1], dtype=np.uint64)
    check("blocks: and its neighbour as before", now.classify(outside)[0] == memory_map.classify(outside)[0])
    reader = PageReader(now)
    cpus = Path(f"/sys/devices/system/node/node{onlined.node}/cpulist").read_text().strip()
    first_cpu, _, last_cpu = cpus.split(",")[0].partition("-")
    os.sched_setaffinity(0, range(int(first_cpu), int(last_cpu or first_cpu) + 1))
    # A zone that was movable before has other free pages; all of them together reach the block's.
    other = sum(zone.free for zone in memory_map.zones if zone.name == "Movable") * PAGE
    with memory.Range.anonymous((64 << 20) + other, huge=False) as buffer:
        buffer.populate()
        state = reader.snapshot(buffer.address, buffer.length)
        inside = int(((state.pfn >= first) & (state.pfn < end)).sum())
        check("blocks: fresh pages come out of it", inside > 0, f"{inside} of {buffer.pages}")
        check("blocks: their references can be read", (state.refcount > 0).all(), np.unique(state.refcount))
        if not inside:
            onlined.give_back(limit=30)
            return
        victim = int(np.flatnonzero((state.pfn >= first) & (state.pfn < end))[0])
        pin = pins.pin_process_vm(buffer.address + victim * PAGE, PAGE)
        check("blocks: not given back while a page is pinned", not onlined.give_back(limit=3), steps[-1])
        check("blocks: the journal keeps it", [e.kind for e in journal.entries] == ["memory-block"])
        pin.release()
        check("blocks: given back with pages in use", onlined.give_back(limit=30), steps[-1])
        check(
            "blocks: everything is what it was",
            block_states() == before,
            {k: (v, before.get(k)) for k, v in block_states().items() if before.get(k) != v},
        )
    check(
        "blocks: the journal is empty",
        not journal.entries and not list(journal_directory().glob("*.json")),
    )
    child = os.fork()
    if child == 0:
        online_movable(Journal(), memory_map=memory_map)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    changed = {k for k, v in block_states().items() if before.get(k) != v}
    check("blocks: a killed run leaves its block", len(changed) == 1, changed)
    answers: list[list[str]] = []
    threads = [threading.Thread(target=lambda: answers.append(reclaim.reclaim())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(
        "blocks: the next start gives it back, once",
        block_states() == before and sum(map(len, answers)) == 1,
        answers,
    )
    child = os.fork()
    if child == 0:
        mine = Journal()
        number = candidates(memory_map)[0].number
        mine.add("memory-block", block=number, restore="online_kernel")
        MemoryBlock(number).change("offline", 10)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    said = reclaim.reclaim()
    check("blocks: killed between offline and online: given back", block_states() == before, said)
    for label, call in {
        "a node that is not there": lambda: online_movable(journal, node=4096),
        "no time": lambda: online_movable(
            journal, memory_map=memory_map, attempts=2, limit=0.0, report=steps.append
        ),
    }.items():
        try:
            given = call()
            check(
                f"blocks: {label}: fast enough, given back",
                given.give_back() and label == "no time",
                steps[-1],
            )
        except Unmet as error:
            check(f"blocks: {label}: unmet, and all is what it was", block_states() == before, str(error))
    hog_until_unmet(journal, before)


def hog_until_unmet(journal: Journal, before: dict[int, str]) -> None:
    with contextlib.ExitStack() as hogs:
        # What is taken drives out page cache and slabs of which the kernel counts only a part as available.
        for _ in range(8):
            spare = zones.read_meminfo()["MemAvailable"] - int(1.5 * block_size())
            if spare < PAGE:
                break
            hogs.enter_context(memory.Range.anonymous(spare // PAGE * PAGE, huge=False)).populate(threads=2)
        try:
            given = online_movable(journal)
            given.give_back()
            check("blocks: too little memory: unmet", False)
        except Unmet as error:
            check("blocks: too little memory: unmet, with the numbers", "MiB" in str(error), str(error))
    now = block_states()
    changed = {
        number: (state, before.get(number)) for number, state in now.items() if state != before[number]
    }
    check("blocks: all is what it was", now == before, changed or [entry.data for entry in journal.entries])


def as_ordinary_user() -> None:
    def body() -> dict[str, object]:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        os.environ.pop("XDG_RUNTIME_DIR", None)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # as a process is that never was root
        seen = read_memory_map()
        with memory.Range.anonymous(4 * PAGE) as buffer:
            buffer.populate()
            state = PageReader(seen).snapshot(buffer.address, buffer.length)
            record = state.as_record()
        facts = node.node_facts()
        try:
            online_movable(Journal())
            unmet = None
        except Unmet as error:
            unmet = str(error)
        return {
            "complete": seen.complete,
            "has": seen.has_unpinnable,
            "problems": seen.problems,
            "page_problems": record["problems"],
            "place": record["place"],
            "caps": facts["capabilities"],
            "unmet": unmet,
            "said": reclaim.reclaim(),
            "reservations": [item.as_record() for item in reservations.read()],
        }

    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = body()
        except BaseException as error:
            answer = {"raised": repr(error)}
        os.write(write_end, json.dumps(answer).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        answer = json.load(file)
    os.waitpid(child, 0)
    print(f"# {answer}")
    check("user: nothing raised", "raised" not in answer)
    if "raised" in answer:
        return
    truth = read_memory_map().has_unpinnable
    check("user: has_unpinnable is the truth or unknown", answer["has"] in (truth, None), answer["has"])
    if any(zone.name == "Movable" and zone.populated for zone in zones.read_zones()):
        check("user: ZONE_MOVABLE is seen without root", answer["has"] is True)
    check(
        "user: places unknown, and why",
        answer["place"] == [[0, 4, "unknown"]] and any("CAP_SYS_ADMIN" in p for p in answer["page_problems"]),
    )
    check("user: online-movable is unmet and says root", bool(answer["unmet"]) and "root" in answer["unmet"])
    check("user: no capability", answer["caps"] == [])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--churn", type=float, default=10)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    began = time.monotonic()

    def wanted(word: str) -> bool:
        return not options.only or word in options.only

    # NUMA balancing leaves hints in page tables, on which a LONGTERM pin itself moves an ordinary page.
    quiet("kernel/numa_balancing", "vm/compaction_proactiveness")
    memory_map = the_map()
    if wanted("planted"):
        plant_wrong_layouts(memory_map)
    reader = PageReader(memory_map)
    if wanted("states"):
        states(reader)
    if wanted("speed"):
        speed(reader)
    if wanted("references"):
        reference_counts(reader)
    if wanted("witness"):
        witness_by_moving(memory_map, reader)
    if wanted("user"):
        as_ordinary_user()
    if wanted("blocks"):
        movable_blocks(memory_map)
    if wanted("churn") and options.churn:
        churn(options.churn)
    print(f"1..{len(results)}")
    print(f"# {results.count(False)} failed, {time.monotonic() - began:.0f} s")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
