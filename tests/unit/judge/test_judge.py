"""The judge: each verdict, and each piece of evidence without which it must not be given."""

from __future__ import annotations

import ast
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import record_builder as build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_builder import CMA, OUT, PAGE, Builder, Record, find, state

import regrepro.judge
from regrepro.judge import exit_code, judge_record


def judged(record: Record, index: int = 0) -> dict[str, Any]:
    """The verdict of a record's scenario, as it would be read back from verdicts.json."""
    verdicts = json.loads(json.dumps(judge_record(record)))
    return dict(verdicts["verdicts"][index])


# The verdicts themselves


def test_reproduced_with_all_its_evidence() -> None:
    verdict = judged(build.reproduced_record())
    assert (verdict["verdict"], verdict["layer"], verdict["errno"]) == (
        "reproduced",
        "page-migration",
        "ENOMEM",
    )
    assert (verdict["pin_owner"], verdict["basis"], verdict["as_declared"]) == ("process-vm", None, True)
    assert verdict["reason"].startswith("this kernel, with this placement, is susceptible")
    values = {name: item["value"] for name, item in verdict["evidence"].items()}
    assert values["placement"] == {"cma": 8}
    assert (values["pages"], values["pages_unpinnable"], values["pages_pinned"]) == (8, 8, 8)
    assert (values["pages_moved"], values["pages_unmoved"]) == (0, 8)
    assert values["references"]["after"] == {"refcount": 1025, "mapcount": 1}
    assert values["trace"]["migrate_pages"] == 8
    assert values["trace"]["reason"] == "longterm_pin"
    assert [node["fn"] for node in values["trace"]["tree"]][-1] == "migrate_pages"
    assert values["release"]["again_errno"] is None
    assert values["release"]["again_moved"] == 8
    assert verdict["evidence"]["registrar"]["how"] == "stand-in"
    assert [(item["name"], item["held"]) for item in verdict["controls"]] == [
        ("no-pin", True),
        ("ordinary-memory", True),
    ]


def test_a_foll_get_reference_reproduces_too() -> None:
    assert judged(build.get_record())["verdict"] == "reproduced"


def test_movement_is_by_page() -> None:
    verdict = judged(build.partly_pinned_record())
    values = {name: item["value"] for name, item in verdict["evidence"].items()}
    assert verdict["verdict"] == "reproduced"
    assert (values["pages_pinned"], values["pages_moved"], values["pages_unmoved"]) == (1, 7, 1)


@pytest.mark.parametrize(
    ("record", "basis", "owner"),
    [
        (build.kernel_record, "kernel", "process-vm"),
        (build.longterm_record, "pin", "io-uring"),
        (build.placement_record, "placement", "process-vm"),
        (build.no_pin_record, "kernel", "none"),
    ],
)
def test_not_reproduced_names_its_basis(record: Callable[[], Record], basis: str, owner: str) -> None:
    verdict = judged(record())
    assert (verdict["verdict"], verdict["basis"], verdict["layer"]) == ("not-reproduced", basis, None)
    assert verdict["pin_owner"] == owner
    assert "susceptible" not in verdict["reason"]


def test_only_cuda_says_anything_of_a_driver() -> None:
    record = build.reproduced_record(nvidia_driver="535.54.03")
    find(record, "pin")["owner"] = "cuda"
    verdict = judged(record)
    assert (verdict["verdict"], verdict["pin_owner"], verdict["driver"]) == (
        "reproduced",
        "cuda",
        "535.54.03",
    )
    assert "NVIDIA driver 535.54.03 pins without FOLL_LONGTERM" in verdict["reason"]
    find(record, "pin")["owner"] = "standin:pin"
    verdict = judged(record)
    assert "driver" not in verdict
    assert "NVIDIA" not in verdict["reason"]
    assert verdict["evidence"]["pins"]["how"] == "stand-in"


def test_a_driver_that_cannot_be_asked_is_believed_by_its_references_only() -> None:
    record = build.reproduced_record(nvidia_driver="535.54.03")
    find(record, "pin")["owner"] = "cuda"
    find(record, "register")["pins"][0] |= {"alive_before": None, "alive_after": None}
    assert judged(record)["verdict"] == "reproduced"
    find(record, "register")["after"]["refcount"] = [[0, 8, 1]]
    assert judged(record)["verdict"] != "reproduced"


