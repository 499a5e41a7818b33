"""The matrix: which cells run, which are kept, how many at a time, what is shown; no machine is booted."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from regrepro.errors import UsageError
from regrepro.lab import matrix as engine
from regrepro.lab.commands import lab
from regrepro.views import matrix as view

UNIT = Path(__file__).parents[1]

# Stands in for `python -m regrepro lab run`: writes the record that a kernel of this series would give.
WORKER = textwrap.dedent(
    """
    import json, os, sys, time
    sys.path.insert(0, {unit!r})
    import record_builder as build
    given = dict(zip(sys.argv, sys.argv[1:]))
    out, kernel, pin, boot = given["--out"], given["--kernel"], given["--cuda"], given.get("--boot", "")
    with open({log!r}, "a") as log:
        log.write(f"begin {{kernel}} {{boot}} {{pin}}\\n")
    time.sleep({sleep})
    if kernel == "broken":
        print("regrepro: no kernel 'broken' (did you mean 6.1?)", file=sys.stderr)
        sys.exit(2)
    if kernel == "panics":
        record = build.reproduced_record().__class__(build.header(kernel="9.9"), [], [])
    elif not boot:
        record = build.placement_record()
    elif kernel == "5.10":
        record = build.kernel_record()
    else:
        record = build.longterm_record() if pin == "standin:longterm" else build.reproduced_record()
    for event in record.events:
        if "scenario" in event:
            event["scenario"] = "pin_then_register"
    with open(os.path.join(out, "record.jsonl"), "w") as file:
        for line in [record.header, *record.events]:
            file.write(json.dumps(line) + "\\n")
    with open({log!r}, "a") as log:
        log.write(f"end {{kernel}} {{boot}} {{pin}}\\n")
    """
)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in in the place of `lab run`; return the log of what it was asked."""
    log = tmp_path / "log"
    log.write_text("")
    monkeypatch.setattr(engine.Plan, "command", command_of(log))
    return log


def command_of(log: Path, sleep: float = 0.0) -> Any:
    real = engine.Plan.command

    def command(self: engine.Plan, cell: engine.Cell, out: Path) -> list[str]:
        arguments = real(self, cell, out)[5:]
        code = WORKER.format(unit=str(UNIT), log=str(log), sleep=sleep)
        return [sys.executable, "-c", code, *arguments]

    return command


def small(**keys: Any) -> engine.Plan:
    return engine.Plan(**{"kernels": ("5.10", "6.1"), "boots": ("", "movablecore=512M"), **keys})


def cells_of(matrix: dict[str, Any]) -> dict[tuple[str, str, str], tuple[str, str | None]]:
    return {
        (cell["kernel"], cell["boot"], cell["pin"]): (item["verdict"], item["basis"])
        for cell in matrix["cells"]
        for item in cell["verdicts"]
    }


def test_every_cell_gets_its_verdict(worker: Path, tmp_path: Path) -> None:
    matrix = engine.run_matrix(small(), tmp_path / "m")
    found = cells_of(matrix)
    assert len(found) == 8
    assert found["6.1", "movablecore=512M", "standin:pin"] == ("reproduced", None)
    assert found["6.1", "movablecore=512M", "standin:longterm"] == ("not-reproduced", "pin")
    assert found["5.10", "movablecore=512M", "standin:pin"] == ("not-reproduced", "kernel")
    assert found["6.1", "", "standin:pin"] == ("not-reproduced", "placement")
    assert engine.exit_code(matrix) == 10
    for cell in matrix["cells"]:
        assert (tmp_path / "m" / cell["run"] / "record.jsonl").is_file()
    assert json.loads((tmp_path / "m" / "matrix.json").read_text()) == matrix


def test_the_schema_holds(worker: Path, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(view.__file__).parents[1] / "schema/matrix-1.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    matrix = engine.run_matrix(small(kernels=("broken", "6.1"), boots=("",)), tmp_path / "m")
    jsonschema.validate(matrix, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**matrix, "cells": [{}]}, schema)


