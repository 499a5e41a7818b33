"""What is declared, and exit codes."""

from __future__ import annotations

from typing import Any

import pytest
import record_builder as build
from record_builder import find

from regrepro.judge import exit_code
from unit.judge.judging import judged, register


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