def test_io_uring_as_registrar_is_named_a_stand_in() -> None:
    record = build.reproduced_record()
    for event in record.events:
        if event["event"] == "register":
            event |= {"verb": "io_uring_register_buffers", "device": "io_uring", "stand_in": "io-uring"}
            for item in (*event["trace"]["events"], *event["trace"]["tree"]):
                if item.get("fn") == "rxe_reg_user_mr":
                    item |= {"fn": "io_sqe_buffers_register", "ret": min(item["ret"], 0)}
    verdict = judged(record)
    assert verdict["verdict"] == "reproduced"
    assert "io_uring" in verdict["evidence"]["registrar"]["value"]["note"]
    assert "io_uring" in verdict["reason"]


# Every piece of evidence, taken away or made false: never `reproduced`

Break = Callable[[Record], object]


def register(record: Record, number: int = 0) -> dict[str, Any]:
    return find(record, "register", number)


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


# False proofs


def test_one_reference_more_is_no_proof_of_foll_get() -> None:
    """A page in an LRU batch also has 2: it must have risen with the pin, or fallen with its release."""
    record = build.get_record()
    find(record, "pin")["before"]["refcount"] = [[0, 8, 2]]
    for event in (find(record, "release"), register(record, 1)):
        event["after" if event["event"] == "release" else "before"]["refcount"] = [[0, 8, 2]]
    verdict = judged(record)
    assert verdict["verdict"] == "unmet"
    assert "single reference" in verdict["reason"]


def test_a_shared_memory_page_at_two_is_not_pinned() -> None:
    record = build.get_record()
    find(record, "buffer")["backing"] = "shm"
    verdict = judged(record)
    assert verdict["verdict"] == "unmet"
    assert "put no reference on page 0-7" in verdict["reason"]
    # With what is due told by the record, the backing is not asked.
    for event in (register(record), find(record, "pin")):
        for when in ("before", "after"):
            event[when]["baseline"] = [[0, 8, 1]]
    assert judged(record)["verdict"] == "reproduced"


def test_copy_on_write_after_a_fork_is_not_longterm() -> None:
    """A plain pin for writing breaks copy-on-write: the page "moves", but nobody asked for FOLL_LONGTERM."""
    record = build.longterm_record()
    find(record, "pin")["before"] = state(CMA, 2, 2)
    verdict = judged(record)
    assert verdict["verdict"] == "unmet"
    assert "copy-on-write" in verdict["reason"]
    contract = verdict["evidence"]["pin_contract"]["value"]["1"]
    assert contract["contract"] == "unknown"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mapcount": None}, "nobody else mapped"),
        ({"traits": [[0, 8, "anonymous shared"]]}, "copy-on-write"),
    ],
)
def test_movement_means_longterm_only_for_exclusive_pages(change: dict[str, Any], why: str) -> None:
    record = build.longterm_record()
    find(record, "pin")["before"] |= change
    verdict = judged(record)
    assert (verdict["verdict"], why in verdict["reason"]) == ("unmet", True)


def test_longterm_needs_exactly_one_pin_more() -> None:
    for count in (1, 2, 2049):
        record = build.longterm_record()
        find(record, "pin")["after"]["refcount"] = [[0, 8, count]]
        assert judged(record)["verdict"] == "unmet", count


def test_longterm_needs_neighbours_that_stayed() -> None:
    record = build.longterm_record()
    for event in (find(record, "pin"), find(record, "register")):
        event |= {"length": 4 * PAGE}
    find(record, "pin")["after"] = state([*OUT[:4], *CMA[4:]], [1025] * 4 + [1] * 4)
    find(record, "register")["before"] = find(record, "pin")["after"]
    find(record, "register", 0, "pin-without-longterm")["length"] = 4 * PAGE
    assert judged(record)["basis"] == "pin"
    find(record, "pin")["after"] = state(OUT, [1025] * 4 + [1] * 4)
    assert judged(record)["verdict"] == "unmet"


