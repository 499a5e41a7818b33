"""Comparing runs: direction, what is proven, what goes with it, and exit codes."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from record_builder import (
    Record,
    kernel_record,
    longterm_record,
    placement_record,
    reproduced_record,
    write,
)

from regrepro import judge
from regrepro.compare import Comparison, compare, differences, exit_code
from regrepro.compare.commands import compare as command
from regrepro.views import comparison as view

SCHEMA = json.loads((Path(view.__file__).parents[1] / "schema/comparison-1.json").read_text(encoding="utf-8"))


def side(record: Record, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and verdicts of one run; `changes` replace keys of each verdict, `node__x` node facts."""
    header = copy.deepcopy(record.header)
    verdicts = copy.deepcopy(judge.judge_record(record))
    for key, value in changes.items():
        if key.startswith("node__"):
            header["node"][key.removeprefix("node__")] = value
        elif key.startswith("run__"):
            header["run"][key.removeprefix("run__")] = value
        else:
            for item in verdicts["verdicts"]:
                item[key] = value
    for item in verdicts["verdicts"]:
        item["scenario"] = "pin_then_register"
    return header, verdicts


def compared(
    before: tuple[Any, Any], after: tuple[Any, Any], question: str = "node", **terms: Any
) -> Comparison:
    found = compare(*before, *after, question, **terms)
    jsonschema.validate(found.as_json(), SCHEMA)
    return found


def only(found: Comparison) -> Any:
    assert len(found.changes) == 1
    return found.changes[0]


def test_the_builders_records_are_what_the_cases_below_need() -> None:
    found = [
        (item["verdict"], item["basis"])
        for record in (reproduced_record(), longterm_record(), placement_record(), kernel_record())
        for item in judge.judge_record(record)["verdicts"]
    ]
    assert found == [
        ("reproduced", None),
        ("not-reproduced", "pin"),
        ("not-reproduced", "placement"),
        ("not-reproduced", "kernel"),
    ]


def test_a_pin_that_now_asks_for_longterm_is_fixed() -> None:
    before = side(reproduced_record(), pin_owner="standin:pin", run__cuda="standin:pin")
    after = side(longterm_record(), pin_owner="standin:longterm", run__cuda="standin:longterm")
    found = compared(before, after)
    change = only(found)
    assert (change.direction, change.proven) == ("better", True)
    assert "fixed" in change.reason
    assert "run.cuda: standin:pin → standin:longterm" in change.reason
    assert "the only change" in change.reason
    assert exit_code(found) == 0


def test_a_driver_upgrade_is_named_as_what_goes_with_it() -> None:
    before = side(reproduced_record(), pin_owner="cuda", node__nvidia_driver="535.104.05")
    after = side(longterm_record(), pin_owner="cuda", node__nvidia_driver="550.67")
    change = only(compared(before, after))
    assert (change.direction, change.proven) == ("better", True)
    assert "535.104.05 → 550.67" in change.reason


def test_without_unpinnable_memory_nothing_is_said_of_the_driver() -> None:
    found = compared(side(reproduced_record()), side(placement_record(), pin_owner="process-vm"), "reproduce")
    change = only(found)
    assert (change.direction, change.proven) == ("cannot-tell", False)
    assert "nothing of the driver" in change.reason
    assert exit_code(found) == 125


def test_nor_when_it_is_the_run_before_that_had_none() -> None:
    found = compared(side(placement_record(), pin_owner="process-vm"), side(reproduced_record()), "reproduce")
    assert only(found).direction == "cannot-tell"
    assert exit_code(found) == 125


def test_a_newer_kernel_that_refuses_is_worse() -> None:
    before = side(kernel_record(), node__kernel="5.10.0-46-amd64")
    after = side(reproduced_record(), node__kernel="6.1.0-57-amd64")
    found = compared(before, after)
    change = only(found)
    assert (change.direction, change.proven) == ("worse", True)
    assert "5.10.0-46-amd64 → 6.1.0-57-amd64" in change.reason
    assert exit_code(found) == 10


def test_different_kinds_of_pins_prove_nothing() -> None:
    before = side(reproduced_record(), pin_owner="process-vm")
    after = side(longterm_record(), pin_owner="cuda")
    change = only(compared(before, after))
    assert (change.direction, change.proven) == ("cannot-tell", False)
    assert "process-vm" in change.reason
    assert "cuda" in change.reason


