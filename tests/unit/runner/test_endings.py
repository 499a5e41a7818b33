"""How a pass can end that no scenario can bring about here: a wait in the kernel, a memory cgroup."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from runner_fakes import FakeEnvironment, run, scenario

from regrepro.record import Record
from regrepro.runner import ending, running

TWO = scenario("pass", name="first") + scenario("pass", name="second")


def ends(record: Record) -> list[tuple[str, str | None, str]]:
    return [
        (event["scenario"], event["control"], event["outcome"])
        for event in record.events
        if event["event"] == "scenario-end"
    ]


@pytest.mark.parametrize("in_lab", [True, False])
def test_a_guest_of_the_lab_ends_after_a_wait_that_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_lab: bool
) -> None:
    real = running._Run._wait

    def wait(self: Any, pid: int, deadline: float) -> Any:
        real(self, pid, deadline)
        return ending.End(blocked=True, where="[<0>] ib_uverbs_remove_one+0x1c4/0x1e0 [ib_uverbs]")

    monkeypatch.setattr(running._Run, "_wait", wait)
    environment = FakeEnvironment()
    environment.in_lab = in_lab
    record = run(tmp_path, TWO, environment=environment)
    assert ends(record)[0] == ("first", None, "blocked")
    assert len(ends(record)) == (1 if in_lab else 4)
    assert record.events[-1]["event"] == "run-end"


def test_what_a_memory_cgroup_counted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"max": 36, "oom": 1, "oom_kill": 1}
    monkeypatch.setattr(running, "memory_events", lambda pid: told)
    record = run(tmp_path, scenario("os.kill(os.getpid(), signal.SIGKILL)"))
    [first, *_] = [event for event in record.events if event["event"] == "scenario-end"]
    assert first["memory_events"] == told


def test_in_its_own_cgroup_nothing_is_told() -> None:
    """Its counts may be anyone's, of any time."""
    assert ending.memory_events(os.getpid()) is None


def own_cgroup() -> Path | None:
    """Return this process' memory cgroup, if a child of it can be made."""
    mounts = re.search(r"^\S+ (\S+) cgroup2 ", Path("/proc/self/mounts").read_text(), re.M)
    own = re.search(r"^0::(.*)", Path("/proc/self/cgroup").read_text(), re.M)
    place = Path(mounts[1] + own[1]) if mounts and own else None
    return place if place and os.access(place, os.W_OK) and (place / "memory.events").exists() else None


@pytest.mark.skipif(own_cgroup() is None, reason="needs a memory cgroup (v2) of one's own below this one")
def test_the_events_of_another_cgroup_are_read() -> None:
    place = own_cgroup()
    assert place is not None
    group = place / "regrepro-test"
    group.mkdir()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os._exit(0)
    try:
        (group / "cgroup.procs").write_text(str(pid))
        if not (group / "memory.events").exists():
            pytest.skip("the memory controller is not handed down to children here")
        events = ending.memory_events(pid)
        assert events is not None
        assert events["oom_kill"] == 0
    finally:
        os.write(writing, b"x")
        os.waitpid(pid, 0)
        group.rmdir()
