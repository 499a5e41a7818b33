"""Short-term pins that are remembered for the failure that may follow."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from watch_fakes import ADDRESS, FLAGS, short_term

from regrepro.watch import process, short_term_pins
from regrepro.watch.evidence import PAGE_SIZE
from regrepro.watch.failed_registration import FailedRegistration, ShortTermPin
from regrepro.watch.short_term_pins import ShortTermPins, modules_of


def test_modules_of_a_stack_are_those_of_drivers(tmp_path: Path) -> None:
    symbols = tmp_path / "kallsyms"
    symbols.write_text(
        "0 t bpf_prog_1234\t[bpf]\n0 t ftrace_trampoline\t[__builtin__ftrace]\n0 T pin_user_pages\n"
        "0 t os_lock_user_pages\t[nvidia]\n0 t ib_umem_get\t[ib_core]\n"
    )
    stack = ["bpf_prog_1234+5", "ftrace_trampoline+1", "pin_user_pages+9", "os_lock_user_pages+77", "0x12"]
    assert modules_of(stack, symbols) == ["nvidia"]


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that remembers pins, and returns those on the range of a failure: (ns, held)."""
    monkeypatch.setattr(process, "PROC", tmp_path)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    monkeypatch.setattr(short_term_pins, "_frames_at", lambda *_: None)
    call = tmp_path / "6" / "task" / "7" / "syscall"
    call.parent.mkdir(parents=True)

    def run(
        *pins: ShortTermPin, syscall: str = "311 0x1 0x2", start: int | None = None
    ) -> list[tuple[int, Any]]:
        call.write_text(syscall + "\n")
        made = ShortTermPins(FLAGS, lambda _page: None)
        for one in pins:
            made.remember(one)
        failure = FailedRegistration(6, 6, "app", 1000, process_start=start)
        return [(one.ns, is_held) for one, is_held in made.on(failure, ADDRESS, 8 * PAGE_SIZE)]

    return run


def test_a_process_vm_pin_is_held_while_its_thread_is_in_that_call(remembering: Any) -> None:
    assert remembering(short_term(5)) == [(5, True)]
    assert remembering(short_term(5), syscall="0 0x1") == [(5, False)]
    assert remembering(short_term(5), syscall="running") == [(5, None)]
    assert remembering(short_term(5, tid=8)) == [(5, False)]  # there is no such thread
    # A call lets go of one part of its pages before it pins the next.
    assert remembering(short_term(5), short_term(6, start=ADDRESS + (1 << 20))) == [(5, False)]
    assert remembering(short_term(5, stack=["os_lock_user_pages+1"])) == [(5, None)]


def test_a_pin_from_before_the_process_started_is_of_another(remembering: Any) -> None:
    assert remembering(short_term(5), short_term(50), start=20) == [(50, True)]
    assert remembering(short_term(5, start=ADDRESS + (1 << 20))) == []


def test_a_pin_has_ended_whose_unpin_was_seen(remembering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ShortTermPins(FLAGS, lambda page: page // 64)
    first, second, other = (
        short_term(number, stack=[], frames=np.arange(frame, frame + 8))
        for number, frame in ((1, 100), (5, 100), (6, 200))
    )
    made._pins[6] = deque([first, second, other])
    made.unpinned(7, 10, 64 * 100)  # another process
    made.unpinned(6, 10, 64 * 99)
    assert not any(pin.ended for pin in (first, second, other))
    made.unpinned(6, 10, 64 * 103)
    made.unpinned(6, 3, 64 * 203)  # before it was pinned
    assert [pin.ended for pin in (first, second, other)] == [False, True, False]
    made.unpinned(6, 11, 64 * 100)
    assert [pin.ended for pin in (first, second, other)] == [True, True, False]
    monkeypatch.setattr(process, "PROC", Path("/nowhere"))
    failure = FailedRegistration(6, 6, "app", 1000)
    found = [(pin.ns, is_held) for pin, is_held in made.on(failure, ADDRESS, 8 * PAGE_SIZE)]
    assert found == [(1, False), (5, False), (6, None)]


@pytest.mark.parametrize("pages", [8, 1 << 20])
def test_pages_that_were_mapped_there_after_the_pin_are_not_what_was_pinned(
    monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """A pin tells the first page that it pinned; where it lies may be mapped anew before it is read."""
    monkeypatch.setattr(short_term_pins, "_frames_at", lambda _pid, _first, number: np.arange(number) + 4096)
    for first, found in ((4096, None if pages > 8 else 8), (777, 1), (0, None if pages > 8 else 8)):
        made = ShortTermPins(FLAGS, lambda page: page // 64)
        made.remember(short_term(1, pages=pages, page=first * 64))
        ((one, _),) = made.on(FailedRegistration(6, 6, "app", 1000), ADDRESS, 8 * PAGE_SIZE)
        assert (one.frames is None) == (found is None), first
        if one.frames is not None:
            assert len(one.frames) == found and one.frames[0] == (first or 4096)


def test_few_pins_are_remembered_with_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(short_term_pins, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(short_term_pins, "_frames_at", lambda _pid, first, pages: np.arange(pages) + first)
    monkeypatch.setattr(short_term_pins, "_FRAMES_KEPT", 2)
    made = ShortTermPins(FLAGS, lambda _page: None)
    pins = [short_term(number) for number in range(4)]
    for one in pins[:2]:
        made.remember(one)
    assert [one.frames is not None for one in pins[:2]] == [True, False]  # they came too fast
    for one in pins[2:]:
        now[0] += 1.0
        made.remember(one)
    assert [one.frames is not None for one in pins] == [False, False, True, True]
    told_pin = made.as_record(pins[2], None, FailedRegistration(6, 6, "app", 2_000_000_002))
    assert told_pin["pfn"] == [[0, ADDRESS, 8]] and told_pin["age_seconds"] == 2.0
    large = short_term(9, pages=1 << 20)
    now[0] += 1.0
    made.remember(large)
    assert large.frames is None
