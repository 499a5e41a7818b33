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
BOUND_OF_INSTRUCTIONS = 1.15  # of one page by --accel icount, libibverbs not followed
TURNS = 20  # of which the median counts
# For a round: where the programs come to lie differs from one start to the next, and an emulator is faster or
# slower by that.
STARTS = 1.6
READY_SECONDS, IDLE_SECONDS, IDLE_STARTS = 180.0, 10.0, 3


class Watching:
    """A running watch, ready. `ready`: seconds that it took."""

    def __init__(self, out: Path, *more: str) -> None:
        begin = time.monotonic()
        self._log = out.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "regrepro", "watch", "--quiet", "--out", str(out), *more],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        deadline = time.monotonic() + READY_SECONDS
        while "watching:" not in self._log.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"bench: watch did not start: {self._log.read_text()}")
            time.sleep(0.1)
        self.ready = time.monotonic() - begin

    def cpu_seconds(self) -> float:
        """Return its CPU time so far (fields 14 and 15 of /proc/PID/stat)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Return its resident memory, bytes."""
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self._process.pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0

    def stop(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


@dataclass
class Cost:
    """What watch cost, a value for each time that it was started."""

    loops: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: {SMALL: [], LARGE: []})
    idle: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)


@measurement("registrations that succeed beside `watch`, its idle time and its memory", where="guest")
def watch(work: Work) -> list[Row]:
    """Time loops in C with watch and without, by turns."""
    cost, bounds, options = Cost(), BOUNDS, []
    if work.accel == "icount":
        bounds, options = {**BOUNDS, SMALL: BOUND_OF_INSTRUCTIONS}, ["--no-libraries"]
    with Paced(work) as paced:

        def loop(length: int) -> float:
            with work.bare("register_loop", str(length)) as registering:
                return paced.loop(registering, TURNS, COUNTS[length])

        bare = {length: loop(length) for length in COUNTS}
        for number in range(max(2, round(STARTS * work.rounds))):
            watching = Watching(Path(f"/run/regrepro-bench-{number}"), *options)
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
        rows = [
            paced.row(f"registering {size} in C beside watch / without", cost.loops[length], bounds[length])
            for length, size in ((SMALL, "one page"), (LARGE, "64 MiB"))
        ]
        rows.append(Row("watch, idle", statistics.median(cost.idle), unit="% of a core", bound=1.0))
        rows.append(Row("memory of watch", max(cost.memory), unit="MiB", bound=100.0))
        rows.append(Row("watch until it is ready", statistics.median(cost.ready), unit="s"))
        return rows
