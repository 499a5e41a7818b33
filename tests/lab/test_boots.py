"""The lab itself on a real kernel: guests that panic, hang, run out of memory; hosts that are killed."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regrepro.lab.machine import Limits
from regrepro.lab.run import LabOptions, lab_run
from regrepro.options import RunOptions
from regrepro.record import read_record

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]

MIB = 1 << 20
SCENARIO = '''
import os, signal
from regrepro import Stage, instead, scenario

@scenario(
    shows="what the lab does with a guest that comes to grief",
    needs=("root", "lab"),
    expects={{"none": "not-reproduced"}},
    controls={{"other": instead("no_pin")}},
    profiles=("faults",),
    timeout=600,
)
def planted(stage: Stage) -> None:
    """Come to grief."""
    {body}
'''
PANIC = "open('/proc/sysrq-trigger', 'w').write('c')"
# Stops every process but the init: what a guest looks like whose kernel schedules no more.
HANG = "os.kill(-1, signal.SIGSTOP)"
MEMORY = "hold = [bytearray(b'x' * (64 << 20)) for _ in range(1000)]"


def planted(tmp_path: Path, body: str) -> str:
    path = tmp_path / "planted.py"
    path.write_text(SCENARIO.format(body=body))
    return str(path)


def verdicts(out: Path) -> dict[str, Any]:
    value = json.loads((out / "verdicts.json").read_text())
    return {item["scenario"]: item for item in value["verdicts"]}


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "regrepro", *arguments], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_a_guest_has_what_scenarios_need(lab: Lab) -> None:
    boot = lab.boot(
        LabOptions("7.3", ("cma=512M",)),
        [
            "cat /sys/class/infiniband/rxe_regrepro0/ports/1/state && ls /dev/infiniband/uverbs0",
            "grep -h . /sys/class/infiniband/rxe_regrepro0/ports/1/gids/* | grep -c ffff:0a63:0001",
            "awk '/CmaTotal/ {print $2}' /proc/meminfo",
            "hostname; test -w /tmp && test -d /sys/kernel/tracing/events && test -d /dev/shm",
            f"{sys.executable} -S -c 'from regrepro.lab.token import in_lab_guest; print(in_lab_guest())'",
            "exit 7",
            "mount | grep ' on / '",
            "cd $(awk '/^virtme.initmount/ && / rw/ {print $2; exit}' /proc/mounts) && ln -s /etc/shadow link"
            " && mkfifo fifo && cp /bin/true suid && chmod 4755 suid && test -u suid -a -L link",
        ],
    )
    assert boot.ending.what == "finished", boot.ending
    assert boot.ending.notes == []
    codes = [code for code, _ in boot.results]
    outputs = [text.split("\n")[0] for _, text in boot.results]
    assert codes == [0, 0, 0, 0, 0, 7, 0, 0], boot.results
    assert "ACTIVE" in outputs[0]
    assert outputs[1] == "1"
    assert int(outputs[2]) == 512 * 1024
    assert outputs[3] == "regrepro-lab"
    assert outputs[4] == "True"
    assert "(ro," in outputs[6], "the guest could write to this host"
    for name in ("link", "fifo", "suid"):
        left = (boot.out / name).lstat()
        assert stat.S_ISREG(left.st_mode) and not left.st_mode & stat.S_ISUID, name


@pytest.mark.parametrize("series", ["6.12", "6.1", "5.10"])
def test_each_series_has_soft_roce(series: str, lab: Lab) -> None:
    from test_lab_programs import ROWS

    row = next(row for row in ROWS if row.options.kernel == series)
    boot = lab.boot(row.options, [lab.program(*program) for program in row.programs])
    assert boot.ending.notes == []


def test_a_panic_keeps_what_was_seen_before(lab: Lab, tmp_path: Path) -> None:
    lab.require("7.3")
    out = tmp_path / "run"
    done = run(
        "lab",
        "run",
        "no_pin",
        planted(tmp_path, PANIC),
        "--kernel",
        "7.3",
        "--boot",
        "cma=512M",
        "--out",
        str(out),
    )
    assert done.returncode == 125, done.stderr
    found = verdicts(out)
    assert found["no_pin"]["verdict"] == "not-reproduced", done.stderr
    assert found["planted"]["verdict"] == "error"
    assert "panic" in found["planted"]["reason"]
    event = read_record(out).events[-1]
    assert (event["event"], event["what"]) == ("lab", "panic")
    assert any("sysrq triggered crash" in line for line in event["console"])
    assert "sysrq triggered crash" in done.stderr
    assert "sysrq triggered crash" in (out / "console.log").read_text()


def test_a_hang_is_noticed(lab: Lab, tmp_path: Path) -> None:
    lab.require("7.3")
    options = RunOptions(names=(planted(tmp_path, HANG),))
    machine = LabOptions("7.3", limits=Limits(silence=25))
    out = lab_run(options.names, options, machine, tmp_path / "run")
    event = read_record(out).events[-1]
    assert (event["event"], event["what"]) == ("lab", "hang")
    assert verdicts(out)["planted"]["verdict"] == "error"


def test_memory_that_runs_out_is_told(lab: Lab, tmp_path: Path) -> None:
    lab.require("7.3")
    options = RunOptions(names=(planted(tmp_path, MEMORY),))
    machine = LabOptions("7.3", memory=1024 * MIB)
    out = lab_run(options.names, options, machine, tmp_path / "run")
    events = read_record(out).events
    told = [event for event in events if event["event"] == "lab"]
    assert [event["what"] for event in told] == ["out-of-memory"]
    assert any("Out of memory: Killed process" in line for line in told[0]["console"])
    assert verdicts(out)["planted"]["verdict"] in {"error", "other-failure"}


def machines() -> set[int]:
    """Return the PIDs of the virtual machines that run here."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().startswith("qemu-system"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def children(pid: int) -> set[int]:
    return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == pid}


