"""The table of planted faults: which boots it takes, what a cell says, and when one is wrong."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import record_builder as build
from click.testing import CliRunner

from regrepro.errors import EnvironmentProblem
from regrepro.lab import faults as engine
from regrepro.lab.commands import lab
from regrepro.lab.progress import Silent
from regrepro.scenario import load_file
from regrepro.views import faults as view

NAMES = ("access_flags", "vanishing_device", "zero_page")
KERNEL_WAIT = "[<0>] ib_uverbs_remove_one+0x1c4/0x1e0 [ib_uverbs]"


def write_record(directory: Path, kernel: str, names: list[str], *, blocks: str = "") -> None:
    """Write what a guest would: each scenario as declared, until one blocks."""
    directory.mkdir(parents=True)
    builder = build.Builder(kernel=f"{kernel}.1-amd64")
    builder.header["run"]["names"] = names
    builder.memory_map()
    for name in names:
        expects = {
            "access_flags": {"verdict": "other-failure", "layer": "arguments", "errno": "EINVAL"},
            "vanishing_device": {"verdict": "other-failure", "layer": "device"},
            "zero_page": {"verdict": "not-reproduced", "basis": "kernel"},
        }[name]
        builder.begin(name, contract="none", expects={"none": expects}, controls={}, needs=())
        pages = build.state(build.OUT)
        builder.buffer(pages, place="any", placed="as-allocated")
        if name == blocks:
            builder.end("blocked", where=KERNEL_WAIT)
            break
        failing = {
            "access_flags": {"errno": "EINVAL", "access": ["REMOTE_WRITE"], "trace": build.trace()},
            "vanishing_device": {"errno": "EIO", "trace": build.trace()},
            "zero_page": {"after": build.state(build.OUT, 1025)},
        }[name]
        builder.register(pages, **{"after": pages, **failing})
        builder.end()
    record = builder.done()
    lines = [record.header, *record.events]
    (directory / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def boots(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """Replace the machine by one that blocks in `vanishing_device` on 6.1; return what is booted."""
    made: list[tuple[str, tuple[str, ...]]] = []

    def lab_run(names: Any, options: Any, lab_options: Any, out: Path, tell: Any) -> Path:
        made.append((lab_options.kernel, tuple(names)))
        blocks = "vanishing_device" if lab_options.kernel == "6.1" else ""
        write_record(out, lab_options.kernel, list(names), blocks=blocks)
        return out

    monkeypatch.setattr(engine, "lab_run", lab_run)
    return made


def test_a_blocked_guest_is_ended_and_the_next_goes_on(
    tmp_path: Path, boots: list[tuple[str, tuple[str, ...]]]
) -> None:
    plan = engine.Plan(NAMES, ("7.3", "6.1"))
    table = engine.run_faults(plan, tmp_path, Silent())
    assert boots == [("7.3", NAMES), ("6.1", NAMES), ("6.1", ("zero_page",))]
    rows = {fault["scenario"]: fault["cells"] for fault in table["faults"]}
    assert view.text(rows["vanishing_device"]["6.1"]) == "device (blocked)"
    assert view.text(rows["vanishing_device"]["7.3"]) == "device (EIO)"
    assert view.text(rows["zero_page"]["6.1"]) == "succeeds (kernel)"
    assert engine.exit_code(table) == 0
    assert json.loads((tmp_path / "faults.json").read_text()) == table
    schema = json.loads((Path(engine.__file__).parents[1] / "schema/faults-1.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(table, schema)
    assert [column["release"] for column in table["kernels"]] == ["7.3.1-amd64", "6.1.1-amd64"]
    # What was run is kept.
    boots.clear()
    engine.run_faults(plan, tmp_path, Silent())
    assert boots == []


def test_what_is_wrong_is_run_again_when_asked(
    tmp_path: Path, boots: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(tmp_path / "7.3/boot-1", "7.3", list(NAMES), blocks="zero_page")
    engine.run_faults(engine.Plan(NAMES, ("7.3",)), tmp_path, Silent())
    assert boots == []
    table = engine.run_faults(engine.Plan(NAMES, ("7.3",), retry=True), tmp_path, Silent())
    assert boots == [("7.3", ("zero_page",))]
    assert engine.exit_code(table) == 0


def test_a_guest_that_begins_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "lab_run", lambda *args: args[3].mkdir(parents=True))
    with pytest.raises(EnvironmentProblem, match="no fault was begun"):
        engine.run_faults(engine.Plan(NAMES, ("7.3",)), tmp_path, Silent())


def test_a_wrong_cell_is_shown_as_wrong(tmp_path: Path, boots: list[Any]) -> None:
    plan = engine.Plan(NAMES, ("7.3",))
    table = engine.run_faults(plan, tmp_path, Silent())
    cell = table["faults"][0]["cells"]["7.3"]
    cell["as_declared"] = False
    assert view.text(cell) == "WRONG: arguments (EINVAL)"
    assert engine.exit_code(table) == 10
    markdown = view.grid(table).markdown()
    assert "| `access_flags` | **WRONG: arguments (EINVAL)** |" in markdown
    assert "3 cells: 2 as declared, 1 wrong, 0 undecided, 0 with an unknown layer." in markdown
    terminal = io.StringIO()
    view.grid(table).show(terminal)
    assert "access_flags on 7.3: " in terminal.getvalue()
    table["faults"][0]["cells"]["7.3"] = None
    assert engine.exit_code(table) == 125
    assert view.text(None) == "not run"


def test_the_command_shows_what_was_run(tmp_path: Path, boots: list[Any]) -> None:
    run = CliRunner().invoke
    given = [*NAMES, "--kernel", "7.3", "--out", str(tmp_path)]
    done = run(lab, ["faults", *given, "--format", "markdown", "--quiet"])
    assert done.exit_code == 0, done.output
    assert "| fault | 7.3 (7.3.1-amd64) |" in done.output
    assert f"regrepro lab faults {' '.join(NAMES)} --kernel 7.3" in done.output
    assert run(lab, ["faults", *given, "--show", "--format", "markdown"]).output == done.output
    assert json.loads(run(lab, ["faults", *given, "--show", "--format", "json"]).output)["faults"]
    missing = run(lab, ["faults", *given[:-1], str(tmp_path / "none"), "--show"])
    assert missing.exit_code != 0


def test_the_table_of_attacks_has_every_attack_and_no_wrong_cell() -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs/verdicts.md").read_text(encoding="utf-8")
    table = text.partition("<!-- attacks: begin -->")[2].partition("<!-- attacks: end -->")[0]
    rows = dict(re.findall(r"^\| `([\w\[\]]+)` \| (.*) \|$", table, re.M))
    files = (root / "tests/attacks").rglob("*.py")
    declared = {item.name for file in files for item in load_file(file)}
    assert set(rows) == declared, "run ./scripts/attack-table"
    assert [name for name, cells in rows.items() if re.search(r"WRONG|not run|error", cells)] == []
