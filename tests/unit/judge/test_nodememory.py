"""A map that shows no unpinnable memory, and what overrules it."""

from __future__ import annotations

from typing import Any

import pytest
from record_builder import CMA, OUT, Builder, state

from regrepro.judge import judge_record

MIGRATED = {
    "t": 1.0,
    "tracepoint": "mm_migrate_pages",
    "fields": {"nr_succeeded": 8, "nr_failed": 0, "mode": "MIGRATE_SYNC", "reason": "longterm_pin"},
}


def onlined() -> dict[str, Any]:
    """Pages in a memory block that became movable since the map was drawn."""
    return state(CMA, place=[[0, len(CMA), "movable-zone"]])


def verdict(
    *checks: dict[str, Any],
    pages: dict[str, Any] | None = None,
    map_says: bool | None = False,
    **register: Any,
) -> dict[str, Any]:
    """One pass without a pin on a node whose map shows no unpinnable memory; `checks`: its second looks."""
    builder = Builder()
    builder.memory_map(has_unpinnable=map_says)
    builder.begin(contract="none", controls={})
    before = pages or state(OUT)
    builder.buffer(before, placed="none-on-node")
    builder.register(before, state(OUT, 1025), **register)
    for keys in checks:
        builder.map_check(**keys)
    builder.end()
    return next(iter(judge_record(builder.done())["verdicts"]))


def test_a_map_that_held() -> None:
    found = verdict({})
    assert (found["verdict"], found["basis"]) == ("not-reproduced", "placement")
    assert found["evidence"]["memory_map"]["value"]["after_the_pass"] is False


def test_a_record_of_a_version_that_did_not_look_again() -> None:
    assert verdict()["basis"] == "placement"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"has_unpinnable": True}, "there was unpinnable memory"),
        ({"has_unpinnable": None}, "not known"),
        ({"complete": False, "problems": ["closed"]}, "closed"),
        ({"changed": True}, "zones changed"),
        ({"changed": None}, "zones changed"),
        ({"block_events": 2}, "2 times"),
    ],
)
def test_a_map_that_did_not_hold(keys: dict[str, Any], why: str) -> None:
    found = verdict(keys)
    assert (found["verdict"], found["basis"]) == ("unmet", None)
    assert why in found["reason"]


def test_block_events_that_nobody_could_count_take_nothing_away() -> None:
    assert verdict({"block_events": None})["basis"] == "placement"


@pytest.mark.parametrize("checks", [(), ({},)], ids=["an old record", "the map held"])
def test_a_migration_for_a_pin_overrules_the_map(checks: tuple[dict[str, Any], ...]) -> None:
    trace = {"status": "complete", "events": [MIGRATED], "tree": [], "missing": [], "misses": 0, "overrun": 0}
    found = verdict(*checks, trace=trace)
    assert found["verdict"] == "unmet"
    assert any("shows a migration" in need["why"] for need in found["unmet"])


@pytest.mark.parametrize("checks", [(), ({"has_unpinnable": True, "changed": True, "block_events": 2},)])
def test_pages_that_were_unpinnable_all_the_same_are_judged_as_such(
    checks: tuple[dict[str, Any], ...],
) -> None:
    found = verdict(*checks, pages=onlined())
    assert (found["verdict"], found["basis"]) == ("not-reproduced", "kernel")
    assert "moved" in found["reason"]


def test_what_another_pass_saw_counts_unless_its_own_look_tells_of_it() -> None:
    for keys, basis in (({}, None), ({"has_unpinnable": True, "changed": True}, "placement")):
        builder = Builder()
        builder.memory_map(has_unpinnable=False)
        for scenario, pages, check in (("first", state(OUT), {}), ("second", onlined(), keys)):
            builder.begin(scenario, contract="none", controls={})
            builder.buffer(pages, placed="as-allocated")
            builder.register(pages, state(OUT, 1025))
            builder.map_check(**check)
            builder.end()
        assert judge_record(builder.done())["verdicts"][0]["basis"] == basis


def test_a_pass_without_its_look_in_a_record_that_has_them() -> None:
    builder = Builder()
    builder.memory_map(has_unpinnable=False)
    for scenario in ("first", "second"):
        builder.begin(scenario, contract="none", controls={})
        builder.buffer(state(OUT), placed="as-allocated")
        builder.register(state(OUT), state(OUT, 1025))
        if scenario == "second":
            builder.map_check()
        builder.end()
    first, second = judge_record(builder.done())["verdicts"]
    assert first["verdict"] == "unmet" and "not looked at again" in first["reason"]
    assert second["basis"] == "placement"


def test_each_pass_has_the_map_that_was_there_when_it_began() -> None:
    builder = Builder()
    builder.memory_map(has_unpinnable=False)
    builder.begin("first", contract="none", controls={})
    builder.buffer(state(OUT), placed="as-allocated")
    builder.register(state(OUT), state(OUT, 1025))
    builder.map_check()
    builder.end()
    builder.memory_map(has_unpinnable=True)
    assert judge_record(builder.done())["verdicts"][0]["basis"] == "placement"