@pytest.mark.parametrize("verdict", ["unmet", "error"])
def test_two_undecided_runs_cannot_be_told_apart(verdict: str) -> None:
    undecided = side(reproduced_record(), verdict=verdict, reason="no root")
    found = compared(undecided, undecided)
    change = only(found)
    assert change.direction == "cannot-tell"
    assert change.reason.count("no root") == 2
    assert exit_code(found) == 125


@pytest.mark.parametrize("make", [reproduced_record, longterm_record, placement_record, kernel_record])
def test_a_run_is_the_same_as_itself(make: Callable[[], Record]) -> None:
    found = compared(side(make()), side(make()))
    assert found.facts == []
    assert (only(found).direction, only(found).proven) == ("same", True)
    assert exit_code(found) == 0


def test_the_same_verdict_on_another_basis_is_the_same_but_not_proven() -> None:
    found = compared(
        side(longterm_record(), pin_owner="process-vm"), side(placement_record(), pin_owner="process-vm")
    )
    assert (only(found).direction, only(found).proven) == ("same", False)
    assert "placement" in only(found).reason


def test_another_failure_is_neither_better_nor_worse() -> None:
    after = side(reproduced_record(), verdict="other-failure", layer="cuda-pin")
    found = compared(side(reproduced_record()), after)
    assert only(found).direction == "cannot-tell"
    assert exit_code(found) == 125


def test_a_scenario_that_ran_on_one_side_only_cannot_be_told() -> None:
    header, verdicts = side(reproduced_record())
    found = compared((header, verdicts), (header, {"verdicts": [], "problems": []}))
    assert only(found).reason == "it did not run after"
    assert exit_code(found) == 125


def test_nothing_at_all_is_not_green() -> None:
    header, _ = side(reproduced_record())
    empty: dict[str, Any] = {"verdicts": [], "problems": []}
    assert exit_code(compared((header, empty), (header, empty))) == 125


def test_worse_wins_over_cannot_tell() -> None:
    one, other = side(kernel_record()), side(reproduced_record())
    extra = {**other[1]["verdicts"][0], "scenario": "new_one"}
    other[1]["verdicts"].append(extra)
    assert exit_code(compared(one, other)) == 10


def test_no_difference_of_facts_asks_for_another_run() -> None:
    same = {"node__kernel": "7.3.4"}
    change = only(compared(side(kernel_record(), **same), side(reproduced_record(), **same)))
    assert "no recorded fact differs" in change.reason


def test_boot_arguments_are_compared_without_noise() -> None:
    one = {"node": {"cmdline": "BOOT_IMAGE=/boot/a root=UUID=1 ro quiet hugetlb_cma=6G"}, "lab": None}
    other = {"node": {"cmdline": "BOOT_IMAGE=/boot/b root=UUID=2 ro hugetlb_cma=0"}, "lab": None}
    (found,) = differences(one, other)
    assert (found.topic, found.before, found.after) == ("boot", ["hugetlb_cma=6G"], ["hugetlb_cma=0"])


def test_not_knowing_a_fact_is_a_difference() -> None:
    one = {"node": {"nvidia_driver": "550.67"}}
    (found,) = differences(one, {"node": {}})
    assert found.sentence() == "node.nvidia_driver: 550.67 → not known"


def test_the_command_says_it_in_words_and_by_its_exit_code(tmp_path: Path) -> None:
    before, after = write(tmp_path / "a", kernel_record()), write(tmp_path / "b", reproduced_record())
    done = CliRunner().invoke(command, [str(before), str(after)])
    assert done.exit_code == 10, done.output
    assert "→" in done.output
    again = CliRunner().invoke(command, [str(after), str(after), "--json"])
    assert again.exit_code == 0
    jsonschema.validate(json.loads(again.output), SCHEMA)


def test_the_view_opens_with_the_answer() -> None:
    out = io.StringIO()
    view.show(compared(side(kernel_record()), side(reproduced_record())).as_json(), out, width=80)
    text = out.getvalue()
    assert text.startswith("Worse than before.")
    assert "WORSE" in text
    assert max(len(line) for line in text.splitlines()) <= 100


# The question


