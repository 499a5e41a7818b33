"""What the engine tells becomes failures, each once and with the library's word."""

from __future__ import annotations

import pytest
from watch_fakes import (
    ADDRESS,
    DMABUF_HANDLER,
    DRIVER,
    FLAGS,
    FUNCTIONS,
    GUP,
    LENGTH,
    PIN,
    Seen,
    asked,
    ended,
    hold_pin,
    word,
)

from regrepro.watch import correlate
from regrepro.watch.failed_registration import REQUESTS, Asked, Inner, attribute_index
from regrepro.watch.failure_trace import trace_of


def test_a_failure_is_handed_out_at_once_and_is_complete_with_the_librarys_word() -> None:
    seen = Seen(library_speaks=True)
    hold_pin(seen.correlator)
    assert len(seen.at_once) == 1 and not seen.complete and seen.correlator.waiting
    seen.correlator.library_failed(word())
    (failure,) = seen.complete
    assert failure is seen.at_once[0] and not seen.correlator.waiting
    assert (failure.verb, failure.errno, failure.errno_how) == ("ibv_reg_mr_iova2", "ENOMEM", "observed")
    assert (failure.address, failure.length, failure.access) == (ADDRESS, LENGTH, 7)
    assert [item.function for item in failure.inner] == ["migrate_pages", GUP, PIN, DRIVER]
    assert failure.stuck[0].refcount == 1026 and failure.pin_calls == 1


def test_where_no_library_is_followed_the_kernels_word_is_all() -> None:
    seen = Seen()
    hold_pin(seen.correlator)
    (failure,) = seen.complete
    assert failure.verb == "" and failure.shown_verb == "ibv_reg_mr" and failure.address == ADDRESS


def test_a_word_that_does_not_come_in_time_is_not_waited_for_nor_told_a_second_time_when_it_comes() -> None:
    seen = Seen(library_speaks=True)
    hold_pin(seen.correlator)
    seen.correlator.overdue(0.5)
    assert not seen.complete
    seen.correlator.overdue(1.5)
    assert len(seen.complete) == 1
    seen.correlator.library_failed(word())
    assert len(seen.complete) == len(seen.at_once) == 1
    seen.correlator.library_failed(word(ns=160, address=1, length=1))  # its thread's next failure
    assert len(seen.complete) == 2
    hold_pin(seen.correlator)
    seen.correlator.flush()
    assert len(seen.complete) == 3


def test_two_threads_that_fail_at_the_same_moment_are_told_apart() -> None:
    seen = Seen(library_speaks=True)
    for step in (
        lambda tid: seen.correlator.failed_inside(tid, Inner(110 + tid, GUP, -12)),
        lambda tid: seen.correlator.request_failed(ended(tid=tid)),
        lambda tid: seen.correlator.library_failed(word(tid=tid, address=tid, length=1)),
    ):
        for tid in (7, 8):
            step(tid)
    assert [(item.tid, item.address, [one.ns for one in item.inner]) for item in seen.complete] == [
        (7, 7, [117]),
        (8, 8, [118]),
    ]


def test_inner_failures_of_a_request_that_went_on_well_belong_to_no_later_one() -> None:
    seen = Seen()
    seen.correlator.failed_inside(7, Inner(110, GUP, -12))
    seen.correlator.request_failed(ended(-22, since=8000, ns=9000))
    assert seen.complete[0].inner == [] and not seen.complete[0].doubt


@pytest.mark.parametrize(("older", "mine", "doubted"), [(0, 300, True), (300, 10, False), (250, 250, False)])
def test_of_very_many_inner_failures_the_newest_are_kept_and_it_is_said_if_some_were_of_this_request(
    older: int, mine: int, doubted: bool
) -> None:
    seen = Seen()
    for at in (*range(100, 100 + older), *range(2000, 2000 + mine)):
        seen.correlator.failed_inside(7, Inner(at, GUP, -12))
    seen.correlator.failed_inside(7, Inner(2990, DRIVER, -12))
    seen.correlator.request_failed(ended(since=1000, ns=3000))
    (failure,) = seen.complete
    assert bool(failure.doubt) == doubted and len(failure.inner) == min(mine + 1, 256)
    assert failure.inner[-1].function == DRIVER
    assert failure.inner[0].ns == 2000 + mine - (len(failure.inner) - 1)
    trace = trace_of(failure, FUNCTIONS, FLAGS, 0)
    assert (trace["status"] == "spoiled") == doubted and ("last 256" in trace["why"]) == doubted


def test_what_failed_in_a_request_is_kept_for_two_minutes() -> None:
    second, seen = 10**9, Seen()
    for tid, at in ((7, 1000), (8, 1010)):
        seen.correlator.failed_inside(tid, Inner(at * second, GUP, -12))
    seen.correlator.forget_stale(1119 * second)
    assert set(seen.correlator._inner) == {7, 8}
    seen.correlator.forget_stale(1121 * second)
    assert set(seen.correlator._inner) == {8}
    seen.correlator.request_failed(ended(tid=8, since=1009 * second, ns=1125 * second))
    assert len(seen.complete[0].inner) == 1


