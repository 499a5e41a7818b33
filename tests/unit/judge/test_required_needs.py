"""`--require NEED`: no answer where nothing shows the need to be met, though a verdict is decided."""

from __future__ import annotations

from pathlib import Path

import pytest
import record_builder as build
from click.testing import CliRunner
from record_builder import Record
from run_builder import write

from regrepro import cli
from regrepro.errors import UsageError
from regrepro.judge import answer, judge_record
from regrepro.judge.questions import check_declared, not_shown
from unit.judge.test_questions import fixed


def code(record: Record, need: str, question: str = "reproduce") -> int:
    return answer(judge_record(record), question, record.header, require=[need]).code


@pytest.mark.parametrize(
    ("need", "record", "expected"),
    [
        ("unpinnable", build.placement_record, 125),
        ("cma", build.placement_record, 125),
        ("root", build.placement_record, 0),
        ("cuda", build.kernel_record, 125),
        ("rdma", build.kernel_record, 0),
        ("unpinnable", build.kernel_record, 0),
        ("cuda", fixed, 0),
        ("cuda", build.reproduced_record, 10),
    ],
)
def test_what_is_required_must_be_shown(need: str, record: object, expected: int) -> None:
    assert callable(record)
    assert code(record(), need) == expected


def test_io_uring_in_the_place_of_an_rdma_device_shows_none() -> None:
    [item] = judge_record(build.kernel_record())["verdicts"]
    assert not_shown(["rdma"], [item]) == []
    item["evidence"]["registrar"]["value"]["verb"] = "io_uring_register_buffers"
    assert not_shown(["rdma"], [item]) == ["rdma"]


def test_every_lack_of_a_verdict_counts() -> None:
    verdicts = judge_record(fixed())
    lacks = [{"need": need, "why": "", "how": ""} for need in ("cuda", "peer-memory")]
    item = {"scenario": "gpu", "verdict": "unmet", "pin_owner": "none", "reason": "", "unmet": lacks}
    verdicts["verdicts"].append(item)
    assert answer(verdicts, "driver", fixed().header).code == 0
    assert answer(verdicts, "driver", fixed().header, require=["peer-memory"]).code == 125


def test_a_need_that_no_scenario_has_cannot_be_required() -> None:
    scenarios = {"no_pin": ("root", "registrar", "kernel>=5.13")}
    check_declared(("no_pin", "rdma", "cuda", "kernel", "kernel>=5.13"), scenarios)
    for name in ("peer-memory", "kernel>nonsense", "lab"):
        with pytest.raises(UsageError, match="none tells whether it is met"):
            check_declared((name,), scenarios)


def test_compare_asks_both_sides(tmp_path: Path) -> None:
    one = str(write(tmp_path / "one", build.kernel_record(), verdicts=False))
    for need, expected in (("rdma", 0), ("cuda", 125), ("peer-memory", 2)):
        done = CliRunner().invoke(cli.group, ["compare", one, one, "--require", need])
        found = done.exit_code if not isinstance(done.exception, UsageError) else 2
        assert found == expected, done.output
        assert expected != 125 or "required: cuda" in done.output.splitlines()[-1]
