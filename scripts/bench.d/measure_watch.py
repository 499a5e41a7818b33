"""What `regrepro watch` costs a node: registrations that succeed, its idle time, its memory."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from measuring import Paced, Row, Work, measurement

LARGE, SMALL = 64 << 20, os.sysconf("SC_PAGE_SIZE")
COUNTS = {SMALL: 100, LARGE: 3}
BOUNDS = {SMALL: 1.3, LARGE: 1.05}
TURNS = 20  # of which the median counts
# Starts of each engine for a round: where its programs come to lie differs from one to the next, and an
# emulator is faster or slower by that.
STARTS = {"bpf": 1.6, "bpftrace": 0.4}
READY_SECONDS, IDLE_SECONDS, IDLE_STARTS = 180.0, 10.0, 3


class Watching:
    """A running watch, ready. `engine`: what is to follow the kernel. `ready`: seconds that it took."""

    def __init__(self, out: Path, engine: str, *more: str) -> None:
        begin = time.monotonic()
        self._log = out.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "regrepro", "watch", "--quiet"),
                    *("--out", str(out), "--engine", engine, *more),
                ],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        deadline = time.monotonic() + READY_SECONDS
        while "watching:" not in self._log.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"bench: watch did not start: {self._log.read_text()}")
            time.sleep(0.1)
        self.ready = time.monotonic() - begin

    def processes(self) -> list[Path]:
        """Return /proc entries of watch and its bpftrace."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return [Path(f"/proc/{pid}") for pid in (self._process.pid, *children)]

    def cpu_seconds(self) -> float:
        """Return the CPU time of all of it so far (fields 14 and 15 of /proc/PID/stat)."""
        ticks = 0
        for path in self.processes():
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Return the resident memory of all of it, bytes."""
        texts = [(path / "status").read_text() for path in self.processes()]
        return sum(int(found[1]) * 1024 for text in texts if (found := re.search(r"VmRSS:\s+(\d+)", text)))

    def stop(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


@dataclass
class Cost:
    """What one engine cost, a value for each time that it was started."""

    loops: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: {SMALL: [], LARGE: []})
    idle: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)


@measurement("registrations that succeed beside `watch`, its idle time and its memory", where="guest")
def watch(work: Work) -> list[Row]:
    """Time loops in C with watch and without, by turns: by its own BPF programs, and by bpftrace."""
    costs = {"bpf": Cost(), "bpftrace": Cost()}
    with Paced(work) as paced:

        def loop(length: int) -> float:
            with work.bare("register_loop", str(length)) as registering:
                return paced.loop(registering, TURNS, COUNTS[length])

        bare = {length: loop(length) for length in COUNTS}
        for number in range(max(2, round(max(STARTS.values()) * work.rounds))):
            for engine, cost in costs.items():
                if number >= max(2, round(STARTS[engine] * work.rounds)):
                    continue
                watching = Watching(Path("/run") / f"regrepro-bench-{engine}-{number}", engine)
                try:
                    if number < IDLE_STARTS:
                        before = watching.cpu_seconds()
                        time.sleep(IDLE_SECONDS)
                        cost.idle.append((watching.cpu_seconds() - before) / IDLE_SECONDS * 100)
                    cost.memory.append(watching.memory() / (1 << 20))
                    cost.ready.append(watching.ready)
                    beside = {length: loop(length) for length in COUNTS}
                finally:
                    watching.stop()
                after = {length: loop(length) for length in COUNTS}
                for length in COUNTS:
                    cost.loops[length].append((beside[length], (bare[length] + after[length]) / 2))
                bare = after
        return [row for engine, cost in costs.items() for row in _rows(paced, engine, cost)]


def _rows(paced: Paced, engine: str, cost: Cost) -> list[Row]:
    """Return the rows of one engine; bounds are for the one that is used where it can be."""
    what, bounds = "watch", {**BOUNDS, "idle": 1.0, "memory": 200.0}
    if engine != "bpf":
        what, bounds = f"watch --engine {engine}", {}
    rows = [
        paced.row(f"registering {size} in C beside {what} / without", cost.loops[length], bounds.get(length))
        for length, size in ((SMALL, "one page"), (LARGE, "64 MiB"))
    ]
    rows.append(
        Row(f"{what}, idle", statistics.median(cost.idle), unit="% of a core", bound=bounds.get("idle"))
    )
    rows.append(Row(f"memory of {what}", max(cost.memory), unit="MiB", bound=bounds.get("memory")))
    rows.append(Row(f"{what} until it is ready", statistics.median(cost.ready), unit="s"))
    return rows
