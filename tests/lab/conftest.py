"""Lab tests: a kernel is booted once for all that is to run on it.

A test that cannot have its kernel or its machine is skipped, and says what is missing; where
REGREPRO_REQUIRE_LAB is set, tests/conftest.py makes that a failure.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from regrepro.errors import EnvironmentProblem
from regrepro.lab.kernels import Kernels
from regrepro.lab.machine import Ending, require_tools
from regrepro.lab.run import LabOptions, run_commands
from regrepro.progress import Lines

HERE = Path(__file__).parent
PANICS_FORGIVEN = 1


@dataclass(frozen=True)
class Boot:
    """One boot and what ran in it: exit code (None: it did not end) and output of each command."""

    ending: Ending
    results: list[tuple[int | None, str]]
    out: Path


class _Tell(Lines):
    """Progress on standard error, where pytest keeps it for a failure."""

    def download(self, what: str, done: int, total: int) -> None:
        if done >= total:
            self.say(f"{what}: downloaded")

    def close(self) -> None: ...


class Lab:
    """Boots kernels, each once for the same options and commands."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._booted: dict[tuple[LabOptions, tuple[str, ...]], Boot] = {}

    def require(self, kernel: str) -> None:
        """Skip the test where the kernel cannot be had or no machine can be booted."""
        try:
            require_tools()
            Kernels(watcher=_Tell()).get(kernel)
        except EnvironmentProblem as problem:
            pytest.skip(str(problem))

    def boot(self, options: LabOptions, commands: Sequence[str]) -> Boot:
        """Return a boot with these options in which these commands ran, one after the other."""
        key = (options, tuple(commands))
        if key not in self._booted:
            self.require(options.kernel)
            # One CPU for each node: an emulated guest has crashed in its own interrupts between CPUs, on a
            # busy host, in code that is not under test. One panic is forgiven; what panics again is ours.
            machine = replace(options, cpus=options.cpus or options.settings().numa)
            for attempt in range(PANICS_FORGIVEN + 1):
                out = self._base / f"boot-{len(self._booted)}-{attempt}"
                ending, results = run_commands(commands, machine, out, _Tell())
                if ending.what != "panic":
                    break
                warnings.warn(f"{out.name}: {ending.why}\n" + "\n".join(ending.console), stacklevel=2)
            self._booted[key] = Boot(ending, results, out)
        return self._booted[key]

    def program(self, name: str, *arguments: str) -> str:
        """Return the command that runs `tests/lab/NAME` in a guest."""
        return " ".join([sys.executable, "-S", str(HERE / name), *arguments])


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The lab, whose boots all tests of the session share."""
    return Lab(tmp_path_factory.mktemp("lab"))


def failures(tap: str) -> list[str]:
    """Return what TAP says went wrong: `not ok` lines with what follows, or that it is no TAP."""
    wrong: list[str] = []
    planned: int | None = None
    seen = 0
    lines = tap.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("1.."):
            with contextlib.suppress(ValueError):
                planned = int(line[3:].split()[0])
        elif line.startswith("not ok") and "# TODO" not in line:
            seen += 1
            wrong.append("\n".join(lines[number : number + 6]))
        elif line.startswith("ok"):
            seen += 1
        elif line.startswith("Bail out!"):
            wrong.append(line)
    if not seen:
        wrong.append("no line of TAP came")
    elif planned is not None and planned != seen:
        wrong.append(f"{planned} lines were planned, {seen} came")
    return wrong