def test_failures_that_wait_for_a_late_word_are_forgotten() -> None:
    seen = Seen(library_speaks=True)
    seen.correlator.request_failed(ended())
    seen.correlator.overdue(1.5)
    seen.correlator.forget_stale(10**12)
    assert not seen.correlator._silent


def test_what_a_failed_request_had_asked_for_is_of_that_request() -> None:
    seen = Seen()
    seen.correlator.asked(7, asked(iova=ADDRESS + 4096))
    seen.correlator.request_failed(ended())
    seen.correlator.asked(7, asked(ns=200))  # the end of its request was lost
    seen.correlator.request_failed(ended(-22, since=290, ns=340))
    first, second = seen.complete
    assert (first.address, first.length, first.iova) == (ADDRESS, LENGTH, ADDRESS + 4096)
    assert (first.access, first.fd, first.dmabuf) == (7, None, False)
    assert (second.address, second.length, second.access) == (None, None, None)


def test_of_a_request_by_attributes_only_those_that_it_had_are_known() -> None:
    start, length, iova, access, fd = (1 << attribute_index(item) for item in REQUESTS[DMABUF_HANDLER])
    seen = Seen()
    for present in (start | length | iova | access | fd, length | fd):
        seen.correlator.asked(7, Asked(139, 0, 4096, 0x1000, 7, 9, present))
        seen.correlator.request_failed(ended(-9, function=DMABUF_HANDLER))
    whole, part = seen.complete
    assert (whole.address, whole.length, whole.iova, whole.access, whole.fd) == (0, 4096, 0x1000, 7, 9)
    assert (part.address, part.length, part.iova, part.access, part.fd) == (None, 4096, None, None, 9)


def test_a_request_that_nobody_saw_begin_claims_nothing_that_came_before() -> None:
    seen = Seen()
    seen.correlator.failed_inside(7, Inner(110, GUP, -12))
    seen.correlator.request_failed(ended(-22, since=0))
    (failure,) = seen.complete
    assert failure.inner == [] and failure.doubt
    trace = trace_of(failure, FUNCTIONS, FLAGS, 0)
    assert trace["status"] == "spoiled" and "begin" in trace["why"]


def test_a_thread_that_fails_as_fast_as_it_can_has_each_failure_once_though_a_word_is_lost() -> None:
    seen = Seen(library_speaks=True)
    for at in range(1000, 11000, 1000):
        seen.correlator.asked(7, asked(at + 1, 0x1000, 4096))
        seen.correlator.request_failed(ended(-14, since=at, ns=at + 1))
        if at != 5000:
            seen.correlator.library_failed(word(ns=at + 2, address=0x1000, length=4096))
    seen.correlator.overdue(100.0)
    assert len(seen.complete) == len(seen.at_once) == 10
    assert sum(not failure.verb for failure in seen.complete) == 1


def test_a_word_of_another_call_of_the_thread_is_a_failure_of_its_own() -> None:
    seen = Seen(library_speaks=True)
    hold_pin(seen.correlator)
    seen.correlator.library_failed(word(ns=200_000_150, address=0x1000, length=4096))
    seen.correlator.overdue(100.0)
    assert sorted(failure.address or 0 for failure in seen.complete) == [0x1000, ADDRESS]


@pytest.mark.parametrize(
    ("verb", "gone", "doubt", "errno"),
    [
        ("ibv_reg_mr_iova2", False, "", None),
        ("ibv_reg_mr_iova2", True, "", "EIO"),
        ("ibv_reg_dmabuf_mr", False, "", "EOPNOTSUPP"),  # a provider's library without dma-buf
        ("ibv_reg_dmabuf_mr", False, "events were lost", None),
    ],
)
def test_of_a_word_alone_the_errno_is_inferred_or_missing(
    verb: str, gone: bool, doubt: str, errno: str | None
) -> None:
    seen = Seen(library_speaks=True)
    seen.correlator.device_is_gone = lambda pid: gone and pid == 6
    seen.correlator.doubt = lambda: doubt
    seen.correlator.library_failed(word(verb=verb, address=0, length=4096, fd=9))
    (failure,) = seen.complete
    assert failure is seen.at_once[0] and failure.function == "" and failure.verb == verb
    assert (failure.address, failure.length, failure.doubt) == (0, 4096, doubt)
    assert (failure.errno, failure.errno_how) == (errno, "inferred" if errno else "missing")
    assert failure.fd == (9 if failure.dmabuf else None)


def test_how_late_a_failure_came_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlate, "kernel_boottime", lambda: 5_000_000_000)
    seen = Seen()
    seen.time = 100.0
    seen.correlator.request_failed(ended(since=2_000_000_000, ns=3_000_000_000))
    seen.correlator.library_failed(word(ns=4_500_000_000, tid=8))
    assert [(failure.since, failure.late) for failure in seen.complete] == [(100.0, 2.0), (100.0, 0.5)]
