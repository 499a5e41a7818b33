"""`regrepro explain` on a log of 1 GiB beside `grep -c` of one pattern on the same file; `regrepro
audit` here.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from measuring import HERE, Row, Work, measurement, ratio

SIZE = 1 << 30
PATTERN = "ibv_reg_mr_iova2"
MIB = 1 << 20
SOURCE = HERE.parent.parent / "src"


def _lines(random_: random.Random) -> Iterator[str]:
    """Lines of a training job: steps, NCCL's and UCX's chatter, and a failure in a million."""
    for number in range(20_000):
        rank = random_.randrange(64)
        head = (
            f"node{rank // 8:03d}:{random_.randrange(1000, 99999)}:{random_.randrange(1000, 99999)} "
            f"[{rank % 8}]"
        )
        yield random_.choice(
            (
                f"{head} NCCL INFO Channel {rank:02d}/0 : {rank}[{rank % 8}] -> {rank + 1} [send] via "
                f"NET/IB/GDRDMA\n",
                f"[2025-03-04 12:{rank % 60:02d}:07,{rank * 9:03d}] [Rank {rank}] step {number} loss "
                f"2.{number:05d}\n",
                f"{head} NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB "
                f"bond0:10.0.0.{rank}\n",
                f"I0315 12:{rank % 60:02d}:01 {number} ProcessGroupNCCL.cpp:{rank + 800}] [Rank {rank}] "
                f"options\n",
                f"[1710501{number:06d}.1] [node{rank:03d}:{number}:0] ucp_context.c:1969 UCX DEBUG "
                f"register host "
                "memory on: md[1]=self, md[3]=mlx5_0\n",
            )
        )


def write_log(path: Path) -> None:
    """Write the log: the same lines again and again, each block with one failure."""
    block = "".join(_lines(random.Random(1))).encode()
    failure = b"node001:4122:4199 [3] misc/ibvwrap.cc:252 NCCL WARN Call to " + PATTERN.encode()
    failure += b" failed with error Cannot allocate memory\n"
    with path.open("wb") as file:
        size = 0
        while size < SIZE:
            size += file.write(block) + file.write(failure)


def _timed(output: Path, *argv: str) -> tuple[float, int]:
    """Run a program with its output in a file: (seconds, peak of its memory in bytes). Raises SystemExit.

    Not to /dev/null: grep sees that nobody will read its count, and stops at the first line that it finds.
    """
    began = time.monotonic()
    pid = os.posix_spawnp(
        argv[0],
        argv,
        {**os.environ, "PYTHONPATH": str(SOURCE)},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)],
    )
    _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - began
    if os.waitstatus_to_exitcode(status) not in (0, 10, 125):
        raise SystemExit(f"bench: {' '.join(argv[:4])} failed")
    return seconds, usage.ru_maxrss * 1024


def _command(module: str, name: str, *arguments: str) -> tuple[str, ...]:
    program = f"from regrepro.{module}.commands import {name}; {name}()"
    return (sys.executable, "-c", program, *arguments)


@measurement("explain a log of 1 GiB over grep -c; its peak memory; an audit of this machine", where="host")
def explain(work: Work) -> list[Row]:
    """Measure by turns; a machine that has other work to do slows both sides."""
    log, output = work.directory / "job.log", work.directory / "output"
    write_log(log)
    pairs = []
    peaks = []
    try:
        _timed(output, "grep", "-c", PATTERN, str(log))  # into the page cache
        for _ in range(work.rounds):
            bare, _ = _timed(output, "grep", "-c", PATTERN, str(log))
            ours, peak = _timed(output, *_command("explain", "explain", "--json", str(log)))
            pairs.append((ours, bare))
            peaks.append(peak)
    finally:
        log.unlink()
    audits = sorted(_timed(output, *_command("audit", "audit", "--json"))[0] for _ in range(work.rounds))
    return [
        ratio("explain 1 GiB / grep -c of one pattern", pairs, bound=8),
        Row("peak memory of explain", max(peaks) / MIB, unit="MiB", bound=150),
        Row(
            "audit of this machine",
            audits[len(audits) // 2],
            unit="s",
            bound=3,
            spread=(audits[0], audits[-1]),
        ),
    ]
