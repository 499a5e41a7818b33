"""The scenario that measure_registrations.py times. No test of anything: its verdict is of no interest."""

import os
import sys
import time
from pathlib import Path

from regrepro import Stage, change, scenario

sys.path.insert(0, str(Path(__file__).parent))
from measure_registrations import COUNT, LARGE, SMALL
from measuring import Bare


@scenario(
    shows="what recording costs",
    needs=("registrar",),
    expects={"none": "not-reproduced"},
    controls={"ordinary-memory": change(place="ordinary")},
    profiles=(),
    timeout=3600,
)
def registrations(stage: Stage) -> None:
    """Register and deregister many times, by turns with the bare loop in C."""
    loop, rounds = Path(os.environ["REGREPRO_BENCH_LOOP"]), int(os.environ["REGREPRO_BENCH_ROUNDS"])
    for length in (LARGE, SMALL):
        buffer = stage.buffer(length=length)
        with Bare(loop, str(length)) as bare:
            each = -(-COUNT // rounds)
            for _ in range(rounds):
                bare_seconds = bare.seconds(each)
                started = time.perf_counter()
                for _ in range(each):
                    stage.register(buffer).deregister()
                recorded = time.perf_counter() - started
                stage.step("turn", length=length, count=each, recorded=recorded, bare=bare_seconds)
