"""Recorded registrations beside the same loop in bare C on the same device."""

from __future__ import annotations

import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

from measuring import HERE, Row, Work, least, measurement

LARGE, SMALL = 64 << 20, os.sysconf("SC_PAGE_SIZE")
COUNT = 200
TURN = 10  # of which the quickest counts: what else runs on the machine only ever adds
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
    """
    pairs: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    quickest = {LARGE: float("inf"), SMALL: float("inf")}  # the bare loop is the same for all ways
    for number in range(max(3, work.rounds)):
        for way, (trace, place, steps) in WAYS.items():
            bare = {}
            for length in (LARGE, SMALL):
                with work.bare("register_loop", str(length)) as loop:
                    bare[length] = loop.quickest(COUNT // TURN, TURN)
                    quickest[length] = min(quickest[length], bare[length])
            recorded = _recorded(work.directory / place / f"registrations-{trace}-{number}", trace, steps)
            for (manner, length), each in recorded.items():
                pairs.setdefault((way, manner, length), []).append((each, bare[length]))
    rows = []
    for manner, said in ((SERIES, "in a series"), (STEPS, "step by step")):
        for way in (way for way in WAYS if (way, manner, LARGE) in pairs):
            what = f"recorded registration of 64 MiB {said} / bare C{way}"
            row = least(what, pairs[way, manner, LARGE], BOUND.get((way, manner)))
            assert row.ours is not None
            rows.append(replace(row, bare=quickest[LARGE], value=row.ours / quickest[LARGE]))
            added = [(ours - bare) * 1e6 for ours, bare in pairs[way, manner, SMALL]]
            rows.append(
                Row(
                    f"added to one of one page by recording it {said}{way}",
                    statistics.median(added),
                    unit="us",
                    ours=statistics.median(ours for ours, _ in pairs[way, manner, SMALL]),
                    bare=statistics.median(bare for _, bare in pairs[way, manner, SMALL]),
                    spread=(min(added), max(added)),
                )
            )
    return rows


def _recorded(out: Path, trace: str, steps: int) -> dict[tuple[str, int], float]:
    """Run the scenario once; return the seconds of one registration by way and length."""
    from regrepro import runner
    from regrepro.options import RunOptions
    from regrepro.record import read_record

    shutil.rmtree(out, ignore_errors=True)
    runner.run([str(HERE / "registrations.py")], RunOptions(trace=trace, option=(f"steps={steps}",)), out)
    found: dict[tuple[str, int], float] = {}
    when: dict[int, list[float]] = {}
    for event in read_record(out).events:
        if event.get("control") is not None:
            continue
        if event["event"] in ("exception", "unmet") or event.get("errno"):
            raise SystemExit(f"bench: {event}")
        if event["event"] == "step" and event["name"] == "turn":
            key = STEPS, event["length"]
            found[key] = min(found.get(key, float("inf")), event["each"])
        elif event["event"] == "registered":
            when.setdefault(event["length"], []).append(event["t"])
    for length, times in when.items():
        turns = zip(times, times[TURN:], strict=False)
        found[SERIES, length] = min(end - begin for begin, end in turns) / TURN
    return found
