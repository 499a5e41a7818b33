"""The pytest plugin: what is collected, what passes, what is shown; on runs made by hand, without root."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import record_builder as build
from run_builder import write

from regrepro import runner
from regrepro.pytest_plugin import is_scenario_file
from regrepro.scenario import NEEDS

pytest_plugins = ["pytester"]

FILE = '''
from regrepro import Stage, change, scenario


@scenario(
    shows="a test",
    needs=("root", "unpinnable"{needs}),
    expects={{"pin": "reproduced"}},
    controls={{"no-pin": change(pin="none")}},
)
def {name}(stage: Stage) -> None:
    """A test."""
    stage.pin(stage.buffer(pages=1))
'''


def renamed(record: Any, name: str) -> Any:
    for event in record.events:
        if "scenario" in event:
            event["scenario"] = name
    return record


def unmet(_: str = "") -> Any:
    builder = build.Builder()
    builder.memory_map()
    builder.begin("needs_more")
    builder.event("unmet", need="root", why="this process is not root", how="run it with sudo")
    builder.end("unmet")
    return builder.done()


RUNS: dict[str, Callable[[], Any]] = {
    "fails": build.reproduced_record,
    "holds": build.kernel_record,
    "needs_more": unmet,
}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with three scenario files and other Python files; a run gives what `RUNS` has for its name."""
    folder = pytester.mkdir("scenarios")
    for name in RUNS:
        needs = {"holds": ', "kernel>=5.13"', "needs_more": ', "peer-memory"'}.get(name, "")
        (folder / f"{name}.py").write_text(FILE.format(name=name, needs=needs))
    (folder / "_helper.py").write_text("raise SystemExit('nobody may import this')\n")
    (folder / "notes.py").write_text(
        "TEXT = '''from regrepro\n@scenario\n'''\nraise SystemExit('nor this')\n"
    )

    def run(names: Any, options: Any, directory: Path, *, library: Any = None) -> Path:
        [name] = names
        assert Path(name.rpartition(":")[0]).is_file()
        scenario = name.rpartition(":")[2]
        record = renamed(RUNS[scenario](), scenario)
        record.header["run"]["cuda"] = options.cuda
        return write(directory, record, verdicts=False)

    monkeypatch.setattr(runner, "run", run)
    return pytester


