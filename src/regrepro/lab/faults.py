"""The table of planted faults: each fault × each kernel, and the layer that the judge names.

All faults of a kernel run in one guest, one after the other. A fault from which the kernel never returns ends
its guest, and the next goes on with those that are left. What was run is kept, so that a table which was
interrupted goes on where it was.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrepro import __version__, judge
from regrepro.errors import EnvironmentProblem, RegreproError, UsageError
from regrepro.judge.names import name_of
from regrepro.lab.progress import LabProgress
from regrepro.lab.run import LabOptions, lab_run
from regrepro.options import RunOptions
from regrepro.record import FILE_NAME, Record, read_record
from regrepro.scenario import Library, Scenario

SCHEMA = "regrepro.faults/1"
FILE = "faults.json"
KERNELS = ("7.3", "6.12", "6.1", "5.10")
# ZONE_MOVABLE is unpinnable memory on every kernel since 5.13, and can hold huge pages.
BOOT = "movablecore=512M"
# The kernel's own memory of half a million MRs is more than a GiB.
MEMORY = 4 << 30
_KEYS = (
    "scenario",
    "verdict",
    "pin_owner",
    "basis",
    "errno",
    "layer",
    "reason",
    "declared",
    "as_declared",
)


@dataclass(frozen=True)
class Plan:
    """What is to be run. `names`: scenarios, none: those of profile `faults`. `memory` in bytes."""

    names: Sequence[str] = ()
    kernels: Sequence[str] = KERNELS
    boot: str = BOOT
    memory: int = MEMORY
    cpus: int | None = None
    accel: str = "auto"
    retry: bool = False

    def lab_options(self, kernel: str) -> LabOptions:
        """Return the machine of a kernel."""
        boot = (self.boot,) if self.boot else ()
        return LabOptions(kernel, boot, self.memory, 1, self.cpus, self.accel)

    def scenarios(self) -> list[Scenario]:
        """Return the faults in order. Raises `UsageError`."""
        return Library().select(self.names, "faults")

    def directory(self, kernel: str) -> Path:
        """Where a kernel's runs lie, below the table's directory."""
        return Path(Path(kernel).name)

    def command(self) -> str:
        """Return the command that makes this table; what is the default is left out."""
        words = ["regrepro", "lab", "faults", *self.names]
        if tuple(self.kernels) != KERNELS:
            words += [word for kernel in self.kernels for word in ("--kernel", kernel)]
        words += ["--boot", self.boot] if self.boot != BOOT else []
        words += ["--memory", str(self.memory)] if self.memory != MEMORY else []
        return shlex.join(words)


def run_faults(plan: Plan, out: Path, tell: LabProgress) -> dict[str, Any]:
    """Run what was not run yet; return the table and write it into `out`.

    Raises `UsageError`, `EnvironmentProblem`, `lab.run.Interrupted`.
    """
    scenarios = plan.scenarios()
    if len({plan.directory(kernel) for kernel in plan.kernels}) < len(set(plan.kernels)):
        raise UsageError("two kernels would have one directory", hint="give one of them another name")
    plan.lab_options(plan.kernels[0]).settings()  # what is wrong with them is said before anything runs
    for kernel in plan.kernels:
        place = out / plan.directory(kernel)
        _run_kernel(plan, kernel, place, [item.name for item in scenarios], tell)
        write(plan, scenarios, out)
    return write(plan, scenarios, out)


def _run_kernel(plan: Plan, kernel: str, place: Path, names: list[str], tell: LabProgress) -> None:
    """Boot until each fault was begun, or a guest began none."""
    known = {name: cell for name, cell in cells(place).items() if cell["as_declared"] or not plan.retry}
    older = {boot.name for boot in _boots(place)}

    def done() -> set[str]:
        return set(known) | {name for name, cell in cells(place).items() if cell["run"] not in older}

    while left := [name for name in names if name not in done()]:
        number = len(_boots(place)) + 1
        tell.say(f"{kernel}: {len(left)} of {len(names)} faults, boot {number}")
        before = len(done())
        options = RunOptions(names=tuple(_arguments(plan, left)), profile="faults", cuda="none")
        directory = place / f"boot-{number}"
        lab_run(options.names, options, plan.lab_options(kernel), directory, tell)
        if len(done()) == before:
            raise EnvironmentProblem(f"{kernel}: no fault was begun", hint=f"see {directory / 'console.log'}")


def _arguments(plan: Plan, left: list[str]) -> list[str]:
    """Return names as they were given: scenarios of a file by `FILE:NAME`."""
    files = {item.name: item.file for item in plan.scenarios()} if plan.names else {}
    shipped = {item.name for item in Library().shipped()}
    return [name if name in shipped or name not in files else f"{files[name]}:{name}" for name in left]


def _boots(place: Path) -> list[Path]:
    found = [path for path in place.glob("boot-*") if (path / FILE_NAME).is_file()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def cells(place: Path) -> dict[str, dict[str, Any]]:
    """Return what is known of each fault of a kernel, from its runs: verdicts of all that were begun."""
    found: dict[str, dict[str, Any]] = {}
    for boot in _boots(place):
        try:
            record = read_record(boot)
        except RegreproError:
            continue
        ends = _ends(record)
        for item in judge.judge_record(record)["verdicts"]:
            if (name := name_of(item)) in ends:
                end = ends[name]
                cell = {key: item.get(key) for key in _KEYS}
                cell["how"] = (item["evidence"].get("layer") or {}).get("how")
                cell["blocked"] = end.get("outcome") == "blocked"
                cell["tried"] = bool(item["checks"])  # a precondition that was not met has none
                cell["run"] = boot.name
                found[name] = cell
    return found


def _ends(record: Record) -> dict[str, Mapping[str, Any]]:
    """Return the scenarios that were begun, each with how it ended; an empty one where it did not."""
    found: dict[str, Mapping[str, Any]] = {}
    for event in record.events:
        if event.get("control") is None and isinstance(event.get("scenario"), str):
            if event["event"] == "scenario-begin":
                found[name_of(event)] = {}
            elif event["event"] == "scenario-end":
                found[name_of(event)] = event
    return found


def _release(place: Path) -> str | None:
    for boot in _boots(place):
        try:
            node = read_record(boot).header.get("node")
        except RegreproError:
            continue
        if isinstance(node, Mapping) and isinstance(node.get("kernel"), str):
            return str(node["kernel"])
    return None


def write(plan: Plan, scenarios: Iterable[Scenario], out: Path) -> dict[str, Any]:
    """Write `faults.json` whole or not at all; return what it holds."""
    by_kernel = {kernel: cells(out / plan.directory(kernel)) for kernel in plan.kernels}
    table = {
        "schema": SCHEMA,
        "version": __version__,
        "command": plan.command(),
        "kernels": [
            {"kernel": kernel, "release": _release(out / plan.directory(kernel))} for kernel in plan.kernels
        ],
        "faults": [
            {
                "scenario": item.name,
                "summary": item.summary,
                "shows": item.shows,
                "cells": {kernel: by_kernel[kernel].get(item.name) for kernel in plan.kernels},
            }
            for item in scenarios
        ],
    }
    from regrepro.cli import write_json

    write_json(out / FILE, table)
    return table


def exit_code(table: Mapping[str, Any]) -> int:
    """Return 0 all as declared, 10 something is not, 125 something was not run or is undecided."""
    items = [cell for fault in table["faults"] for cell in fault["cells"].values()]
    verdicts = {"verdicts": [item for item in items if item], "complete": all(items)}
    return judge.exit_code(verdicts, expect_declared=True)