def test_a_pin_that_died_early_gives_no_not_reproduced() -> None:
    for record in (build.kernel_record(), build.longterm_record(), build.placement_record()):
        find(record, "register")["pins"][0]["alive_after"] = False
        assert judged(record)["verdict"] == "unmet"


def test_a_failed_migration_without_a_pin_leaves_open_what_held_the_pages() -> None:
    builder = Builder()
    builder.memory_map()
    builder.begin("no_pin", contract="none", controls={})
    builder.buffer(state(CMA))
    builder.register(state(CMA), state(CMA), errno="ENOMEM")
    builder.end()
    verdict = judged(builder.done())
    assert (verdict["verdict"], verdict["layer"], verdict["pin_owner"]) == ("unmet", "unknown", "none")
    assert "no pin without FOLL_LONGTERM was held" in verdict["reason"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_not_reproduced_by_the_kernel_needs_the_references(when: str) -> None:
    record = build.kernel_record()
    find(record, "register")[when]["refcount"] = None
    assert judged(record)["verdict"] == "unmet"
    record = build.kernel_record()
    find(record, "register")[when]["refcount"] = [[0, 8, 1]]
    assert judged(record)["verdict"] == "unmet"


def test_not_reproduced_by_the_kernel_needs_unpinnable_pages() -> None:
    record = build.kernel_record()
    find(record, "register")["before"]["place"] = [[0, 8, "unknown"]]
    assert judged(record)["verdict"] == "unmet"


@pytest.mark.parametrize("change", [{"complete": False}, {"has_unpinnable": None}, {"has_unpinnable": True}])
def test_placement_needs_a_complete_map_without_unpinnable_memory(change: dict[str, Any]) -> None:
    record = build.placement_record()
    record.events[0] |= change
    assert judged(record)["verdict"] == "unmet"


def test_placement_needs_ordinary_pages() -> None:
    record = build.placement_record()
    find(record, "register")["before"] = None
    assert judged(record)["verdict"] == "unmet"


def test_a_kernel_that_allows_the_plain_pin_as_well_is_the_basis() -> None:
    record = build.longterm_record()
    control = find(record, "register", 0, "pin-without-longterm")
    control |= {"errno": None, "after": state(CMA, 2049), "lkey": 1, "rkey": 1}
    control["trace"] = build.succeeding_trace(state(CMA), state(CMA))
    verdict = judged(record)
    assert (verdict["verdict"], verdict["basis"]) == ("not-reproduced", "kernel")


# Batches


def batch_record(pages: int, pinned: int, moved_to: int, left: int = 1) -> Record:
    """`pages` unpinnable pages, one pinned; after the failure the pages before `moved_to` have moved."""
    builder = Builder()
    builder.memory_map()
    cma, out = [n + 1 for n in range(pages)], [n + 50000 for n in range(pages)]
    places = {"place": [[0, pages, "cma"]]}
    refs = [1025 if n == pinned else 1 for n in range(pages)]
    after = [out[n] if n < moved_to and n != pinned else cma[n] for n in range(pages)]
    mixed = {
        "place": build.runs(["ordinary" if pfn >= 50000 else "cma" for pfn in after]),
    }
    builder.begin(controls={"no-pin": "pin=none"})
    builder.buffer(state(cma, **places))
    builder.pin(state(cma, **places), state(cma, refs, **places), ranges=[[pinned * PAGE, PAGE]])
    before = state(cma, refs, **places)
    moved = sum(1 for pfn in after if pfn >= 50000)
    trace = build.failing_trace(left, moved=moved)
    builder.register(before, state(after, refs, **mixed), errno="ENOMEM", pins=[1], trace=trace)
    builder.release(state(after, **mixed))
    builder.register(state(after, **mixed), state(out, 1025), 2)
    builder.end()
    builder.begin(control="no-pin", contract="none", controls={"no-pin": "pin=none"})
    builder.buffer(state(cma, **places))
    builder.register(state(cma, **places), state(out, 1025))
    builder.end()
    return builder.done()


@pytest.mark.parametrize(
    ("pinned", "moved_to", "left", "due"),
    [
        (3, 512, 1, "reproduced"),  # the first batch of 512; what lies behind was never tried
        (600, 1024, 1, "reproduced"),  # the second batch
        (600, 1025, 1, "reproduced"),  # more moved than had to: no contradiction
        (1024, 1025, 1, "reproduced"),  # the last page, a batch of its own
        (3, 300, 213, "unmet"),  # pages of the batch that did not move, and no pin on them
        (600, 512, 512, "unmet"),
    ],
)
def test_only_batches_that_were_tried_count(pinned: int, moved_to: int, left: int, due: str) -> None:
    assert judged(batch_record(1025, pinned, moved_to, left))["verdict"] == due


def test_batches_are_as_long_as_a_page_holds_pointers() -> None:
    """With 64 KiB pages a batch is 8,192 pages: none of 1,025 lies behind it."""
    record = batch_record(1025, 3, 512, 514)
    text = json.dumps({"header": record.header, "events": record.events})
    scaled = json.loads(text)
    scaled["header"]["node"]["page_size"] = 65536
    for event in scaled["events"]:
        for key in ("length",):
            if key in event:
                event[key] *= 16
        if event.get("page_size"):
            event["page_size"] = 65536
        if "ranges" in event:
            event["ranges"] = [[offset * 16, length * 16] for offset, length in event["ranges"]]
    assert judged(Record(scaled["header"], scaled["events"]))["verdict"] == "unmet"


# What is declared, and exit codes


@pytest.mark.parametrize(
    ("declared", "right"),
    [
        ("reproduced", True),
        ("not-reproduced", False),
        ({"verdict": "reproduced", "layer": "page-migration"}, True),
        ({"verdict": ["reproduced", "not-reproduced"]}, True),
        ({"verdict": "reproduced", "layer": "mkey"}, False),
        ({"verdict": "other-failure", "layer": "mkey"}, False),
        ({}, None),
        (None, None),
        (7, None),
    ],
)
def test_as_declared(declared: Any, right: bool | None) -> None:
    record = build.reproduced_record()
    find(record, "scenario-begin")["declared"]["expects"] = {"pin": declared}
    assert judged(record)["as_declared"] is right


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("6.12.118+deb13-amd64", "reproduced"),
        ("5.13.0", "reproduced"),
        ("5.10.0-46-amd64", {"verdict": "not-reproduced", "basis": "kernel"}),
        ("4.19.0", "not-reproduced"),
        ("no version", None),
    ],
)
def test_a_declaration_may_depend_on_the_kernel(kernel: str, expected: Any) -> None:
    record = build.reproduced_record()
    record.header["node"]["kernel"] = kernel
    find(record, "scenario-begin")["declared"]["expects"] = {
        "pin": {
            "kernel>=5.13": "reproduced",
            "kernel==5.10": {"verdict": "not-reproduced", "basis": "kernel"},
            "kernel<5.10": "not-reproduced",
        }
    }
    verdict = judged(record)
    assert verdict["declared"] == expected
    assert verdict["as_declared"] is (None if expected is None else expected == "reproduced")