def _parent(path: Path) -> int | None:
    try:
        return int(path.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def start(out: Path, temporary: Path) -> subprocess.Popen[str]:
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "regrepro", "lab", "run", "pin_then_register", "--kernel", "7.3",
         "--boot", "cma=512M", "--out", str(out)],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        # A shell starts what runs in the background with SIGINT ignored, and the lab keeps to that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip


def wait_for(what: str, path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not (path.exists() and what in path.read_text(errors="replace")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_host_leaves_no_machine_and_a_whole_record(lab: Lab, tmp_path: Path) -> None:
    lab.require("7.3")
    out, temporary = tmp_path / "run", tmp_path / "tmp"
    process = start(out, temporary)
    wait_for("scenario-begin", out / "record.jsonl", process)
    mine = children(process.pid) & machines()
    assert len(mine) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while mine & machines():
        assert time.monotonic() < deadline, "the machine outlived the run"
        time.sleep(0.05)
    for line in (out / "record.jsonl").read_text().splitlines():
        json.loads(line)
    assert run("judge", str(out)).returncode == 125
    assert list(temporary.glob("regrepro-lab-*")), "nothing to clean up: the test proves nothing"

    # The next start, whatever it is, removes the rest.
    from regrepro.kernel import reclaim

    reclaim.reclaim()
    assert not list(temporary.glob("regrepro-lab-*"))


def test_an_interrupted_run_gives_everything_back(lab: Lab, tmp_path: Path) -> None:
    lab.require("7.3")
    out, temporary = tmp_path / "run", tmp_path / "tmp"
    process = start(out, temporary)
    wait_for("scenario-begin", out / "record.jsonl", process)
    mine = children(process.pid) & machines()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert not mine & machines()
    assert not list(temporary.glob("regrepro-lab-*"))
    assert read_record(out).events[-1]["outcome"] == "interrupted"


def test_two_runs_at_once(lab: Lab, tmp_path: Path) -> None:
    lab.require("7.3")
    runs = [(start(tmp_path / name, tmp_path / "tmp"), tmp_path / name) for name in ("one", "other")]
    for process, out in runs:
        _, told = process.communicate(timeout=1500)
        assert process.returncode == 10, told
        assert verdicts(out)["pin_then_register"]["verdict"] == "reproduced"
    assert not list((tmp_path / "tmp").glob("regrepro-lab-*"))
