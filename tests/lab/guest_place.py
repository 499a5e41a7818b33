"""Steering against a real kernel: patterns met exactly, by each way; pressure; what cannot be.

Run as root in a lab guest.

Prints TAP: `python tests/lab/guest_place.py [--runs N] [--presses N] [--node N] [--only WORD …]`; exit code
0 when no line is `not ok`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from guest_kernel import check, drain, quiet, results, skip

from regrepro.core import cuda, memory
from regrepro.errors import Unmet
from regrepro.kernel import procfs, reclaim, zones
from regrepro.kernel.journal import Journal, journal_directory
from regrepro.kernel.memoryblocks import online_movable
from regrepro.kernel.memorymap import CMA, MOVABLE_ZONE, ORDINARY, UNPINNABLE, MemoryMap, read_memory_map
from regrepro.kernel.pagestate import PageReader
from regrepro.kernel.pressure.cgroup import CGROUP_ROOTS
from regrepro.kernel.pressure.gpu_users import gpu_users
from regrepro.kernel.pressure.outlook import outlook
from regrepro.kernel.pressure.pressure import Pressure
from regrepro.kernel.pressure.stalls import oom_kills
from regrepro.options import RunOptions
from regrepro.stage import buffers
from regrepro.stage.system import System

PAGE = memory.PAGE_SIZE
MIB = 1 << 20
PAGES = 64
LIMIT = 8 << 30


def patterns(kind: str) -> dict[str, buffers.Place]:
    return {
        "all": kind,
        "none": "ordinary",
        "5 of 64": {kind: 5},
        "every third": {kind: list(range(1, PAGES, 3))},
    }


def expected(place: buffers.Place) -> np.ndarray[Any, Any]:
    """Where pages are to be unpinnable, worked out apart from the code under test."""
    if isinstance(place, str):
        return np.full(PAGES, place != "ordinary")
    [which] = place.values()
    answer = np.zeros(PAGES, dtype=bool)
    answer[list(range(which)) if isinstance(which, int) else list(which)] = True
    return answer


def codes(kind: str) -> tuple[int, ...]:
    return {"cma": (CMA,), "movable-zone": (MOVABLE_ZONE,)}.get(kind, UNPINNABLE)


def settled() -> int:
    """Free memory, with the pages on the CPUs' own lists, which MemFree leaves out: tens of MiB a CPU."""
    drain()
    on_lists = sum(zone.free_pages_per_cpu for zone in zones.read_zones())
    return zones.read_meminfo()["MemFree"] + on_lists * PAGE


def steer(memory_map: MemoryMap, way: str, kind: str, runs: int, node: int | None = None) -> None:
    reader = PageReader(memory_map)
    where = "" if node is None else f" on node {node}"
    for name, place in patterns(kind).items():
        met = 0
        note = ""
        touched = 0
        began = time.monotonic()
        for run in range(runs):
            backend = System(RunOptions(place=way, pressure_limit=LIMIT), memory_map, in_lab=True)
            try:
                made, _, facts = buffers.make(backend, PAGES * PAGE, place, "anonymous", run, node)
            except Unmet as unmet:
                note = note or str(unmet)
                backend.close()
                continue
            state = reader.snapshot(made.address, made.length)
            unpinnable = np.isin(state.place, codes(kind))
            right = np.array_equal(unpinnable, expected(place))
            right &= bool((state.place[~expected(place)] == ORDINARY).all())
            right &= node is None or bool((state.node == node).all())
            touched += facts.get("touched", 0)
            met += right
            if not right:
                note = note or f"run {run}: {state.as_record()['place']} {facts}"
            made.close()
            backend.close()
        seconds = (time.monotonic() - began) / runs
        check(
            f"{way}: {kind} {name}{where}: {runs} runs, each exact",
            met == runs,
            f"{met} met, {seconds * 1e3:.0f} ms and {touched // runs // MIB} MiB a run; {note}",
        )


def given_back(what: str, act: Callable[[], object]) -> None:
    """Whatever `act` does: memory, control groups, journal and processes are as before."""
    before = settled()
    act()
    for _ in range(50):
        left = before - settled()
        if left < 24 * MIB:
            break
        time.sleep(0.1)
    check(f"{what}: memory is free again", left < 24 * MIB, f"{left // MIB} MiB less are free")
    groups = [str(path) for root in CGROUP_ROOTS for path in root.glob("regrepro-*")]
    check(f"{what}: no control group is left", not groups, groups)
    held = [entry.name for entry in journal_directory().glob("*.json")]
    check(f"{what}: the journal is empty", not held, held)