def test_undecided_is_never_as_declared_unless_it_was() -> None:
    record = build.reproduced_record()
    register(record)["trace"] = None
    assert judged(record)["as_declared"] is None
    find(record, "scenario-begin")["declared"]["expects"] = {"pin": "unmet"}
    assert judged(record)["as_declared"] is True


@pytest.mark.parametrize(
    ("names", "declared", "codes"),
    [
        ([], [], (125, 125)),
        (["not-reproduced"], [True], (0, 0)),
        (["not-reproduced", "reproduced"], [True, True], (10, 0)),
        (["not-reproduced", "reproduced"], [True, False], (10, 10)),
        (["reproduced", "unmet"], [True, None], (10, 125)),
        (["other-failure", "unmet"], [True, None], (11, 125)),
        (["other-failure", "reproduced"], [False, None], (10, 10)),
        (["not-reproduced", "unmet"], [True, None], (125, 125)),
        (["error"], [None], (125, 125)),
        (["from the future"], [None], (125, 125)),
    ],
)
def test_exit_codes(names: list[str], declared: list[bool | None], codes: tuple[int, int]) -> None:
    items = [{"verdict": name, "as_declared": item} for name, item in zip(names, declared, strict=True)]
    verdicts = {"verdicts": items}
    assert (exit_code(verdicts), exit_code(verdicts, expect_declared=True)) == codes


