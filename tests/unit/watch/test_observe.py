"""Looks at the process and the pages of a failure."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from watch_fakes import (
    ADDRESS,
    GUP,
    Seen,
    at_start,
    ended,
    fail_inside_driver,
    judged,
    observer,
    page_state,
    short_term,
)

from regrepro.watch import observe, process
from regrepro.watch.evidence import PAGE_SIZE, Evidence
from regrepro.watch.failed_registration import FailedRegistration, Inner, StuckPage, limits_of
from regrepro.watch.process import Process


def test_one_that_died_is_what_it_was_when_it_opened_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = tmp_path / "6"
    base.mkdir()
    (base / "status").write_text("Name:\tapp\nUid:\t1000 1000 1000 1000\nCapEff:\t0\nVmPin:\t16 kB\n")
    (base / "limits").write_text("Max locked memory   4096   4096   bytes\n")
    real = process.read_process
    monkeypatch.setattr(process, "read_process", lambda pid: real(pid, tmp_path))
    made = observer()
    made.meet(6)
    assert made._of_process(FailedRegistration(6, 6, "app", 1)).limits == {
        "memlock_soft": 4096,
        "vmpin": 16384,
    }
    for path in base.iterdir():
        path.unlink()
    gone = made._of_process(FailedRegistration(6, 6, "app", 1))
    assert gone.limits == {"memlock_soft": 4096} and gone.capabilities == []
    assert gone.facts["comm"] == "app" and set(gone.facts["of_opening"]) >= {"comm", "uid"}
    assert "of_opening" not in made._of_process(FailedRegistration(7, 7, "app", 1)).facts
    assert any("status" in problem for problem in gone.problems)
    assert any("ns/mnt" in problem for problem in gone.problems)
    assert made._of_process(FailedRegistration(7, 7, "app", 1)).limits == {}
    # So that the layer of its failure is known.
    seen = Seen()
    seen.correlator.failed_inside(7, Inner(110, GUP, 0))
    fail_inside_driver(seen.correlator, -12, uid=1000)
    verdict = judged(seen.complete[0], limits=gone.limits, capabilities=gone.capabilities)
    assert verdict["layer"] == "memlock-accounting"


@pytest.mark.parametrize(("now", "met"), [(500, None), (None, 500), (None, None)])
def test_another_process_of_the_same_number_lends_it_nothing(
    now: int | None, met: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is of one that started at 300: neither who has its number now nor who had it counts."""
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    shown = Process(6) if now is None else at_start(6, now, 4096)
    monkeypatch.setattr(process, "read_process", lambda _pid: shown)
    made = observer()
    made._met = {} if met is None else {6: at_start(6, met, 8192)}
    limits: dict[str, int | None] = {"memlock_soft": None, "vmpin": 0}
    seen = made._of_process(FailedRegistration(6, 6, "app", 1, process_start=300 * tick + 5, limits=limits))
    assert seen.facts["starttime"] == 300 and "comm" not in seen.facts and seen.limits == limits
    assert ("process 6 is another one by now" in seen.problems) == (now is not None)


def test_what_its_limits_were_the_kernel_has_told_of_that_very_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(process, "read_process", lambda _pid: at_start(6, 300, 1 << 30))
    made = observer()
    made._met = {6: at_start(6, 300, 8192)}
    seen = Seen()
    for tid, limits in ((7, limits_of(65536, 4)), (8, limits_of(-1, 0))):
        seen.correlator.request_failed(ended(tid=tid, process_start=300 * tick, limits=limits))
    first, second = (made._of_process(failure) for failure in seen.complete)
    assert first.limits == {"memlock_soft": 65536, "vmpin": 4 * PAGE_SIZE} and first.facts["comm"] == "of 300"
    assert second.limits == {"memlock_soft": None, "vmpin": 0}


def watched_failure(**change: Any) -> Evidence:
    failure = FailedRegistration(
        6, os.getpid(), "app", 1, ret=-12, stuck=[StuckPage(0, 3, 0, 0, 0)], since=time.monotonic()
    )
    failure.inner = [Inner(1, "pin_user_pages_fast", -12, {"start": ADDRESS, "nr_pages": 4})]
    made = Evidence(failure, Process(failure.pid, {"starttime": observe.start_time(failure.pid)}))
    made.first, made.length, made.pages = ADDRESS - 4 * PAGE_SIZE, 16 * PAGE_SIZE, page_state()
    for name, value in change.items():
        setattr(made, name, value)
    return made


def test_a_look_says_that_the_process_is_another_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = observer()
    monkeypatch.setattr(made, "_snapshot", lambda *_: page_state())
    seen = watched_failure()
    assert made.look_at_frames(seen)["ended"] == "" and made.look_at_frames(seen)["pages"]["pages"] == 8
    seen.process.facts["starttime"] += 1
    told_then = made.look_at_frames(seen)
    assert told_then["ended"] == f"process {os.getpid()} has ended" and told_then["pages"] is None


def test_what_kpageflags_says_stands_as_words() -> None:
    pages: Any = page_state()
    assert observe._lists(pages) is None
    pages.flags = np.array([1 << 5] * 3 + [1 << 5 | 1 << 6 | 1 << 33 | 1 << 2] + [1] * 4, dtype=np.uint64)
    assert observe._lists(pages) == [[0, 3, "lru"], [3, 1, "lru active mlocked"], [4, 4, ""]]


def test_a_look_tells_the_pins_that_came_or_went_since_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    made = observer()
    pins = {number: short_term(number * 1_000_000, pages=4) for number in (1, 2, 50, 60)}
    now = {1: False, 2: True, 50: None, 60: False}
    found = [(pins[number], now[number]) for number in pins]
    monkeypatch.setattr(made.pins, "on", lambda *_: iter(found))
    seen = Evidence(FailedRegistration(6, 6, "app", 40_000_000), Process(6))
    seen.pins = [(pins[1], True), (pins[2], True)]
    told_then = made._changed_pins(seen, ADDRESS, 4 * PAGE_SIZE)
    assert [(one["held"], one["age_seconds"] < 0) for one in told_then] == [(False, False), (None, True)]
    seen.pins = [(pins[1], None)]  # it may have ended before
    assert [one["held"] for one in made._changed_pins(seen, ADDRESS, 4 * PAGE_SIZE)] == [None]


def test_the_frames_are_those_of_the_call_that_failed() -> None:
    assert watched_failure().frames == (ADDRESS, 4 * PAGE_SIZE)
    assert watched_failure(length=6 * PAGE_SIZE).frames == (ADDRESS, 2 * PAGE_SIZE)
    assert watched_failure(pages=None).frames is None
    assert watched_failure(process=Process(6)).frames is None
    seen = watched_failure(length=1 << 30)
    assert seen.frames == (ADDRESS, 4 * PAGE_SIZE)
    seen.failure.inner = []
    assert seen.frames is None  # too much to be looked at, and nobody knows which part
    seen.failure.stuck = []
    assert seen.frames is None