def test_it_goes_on_where_it_was(worker: Path, tmp_path: Path) -> None:
    out = tmp_path / "m"
    engine.run_matrix(small(kernels=("6.1",)), out)
    assert worker.read_text().count("begin") == 4
    told: list[str] = []
    engine.run_matrix(small(), out, tell=told.append)
    assert worker.read_text().count("begin") == 8  # the four of 5.10 only
    assert told == ["4 of 8 cells were run before and are kept"]
    # A run that was cut is done again; so is one that left no record.
    cut = out / "6.1" / "no-arguments" / "gather" / "standin-pin" / "record.jsonl"
    cut.write_bytes(cut.read_bytes()[:-5])
    (out / "5.10" / "no-arguments" / "gather" / "standin-pin" / "record.jsonl").unlink()
    matrix = engine.run_matrix(small(), out)
    assert worker.read_text().count("begin") == 10
    assert all(cell["complete"] for cell in matrix["cells"])


def test_undecided_cells_are_done_again_only_when_asked(worker: Path, tmp_path: Path) -> None:
    out = tmp_path / "m"
    engine.run_matrix(small(kernels=("6.1",)), out)
    file = out / "6.1" / "no-arguments" / "gather" / "standin-pin" / "record.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line.get("event") == "memory-map":
            line |= {"complete": False, "has_unpinnable": None}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    matrix = engine.run_matrix(small(kernels=("6.1",)), out)
    assert cells_of(matrix)["6.1", "", "standin:pin"][0] == "unmet"
    assert worker.read_text().count("begin") == 4
    assert engine.exit_code(matrix) == 10  # something was found elsewhere
    matrix = engine.run_matrix(small(kernels=("6.1",), retry=True), out)
    assert cells_of(matrix)["6.1", "", "standin:pin"][0] == "not-reproduced"
    assert worker.read_text().count("begin") == 5


def test_a_cell_that_cannot_run_does_not_stop_the_others(worker: Path, tmp_path: Path) -> None:
    matrix = engine.run_matrix(small(kernels=("broken", "panics", "6.1"), boots=("",)), tmp_path / "m")
    states = {(cell["kernel"], cell["pin"]): cell for cell in matrix["cells"]}
    assert states["broken", "standin:pin"]["state"] == "failed"
    assert states["broken", "standin:pin"]["why"] == "no kernel 'broken' (did you mean 6.1?)"
    assert states["panics", "standin:pin"]["complete"] is False
    assert states["6.1", "standin:pin"]["verdicts"][0]["verdict"] == "not-reproduced"
    assert engine.exit_code(matrix) == 125
    text = io.StringIO()
    view.grid(matrix).show(text)
    assert "could not be run" in text.getvalue()
    assert "no kernel 'broken'" in text.getvalue()