@pytest.mark.parametrize("verdicts", [{}, {"verdicts": None}, {"verdicts": [3]}, {"verdicts": {}}])
def test_no_verdicts_are_undecided(verdicts: dict[str, Any]) -> None:
    assert exit_code(verdicts) == 125


# Records that are cut, killed, of the future


def test_a_killed_run_is_undecided_but_keeps_what_it_proved() -> None:
    record = build.reproduced_record()
    record.events.pop()
    verdicts = judge_record(record)
    assert verdicts["verdicts"][0]["verdict"] == "reproduced"
    assert (verdicts["complete"], exit_code(verdicts)) == (False, 10)
    assert any("run-end" in text for text in verdicts["problems"])
    record = build.kernel_record()
    record.events.pop()
    assert exit_code(judge_record(record)) == 125


def test_scenarios_that_never_began_are_errors() -> None:
    record = build.kernel_record()
    record.header["run"]["names"] = ["pin_then_register", "no_pin"]
    record.events.pop()
    verdicts = judge_record(record)
    assert [(item["scenario"], item["verdict"]) for item in verdicts["verdicts"]] == [
        ("pin_then_register", "not-reproduced"),
        ("no_pin", "error"),
    ]


def test_cut_anywhere_a_record_is_judged() -> None:
    whole = build.reproduced_record()
    for length in range(len(whole.events)):
        verdicts = judge_record(Record(whole.header, whole.events[:length], ["the last line is cut"]))
        assert (
            "reproduced" not in [item["verdict"] for item in verdicts["verdicts"]]
            or length == len(whole.events) - 1
        )
        assert exit_code(verdicts) in (10, 11, 125)


def test_event_types_of_the_future_are_named_and_left_out() -> None:
    record = build.reproduced_record()
    find(record, "free")["event"] = "phase-of-the-moon"
    verdicts = judge_record(record)
    assert verdicts["verdicts"][0]["verdict"] == "reproduced"
    assert any("phase-of-the-moon" in text for text in verdicts["problems"])


def test_other_scenarios_are_judged_though_one_was_cut() -> None:
    first, second = build.reproduced_record(), Builder()
    second.begin("no_pin", contract="none")
    events = first.events[:-1]
    for event in second.events:
        events.append(event | {"seq": len(events) + 1})
    verdicts = judge_record(Record(first.header, events))
    assert [item["verdict"] for item in verdicts["verdicts"]] == ["reproduced", "error"]


def test_the_judge_changes_nothing_and_says_the_same_twice() -> None:
    record = build.reproduced_record()
    before = copy.deepcopy((record.header, record.events))
    assert judge_record(record) == judge_record(record)
    assert (record.header, record.events) == before


