"""The main job on real kernels: the table of verdicts that the README promises, one boot for each row."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import regrepro
from regrepro.judge.names import names_of
from regrepro.record import read_record

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]

SCHEMAS = Path(regrepro.__file__).parent / "schema"
ALL = (
    "pin_then_register",
    "register_then_pin",
    "no_pin",
    "longterm_pin_then_register",
    "get_reference_then_register",
    "one_page_of_many",
    "release_and_retry",
)
# Verdict, basis and pin owner on unpinnable memory, by a kernel that keeps to it (5.13 and later).
REFUSING = {
    "pin_then_register": ("reproduced", None, "process-vm"),
    "register_then_pin": ("not-reproduced", "kernel", "process-vm"),
    "no_pin": ("not-reproduced", "kernel", "none"),
    "longterm_pin_then_register": ("not-reproduced", "pin", "io-uring"),
    "get_reference_then_register": ("reproduced", None, "vmsplice"),
    "one_page_of_many": ("reproduced", None, "process-vm"),
    "release_and_retry": ("reproduced", None, "process-vm"),
}


@dataclass
class Row:
    """One boot, and what it must end in: exit code, verdict by scenario."""

    name: str
    arguments: list[str]
    exit_code: int
    verdicts: dict[str, tuple[str, str | None, str]]
    scenarios: tuple[str, ...] = field(default=("pin_then_register",))


def everywhere(verdict: str, basis: str | None) -> dict[str, tuple[str, str | None, str]]:
    """The same verdict for every scenario, each with its own pin owner."""
    return {name: (verdict, basis, REFUSING[name][2]) for name in ALL}


# The policy, and huge and file pages; a file on a disk is refused by another rule since 6.5.
PLACED = {
    "placement_policy": ("not-reproduced", "kernel", "none"),
    **dict.fromkeys(
        ("huge_thp", "huge_hugetlb", "file_memfd", "file_shm"), ("reproduced", None, "process-vm")
    ),
    "file_on_disk": ("other-failure", None, "process-vm"),
}
ONE = {"pin_then_register": REFUSING["pin_then_register"]}
TWO_NODES = ["--numa", "2", "--memory", "8G"]
ROWS = [
    Row("7.3, hugetlb_cma=2G on two nodes", ["--kernel", "7.3", "--boot", "hugetlb_cma=2G", *TWO_NODES], 10,
        REFUSING, ALL),
    Row("7.3, hugetlb_cma=0", ["--kernel", "7.3", "--boot", "hugetlb_cma=0"], 0,
        everywhere("not-reproduced", "placement"), ALL),
    Row("7.3, cma=512M", ["--kernel", "7.3", "--boot", "cma=512M", "--memory", "2G"], 10,
        PLACED | ONE, (*PLACED, *ONE)),  # the policy is measured in a guest that nothing has filled yet
    Row("6.12, movablecore=512M", ["--kernel", "6.12", "--boot", "movablecore=512M"], 10, REFUSING, ALL),
    Row("6.1, movablecore=512M", ["--kernel", "6.1", "--boot", "movablecore=512M"], 10, REFUSING, ALL),
    Row("5.10, movablecore=512M", ["--kernel", "5.10", "--boot", "movablecore=512M"], 0,
        {"pin_then_register": ("not-reproduced", "kernel", "process-vm")}),
    Row("7.3, online-movable", ["--kernel", "7.3", "--place", "online-movable"], 10, ONE),
    Row("6.12, online-movable", ["--kernel", "6.12", "--place", "online-movable"], 10, ONE),
    Row("6.1, online-movable", ["--kernel", "6.1", "--place", "online-movable"], 10, ONE),
]  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "regrepro", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def panicked(out: Path) -> bool:
    """Whether the record says that the guest panicked."""
    return any(event["what"] == "panic" for event in read_record(out).of("lab"))


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_boot_ends_in_the_verdicts_that_it_should(row: Row, tmp_path: Path) -> None:
    out = tmp_path / "run"
    cpus = ["--cpus", "2" if "--numa" in row.arguments else "1"]
    for attempt in (1, 2):  # as conftest.Lab.boot does, and for the same reason
        done = run("lab", "run", *row.scenarios, *row.arguments, *cpus, "--out", str(out))
        if attempt == 2 or not panicked(out):
            break
        warnings.warn(f"{row.name}: the guest panicked\n{done.stderr}", stacklevel=2)
        shutil.rmtree(out)
    told = f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in told, told
    verdicts = json.loads((out / "verdicts.json").read_text(encoding="utf-8"))
    found = {
        names_of(item)[-1]: (item["verdict"], item["basis"], item["pin_owner"])
        for item in verdicts["verdicts"]
    }
    assert found == row.verdicts, told
    assert done.returncode == row.exit_code, told
    jsonschema.validate(verdicts, schema("verdicts-1.json"))
    check = jsonschema.Draft202012Validator(schema("record-2.json"))
    lines = (out / "record.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        check.validate(json.loads(line))
    for item in verdicts["verdicts"]:
        if item["verdict"] == "reproduced":
            hold_evidence(item)
    hold_steps([json.loads(line) for line in lines])

    # The record alone gives the same again, wherever it lies.
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.copy(out / "record.jsonl", moved)
    again = run("judge", str(moved), "--json")
    assert again.returncode == row.exit_code
    assert json.loads(again.stdout) == verdicts


def hold_steps(events: list[dict[str, Any]]) -> None:
    """CMA comes once it is half of what is free; gigantic pages come once the pin is gone."""
    steps = [event for event in events if event.get("event") == "step" and event.get("control") is None]
    policy = [step for step in steps if step["name"] == "placement-policy"]
    for step in policy:
        share = step["free_cma"] / step["free"]
        if share < 0.48:
            assert step["cma"] <= step["touched"] * 0.05, step
        elif share > 0.505:
            assert step["cma"] > step["touched"] * 0.4, step
    assert not policy or any(step["cma"] for step in policy)
    for step in steps:
        if step["name"] == "gigantic-pages":
            assert (step["got"] == step["asked"]) is (step["when"] == "released"), step


def hold_evidence(item: dict[str, Any]) -> None:
    """A proof has every part, each observed, and its controls held."""
    evidence = item["evidence"]
    for name in (
        "placement",
        "pages",
        "pages_unpinnable",
        "pages_pinned",
        "pages_unmoved",
        "references",
        "pins",
        "release",
    ):
        assert evidence[name]["how"] in ("observed", "stand-in"), (item["scenario"], name, evidence[name])
    assert evidence["trace"]["how"] == "observed", (item["scenario"], evidence["trace"])
    assert item["errno"] == "ENOMEM"
    assert item["layer"] == "page-migration"
    assert item["controls"], item["scenario"]
    assert all(control["held"] for control in item["controls"])