def of_driver(record: Record, contract: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One side in the lab, its pin the chosen stand-in's."""
    name = f"standin:{contract}"
    header, verdicts = side(record, pin_owner=name, run__cuda=name, **changes)
    return {**header, "lab": {"boot": []}}, verdicts


@pytest.mark.parametrize(
    ("question", "rolled_out", "taken_back"),
    [("node", 0, 10), ("reproduce", 125, 125), ("driver", 125, 125), ("kernel", 125, 125)],
)
def test_taking_unpinnable_memory_away_is_better_for_the_node_alone(
    question: str, rolled_out: int, taken_back: int
) -> None:
    """The write-up's own roll-out: hugetlb_cma=2G, then 0."""
    before, after = of_driver(reproduced_record(), "pin"), of_driver(placement_record(), "pin")
    there = compared(before, after, question)
    back = compared(after, before, question)
    assert (exit_code(there), exit_code(back)) == (rolled_out, taken_back)
    assert f"Exit code {rolled_out}:" in there.line and there.line.startswith(f"Asked {question}")
    if question == "node":
        assert (only(there).direction, only(back).direction) == ("better", "worse")
        assert "says nothing of the driver" in only(there).reason


@pytest.mark.parametrize(("question", "there", "back"), [("driver", 0, 10), ("node", 0, 10)])
def test_a_driver_that_is_fixed_or_broken(question: str, there: int, back: int) -> None:
    old, fixed = of_driver(reproduced_record(), "pin"), of_driver(longterm_record(), "longterm")
    assert exit_code(compared(old, fixed, question)) == there
    assert exit_code(compared(fixed, old, question)) == back


def test_pins_of_our_own_say_nothing_of_a_driver() -> None:
    old, new = side(reproduced_record()), side(kernel_record())
    assert exit_code(compared(old, new, "driver")) == 125
    assert exit_code(compared(old, old, "driver")) == 125
    assert exit_code(compared(old, new, "kernel")) == 0
    assert exit_code(compared(new, old, "kernel")) == 10


def lacking(given: tuple[Any, Any], need: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same run, and a second scenario in it that lacks a need."""
    header, verdicts = copy.deepcopy(given)
    item = copy.deepcopy(verdicts["verdicts"][0])
    item |= {"scenario": "gpu_buffer_peermem", "verdict": "unmet", "pin_owner": "none", "basis": None}
    item |= {"reason": f"{need} is not met", "unmet": [{"need": need, "why": "it is not there", "how": ""}]}
    verdicts["verdicts"].append(item)
    return header, verdicts


@pytest.mark.parametrize("need", ["peer-memory", "dmabuf"])
def test_a_run_is_the_same_as_itself_without_what_is_optional(need: str) -> None:
    run = lacking(side(longterm_record()), need)
    found = compared(run, run)
    assert exit_code(found) == 0
    assert [change.counts for change in found.changes] == [True, False]
    assert exit_code(compared(run, run, require=[need])) == 125
    assert exit_code(compared(run, run, require=["gpu_buffer_peermem"])) == 125


@pytest.mark.parametrize("question", ["node", "driver", "reproduce"])
def test_a_run_that_was_killed_is_no_success(question: str) -> None:
    whole = side(longterm_record())
    cut = whole[0], {**whole[1], "complete": False}
    for before, after, says in ((whole, cut, "after"), (cut, whole, "before")):
        found = compared(before, after, question)
        assert exit_code(found) == 125
        assert f"the run {says} did not reach its end" in found.line
    worse = side(reproduced_record())
    assert exit_code(compared(whole, (worse[0], {**worse[1], "complete": False}))) == exit_code(
        compared(whole, worse)
    )


def test_what_is_not_optional_can_be_allowed() -> None:
    run = lacking(side(longterm_record()), "cuda")
    assert exit_code(compared(run, run)) == 125
    assert exit_code(compared(run, run, allow_unmet=["cuda"])) == 0


def test_nothing_but_what_is_optional_is_no_answer() -> None:
    header, verdicts = lacking(side(longterm_record()), "peer-memory")
    del verdicts["verdicts"][0]
    found = compared((header, verdicts), (header, verdicts))
    assert exit_code(found) == 125
    assert "nothing in the two tells of it" in found.line


def test_an_rdma_device_that_is_gone_is_not_the_same() -> None:
    before = side(longterm_record())
    after = copy.deepcopy(before)
    after[1]["verdicts"][0]["evidence"]["registrar"]["value"]["verb"] = "io_uring_register_buffers"
    found = compared(before, after)
    assert only(found).direction == "cannot-tell" and "RDMA device" in only(found).reason
    assert exit_code(compared(before, after, "reproduce")) == 0  # the same pin by the same kernel
    assert exit_code(compared(after, after)) == 0
