"""Recorded registrations beside the same loop in bare C on the same device."""

from __future__ import annotations

import os
import shutil

from measuring import HERE, Row, Work, measurement, ratio

LARGE, SMALL = 64 << 20, os.sysconf("SC_PAGE_SIZE")
COUNT = 200


@measurement(
    "200 recorded registrations of 64 MiB over bare C; the cost of recording one small one", where="guest"
)
def registrations(work: Work) -> list[Row]:
    """Run a scenario by the runner, as `regrepro run` does: page states, trace and record as always."""
    from regrepro import runner
    from regrepro.options import RunOptions
    from regrepro.record import read_record

    out = work.directory / "guest/registrations"
    shutil.rmtree(out, ignore_errors=True)
    # The body runs in a child of the runner, and is told by the environment.
    os.environ["REGREPRO_BENCH_LOOP"] = str(work.program("register_loop"))
    os.environ["REGREPRO_BENCH_ROUNDS"] = str(work.rounds)
    runner.run([str(HERE / "registrations.py")], RunOptions(), out)
    record = read_record(out)
    events = [event for event in record.events if event.get("control") is None]
    for event in events:
        if event["event"] in ("exception", "unmet"):
            raise SystemExit(f"bench: {event}")
    turns = [event for event in events if event["event"] == "step" and event["name"] == "turn"]
    large = [(turn["recorded"], turn["bare"]) for turn in turns if turn["length"] == LARGE]
    small = [turn for turn in turns if turn["length"] == SMALL]
    added = sorted((turn["recorded"] - turn["bare"]) / turn["count"] * 1e6 for turn in small)
    rows = [ratio(f"{COUNT} recorded registrations of 64 MiB / bare C", large, bound=1.1)]
    one = Row("added to a registration of one page by recording it", added[len(added) // 2], unit="us")
    one.ours = sum(turn["recorded"] for turn in small) / sum(turn["count"] for turn in small)
    one.bare = sum(turn["bare"] for turn in small) / sum(turn["count"] for turn in small)
    one.spread = (added[0], added[-1])
    return [*rows, one]