def go(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_inprocess("-p", "regrepro.pytest_plugin", "--strict-markers", *arguments)


def test_scenario_files_are_collected_and_nothing_else(suite: pytest.Pytester) -> None:
    result = go(suite, "scenarios", "--collect-only", "-q")
    assert [line for line in result.outlines if "::" in line] == [
        "scenarios/fails.py::fails",
        "scenarios/holds.py::holds",
        "scenarios/needs_more.py::needs_more",
    ]
    assert result.ret == 0


def test_a_file_named_outright_is_no_module_of_tests(suite: pytest.Pytester) -> None:
    result = go(suite, "scenarios/holds.py", "-v")
    result.assert_outcomes(passed=1)


def test_the_bug_and_what_is_unmet_are_failures(suite: pytest.Pytester) -> None:
    result = go(suite, "scenarios")
    result.assert_outcomes(passed=1, failed=2)
    text = result.stdout.str()
    assert "migrate_pages" in text  # the kernel's own path
    assert "the rules of proof" in text
    assert "not met: root: this process is not root (run it with sudo)" in text
    assert "Traceback" not in text
    assert result.ret == 1


def test_unmet_can_be_a_skip_with_its_reason(suite: pytest.Pytester) -> None:
    result = go(suite, "scenarios", "--regrepro-allow-unmet", "-rs")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    assert "this process is not root" in result.stdout.str()


def test_a_gate_that_skips_everything_is_not_green(suite: pytest.Pytester) -> None:
    result = go(suite, "scenarios", "--regrepro-allow-unmet", "-k", "needs_more")
    result.assert_outcomes(skipped=1, deselected=2)
    assert result.ret != 0
    assert "nothing was decided" in result.stdout.str()
    assert go(suite, "scenarios", "--regrepro-allow-unmet", "-k", "needs_more or holds").ret == 0


def test_expect_declared_judges_by_the_file(suite: pytest.Pytester) -> None:
    result = go(suite, "scenarios", "--regrepro-expect", "declared", "-v")
    lines = result.stdout.str()
    assert "fails.py::fails PASSED" in lines
    assert "holds.py::holds FAILED" in lines  # declared reproduced, and was not
    assert "needs_more.py::needs_more FAILED" in lines


def test_markers_select_by_need(suite: pytest.Pytester) -> None:
    go(suite, "scenarios", "-m", "needs_kernel").assert_outcomes(passed=1, deselected=2)
    go(suite, "scenarios", "-m", "regrepro and not needs_root").assert_outcomes(deselected=3)


def test_options_reach_the_run(suite: pytest.Pytester) -> None:
    out = suite.path / "runs"
    go(suite, "scenarios", "-k", "holds", "--regrepro-cuda", "standin:pin", "--regrepro-out", str(out))
    header = json.loads((out / "holds" / "record.jsonl").read_text().splitlines()[0])
    assert header["run"]["cuda"] == "standin:pin"
    assert json.loads((out / "holds" / "verdicts.json").read_text())["verdicts"][0]["basis"] == "kernel"
    # A second session into the same place writes beside the first.
    go(suite, "scenarios", "-k", "holds", "--regrepro-out", str(out))
    assert (out / "holds-2" / "record.jsonl").exists()


def test_x_and_lf(suite: pytest.Pytester) -> None:
    go(suite, "scenarios", "-x").assert_outcomes(failed=1)
    go(suite, "scenarios").assert_outcomes(passed=1, failed=2)
    go(suite, "scenarios", "--lf").assert_outcomes(failed=2)


def test_junit_properties(suite: pytest.Pytester) -> None:
    go(suite, "scenarios", "--junitxml", "j.xml")
    cases = {case.get("name"): case for case in ET.parse(suite.path / "j.xml").getroot().iter("testcase")}
    properties = {one.get("name"): one.get("value") for one in cases["fails"].iter("property")}
    assert properties["regrepro.verdict"] == "reproduced"
    assert properties["regrepro.errno"] == "ENOMEM"
    assert properties["regrepro.pin_owner"] == "process-vm"


def test_a_baseline_makes_it_relative(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    before = suite.path / "before"
    go(suite, "scenarios", "--regrepro-out", str(before))
    result = go(suite, "scenarios", "--baseline", str(before), "-k", "not needs_more")
    result.assert_outcomes(passed=2, deselected=1)
    assert "fails: as before" in result.stdout.str()
    monkeypatch.setitem(RUNS, "holds", build.reproduced_record)
    monkeypatch.setitem(RUNS, "fails", build.kernel_record)
    result = go(suite, "scenarios", "--baseline", str(before))
    result.assert_outcomes(passed=1, failed=2)
    text = result.stdout.str()
    assert "holds: newly broken" in text
    assert "fails: fixed" in text
    assert "needs_more: cannot be told" in text
    result = go(suite, "scenarios", "--baseline", str(before), "--regrepro-allow-unmet")
    result.assert_outcomes(passed=1, failed=1, skipped=1)


def test_placement_does_not_count_as_fixed(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write(suite.path / "before", renamed(build.reproduced_record(), "fails"))
    monkeypatch.setitem(RUNS, "fails", build.placement_record)
    result = go(suite, "scenarios", "--baseline", str(before), "-k", "fails")
    result.assert_outcomes(failed=1, deselected=2)
    assert "says nothing of the driver" in " ".join(result.stdout.str().split())


def test_what_is_not_in_the_baseline_cannot_be_told(suite: pytest.Pytester) -> None:
    before = write(suite.path / "before", renamed(build.reproduced_record(), "other"))
    result = go(suite, "scenarios", "--baseline", str(before), "-k", "holds")
    result.assert_outcomes(failed=1, deselected=2)
    assert "it is not in the baseline" in result.stdout.str()


@pytest.mark.parametrize("what", ["nowhere", "scenarios"])
def test_a_baseline_is_checked_before_anything_runs(suite: pytest.Pytester, what: str) -> None:
    result = go(suite, "scenarios", "--baseline", what)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--baseline: " in result.stderr.str() and "collected" not in result.stdout.str()
    assert not (suite.path / "regrepro-runs").exists()


def test_every_need_has_its_marker(suite: pytest.Pytester) -> None:
    needs = ", ".join(f'"{need}"' for need in (*NEEDS, "kernel<99.0"))
    (suite.path / "scenarios" / "every.py").write_text(FILE.format(name="every", needs=f", {needs}"))
    result = go(suite, "scenarios/every.py", "--collect-only", "-q")
    assert result.ret == 0, result.stdout.str()


def test_the_shipped_scenarios_are_collected_under_strict_markers(pytester: pytest.Pytester) -> None:
    shipped = Path(__file__).parents[2] / "scenarios"
    result = go(pytester, str(shipped), "--regrepro-cuda", "real", "--collect-only", "-q")
    assert result.ret == 0, result.stdout.str()


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        ((), {"failed": 1}),
        (("--regrepro-allow-unmet",), {"skipped": 1}),
        (("--regrepro-allow-unmet", "root"), {"skipped": 1}),
        (("--regrepro-allow-unmet", "cuda"), {"failed": 1}),
        (("--regrepro-allow-unmet", "cuda", "--regrepro-allow-unmet", "root"), {"skipped": 1}),
    ],
)
def test_a_need_can_be_allowed(
    suite: pytest.Pytester, arguments: tuple[str, ...], outcome: dict[str, int]
) -> None:
    result = go(suite, *arguments, "scenarios/needs_more.py", "scenarios/holds.py")
    result.assert_outcomes(passed=1, **outcome)
    if "skipped" in outcome:  # with its reason on the terminal, also without -rs
        assert "needs_more: skipped (unmet: root is not met: this process is not root" in result.stdout.str()


@pytest.mark.parametrize("question", ["driver", "kernel"])
def test_a_result_that_proves_nothing_counts_as_unmet(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setitem(RUNS, "holds", build.placement_record)
    arguments = ("scenarios/holds.py", "--regrepro-ask", question)
    go(suite, *arguments).assert_outcomes(failed=1)
    allowed = go(suite, *arguments, "--regrepro-allow-unmet")
    allowed.assert_outcomes(skipped=1)
    assert allowed.ret != 0  # nothing was shown
    assert "nothing was decided" in allowed.stdout.str()
    go(suite, "scenarios/holds.py", "--regrepro-ask", "node").assert_outcomes(passed=1)


def test_what_is_optional_is_a_skip(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks() -> Any:
        record = unmet()
        build.find(record, "unmet")["need"] = "peer-memory"
        return record

    monkeypatch.setitem(RUNS, "needs_more", lacks)
    files = ("scenarios/needs_more.py", "scenarios/holds.py")
    go(suite, *files).assert_outcomes(passed=1, skipped=1)
    go(suite, *files, "--regrepro-require", "peer-memory").assert_outcomes(passed=1, failed=1)
    go(suite, *files, "--regrepro-require", "needs_more").assert_outcomes(passed=1, failed=1)
    allow = "--regrepro-allow-unmet"  # whatever is allowed, what is required must answer
    for name in ("needs_more", "peer-memory"):
        go(suite, *files, allow, "--regrepro-require", name).assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize(("need", "shown"), [("cuda", False), ("unpinnable", True), ("dmabuf", None)])
def test_a_required_need_must_be_shown(suite: pytest.Pytester, need: str, shown: bool | None) -> None:
    result = go(suite, "scenarios/holds.py", "--regrepro-require", need)
    if shown is None:
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "no scenario of this run has that need" in result.stderr.str() + result.stdout.str()
        return
    result.assert_outcomes(passed=1)
    assert (result.ret == 0) is shown
    assert ("no scenario shows what is required: cuda" in result.stdout.str()) is not shown


@pytest.mark.parametrize(
    "arguments",
    [
        ("--regrepro-require", "no_such"),
        ("--regrepro-allow-unmet=no_such",),
        ("--regrepro-require", "root", "--regrepro-allow-unmet", "root"),
        ("--regrepro-ask", "driver", "--regrepro-expect", "declared"),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(suite: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    assert go(suite, "scenarios", *arguments).ret == pytest.ExitCode.USAGE_ERROR


def test_a_mistake_in_a_scenario_file_is_one_line(suite: pytest.Pytester) -> None:
    (suite.path / "scenarios" / "wrong.py").write_text(FILE.format(name="wrong", needs=', "rooot"'))
    result = go(suite, "scenarios/wrong.py")
    result.assert_outcomes(errors=1)
    assert "did you mean" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
    (suite.path / "scenarios" / "broken.py").write_text("from regrepro import scenario\n@scenario(\n")
    result = go(suite, "scenarios/broken.py")
    result.assert_outcomes(errors=1)
    assert "broken.py:2" in result.stdout.str()


def test_a_run_that_cannot_begin_is_said_in_words(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regrepro.errors import EnvironmentProblem

    def run(*_: Any, **__: Any) -> Path:
        raise EnvironmentProblem("cannot make runs", why="read-only", hint="give --out")

    monkeypatch.setattr(runner, "run", run)
    result = go(suite, "scenarios", "-k", "holds")
    result.assert_outcomes(failed=1, deselected=2)
    assert "cannot make runs: read-only" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()


def test_parallel_runs_are_refused_with_the_reason(suite: pytest.Pytester) -> None:
    """By pytest-xdist."""
    result = go(suite, "scenarios", "-n", "2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "scenarios cannot run in parallel (-n)" in result.stderr.str()
    suite.makepyfile(test_other="def test_it(): pass")
    assert go(suite, "test_other.py", "--numprocesses", "2").ret == 0
    assert go(suite, "scenarios", "--numprocesses", "2", "--regrepro-lab", "7.3", "--collect-only").ret == 0


def test_other_projects_pay_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_light="""
        import sys

        def test_it():
            heavy = {"numpy", "regrepro.runner", "regrepro.judge", "regrepro.core", "rich"}
            assert not heavy & set(sys.modules)
        """
    )
    result = suite.runpytest_subprocess("-p", "regrepro.pytest_plugin", "test_light.py")
    result.assert_outcomes(passed=1)


def test_the_lab_runs_a_scenario_in_a_machine(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    import regrepro.lab.run as lab

    asked: list[Any] = []

    def lab_run(names: Any, options: Any, machine: Any, out: Path, progress: Any = None) -> Path:
        asked.append((names, machine.kernel, machine.boot))
        return write(out, renamed(build.kernel_record(), "holds"), verdicts=False)

    monkeypatch.setattr(lab, "lab_run", lab_run)
    arguments = ("--regrepro-lab", "6.12", "--regrepro-boot", "movablecore=512M")
    go(suite, "scenarios", "-k", "holds", *arguments).assert_outcomes(passed=1, deselected=2)
    [(names, kernel, boot)] = asked
    assert names[0].endswith("holds.py:holds")
    assert (kernel, boot) == ("6.12", ("movablecore=512M",))


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (FILE.format(name="a", needs=""), True),
        ("import regrepro\n@regrepro.scenario(shows='x')\ndef a(stage): ...\n", True),
        ("SOURCE = '''from regrepro import scenario\n@scenario()\n'''\n", False),
        ("def test_a():\n    from regrepro import scenario\n    @scenario()\n    def b(): ...\n", False),
        ("from regrepro import scenario\n@scenario(\n", True),
        ("from other import scenario\n@scenario\ndef a(): ...  # not regrepro", False),
        ("", False),
    ],
)
def test_what_is_a_scenario_file(text: str, is_one: bool, tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text(text)
    assert is_scenario_file(file) is is_one


def test_shipped_scenarios_are_found_and_this_projects_tests_are_not() -> None:
    root = Path(__file__).parents[2]
    shipped = [file for file in (root / "scenarios").rglob("*.py") if not file.name.startswith("_")]
    assert shipped
    assert all(is_scenario_file(file) for file in shipped)
    found = {file for file in (root / "tests").rglob("*.py") if is_scenario_file(file)}
    assert found == set((root / "tests" / "attacks").rglob("*.py"))  # attacks on the verdicts are scenarios


def test_the_plugin_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\n"regrepro.pytest_plugin" = "regrepro.pytest_plugin"' in text


def test_the_page_for_gates_names_only_what_exists() -> None:
    """Every command and option of docs/gates.md is one that the command line or the plugin knows."""
    import re

    import click

    from regrepro.cli import group

    def options(*path: str) -> set[str]:
        command: Any = group
        with click.Context(group) as context:
            for name in path:
                command = command.get_command(context, name)
                assert command is not None, path
            return {option for parameter in command.params for option in parameter.opts} | {"--help"}

    text = (Path(__file__).parents[2] / "docs/gates.md").read_text(encoding="utf-8")
    text = text.replace("\\\n", " ")
    plugin = (Path(__file__).parents[2] / "src/regrepro/pytest_plugin.py").read_text(encoding="utf-8")
    for found in re.finditer(r"--(?:regrepro-[a-z-]+|baseline)", text):
        assert f'"{found[0]}"' in plugin or found[0] == "--regrepro-", found[0]
    commands = re.findall(r"regrepro ((?:lab )?(?:run|matrix|compare|judge|bundle|report))\b([^\n`#]*)", text)
    assert len(commands) > 8
    for command, rest in commands:
        known = options(*command.split())
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in known, f"regrepro {command} {option}"
