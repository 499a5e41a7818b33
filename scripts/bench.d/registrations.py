"""The scenario that measure_registrations.py times. No test of anything: its verdict is of no interest."""

import os
import sys
import time
from functools import partial
from pathlib import Path

from regrepro import Stage, change, scenario
from regrepro.stage.buffers import Buffer

sys.path.insert(0, str(Path(__file__).parent))
from measure_registrations import COUNT, LARGE, PACE, SERIES, SMALL, STEPS, TURN
from measuring import Pace


@scenario(
    shows="what recording costs",
    needs=("registrar",),
    expects={"none": "not-reproduced"},
    # Every scenario has one; its pass has no pages to place, and is over at once.
    controls={"a-control": change(place="unpinnable")},
    profiles=(),
    timeout=3600,
    options={"steps": 0},
)
def registrations(stage: Stage) -> None:
    """Register and deregister many times, and note how long it took."""
    if _is_second_pass():
        return
    with Pace(Path(os.environ[PACE])) as pace:
        for length in (LARGE, SMALL):
            buffer = stage.buffer(length=length)
            for way, turns in ((SERIES, COUNT // TURN), (STEPS, stage.option("steps") // TURN)):
                for _ in range(turns):
                    seconds, call = pace.around(partial(_turn, stage, buffer, way))
                    stage.step("turn", way=way, length=length, each=seconds / TURN, pace=call)


def _turn(stage: Stage, buffer: Buffer, way: str) -> float:
    started = time.perf_counter()
    if way == SERIES:
        # One that is recorded as any other, then a line each: TURN times from line to line.
        if not stage.register_many(buffer, TURN + 2):
            raise RuntimeError("a registration was refused")
    else:
        for _ in range(TURN):
            stage.register(buffer).deregister()
    return time.perf_counter() - started


def _is_second_pass() -> bool:
    """Whether this is the control's pass: all passes of a run are forked by one process, in order."""
    mark = Path(f"/tmp/regrepro-bench-{os.getppid()}")  # in a guest, where /tmp is its own
    if mark.exists():
        mark.unlink()
        return True
    mark.touch()
    return False
