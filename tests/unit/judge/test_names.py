"""What a verdict is called by, and that commands know it by each of its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import record_builder as build
from scenario_files import GOOD, load

from regrepro.compare import compare
from regrepro.judge import judge_record, questions
from regrepro.judge.names import name_of, names_of
from regrepro.record import key_of

VARIANT = {"scenario": "file", "variant": "memfd"}


@pytest.mark.parametrize("item", [{"scenario": "file"}, {"scenario": "file", "variant": "default"}])
def test_a_scenario_without_variants_has_one_name(item: dict[str, Any]) -> None:
    assert (name_of(item), names_of(item)) == ("file", ("file",))


def test_each_failure_that_watch_caught_has_a_name_of_its_own() -> None:
    item = {"scenario": "watch", "variant": "default", "failure": "failure-1"}
    assert (name_of(item), names_of(item)) == ("watch (failure-1)", ("watch", "watch (failure-1)"))
    assert key_of(item) == ("watch", "failure-1")


def test_a_variant_is_called_as_its_scenario_file_is(tmp_path: Path) -> None:
    assert (name_of(VARIANT), names_of(VARIANT)) == ("file[memfd]", ("file", "file[memfd]", "file_memfd"))
    [one] = load(tmp_path, GOOD.replace("timeout=30", 'variants={"memfd": {}}').replace("mine", "file"))
    assert (one.name, one.function, *one.names) == (
        name_of(VARIANT),
        *names_of(VARIANT)[:1],
        *names_of(VARIANT)[1:],
    )


def verdicts(**labels: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return header and verdicts of a run that reproduced the bug, under other labels."""
    record = build.reproduced_record()
    for event in record.events:
        if "scenario" in event:
            event.update(labels)
    return record.header, judge_record(record)


@pytest.mark.parametrize(
    ("required", "state"),
    [
        ((), "aside"),
        (("file",), "undecided"),
        (("file[memfd]",), "undecided"),
        (("file_memfd",), "undecided"),
    ],
)
def test_what_is_required_may_be_said_by_each_name(required: tuple[str, ...], state: str) -> None:
    """Where an optional need is not met, only what is required is undecided."""
    item = VARIANT | {"verdict": "unmet", "unmet": [{"need": "peer-memory"}], "reason": "no peer-memory"}
    assert questions.standing(item, "reproduce", {}, require=required).state == state
    assert bool(questions.answer({"verdicts": [item]}, require=required).text.count("file[memfd]"))


def test_a_variant_is_compared_with_the_scenario_that_it_once_was() -> None:
    comparison = compare(*verdicts(scenario="file_memfd"), *verdicts(**VARIANT))
    [change] = comparison.changes
    assert comparison.answer.endswith(": file[memfd]")
    assert (change.scenario, change.part, change.direction) == ("file", "memfd", "same")


def test_a_variant_that_was_never_begun_is_no_success() -> None:
    record = build.reproduced_record()
    record.header["run"]["names"] = ["pin_then_register", "file[memfd]"]
    last = judge_record(record)["verdicts"][-1]
    assert (last["scenario"], last["variant"], last["verdict"]) == ("file", "memfd", "error")
    assert last["reason"].startswith("file[memfd] was asked for, but the run ended before it began")
