"""Successes and long-term pins: what proves them, and what only looks as if it did."""

from __future__ import annotations

from typing import Any

import pytest
import record_builder as build
from record_builder import CMA, OUT, PAGE, Builder, find, state

from regrepro.judge import judge_record
from unit.judge.judging import judged, register


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
