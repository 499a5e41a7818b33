"""The scenario that measure_registrations.py times. No test of anything: its verdict is of no interest."""

import os
import sys
import time
from pathlib import Path

from regrepro import Stage, change, scenario

sys.path.insert(0, str(Path(__file__).parent))
from measure_registrations import COUNT, LARGE, SERIES, SMALL, STEPS, TURN


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
    for length in (LARGE, SMALL):
        buffer = stage.buffer(length=length)
        for way, count in ((SERIES, COUNT), (STEPS, stage.option("steps"))):
            if way == SERIES:  # its lines say when each was made
                if not stage.register_many(buffer, count):
                    raise RuntimeError("a registration was refused")
                continue
            for _ in range(count // TURN):
                started = time.perf_counter()
                for _ in range(TURN):
                    stage.register(buffer).deregister()
                stage.step("turn", length=length, each=(time.perf_counter() - started) / TURN)


def _is_second_pass() -> bool:
    """Whether this is the control's pass: all passes of a run are forked by one process, in order."""
    mark = Path(f"/tmp/regrepro-bench-{os.getppid()}")  # in a guest, where /tmp is its own
    if mark.exists():
        mark.unlink()
        return True
    mark.touch()
    return False
