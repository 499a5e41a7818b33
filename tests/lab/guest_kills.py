"""Runs side by side, and runs killed at random moments, all traced. Run as root in a lab guest; TAP.

`python tests/lab/guest_kills.py [--kills N] [--seed N]`. After each kill the next start must leave nothing of
the dead run in tracefs, no process and no journal, and the record must hold every line that was written
before the kill. At the end a whole run must work and leave kprobe_events as they were. Exit code 0 when every
line is `ok`, else 1.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from regrepro import runner
from regrepro.errors import RegreproError
from regrepro.kernel import leftovers, trace_fs
from regrepro.options import RunOptions
from regrepro.record import read_record

TRACEFS = trace_fs.mounted() or Path("/sys/kernel/tracing")
WORK = Path("/run/regrepro-kills")
SCENARIO = '''
import mmap, os
from regrepro import Stage, change, scenario

@scenario(
    shows="kills", expects={"none": "not-reproduced"}, controls={"again": change(pin="none")}, timeout=300
)
def work(stage: Stage) -> None:
    """Register again and again, and say in shared memory how many steps were recorded."""
    told = mmap.mmap(int(os.environ["REGREPRO_KILLS_FD"]), mmap.PAGESIZE)
    buffer = stage.buffer(pages=8)
    for number in range(1, 11):
        stage.register(buffer).deregister()
        stage.step("worked", number=number)
        if stage.control is None:
            told[:8] = number.to_bytes(8, "little")
'''
results: list[bool] = []


def check(name: str, good: bool, note: str = "") -> None:
    results.append(good)
    print(f"{'ok' if good else 'not ok'} {len(results)} - {name}{f' # {note}' if note else ''}", flush=True)


def left_in_tracefs() -> list[str]:
    """Return every instance and probe of ours, whoever's."""
    instances = [path.name for path in (TRACEFS / "instances").glob("regrepro-*")]
    lines = (TRACEFS / "kprobe_events").read_text().splitlines()
    return instances + [line for line in lines if ":regrepro_" in line]


def start(out: Path) -> int:
    """Start a run in a process of its own; return its PID."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        runner.run([str(WORK / "work.py")], RunOptions(trace="auto"), out)
        code = 0
    except RegreproError as error:
        print(f"# {error}", flush=True)
    finally:
        os._exit(code)


def processes(name: str) -> list[int]:
    """Return the processes whose environment or session came from a run: children that outlived it."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            stat = (place / "stat").read_text()
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        # In a session of its own whose leader is gone, and not a zombie: a pass of a run that was killed.
        if fields[0] != "Z" and name in stat.partition("(")[2].rpartition(")")[0] and int(fields[1]) == 1:
            found.append(int(place.name))
    return found


def flaws_of(out: Path, told: int) -> list[str]:
    """Return what the record of a killed run lacks."""
    if not (out / "record.jsonl").exists():
        return [] if not told else [f"there is no record, but {told} steps were written"]
    data = (out / "record.jsonl").read_bytes()
    if b"\n" not in data:
        return [] if not told else ["the record has no header"]
    record = read_record(out)
    numbers = [event["seq"] for event in record.events]
    found = [] if numbers == list(range(1, len(numbers) + 1)) else ["its events are not numbered in a row"]
    steps = [
        event["number"]
        for event in record.events
        if event["event"] == "step" and event["control"] is None and event["name"] == "worked"
    ]
    if len(steps) < told or steps != list(range(1, len(steps) + 1)):
        found.append(f"{told} steps were written, it holds {len(steps)}")
    return found


def two_at_once() -> None:
    """Two runs at the same time: both are traced, and neither sees an event of the other's."""
    outs = [WORK / "one", WORK / "other"]
    pids = [start(out) for out in outs]
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    check("two runs at once work", statuses == [0, 0], str(statuses))
    whole, foreign, calls = True, [], 0
    for out in outs:
        passes: dict[object, int] = {}
        for event in read_record(out).events:
            if event["event"] == "scenario-begin":
                passes[event["control"]] = event["pid"]
            elif event["event"] == "register":
                trace = event["trace"]
                whole = whole and trace["status"] in (
                    "complete",
                    "off" if event["errno"] is None else "complete",
                )
                seen = {item["tid"] for item in trace.get("events", []) if "tid" in item}
                calls += bool(seen)
                foreign += sorted(seen - {passes[event["control"]]})
    check("both are traced", whole and calls >= 4, f"{calls} calls with events")
    check("neither sees the other's events", not foreign, str(foreign[:5]))
    check("and both leave nothing", left_in_tracefs() == [])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    (WORK / "work.py").write_text(SCENARIO)
    shared = os.memfd_create("told", 0)
    os.ftruncate(shared, mmap.PAGESIZE)
    os.set_inheritable(shared, True)
    told = mmap.mmap(shared, mmap.PAGESIZE)
    os.environ["REGREPRO_KILLS_FD"] = str(shared)
    environment = runner.Environment()
    probes = (TRACEFS / "kprobe_events").read_text()

    began = time.monotonic()
    _, status = os.waitpid(start(WORK / "whole"), 0)
    whole = time.monotonic() - began
    check("a whole run works", status == 0, f"{whole:.1f} s")
    traced = sum(
        (event.get("trace") or {}).get("status") == "complete" for event in read_record(WORK / "whole").events
    )
    check("and is traced", traced > 0, f"{traced} calls")
    check("and leaves nothing in tracefs", left_in_tracefs() == [])

    two_at_once()
    others = processes("python")
    armed, left, lost, lingering, steps = 0, [], [], [], 0
    for number in range(given.kills):
        out = WORK / f"run-{number}"
        told[:8] = bytes(8)
        pid = start(out)
        time.sleep(chance.uniform(0, whole))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        armed += bool(left_in_tracefs())
        written = int.from_bytes(told[:8], "little")
        steps += written
        lost += [f"kill {number}: {flaw}" for flaw in flaws_of(out, written)]
        environment.reclaim()
        trace_fs.reclaim(TRACEFS)  # as the tracer's arming does
        left += [f"kill {number}: {name}" for name in left_in_tracefs()]
        deadline = time.monotonic() + 5
        while (alive := sorted(set(processes("python")) - set(others))) and time.monotonic() < deadline:
            time.sleep(0.05)
        lingering += [f"kill {number}: process {one}" for one in alive]
        shutil.rmtree(out, ignore_errors=True)
        if number % 20 == 19:
            print(f"# {number + 1} kills, {armed} while armed", flush=True)
    check(f"{given.kills} kills: most while the tracer was armed", armed > given.kills / 3, f"{armed}")
    check("the next start leaves no probe and no instance", not left, "; ".join(left[:5]))
    check(
        "no record line is lost", not lost, "; ".join(lost[:5]) or f"{steps} steps written before the kills"
    )
    check("no process outlives its run", not lingering, "; ".join(lingering[:5]))
    journals = [path.name for path in Path("/run/regrepro").glob("*.json")]
    check("no journal is left", not journals, str(journals[:5]))

    _, status = os.waitpid(start(WORK / "last"), 0)
    check("a whole run works afterwards", status == 0)
    check("and kprobe_events are as they were", (TRACEFS / "kprobe_events").read_text() == probes)
    check("and nothing is left to give back", leftovers.reclaim() == [])
    shutil.rmtree(WORK, ignore_errors=True)
    print(f"1..{len(results)}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
