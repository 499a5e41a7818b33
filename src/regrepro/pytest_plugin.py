"""Scenario files as tests: `pytest scenarios/`.

A file is a scenario file if a function at its top level is decorated with regrepro's `scenario`; no other
file that ends in `.py` is touched. Each scenario is one test: run with its controls, judged, and held to what
the options ask. The plugin imports nothing of regrepro's core before a scenario runs, so that other projects'
tests pay nothing.
"""

from __future__ import annotations

import ast
import io
import json
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from regrepro.errors import RegreproError
from regrepro.options import CUDA_CHOICES, PLACE_CHOICES, TRACE_CHOICES, RunOptions, parse_size

# The judge's words for questions, which the plugin imports only when a scenario has run.
_QUESTIONS = ("reproduce", "driver", "kernel", "node")
# The fields of `RunOptions` that an option of the same name gives as they are.
_RUN_OPTIONS = ("cuda", "gpu", "rdma_device", "port", "gid_index", "trace", "place", "expect", "timeout")
_ALLOW = "--regrepro-allow-unmet"
_ALL = "all"
_CHANGES = {"same": "as before", "better": "fixed", "worse": "newly broken", "cannot-tell": "cannot be told"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `regrepro run`, and those of a test suite."""
    group = parser.getgroup("regrepro", "RDMA registrations under pins (regrepro)")
    add = group.addoption
    add("--regrepro-out", metavar="DIR", help="Run directories go below it  [./regrepro-runs/<time>-pytest]")
    add(
        "--regrepro-cuda", choices=CUDA_CHOICES, default="auto", help="Who pins: driver, stand-in, or nobody."
    )
    add("--regrepro-gpu", type=int, default=0, metavar="N", help="Which GPU.")
    add("--regrepro-rdma-device", default="auto", metavar="NAME|auto|none", help="Device to register with.")
    add("--regrepro-port", type=int, default=1, metavar="N", help="Its port.")
    add("--regrepro-gid-index", type=int, metavar="N", help="GID index for transfers.")
    add("--regrepro-trace", choices=TRACE_CHOICES, default="auto", help="The kernel's own trace.")
    add("--regrepro-place", choices=PLACE_CHOICES, default="gather", help="How pages are placed.")
    add("--regrepro-pressure-limit", metavar="SIZE", help="With --regrepro-place pressure: at most so much.")
    add("--regrepro-timeout", type=float, metavar="SECONDS", help="Time limit of each pass.")
    add(
        "--regrepro-expect",
        choices=("declared",),
        help="Pass if the verdict is as the scenario file declares; without it, if nothing failed.",
    )
    add(
        "--regrepro-ask",
        choices=_QUESTIONS,
        help="The question that a test answers, as for regrepro run --ask  [reproduce].",
    )
    add(
        "--regrepro-require",
        action="append",
        default=[],
        metavar="SCENARIO|NEED",
        help="A scenario that must answer, or a need that must be met. Can be repeated.",
    )
    add(
        _ALLOW,
        action="append",
        nargs="?",
        const=_ALL,
        default=[],
        metavar="NEED",
        help="What this need (without NEED: any) kept from running, or from proving something, is a skip, "
        "not a failure. Can be repeated.",
    )
    add("--regrepro-lab", metavar="KERNEL", help="Run each scenario in a virtual machine with this kernel.")
    add("--regrepro-boot", action="append", default=[], metavar="ARGUMENTS", help="Boot arguments for it.")
    baseline = {
        "dest": "regrepro_baseline",
        "metavar": "RUNDIR",
        "help": "A test fails only where it is worse than in this run.",
    }
    try:
        add("--baseline", "--regrepro-baseline", **baseline)
    except ValueError:  # another plugin has --baseline
        add("--regrepro-baseline", **baseline)


def pytest_load_initial_conftests(args: list[str]) -> None:
    """Keep a bare `--regrepro-allow-unmet` from taking the file that follows it for a need."""
    for number, argument in enumerate(args):
        following = args[number + 1] if number + 1 < len(args) else ""
        if argument == _ALLOW and not _is_need(following):
            args[number] = f"{_ALLOW}={_ALL}"


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; refuse what cannot work."""
    for name in _needs():
        config.addinivalue_line("markers", f"needs_{_mark(name)}: a scenario that needs {name}")
    config.addinivalue_line("markers", "regrepro: a scenario of regrepro")
    state = config.stash[_SESSION] = _Session(config)
    state.check()
    parallel = config.getoption("numprocesses", None) or getattr(config, "workerinput", None)
    if parallel and config.getoption("regrepro_lab") is None and _names_scenarios(config):
        raise pytest.UsageError(
            "scenarios cannot run in parallel (-n): they share this node's memory, trace, RDMA device and "
            "GPU, and one would see the other's pins; leave out -n, or give each its own machine with "
            "--regrepro-lab"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a `--regrepro-require` that names nothing that is there."""
    scenarios = [item.scenario for item in items if isinstance(item, ScenarioItem)]
    config.stash[_SESSION].check_names(scenarios)


def _needs() -> tuple[str, ...]:
    from regrepro.scenario import NEEDS

    return (*NEEDS, "kernel")


def _is_need(text: str) -> bool:
    return text in _needs() or text.startswith(("kernel>", "kernel<", "kernel="))


def _mark(need: str) -> str:
    return need.replace("-", "_")


def _names_scenarios(config: pytest.Config) -> bool:
    """Tell whether the files that were named, or lie in directories that were named, hold scenarios."""
    for argument in config.args:
        path = Path(str(argument).partition("::")[0])
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if any(is_scenario_file(file) for file in files if file.suffix == ".py"):
            return True
    return False


# Collecting


def is_scenario_file(path: Path) -> bool:
    """Tell whether a file holds scenarios, by its text: nothing in it is run.

    A file that cannot be parsed counts as one if it says so: then its mistake is told and not passed over.
    """
    try:
        source = path.read_bytes()
    except OSError:
        return False
    if b"scenario" not in source or b"regrepro" not in source:
        return False
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        lines = source.split(b"\n")
        return any(line.startswith(b"@scenario") for line in lines) and any(
            line.startswith((b"from regrepro", b"import regrepro")) for line in lines
        )
    return _imports_regrepro(tree) and any(
        isinstance(node, ast.FunctionDef) and any(_is_scenario(item) for item in node.decorator_list)
        for node in tree.body
    )


def _imports_regrepro(tree: ast.Module) -> bool:
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return any(name.partition(".")[0] == "regrepro" for name in names)


def _is_scenario(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (isinstance(called, ast.Name) and called.id == "scenario") or (
        isinstance(called, ast.Attribute) and called.attr == "scenario"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, Any, None]:
    """Collect a scenario file as such, and keep it from being taken for a module of tests."""
    outcome = yield
    if file_path.suffix == ".py" and file_path.name != "conftest.py" and is_scenario_file(file_path):
        outcome.force_result([ScenarioFile.from_parent(parent, path=file_path)])


class ScenarioFile(pytest.File):
    """A scenario file."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield its scenarios."""
        from regrepro.scenario import load_file

        for scenario in load_file(self.path):
            yield ScenarioItem.from_parent(self, name=scenario.name, scenario=scenario)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A mistake in a scenario file is one line, not a traceback."""
        if isinstance(excinfo.value, RegreproError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)


class _Failed(Exception):
    """The verdict is not what was asked for; the text is the evidence."""


class ScenarioItem(pytest.Item):
    """One scenario, with its controls."""

    def __init__(self, *, scenario: Any, **keys: Any) -> None:
        super().__init__(**keys)
        self.scenario = scenario
        self.add_marker("regrepro")
        for need in scenario.needs:
            self.add_marker(f"needs_{_mark('kernel' if need.startswith('kernel') else need)}")

    def runtest(self) -> None:
        """Run and judge the scenario; raise where the verdict is not what was asked for."""
        session = self.config.stash[_SESSION]
        directory = session.run(self)
        from regrepro import judge
        from regrepro.judge.names import name_of
        from regrepro.record import read_record

        record = read_record(directory)
        verdicts = judge.judge_record(record)
        (directory / "verdicts.json").write_text(json.dumps(verdicts, indent=2) + "\n", encoding="utf-8")
        item = next((one for one in verdicts["verdicts"] if name_of(one) == self.scenario.name), None)
        if item is None:
            raise _Failed(f"{self.scenario.name} has no verdict: {'; '.join(verdicts['problems'])}")
        for key in ("verdict", "pin_owner", "basis", "errno", "layer", "reason", "driver"):
            if item.get(key) is not None:
                self.user_properties.append((f"regrepro.{key}", str(item[key])))
        self.user_properties.append(("regrepro.run", str(directory)))
        session.conclude(self, item, record.header, verdicts, directory)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show the evidence, or what a person can do; a traceback for a crash of regrepro itself only."""
        if isinstance(excinfo.value, (_Failed, RegreproError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where the scenario is declared."""
        return self.path, self.scenario.line - 1, self.scenario.name


# Running and judging


@dataclass
class _Session:
    """What the tests of one pytest session share."""

    config: pytest.Config
    directory: Path | None = None
    changes: list[tuple[str, str, str]] = field(default_factory=list)
    skips: list[tuple[str, str]] = field(default_factory=list)
    verdicts: list[Mapping[str, Any]] = field(default_factory=list)
    proofs: int = 0
    ran: int = 0
    _baseline: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] | None = None
    _library: Any = None

    def option(self, name: str) -> Any:
        return self.config.getoption(f"regrepro_{name}")

    @property
    def proves_nothing(self) -> bool:
        """Whether scenarios ran and not one of them showed anything, or not all that is required."""
        return bool(self.ran) and (not self.proofs or bool(self.not_shown))

    @property
    def not_shown(self) -> list[str]:
        """The needs that are required and that no scenario showed to be met."""
        from regrepro.judge.questions import not_shown

        return not_shown(self.option("require"), self.verdicts)

    @property
    def question(self) -> str:
        return str(self.option("ask") or "reproduce")

    def check(self) -> None:
        """Refuse options that exclude each other, and a baseline that cannot be read."""
        if self.option("ask") and self.option("expect"):
            raise pytest.UsageError("--regrepro-ask and --regrepro-expect declared exclude each other")
        if self.option("baseline"):
            try:
                self._baseline = read_baseline(Path(self.option("baseline")))
            except RegreproError as error:
                raise pytest.UsageError(f"--baseline: {error}") from None
            if not self._baseline:
                raise pytest.UsageError(f"--baseline: {self.option('baseline')} holds no verdict")

    def check_names(self, collected: list[Any]) -> None:
        """Refuse a name that is neither a need nor one of the scenarios that were collected."""
        if not self.option("require") and not self.option("allow_unmet"):
            return
        from regrepro.judge.questions import check_declared, check_terms
        from regrepro.scenario import needs_by_name

        scenarios = needs_by_name(collected)
        allow = [need for need in self.option("allow_unmet") if need != _ALL]
        try:
            check_terms(self.option("require"), allow, scenarios=scenarios, needs=_needs())
            check_declared(self.option("require"), scenarios)
        except RegreproError as error:
            raise pytest.UsageError(str(error).replace("--", "--regrepro-")) from None

    def run(self, item: ScenarioItem) -> Path:
        """Run one scenario into a directory of its own."""
        if self.directory is None:
            given = self.option("out")
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-pytest"
            self.directory = Path(given) if given else Path("regrepro-runs") / name
        directory = self.directory / item.scenario.names[-1]
        number = 2
        while (directory / "record.jsonl").exists():
            directory = self.directory / f"{item.scenario.names[-1]}-{number}"
            number += 1
        limit = self.option("pressure_limit")
        names = (f"{item.path}:{item.scenario.name}",)
        given = {key: self.option(key) for key in _RUN_OPTIONS}
        options = RunOptions(names=names, pressure_limit=parse_size(limit) if limit else None, **given)
        if self.option("lab") is not None:
            from regrepro.lab.run import LabOptions, lab_run

            lab = LabOptions(kernel=self.option("lab"), boot=tuple(self.option("boot")))
            return lab_run(names, options, lab, directory)
        from regrepro import runner
        from regrepro.scenario import Library

        self._library = self._library or Library()
        return runner.run(names, options, directory, library=self._library)

    def conclude(
        self,
        test: ScenarioItem,
        item: Mapping[str, Any],
        header: Mapping[str, Any],
        verdicts: Mapping[str, Any],
        directory: Path,
    ) -> None:
        """Pass, fail or skip a test by its verdict, by what is declared, or by how it was before.

        What is unmet and what proves nothing fails, unless it is allowed: then it is a skip.
        """
        from regrepro.judge.names import names_of
        from regrepro.judge.questions import ASIDE, GOOD, SILENT, UNDECIDED, standing

        self.ran += 1
        self.verdicts.append(item)
        allowed = self.option("allow_unmet")
        found = standing(item, self.question, header, require=self.option("require"), allow_unmet=allowed)
        say = str(item["verdict"])
        need, open_ = found.need, found.state in (UNDECIDED, SILENT, ASIDE)
        good = found.state == GOOD
        if self.option("baseline"):
            told, say, need = self._compare(test, item, header, need)
            good, open_ = told is True, told is None and item["verdict"] != "error"
        elif self.option("expect") == "declared":
            good = item.get("as_declared") is True
            open_ = item.get("as_declared") is None and item["verdict"] == "unmet"
            say = f"{say}, and the scenario file declares {item.get('declared')}"
        elif found.state == SILENT:
            say = f"{say}, which says nothing of the {self.question}: {found.why}"
        self.proofs += not open_ and item["verdict"] != "error"
        if good:
            return
        named = {*names_of(item), *(entry.get("need") for entry in item.get("unmet") or [])}
        required = not named.isdisjoint(self.option("require"))
        allows = found.state == ASIDE or _ALL in allowed or (need and need in allowed)
        if open_ and allows and not required:
            reason = f"{say}: {item.get('reason')}"
            self.skips.append((test.scenario.name, reason))
            pytest.skip(reason)
        raise _Failed(_evidence(test, item, say, verdicts, directory))

    def _compare(
        self, test: ScenarioItem, item: Mapping[str, Any], header: Mapping[str, Any], need: str
    ) -> tuple[bool | None, str, str]:
        """Hold a verdict against the baseline's: True same or better, False worse, None cannot be told.

        Return that, what to say, and the need that is lacking.
        """
        from regrepro.compare import compare

        before = (self._baseline or {}).get(test.scenario.names[-1])
        if before is None:
            self.changes.append((test.scenario.name, "cannot be told", "it is not in the baseline"))
            return None, "it is not in the baseline", ""
        found = compare(
            before[0],
            {"verdicts": [before[1]]},
            header,
            {"verdicts": [item]},
            self.question,
            require=self.option("require"),
            allow_unmet=self.option("allow_unmet"),
        )
        [change] = found.changes
        text = _CHANGES[change.direction if change.counts else "cannot-tell"]
        self.changes.append((test.scenario.name, text, change.reason))
        test.user_properties.append(("regrepro.change", text))
        good = {"same": True, "better": True, "worse": False}.get(change.direction)
        return good if change.counts else None, f"{text}: {change.reason}", need


_SESSION = pytest.StashKey[_Session]()


def read_baseline(path: Path) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return header and verdict of each scenario in a run directory, or in run directories below it.

    Raises `UsageError` where there is none.
    """
    from regrepro import judge
    from regrepro.judge.names import names_of
    from regrepro.record import FILE_NAME, read_record, record_path

    below = sorted(path.rglob(FILE_NAME)) if path.is_dir() and not (path / FILE_NAME).exists() else []
    found: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for file in below or [record_path(path)]:
        record = read_record(file)
        for item in judge.judge_record(record)["verdicts"]:
            found[names_of(item)[-1]] = (record.header, item)
    return found


def _evidence(
    test: ScenarioItem, item: Mapping[str, Any], say: str, verdicts: Mapping[str, Any], directory: Path
) -> str:
    from regrepro.views import terminal

    out = io.StringIO()
    out.write(f"{test.scenario.name}: {say}\n\n")
    terminal.show_evidence(item, out, width=100)
    for entry in item.get("unmet") or []:
        how = f" ({entry['how']})" if entry.get("how") else ""
        out.write(f"  not met: {entry.get('need')}: {entry.get('why')}{how}\n")
    for problem in verdicts.get("problems") or []:
        out.write(f"  the record: {problem}\n")
    out.write(f"\nThe run lies in {directory} (regrepro report {directory})")
    return out.getvalue()


# The end


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A gate that skips everything must not be green."""
    state = session.config.stash.get(_SESSION, None)
    if state is not None and state.proves_nothing and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how it was before, what was skipped and why, where the runs lie, whether anything was shown."""
    state = config.stash.get(_SESSION, None)
    if state is None or state.directory is None:
        return
    terminalreporter.section("regrepro")
    for name, change, reason in state.changes:
        terminalreporter.write_line(f"{name}: {change} ({reason})")
    for name, reason in state.skips:
        terminalreporter.write_line(f"{name}: skipped ({reason})")
    terminalreporter.write_line(f"runs: {state.directory}")
    if state.proofs and state.not_shown:
        terminalreporter.write_line(
            f"no scenario shows what is required: {', '.join(state.not_shown)}; so this is no success"
        )
    elif state.proves_nothing:
        terminalreporter.write_line(
            f"nothing was decided: no scenario shows anything of the question ({state.question}), so this is "
            "no success"
        )
