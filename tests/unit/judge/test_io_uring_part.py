"""io_uring's EFAULT where it pinned a part of the range: this bug is neither proven by it nor excluded."""

from __future__ import annotations

import pytest
import record_builder as build

from regrepro.judge import judge_record
from unit.judge.driver_records import by_io_uring


@pytest.mark.parametrize(("io_uring", "verdict"), [(True, "unmet"), (False, "other-failure")])
def test_a_part_of_the_range(io_uring: bool, verdict: str) -> None:
    # Seen on 6.18 without kprobes: page 0 is ordinary and pinned at once, page 5 would not move.
    record = build.reproduced_record()
    for event in record.events:
        if event["event"] in ("register", "pin"):
            event["trace"] = {"status": "unavailable", "why": "no kprobes"}
        if event["event"] == "register" and event["errno"] == "ENOMEM":
            event["errno"] = "EFAULT"
    [item] = judge_record(by_io_uring(record) if io_uring else record)["verdicts"]
    assert item["verdict"] == verdict, item["reason"]
    assert ("could pin a part" in str(item["checks"])) is io_uring