def test_the_judge_imports_nothing_but_the_standard_library() -> None:
    allowed = {
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "functools",
        "itertools",
        "re",
        "typing",
        "regrepro",
    }
    for file in Path(regrepro.judge.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                assert module.split(".")[0] in allowed, (file.name, module)
                assert not module.startswith("regrepro") or module.startswith(
                    ("regrepro.judge", "regrepro.errors", "regrepro.record.events", "regrepro.record.parse")
                )


# Whatever a record holds


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _places(item, (*path, key))
    return found


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 10),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.just([[0, 4, 1]]),
    st.just({"pages": 8}),
    st.sampled_from(
        ["EINVAL", "ENOMEM", "cma", "ordinary", "pin", "get", "complete", "off", "finished", "killed"]
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_mutation_crashes_the_judge(data: st.DataObject) -> None:
    maker = data.draw(st.sampled_from([build.reproduced_record, build.longterm_record, build.get_record]))
    record = maker()
    whole: Any = {"header": record.header, "events": record.events}
    for _ in range(data.draw(st.integers(1, 4))):
        places = _places(whole)
        if not places:
            break
        path = places[data.draw(st.integers(0, len(places) - 1))]
        target = whole
        for key in path[:-1]:
            target = target[key]
        if data.draw(st.booleans()):
            target[path[-1]] = copy.deepcopy(data.draw(JUNK))
        elif isinstance(target, list):
            target.pop(path[-1])
        else:
            del target[path[-1]]
    if not isinstance(whole.get("header"), dict) or not isinstance(whole.get("events"), list):
        return
    verdicts = judge_record(Record(whole["header"], whole["events"]))
    json.dumps(verdicts)
    assert exit_code(verdicts) in (0, 10, 11, 125)
    assert exit_code(verdicts, expect_declared=True) in (0, 10, 125)


# Where a proof lives in the record of a pass: without any one of these keys nothing is proven.
VITAL = {
    "scenario-begin": ("event",),
    "buffer": ("event", "buffer", "address", "length"),
    "pin": ("event", "pin", "buffer", "kind", "errno"),
    "register": ("event", "buffer", "errno", "before", "after", "pins", "trace", "address", "length"),
    "release": ("event", "pin", "errno"),
    "scenario-end": ("event", "outcome"),
}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_no_missing_piece_turns_into_reproduced(seed: int, partly: bool) -> None:
    chance = random.Random(seed)
    record = build.partly_pinned_record() if partly else build.reproduced_record()
    events = [
        item for item in record.events if item["event"] in VITAL and item.get("control") != "ordinary-memory"
    ]
    event = chance.choice([item for item in events if item["event"] != "release" or item["control"] is None])
    if event["control"] == "no-pin" and event["event"] == "pin":
        return  # of kind none: it says that nothing happened
    key = chance.choice(VITAL[event["event"]])
    if event["event"] == "register" and event["control"] == "no-pin" and key in ("pins", "trace"):
        return  # nothing was pinned in it, and a success needs no trace
    if event["event"] == "register" and event["registration"] == 2 and key in ("pins", "trace"):
        return
    del event[key]
    assert "reproduced" not in [item["verdict"] for item in judge_record(record)["verdicts"]], (
        event["event"],
        key,
    )


@pytest.mark.parametrize(("left", "verdict"), [([2], "reproduced"), ([2, 3], "unmet")])
def test_a_long_term_pin_that_stood_at_both_tries_changed_nothing(left: list[int], verdict: str) -> None:
    """Half of the pages bear an older FOLL_LONGTERM pin throughout; a pin that is new at the retry counts."""
    builder = build.Builder()
    builder.memory_map()
    builder.begin()
    half, longterm = [*build.OUT[:4], *build.CMA[4:]], {"kind": "longterm", "owner": "io-uring"}
    first = {"offset": 0, "length": 4 * build.PAGE}
    old = build.state(half, [1025] * 4 + [1] * 4)
    held = build.state(half, 1025)
    builder.buffer(build.state(build.CMA))
    builder.pin(build.state(build.CMA), old, 2, **longterm, **first)
    builder.pin(old, held, 1, offset=4 * build.PAGE, length=4 * build.PAGE)
    builder.register(held, held, errno="ENOMEM", pins=[2, 1], trace=build.failing_trace(4))
    builder.release(old)
    if 3 in left:
        old, was = build.state(half, [2049] * 4 + [1] * 4), old
        builder.pin(was, old, 3, **longterm, **first)
    builder.register(
        old, build.state(build.OUT, [2049 + 1024 * (len(left) - 1)] * 4 + [1025] * 4), 2, pins=left
    )
    builder.end()
    build.no_pin_control(builder)
    build.ordinary_control(builder)
    assert judge_record(builder.done())["verdicts"][0]["verdict"] == verdict


def test_pages_that_are_not_there_yet_are_not_a_matter_of_rights() -> None:
    """To run as root helps nobody whose pages were known, and ordinary or absent."""
    for pfns, due in (([0] * 8, "page 0-7 had no frame yet"), (build.OUT, "every page was ordinary")):
        builder = build.Builder()
        builder.memory_map()
        builder.begin("no_pin", contract="none", controls={"with-pin": "pin=pin"})
        builder.buffer(build.state(pfns))
        builder.register(build.state(pfns), build.state(build.OUT, 1025))
        builder.end()
        verdict = judge_record(builder.done())["verdicts"][0]
        assert verdict["verdict"] == "unmet"
        assert due in str(verdict["unmet"])
        assert "as root" not in str(verdict["unmet"])


PRIVATE_FILE = f"{build.ADDRESS:x}-{build.ADDRESS + 8 * build.PAGE:x} rw-p 00000000 00:01 7 /memfd:x"


def test_a_private_mapping_of_a_file_is_copied_and_not_migrated() -> None:
    """Its pages are copied by a write even where nobody else maps them (`do_wp_page`, mm/memory.c)."""
    builder = build.Builder()
    builder.memory_map()
    builder.begin("no_pin", contract="none", expects={"none": "not-reproduced"}, controls={"x": "pin=pin"})
    before = build.state(build.CMA, 2, 1, traits=[[0, 8, "file exclusive"]])
    builder.buffer(before, backing="memfd", vma=PRIVATE_FILE)
    builder.register(before, build.state(build.OUT, 1025))
    builder.end()
    assert "were copied, not migrated" in judge_record(builder.done())["verdicts"][0]["reason"]


def test_a_plain_pin_that_copied_a_file_s_pages_did_not_ask_for_longterm() -> None:
    """Without a trace only the movement tells, and copy-on-write moves pages for any pin."""
    builder = build.Builder()
    builder.memory_map()
    builder.begin("copied", controls={"no-pin": "pin=none"})
    before = build.state(build.CMA, 2, 1, traits=[[0, 8, "file exclusive"]], baseline=[[0, 8, 2]])
    after = build.state(build.OUT, 1025, baseline=[[0, 8, 1]])
    builder.buffer(before, backing="memfd", vma=PRIVATE_FILE)
    untraced = {"status": "unavailable", "why": "no tracefs"}
    builder.pin(before, after, trace=untraced)
    builder.register(after, build.state(build.OUT, 2049, baseline=[[0, 8, 1]]), pins=[1], trace=untraced)
    builder.end()
    verdict = judge_record(builder.done())["verdicts"][0]
    assert verdict["basis"] != "pin"
    assert "copy-on-write" in verdict["reason"]


def test_a_pin_on_what_was_copied_is_not_said_to_come_from_a_fork() -> None:
    """A private mapping of a memfd that is pinned by its shared one: the frames part at the first write."""
    builder = build.Builder()
    builder.memory_map()
    builder.begin("copied", controls={"no-pin": "pin=none"})
    fresh = build.state(build.CMA, 3, 2, traits=[[0, 8, "file shared"]])
    held = build.state(build.CMA, 1027, 2, traits=[[0, 8, "file shared"]])
    builder.buffer(fresh, backing="memfd", vma=PRIVATE_FILE)
    builder.pin(fresh, held)
    builder.register(held, build.state(build.OUT, 1025), pins=[1])
    builder.end()
    reason = judge_record(builder.done())["verdicts"][0]["reason"]
    assert "fork" not in reason
    assert "so that this bug was not tried on them" in reason


@pytest.mark.parametrize(
    ("backing", "maps", "traits", "due"),
    [
        ("anonymous", 1, "anonymous exclusive", "the kernel moved 8 pages out of unpinnable memory"),
        ("anonymous", 8, "anonymous shared", "were copied, not migrated"),
        ("anonymous", 1, "anonymous exclusive ksm", "were copied, not migrated"),
        ("memfd", 2, "file shared", "the kernel moved 8 pages out of unpinnable memory"),
    ],
)
def test_pages_that_were_copied_are_not_told_as_migrated(
    backing: str, maps: int, traits: str, due: str
) -> None:
    """KSM's pages, and a forked process', get other frames by copy-on-write (`do_wp_page`, mm/memory.c)."""
    builder = build.Builder()
    builder.memory_map()
    builder.begin("no_pin", contract="none", expects={"none": "not-reproduced"}, controls={"x": "pin=pin"})
    before = build.state(build.CMA, maps, maps, traits=[[0, 8, traits]])
    builder.buffer(before, backing=backing)
    builder.register(before, build.state(build.OUT, 1025))
    builder.end()
    verdict = judge_record(builder.done())["verdicts"][0]
    assert (verdict["verdict"], verdict["basis"]) == ("not-reproduced", "kernel")
    assert due in verdict["reason"]