@pytest.mark.parametrize(
    ("machine", "jobs", "most"),
    [
        ((4, 1 << 40), None, 2),
        ((1, 1 << 40), None, 1),
        ((64, 6 << 30), None, 1),
        ((64, 1 << 40), 3, 3),
        ((64, 1 << 40), None, 4),
    ],
)
def test_as_many_at_a_time_as_fit(
    machine: tuple[int, int], jobs: int | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines of 2 CPUs and 2 GiB on one of so many cores and so much free memory."""
    log = tmp_path / "log"
    log.write_text("")
    monkeypatch.setattr(engine.Plan, "command", command_of(log, sleep=0.5))
    monkeypatch.setattr(engine.os, "cpu_count", lambda: machine[0])
    monkeypatch.setattr(engine, "available_memory", lambda: machine[1])
    options = engine.LabOptions(memory=2 << 30, cpus=2)
    monkeypatch.setattr(engine.Plan, "lab_options", lambda self, cell: options)
    running, top = 0, 0

    def started(_: engine.Cell) -> None:
        nonlocal running, top
        running += 1
        top = max(top, running)

    def finished(_: engine.Result) -> None:
        nonlocal running
        running -= 1

    engine.run_matrix(small(kernels=("6.1",)), tmp_path / "m", jobs=jobs, started=started, finished=finished)
    assert top == most


def test_a_signal_ends_the_machines_and_keeps_what_was_run(tmp_path: Path) -> None:
    """In a process of its own: it gets SIGTERM while a cell runs."""
    log = tmp_path / "log"
    log.write_text("")
    script = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(UNIT)!r})
        from unit.lab import test_matrix
        from pathlib import Path
        from regrepro.lab import matrix as engine
        engine.os.cpu_count = lambda: 2
        engine.Plan.command = test_matrix.command_of(Path({str(log)!r}), sleep=30)
        engine.run_matrix(test_matrix.small(), Path({str(tmp_path / "m")!r}), jobs=1)
        """
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while "begin" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert "Interrupted" in errors
    assert "it goes on where it was" in errors
    assert "end" not in log.read_text()
    assert [cell["state"] for cell in json.loads((tmp_path / "m" / "matrix.json").read_text())["cells"]] == [
        "waiting"
    ] * 8


def test_a_cell_runs_the_command_that_a_person_would(tmp_path: Path) -> None:
    plan = engine.Plan(scenarios=("one_page_of_many",), memory=4 << 30, timeout=90.0, cpus=1)
    cell = engine.Cell("6.12", "movablecore=512M", "gather", "standin:longterm")
    command = plan.command(cell, tmp_path)
    assert command[1:5] == ["-m", "regrepro", "lab", "run"]
    arguments = CliRunner().invoke(lab, ["run", *command[5:], "--help"])
    assert arguments.exit_code == 0  # click knows every one of them
    assert command[5] == "one_page_of_many"
    pairs = dict(pairwise(command))
    assert (pairs["--kernel"], pairs["--boot"], pairs["--cuda"]) == ("6.12", "movablecore=512M", cell.pin)
    assert (pairs["--memory"], pairs["--timeout"], pairs["--cpus"]) == (str(4 << 30), "90.0", "1")


def test_what_is_wrong_is_said_before_anything_runs(worker: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bad value"):
        engine.run_matrix(small(boots=("cma=lots",)), tmp_path / "m")
    with pytest.raises(UsageError, match="one run directory"):
        engine.run_matrix(small(kernels=("/a/vmlinuz", "/b/vmlinuz")), tmp_path / "m")
    assert worker.read_text() == ""
    assert not (tmp_path / "m").exists()


def test_tables(worker: Path, tmp_path: Path) -> None:
    matrix = engine.run_matrix(small(), tmp_path / "m")
    head, rows = view.table(matrix, "pin_then_register")
    assert list(head) == ["kernel", "boot arguments", "standin:pin", "standin:longterm"]
    assert [[text for text, _ in row][1:] for row in rows] == [
        ["none", "not-reproduced (placement)", "not-reproduced (placement)"],
        ["movablecore=512M", "not-reproduced (kernel)", "not-reproduced (kernel)"],
        ["none", "not-reproduced (placement)", "not-reproduced (placement)"],
        ["movablecore=512M", "reproduced", "not-reproduced (pin)"],
    ]
    text = io.StringIO()
    view.grid(matrix).show(text)
    made = view.grid(matrix).markdown()
    assert "Made by `regrepro lab matrix --kernel 5.10 --kernel 6.1`" in made
    assert "| **reproduced** | not-reproduced (pin) |" in made
    page = view.grid(matrix).html()
    parser = HTMLParser()
    parser.feed(page)
    for shown in (text.getvalue(), made, page):
        assert shown.count("not-reproduced (placement)") == 4
        assert len(re.findall(r"(?<!not-)\breproduced\b", shown)) == 1
        assert "no vendor driver took part" in shown


def test_the_default_matrix_is_the_documented_one() -> None:
    plan = engine.Plan()
    assert len(plan.cells()) == 16
    assert engine.as_command(plan) == "regrepro lab matrix"


def test_command_line(worker: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "m")
    arguments = ["matrix", "--kernel", "6.1", "--boot", "", "--pin", "standin:pin", "--out", out]
    result = CliRunner().invoke(lab, [*arguments, "--format", "json", "-q"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["cells"]) == 1
    again = CliRunner().invoke(lab, ["matrix", "--show", "--out", out, "--format", "markdown"])
    assert again.exit_code == 0
    assert "not-reproduced (placement)" in again.output
    missing = CliRunner().invoke(lab, ["matrix", "--show", "--out", str(tmp_path / "none")])
    assert isinstance(missing.exception, UsageError)
