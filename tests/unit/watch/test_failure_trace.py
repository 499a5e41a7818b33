"""The kernel's account of a failure, as the record has it."""

from __future__ import annotations

import pytest
from watch_fakes import DRIVER, FLAGS, FUNCTIONS, PIN, Seen, ended, fail_inside_driver, held_failure, word

from regrepro.watch.failure_trace import trace_of
from regrepro.watch.functions import Functions


def test_a_migration_of_compaction_is_no_part_of_the_path() -> None:
    seen = Seen()
    seen.correlator.migration_failed(7, 100, 5, 0)
    fail_inside_driver(seen.correlator, -12)
    trace = trace_of(seen.complete[0], FUNCTIONS, FLAGS, 0)
    assert [event["fn"] for event in trace["events"]] == [DRIVER, "ib_uverbs_reg_mr"]


def test_pins_that_succeeded_stand_before_what_failed() -> None:
    seen = Seen()
    fail_inside_driver(seen.correlator, -12, pin_calls=3, pinned=1024)
    first, *rest = trace_of(seen.complete[0], FUNCTIONS, FLAGS, 0)["events"]
    assert (first["fn"], first["ret"], first["calls"], first["t"]) == (PIN, 1024, 3, 0.0)
    assert [event["t"] for event in rest] == [0.0, 1e-08] or [event["ret"] for event in rest] == [-12, -12]


def test_the_request_is_the_root_of_its_path() -> None:
    seen = Seen()
    seen.correlator.request_failed(ended(-22))
    trace = trace_of(seen.complete[0], FUNCTIONS, FLAGS, 0)
    assert [(item["depth"], item["fn"]) for item in trace["tree"]] == [(0, "ib_uverbs_reg_mr")]
    trace = trace_of(held_failure(), FUNCTIONS, FLAGS, 0)
    assert trace["tree"][0]["fn"] == "ib_uverbs_reg_mr" and len(trace["tree"]) == 5


@pytest.mark.parametrize(
    ("lost", "missed", "why"),
    [
        (0, None, ""),
        (0, 0, ""),
        (3, 0, "3 events were lost near this failure: what is absent may have happened"),
        (0, 2, "2 hits of probes were missed near this failure"),
    ],
)
def test_what_was_lost_or_missed_spoils_it(lost: int, missed: int | None, why: str) -> None:
    trace = trace_of(held_failure(), FUNCTIONS, FLAGS, lost, missed)
    assert (trace["status"], trace["why"]) == ("spoiled" if why else "complete", why)
    assert (trace["overrun"], trace["misses"]) == (lost, missed)


def test_where_no_handler_ran_that_is_said() -> None:
    seen = Seen()
    seen.correlator.library_failed(word())
    trace = trace_of(seen.complete[0], FUNCTIONS, FLAGS, 0)
    assert trace["status"] == "complete" and "no handler" in trace["why"] and trace["events"] == []
    assert trace_of(seen.complete[0], Functions(entries=FUNCTIONS.entries), FLAGS, 1)["status"] == "spoiled"