def impossible(memory_map: MemoryMap) -> None:
    def make(options: RunOptions, place: buffers.Place, node: int | None = None) -> str:
        backend = System(options, memory_map, in_lab=True)
        try:
            made, _, _ = buffers.make(backend, PAGES * PAGE, place, "anonymous", 1, node)
            made.close()
            return ""
        except Unmet as unmet:
            return str(unmet)
        finally:
            backend.close()

    said: list[str] = []
    seen = zones.read_zones()
    looks = [outlook(seen, node) for node in {zone.node for zone in seen if zone.free_cma}]
    if looks:
        farthest = max(looks, key=lambda item: item.before)
        small = RunOptions(place="pressure", pressure_limit=32 * MIB)
        given_back(
            "impossible: too small a limit",
            lambda: said.append(make(small, "cma", farthest.node)),
        )
        check(
            "impossible: too small a limit is unmet with the numbers",
            "MiB" in said[-1] and "limit is 32 MiB" in said[-1] and "--pressure-limit" in said[-1],
            said[-1],
        )
        given_back(
            "impossible: more CMA than a run may hold",
            lambda: said.append(
                make_large(memory_map, sum(zone.free_cma or 0 for zone in zones.read_zones()) * PAGE * 3 // 4)
            ),
        )
        check(
            "impossible: more CMA than a run may hold is unmet",
            "a run may hold" in said[-1],
            said[-1],
        )
    else:
        given_back(
            "impossible: no CMA",
            lambda: said.append(make(RunOptions(place="pressure", pressure_limit=LIMIT), "cma")),
        )
        check("impossible: no CMA is unmet", bool(said[-1]), said[-1])
    said.append(make(RunOptions(), "unpinnable", node=9))
    check("impossible: a node that is not there is unmet", "node 9" in said[-1], said[-1])


def make_large(memory_map: MemoryMap, length: int) -> str:
    backend = System(RunOptions(), memory_map, in_lab=True)
    try:
        made, _, _ = buffers.make(backend, length // PAGE * PAGE, "cma", "anonymous", 1)
        made.close()
        return ""
    except Unmet as unmet:
        return str(unmet)
    finally:
        backend.close()


def by_pressure_alone(memory_map: MemoryMap, presses: int) -> None:
    """The stand-in for CUDA maps its own memory: only pressure makes it come out of CMA."""
    reader = PageReader(memory_map)
    kills = oom_kills()
    length = 2 * MIB
    got: list[int] = []
    draws: list[int] = []
    worst = 0.0
    most = 0
    note = ""
    with cuda.open_cuda("standin:pin") as library:
        address = library.host_alloc(length)
        plain = reader.snapshot(address, length, counts=False).place
        library.free_host(address)
        print(f"# without pressure {int((plain == CMA).sum())} of {len(plain)} pages lie in CMA")

        def all_runs() -> None:
            nonlocal worst, most, note
            for run in range(presses):
                try:
                    with Pressure(limit=LIMIT, memory_map=memory_map) as held:
                        report = held.press(2 * length)
                        worst, most = max(worst, report.seconds), max(most, report.held)
                        drawn: list[int] = []
                        # What the CPU has on its own list of free pages comes first.
                        for _ in range(8):
                            drawn.append(library.host_alloc(length))
                            place = reader.snapshot(drawn[-1], length, counts=False).place
                            if (place == CMA).all():
                                break
                            held.press(2 * length)
                        got.append(int((place == CMA).sum()))
                        draws.append(len(drawn))
                        for address in drawn:
                            library.free_host(address)
                except Unmet as unmet:
                    note = f"run {run}: {unmet}"

        given_back("pressure", all_runs)
    check(
        f"pressure: {presses} runs, cudaHostAlloc of the stand-in gets CMA pages by it alone",
        len(got) == presses and set(got) == {length // PAGE},
        f"pages in CMA {got}, draws {draws}; at most {worst:.1f} s and {most // MIB} MiB; {note}",
    )
    check("pressure: no process was ended for want of memory", oom_kills() == kills)


def killed_while_holding(memory_map: MemoryMap) -> None:
    def act() -> None:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            held = Pressure(limit=LIMIT, memory_map=memory_map)
            held.press(MIB)
            os.write(write_end, held._pid.to_bytes(8, "little"))
            signal.pause()
        holder = int.from_bytes(os.read(read_end, 8), "little")
        groups = [path for root in CGROUP_ROOTS for path in root.glob("regrepro-*")]
        limits = [(group / "memory.max").read_text().strip() for group in groups]
        check("killed: the holder had a control group with the limit", limits == [str(LIMIT)], limits)
        adjusted = Path(f"/proc/{holder}/oom_score_adj").read_text().strip()
        check("killed: the holder is first in line for the OOM killer", adjusted == "1000", adjusted)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for _ in range(100):
            if procfs.start_time(holder) is None:
                break
            time.sleep(0.05)
        check("killed: the holder ends with who held by it", procfs.start_time(holder) is None)
        said = reclaim.reclaim()
        check(
            "killed: the next start removes the control group", any("control group" in s for s in said), said
        )

    given_back("killed", act)


def beside_gpu_jobs() -> None:
    """Another process that has /dev/nvidia0 open, as every CUDA program has."""
    node = Path("/dev/nvidia0")
    if node.exists():
        skip("gpu: pressure is refused beside GPU jobs", "a machine without /dev/nvidia0")
        return
    os.mknod(node, 0o600 | 0o020000, os.makedev(1, 3))  # /dev/null by another name
    child = os.fork()
    if child == 0:
        os.setsid()
        os.open(node, os.O_RDONLY)
        signal.pause()
    try:
        for _ in range(100):
            if gpu_users():
                break
            time.sleep(0.05)
        users = [pid for pid, _ in gpu_users()]
        check("gpu: the other process is seen", users == [child], users)
        try:
            Pressure(limit=LIMIT, memory_map=None).start()
            check("gpu: pressure is refused", False)
        except Unmet as unmet:
            check("gpu: pressure is refused, and says by whom", str(child) in str(unmet), unmet)
        told = Pressure(limit=LIMIT, memory_map=None, beside_gpu_jobs=True)
        told.start()
        told.close()
        check("gpu: told otherwise, it goes on", True)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        node.unlink()


def by_block(memory_map: MemoryMap, runs: int, node: int | None = None) -> None:
    journal = Journal()
    where = "" if node is None else f" on node {node}"
    try:
        block = online_movable(journal, memory_map=memory_map, node=node)
    except Unmet as unmet:
        skip(f"online-movable: patterns{where}", str(unmet))
        return
    with block:
        steer(read_memory_map(), "online-movable", "movable-zone", runs, node)
    check(f"online-movable: the block{where} was given back", block.given_back)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--presses", type=int, default=50)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--node", type=int, help="steer on this NUMA node alone")
    options = parser.parse_args()
    began = time.monotonic()

    def wanted(word: str) -> bool:
        return not options.only or word in options.only

    quiet("kernel/numa_balancing", "vm/compaction_proactiveness")
    memory.keep_from_numa_balancing()
    memory_map = read_memory_map()
    check("the map is complete", memory_map.complete, memory_map.problems)
    having = [item for item in zones.read_zones() if item.free_cma or (item.name == "Movable" and item.free)]
    nodes = sorted({zone.node for zone in having}) if len({z.node for z in memory_map.zones}) > 1 else [None]
    if options.node is not None:
        nodes = [options.node]
    kind = "cma" if any(zone.free_cma for zone in having) else "movable-zone"
    if wanted("gather") and having:
        for node in nodes:
            steer(memory_map, "gather", kind, options.runs, node)
    if wanted("pressure") and having:
        for node in nodes:
            steer(memory_map, "pressure", kind, options.runs, node)
    if wanted("blocks"):
        all_nodes = sorted({zone.node for zone in memory_map.zones})
        for node in all_nodes if len(all_nodes) > 1 else [None]:
            by_block(memory_map, options.runs, node)
    if wanted("impossible"):
        impossible(memory_map)
    if wanted("presses") and kind == "cma":
        by_pressure_alone(memory_map, options.presses)
    if wanted("killed") and kind == "cma":
        killed_while_holding(memory_map)
    if wanted("gpu"):
        beside_gpu_jobs()
    print(f"1..{len(results)}")
    print(f"# {results.count(False)} failed, {time.monotonic() - began:.0f} s")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
