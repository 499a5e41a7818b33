"""Recorded registrations beside the same loop in bare C on the same device."""

from __future__ import annotations

import os
import shutil
import statistics
from pathlib import Path

from measuring import HERE, Paced, Row, Work, measurement

LARGE, SMALL = 64 << 20, os.sysconf("SC_PAGE_SIZE")
COUNT = 200
TURN = 10  # that are timed together
PACE = "REGREPRO_BENCH_PACE"  # variable that names the program
# How a scenario registers many times: in one call, or step by step with page states and trace of each.
SERIES, STEPS = "series", "steps"
SHARED = "guest"
# How a run is done: trace, where the record lies, how many registrations step by step. A node writes to a
# file system of its own, as is the guest's /run; the lab's record goes to the host over 9p, which costs eight
# times as much under TCG.
WAYS = {
    "": ("auto", "/run/regrepro-bench", 40),
    ", --trace off": ("off", "/run/regrepro-bench", 0),
    ", record on 9p": ("auto", SHARED, 0),
}
# What is held to a bound: a series, its record where a node has it.
BOUND = {("", SERIES): 1.1, (", --trace off", SERIES): 1.1}


@measurement(
    "200 recorded registrations of 64 MiB over bare C; the cost of recording one small one", where="guest"
)
def registrations(work: Work) -> list[Row]:
    """Run a scenario by the runner, as `regrepro run` does, with all that a record holds.

    The bare loops run between two runs, when no probe of ours is armed: a kprobe costs every process.
    So the two sides cannot take turns, and each is timed in the pace of its own moment.
    """
    pairs: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    os.environ[PACE] = str(work.program("pace"))
    with Paced(work) as paced:
        for number in range(max(3, work.rounds)):
            for way, (trace, place, steps) in WAYS.items():
                bare = {}
                for length in (LARGE, SMALL):
                    with work.bare("register_loop", str(length)) as loop:
                        bare[length] = paced.loop(loop, COUNT // TURN, TURN)
                out = work.directory / place / f"registrations-{trace}-{number}"
                for (manner, length), each in _recorded(out, trace, steps).items():
                    pairs.setdefault((way, manner, length), []).append((each, bare[length]))
        rows = []
        for manner, said in ((SERIES, "in a series"), (STEPS, "step by step")):
            for way in (way for way in WAYS if (way, manner, LARGE) in pairs):
                what = f"recorded registration of 64 MiB {said} / bare C{way}"
                rows.append(paced.row(what, pairs[way, manner, LARGE], BOUND.get((way, manner))))
                small = paced.row("", pairs[way, manner, SMALL], None)
                assert small.ours is not None and small.bare is not None
                rows.append(
                    Row(
                        f"added to one of one page by recording it {said}{way}",
                        (small.ours - small.bare) * 1e6,
                        unit="us",
                        ours=small.ours,
                        bare=small.bare,
                    )
                )
    return rows


def _recorded(out: Path, trace: str, steps: int) -> dict[tuple[str, int], float]:
    """Run the scenario once; return by way and length how many trivial calls one registration takes."""
    from regrepro import runner
    from regrepro.options import RunOptions
    from regrepro.record import read_record

    shutil.rmtree(out, ignore_errors=True)
    runner.run([str(HERE / "registrations.py")], RunOptions(trace=trace, option=(f"steps={steps}",)), out)
    turns: dict[tuple[str, int], list[float]] = {}
    lines: list[float] = []
    for event in read_record(out).events:
        if event.get("control") is not None:
            continue
        if event["event"] in ("exception", "unmet") or event.get("errno"):
            raise SystemExit(f"bench: {event}")
        if event["event"] == "registered":
            lines.append(event["t"])
        elif event["event"] == "step" and event["name"] == "turn":
            each = (lines[-1] - lines[0]) / TURN if event["way"] == SERIES else event["each"]
            turns.setdefault((event["way"], event["length"]), []).append(each / event["pace"])
            lines.clear()
    return {key: statistics.median(values) for key, values in turns.items()}
