"""A failure in the record, and what the judge says of it."""

from __future__ import annotations

from typing import Any

import pytest
from watch_fakes import (
    ADDRESS,
    DMABUF_HANDLER,
    DRIVER,
    LENGTH,
    Seen,
    asked,
    ended,
    fail_inside_driver,
    held,
    judged,
    lasting,
    pinned_part,
    word,
)

from regrepro.judge import exit_code
from regrepro.watch.failed_registration import FailedRegistration, Inner


def test_a_held_pin_that_was_seen_in_full_is_class_b_proven() -> None:
    verdict = held()
    assert verdict["verdict"] == "caught" and verdict["layer"] == "page-migration"
    assert verdict["class"] == {"name": "B", "state": "proven", "missing": []}
    assert verdict["pin_owner"] == "unknown" and "whose holder was not seen" in verdict["reason"]
    assert exit_code({"verdicts": [verdict]}) == 10
    assert all(check["state"] == "ok" for check in verdict["checks"] if check["name"] != "holder")


def test_the_holder_is_named_where_its_pin_was_seen() -> None:
    pin = {
        "fn": "pin_user_pages",
        "start": ADDRESS,
        "nr_pages": 8,
        "flags": ["FOLL_WRITE"],
        "stack": ["pin_user_pages+1", "os_lock_user_pages+5"],
        "modules": ["nvidia"],
    }
    verdict = held(plain_pins=[pin])
    assert verdict["pin_owner"] == "cuda" and "a pin by cuda" in verdict["reason"]


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({"looks": []}, "not looked at again"),
        ({"stuck": []}, "the references of the pages left behind were not seen"),
        ({"looks": lasting(1)}, "I/O in flight"),
        ({"pages": None, "again": None, "pages_unknown": "it was gone"}, "it was gone"),
        ({"lost": 3}, "3 events were lost"),
    ],
)
def test_what_is_missing_makes_it_likely_and_is_named(change: dict[str, Any], lacks: str) -> None:
    verdict = held(**change)
    assert verdict["class"]["state"] == "likely" and lacks in verdict["reason"], verdict["reason"]


def test_pages_in_ordinary_memory_lay_in_other_memory_when_the_kernel_moved_them() -> None:
    """The kernel migrates for a long-term pin out of unpinnable memory only."""
    verdict = held(place="ordinary")
    assert verdict["class"]["state"] == "likely" and "has changed" in verdict["reason"]


def test_a_process_that_died_is_judged_by_what_the_kernel_told() -> None:
    verdict = held(pages=None, again=None, first=0, length=0, pages_unknown="it was gone")
    assert verdict["class"]["state"] == "likely"
    assert {check["name"] for check in verdict["checks"] if check["state"] == "ok"} >= {
        "trace",
        "placement",
        "references",
    }


def umem_failed() -> FailedRegistration:
    seen = Seen()
    fail_inside_driver(seen.correlator, -12)
    return seen.complete[0]


def test_memlock_is_told_by_the_process_own_limit_and_what_it_has_pinned() -> None:
    for pinned, capabilities, is_memlock in (
        (0, [], False),
        (65536, [], True),
        (65536, ["CAP_IPC_LOCK"], False),
    ):
        limits = {"memlock_soft": 65536, "vmpin": pinned}
        verdict = judged(
            umem_failed(), limits=limits, capabilities=capabilities, first=ADDRESS, length=LENGTH
        )
        assert (verdict["layer"] == "memlock-accounting") == is_memlock
        assert not is_memlock or verdict["evidence"]["layer"]["how"] == "observed"


def test_a_bad_address_a_bad_flag_and_no_dmabuf() -> None:
    seen = Seen(library_speaks=True)
    told = seen.correlator
    told.failed_inside(7, pinned_part(-14, 0x10000, 1))
    told.failed_inside(7, Inner(130, DRIVER, -14))
    told.asked(7, asked(139, 0x10000, 4096, 0x10000))
    told.request_failed(ended(-14, pin_calls=1))
    told.library_failed(word(verb="ibv_reg_mr", address=0x10000, length=4096, access=7))
    told.request_failed(ended(-22, since=190, ns=240))
    told.library_failed(word(250, verb="ibv_reg_mr", address=ADDRESS, length=4096, access=2))
    told.request_failed(ended(-95, since=290, ns=340, function=DMABUF_HANDLER))
    told.library_failed(word(350, verb="ibv_reg_dmabuf_mr", address=0, length=4096, access=7, fd=0))
    assert [judged(failure)["layer"] for failure in seen.complete] == ["page-fault", "arguments", "dma-buf"]
    assert [failure.verb for failure in seen.complete] == ["ibv_reg_mr", "ibv_reg_mr", "ibv_reg_dmabuf_mr"]


def test_an_errno_that_nobody_said_stands_as_unknown_in_the_record() -> None:
    seen = Seen()
    seen.correlator.library_failed(word())
    verdict = judged(seen.complete[0])
    assert verdict["errno"] == "EUNKNOWN" and verdict["layer"] == "unknown"
