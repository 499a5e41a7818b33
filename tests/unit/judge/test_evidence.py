"""Every piece of evidence, taken away or made false: never `reproduced`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import record_builder as build
from record_builder import CMA, OUT, PAGE, Record, find, state

from regrepro.judge import exit_code, judge_record
from unit.judge.judging import judged, register

Break = Callable[[Record], object]


def drop(record: Record, event: dict[str, Any]) -> None:
    """Take an event out and close the gap, as if it had never been written."""
    record.events.remove(event)
    for seq, item in enumerate(record.events, 1):
        item["seq"] = seq


def without_pass(record: Record, control: str) -> None:
    record.events = [item for item in record.events if item.get("control") != control]
    for seq, item in enumerate(record.events, 1):
        item["seq"] = seq


def in_trace(record: Record, fn: str, ret: int) -> None:
    for event in (*register(record)["trace"]["events"], *register(record)["trace"]["tree"]):
        if event.get("fn") == fn:
            event["ret"] = ret


def fields(record: Record) -> dict[str, Any]:
    return dict(register(record)["trace"]["events"][0]["fields"])


def _released_first(record: Record) -> None:
    release, registration = find(record, "release"), register(record)
    at = record.events.index(registration)
    record.events.remove(release)
    record.events.insert(at, release)
    for seq, item in enumerate(record.events, 1):
        item["seq"] = seq


def _pinned_last(record: Record) -> None:
    pin, registration = find(record, "pin"), register(record)
    record.events.remove(pin)
    record.events.insert(record.events.index(registration) + 1, pin)
    for seq, item in enumerate(record.events, 1):
        item["seq"] = seq


def _unpinned(record: Record) -> None:
    drop(record, find(record, "pin"))
    drop(record, find(record, "release"))
    register(record)["pins"] = []


def _no_controls(record: Record) -> None:
    without_pass(record, "no-pin")
    without_pass(record, "ordinary-memory")
    find(record, "scenario-begin")["declared"]["controls"] = {}


BREAKS: dict[str, tuple[Break, str]] = {
    # name: (what is taken away or made false, the verdict that is due)
    "the registration succeeded": (lambda r: register(r).update(errno=None), "unmet"),
    "another errno": (lambda r: register(r).update(errno="EINVAL"), "unmet"),
    "errno missing": (lambda r: register(r).pop("errno"), "not reproduced"),
    "no registration under the pin": (lambda r: drop(r, register(r)), "unmet"),
    # placement
    "pages not read before": (lambda r: register(r).update(before=None), "unmet"),
    "places unknown": (lambda r: register(r)["before"].update(place=[[0, 8, "unknown"]]), "unmet"),
    "places inferred": (lambda r: register(r)["before"].update(how="inferred"), "unmet"),
    "places missing": (lambda r: register(r)["before"].pop("place"), "unmet"),
    "one place unknown": (
        lambda r: register(r)["before"].update(place=[[0, 7, "cma"], [7, 1, "unknown"]]),
        "unmet",
    ),
    "pages were ordinary": (
        lambda r: register(r)["before"].update(place=[[0, 8, "ordinary"]]),
        "unmet",
    ),
    "PFNs gone before": (lambda r: register(r)["before"].update(pfn=[]), "unmet"),
    # the pin
    "no pin": (_unpinned, "unmet"),
    "no pin that the registration names": (lambda r: drop(r, find(r, "pin")), "unmet"),
    "the pin failed": (lambda r: find(r, "pin").update(errno="EPERM"), "unmet"),
    "the pin was of kind none": (lambda r: find(r, "pin").update(kind="none"), "unmet"),
    "the pin was longterm": (lambda r: find(r, "pin").update(kind="longterm"), "unmet"),
    "the pin was elsewhere": (lambda r: find(r, "pin").update(length=4 * PAGE), "unmet"),
    "the pin died before": (lambda r: register(r)["pins"][0].update(alive_before=False), "unmet"),
    "the pin died meanwhile": (lambda r: register(r)["pins"][0].update(alive_after=False), "unmet"),
    "the pin's life is unknown": (lambda r: register(r)["pins"][0].update(alive_after=None), "unmet"),
    "the pin's life was not recorded": (lambda r: register(r).update(pins=[]), "unmet"),
    "released before": (_released_first, "unmet"),
    "taken after": (_pinned_last, "unmet"),
    # references
    "references missing after": (lambda r: register(r)["after"].update(refcount=None), "unmet"),
    "references missing before": (lambda r: register(r)["before"].update(refcount=None), "unmet"),
    "references at the baseline": (
        lambda r: register(r)["after"].update(refcount=[[0, 8, 1]]),
        "unmet",
    ),
    "a transient reference only": (
        lambda r: register(r)["after"].update(refcount=[[0, 8, 2]]),
        "unmet",
    ),
    "1,023 mappings more": (lambda r: register(r)["after"].update(mapcount=[[0, 8, 1024]]), "unmet"),
    "one page without a reference": (
        lambda r: register(r)["after"].update(refcount=[[0, 7, 1025], [7, 1, 1]]),
        "unmet",
    ),
    "somebody else's pin besides": (
        lambda r: [register(r)[when].update(refcount=[[0, 8, 2049]]) for when in ("before", "after")],
        "unmet",
    ),
    # movement
    "pages not read after": (lambda r: register(r).update(after=None), "unmet"),
    "pinned pages moved": (lambda r: register(r).update(after=state(OUT, 1025)), "unmet"),
    "one pinned page moved": (
        lambda r: register(r).update(after=state([*CMA[:7], 5007], 1025)),
        "unmet",
    ),
    "PFNs gone after": (lambda r: register(r)["after"].update(pfn=[]), "unmet"),
    "no longer unpinnable after": (
        lambda r: register(r)["after"].update(place=[[0, 8, "ordinary"]]),
        "unmet",
    ),
    # the trace
    "no trace": (lambda r: register(r).update(trace=None), "unmet"),
    "tracing off": (lambda r: register(r).update(trace={"status": "off", "why": "--trace off"}), "unmet"),
    "trace spoiled": (lambda r: register(r)["trace"].update(status="spoiled", why="overrun"), "unmet"),
    "trace unavailable here alone": (
        lambda r: register(r).update(trace={"status": "unavailable", "why": "no tracefs"}),
        "unmet",
    ),
    "probes missed": (lambda r: register(r)["trace"].update(misses=1), "unmet"),
    "ring overrun": (lambda r: register(r)["trace"].update(overrun=3), "unmet"),
    "trace malformed": (lambda r: register(r)["trace"].update(events=7), "unmet"),
    "trace of unknown status": (lambda r: register(r)["trace"].update(status="splendid"), "unmet"),
    "no page to move to": (lambda r: in_trace(r, "migrate_pages", -12), "other-failure"),
    "every page was migrated": (lambda r: in_trace(r, "migrate_pages", 0), "unmet"),
    "pinning succeeded": (lambda r: in_trace(r, "pin_user_pages_fast", 8), "unmet"),
    "migrated for another reason": (
        lambda r: register(r)["trace"]["events"][0].update(fields=fields(r) | {"reason": "compaction"}),
        "unmet",
    ),
    "no migration": (lambda r: register(r)["trace"].update(events=[], tree=[]), "unmet"),
    "no tracepoint": (lambda r: register(r)["trace"]["events"].pop(0), "unmet"),
    "tracepoint counts no failure": (
        lambda r: register(r)["trace"]["events"][0].update(fields=fields(r) | {"nr_failed": 0}),
        "unmet",
    ),
    # A-B-A
    "never released": (lambda r: drop(r, find(r, "release")), "unmet"),
    "release failed": (lambda r: find(r, "release").update(errno="EBADF"), "unmet"),
    "not tried again": (lambda r: drop(r, register(r, 1)), "unmet"),
    "tried again elsewhere": (lambda r: register(r, 1).update(address=build.ADDRESS + PAGE), "unmet"),
    "tried again with other flags": (lambda r: register(r, 1).update(access=["LOCAL_WRITE"]), "unmet"),
    "tried again by another verb": (lambda r: register(r, 1).update(verb="ibv_reg_mr"), "unmet"),
    "tried again, failed": (lambda r: register(r, 1).update(errno="ENOMEM"), "unmet"),
    "other pages at the second try": (
        lambda r: register(r, 1).update(before=state(range(300, 308))),
        "unmet",
    ),
    "ordinary pages at the second try": (lambda r: register(r, 1).update(before=state(OUT)), "unmet"),
    "nothing moved at the second try": (lambda r: register(r, 1).update(after=state(CMA, 1025)), "unmet"),
    "pages not read at the second try": (lambda r: register(r, 1).update(after=None), "unmet"),
    "moved within unpinnable memory": (
        lambda r: register(r, 1).update(after=state(range(300, 308))),
        "unmet",
    ),
    # controls
    "control not run": (lambda r: without_pass(r, "no-pin"), "unmet"),
    "no control at all": (_no_controls, "unmet"),
    "control failed": (lambda r: find(r, "register", 0, "no-pin").update(errno="ENOMEM"), "unmet"),
    "control crashed": (
        lambda r: find(r, "scenario-end", 0, "no-pin").update(outcome="killed", signal="SIGSEGV"),
        "unmet",
    ),
    "control cut": (lambda r: drop(r, find(r, "scenario-end", 0, "no-pin")), "unmet"),
    "control on ordinary pages": (
        lambda r: find(r, "register", 0, "no-pin").update(before=state(OUT), after=state(OUT)),
        "unmet",
    ),
    "control moved nothing": (
        lambda r: find(r, "register", 0, "no-pin").update(after=state(range(200, 208), 1025)),
        "unmet",
    ),
    "control was pinned": (
        lambda r: find(r, "pin", 0, "no-pin").update(kind="pin", owner="process-vm"),
        "unmet",
    ),
    "control on unpinnable pages": (
        lambda r: find(r, "register", 0, "ordinary-memory").update(before=state(CMA, 1025)),
        "unmet",
    ),
    "control without its pin": (lambda r: drop(r, find(r, "pin", 0, "ordinary-memory")), "unmet"),
    "control's pin died": (
        lambda r: find(r, "register", 0, "ordinary-memory")["pins"][0].update(alive_after=False),
        "unmet",
    ),
    "control of another length": (lambda r: find(r, "register", 0, "no-pin").update(length=PAGE), "unmet"),
    # the record
    "the pass was cut": (lambda r: drop(r, find(r, "scenario-end")), "error"),
    "an exception": (
        lambda r: find(r, "scenario-end").update(event="exception", type="ValueError", text="x"),
        "error",
    ),
    "killed": (lambda r: find(r, "scenario-end").update(outcome="killed", signal="SIGKILL"), "error"),
    "timed out": (lambda r: find(r, "scenario-end").update(outcome="timeout"), "error"),
    "blocked": (lambda r: find(r, "scenario-end").update(outcome="blocked"), "error"),
    "ended in a new way": (lambda r: find(r, "scenario-end").update(outcome="evaporated"), "error"),
    "unmet": (lambda r: find(r, "free").update(event="unmet", need="root", why="x", how="y"), "unmet"),
    "no beginning": (lambda r: drop(r, find(r, "scenario-begin")), "error"),
    "a line is missing": (lambda r: r.events.remove(find(r, "free")), "unmet"),
    "a line is there twice": (lambda r: find(r, "free").update(seq=find(r, "buffer")["seq"]), "unmet"),
    "a malformed state": (lambda r: find(r, "pin")["before"].update(pfn=[[0, 100, 9]]), "unmet"),
    "overlapping runs": (lambda r: register(r)["before"].update(pfn=[[0, 100, 8], [3, 500, 1]]), "unmet"),
    "a second buffer of that number": (
        lambda r: find(r, "free").update(copy.deepcopy(find(r, "buffer")) | {"seq": find(r, "free")["seq"]}),
        "unmet",
    ),
    "another schema": (lambda r: r.header.update(schema="regrepro.record/9"), "none"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_without_one_piece_it_is_not_reproduced(name: str) -> None:
    record = build.reproduced_record()
    assert judged(record)["verdict"] == "reproduced"
    breaker, due = BREAKS[name]
    breaker(record)
    verdicts = judge_record(record)
    names = [item["verdict"] for item in verdicts["verdicts"]]
    assert "reproduced" not in names
    assert exit_code(verdicts) == {"other-failure": 11}.get(due, 125) or due == "not reproduced"
    if due == "none":
        assert names == []
    elif due != "not reproduced":
        assert names[0] == due, verdicts["verdicts"][0]["reason"]
    for item in verdicts["verdicts"]:
        assert item["reason"]
        if item["verdict"] == "unmet":
            assert item["unmet"]
            assert all(entry["need"] and entry["why"] for entry in item["unmet"])


def test_an_unavailable_trace_is_allowed_and_named() -> None:
    record = build.reproduced_record()
    for event in record.events:
        if event["event"] == "register":
            event["trace"] = {"status": "unavailable", "why": "tracefs is locked down"}
    verdict = judged(record)
    assert verdict["verdict"] == "reproduced"
    assert verdict["evidence"]["trace"]["how"] == "missing"
    assert "locked down" in verdict["evidence"]["trace"]["source"]
