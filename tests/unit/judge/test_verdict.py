"""Each verdict with what it says, and whatever else a record holds."""

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
from record_builder import Builder, Record, find

import regrepro.judge
from regrepro.judge import exit_code, judge_record
from unit.judge.judging import judged


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
        "enum",
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
                    (
                        "regrepro.judge",
                        "regrepro.errors",
                        "regrepro.kernel_functions",
                        "regrepro.record.events",
                        "regrepro.record.parse",
                    )
                )


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
