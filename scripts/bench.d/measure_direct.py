"""What following unpins costs O_DIRECT, whose pages are unpinned after each read."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import time
from pathlib import Path

from measure_watch import Watching
from measuring import Row, Work, measurement

DISK = "/dev/nullb0"
LENGTH = 256 << 10
READS, TURNS = 300, 5


def read_by_process_vm(buffer: mmap.mmap) -> None:
    """Read this process' own memory by process_vm_readv: it has then made a pin without FOLL_LONGTERM."""
    into = ctypes.create_string_buffer(4096)
    iovec = ctypes.c_size_t * 2
    local = iovec(ctypes.addressof(into), 4096)
    remote = iovec(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), 4096)
    ctypes.CDLL(None).process_vm_readv(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)


def loop(disk: int, buffer: mmap.mmap) -> float:
    """Return the median time of some reads."""
    times = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(READS):
            os.preadv(disk, [buffer], 0)
        times.append((time.perf_counter() - begin) / READS)
    return statistics.median(times)


@measurement("O_DIRECT beside `watch --pins unpins`", where="guest")
def direct(work: Work) -> list[Row]:
    """Time reads of a disk that does nothing, by a process that made no pins and by one that did."""
    subprocess.run(["modprobe", "null_blk", "nr_devices=1", "irqmode=0", "queue_mode=2"], check=True)
    while not Path(DISK).exists():
        time.sleep(0.1)
    disk, buffer = os.open(DISK, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, LENGTH)
    found: dict[str, list[tuple[float, float]]] = {"that pins nothing": [], "that made a pin before": []}
    for number in range(max(2, work.rounds // 2)):
        before = loop(disk, buffer)
        watching = Watching(Path("/run") / f"regrepro-bench-direct-{number}", "--pins", "unpins")
        try:
            beside = {}
            for name in found:
                beside[name] = loop(disk, buffer)
                read_by_process_vm(buffer)  # after the first
        finally:
            watching.stop()
        bare = (before + loop(disk, buffer)) / 2
        for name, value in beside.items():
            found[name].append((value, bare))
    os.close(disk)
    rows = []
    for name, pairs in found.items():
        ratios = [ours / bare for ours, bare in pairs]
        rows.append(
            Row(
                f"O_DIRECT reads of 256 KiB beside watch --pins unpins / without, in a process {name}",
                statistics.median(ratios),
                ours=statistics.median(ours for ours, _ in pairs),
                bare=statistics.median(bare for _, bare in pairs),
                spread=(min(ratios), max(ratios)),
            )
        )
    return rows
