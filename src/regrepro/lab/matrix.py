"""Many lab runs, one for each cell: kernels × boot arguments × placement × pin contract.

Each cell is a `regrepro lab run` in a process and a run directory of its own. A cell that was run to its end
is not run again, so that a matrix which was interrupted goes on where it was. As many cells run at a time as
memory and cores allow.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro import __version__, judge
from regrepro.errors import EnvironmentProblem, RegreproError, UsageError
from regrepro.kernel import procfs
from regrepro.kernel.zones import MEMINFO, parse_meminfo
from regrepro.lab.run import LabOptions
from regrepro.record import FILE_NAME, read_record

SCHEMA = "regrepro.matrix/1"
FILE = "matrix.json"
KERNELS = ("5.10", "6.1", "6.12", "7.3")
BOOTS = ("", "movablecore=512M")
PINS = ("standin:pin", "standin:longterm")
PLACES = ("gather",)
SCENARIOS = ("pin_then_register",)

_LOG = "lab-run.log"
# What QEMU and the process around it take beside the guest's memory.
_OVERHEAD = 512 << 20
_RUN_CODES = (0, 10, 11, 125)


@dataclass(frozen=True)
class Cell:
    """One cell. `boot` is the boot arguments as one string, perhaps empty."""

    kernel: str
    boot: str
    place: str
    pin: str

    def directory(self) -> Path:
        """Where its run lies, below the matrix' directory."""
        kernel = Path(self.kernel).name if "/" in self.kernel else self.kernel
        return (
            Path(_slug(kernel)) / (_slug(self.boot) or "no-arguments") / _slug(self.place) / _slug(self.pin)
        )

    def __str__(self) -> str:
        place = "" if self.place == "gather" else f", {self.place}"
        return f"{self.kernel}, {self.boot or 'no boot arguments'}{place}, {self.pin}"


@dataclass(frozen=True)
class Plan:
    """What is to be run. `memory` in bytes or None, `timeout` in seconds or None, both as `lab run` has "
    "them."""

    kernels: Sequence[str] = KERNELS
    boots: Sequence[str] = BOOTS
    places: Sequence[str] = PLACES
    pins: Sequence[str] = PINS
    scenarios: Sequence[str] = SCENARIOS
    memory: int | None = None
    numa: int = 1
    cpus: int | None = None
    accel: str = "auto"
    timeout: float | None = None
    retry: bool = False

    def cells(self) -> list[Cell]:
        """Return the cells in order. Raises `UsageError` where two would share a directory."""
        cells = [
            Cell(kernel, boot, place, pin)
            for kernel in dict.fromkeys(self.kernels)
            for boot in dict.fromkeys(self.boots)
            for place in dict.fromkeys(self.places)
            for pin in dict.fromkeys(self.pins)
        ]
        seen: dict[Path, Cell] = {}
        for cell in cells:
            other = seen.setdefault(cell.directory(), cell)
            if other != cell:
                raise UsageError(
                    f"{other} and {cell} would have one run directory, {cell.directory()}",
                    hint="give one of the kernels another name",
                )
        return cells

    def lab_options(self, cell: Cell) -> LabOptions:
        """Return the machine of a cell."""
        cpus = self.cpus if self.cpus is not None else min(2, os.cpu_count() or 1)
        boot = (cell.boot,) if cell.boot else ()
        return LabOptions(cell.kernel, boot, self.memory, self.numa, cpus, self.accel)

    def command(self, cell: Cell, out: Path) -> list[str]:
        """Return the command that runs a cell."""
        lab = self.lab_options(cell)
        words = [sys.executable, "-m", "regrepro", "lab", "run", *self.scenarios, "--kernel", cell.kernel]
        words += ["--boot", cell.boot] if cell.boot else []
        words += ["--cuda", cell.pin, "--place", cell.place, "--numa", str(lab.numa), "--cpus", str(lab.cpus)]
        words += ["--accel", lab.accel, "--out", str(out)]
        words += ["--memory", str(self.memory)] if self.memory is not None else []
        words += ["--timeout", str(self.timeout)] if self.timeout is not None else []
        return words


@dataclass
class Result:
    """What is known of a cell: `state` is `done`, `failed` (no record came of it) or `waiting`."""

    cell: Cell
    state: str
    why: str = ""
    seconds: float | None = None
    release: str | None = None
    complete: bool = False
    verdicts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def decided(self) -> bool:
        """Whether every scenario of the cell has a verdict that is one."""
        undecided = [item for item in self.verdicts if item["verdict"] in ("unmet", "error")]
        return self.state == "done" and self.complete and bool(self.verdicts) and not undecided

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "kernel": self.cell.kernel,
            "release": self.release,
            "boot": self.cell.boot,
            "place": self.cell.place,
            "pin": self.cell.pin,
            "run": self.cell.directory().as_posix(),
            "state": self.state,
            "why": self.why,
            "seconds": self.seconds,
            "complete": self.complete,
            "verdicts": self.verdicts,
        }


class Interrupted(RegreproError):
    """The matrix was ended by a signal; run it again with the same --out and it goes on."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum
        super().__init__(
            f"ended by {signal.Signals(signum).name}", hint="run it again, and it goes on where it was"
        )


def run_matrix(
    plan: Plan,
    out: Path,
    *,
    jobs: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    started: Callable[[Cell], None] = lambda cell: None,
    finished: Callable[[Result], None] = lambda result: None,
) -> dict[str, Any]:
    """Run the cells that were not run yet; return the matrix and write it into `out`.

    `jobs` limits how many run at a time, beside memory and cores. Raises `UsageError`, `EnvironmentProblem`,
    `Interrupted`.
    """
    cells = plan.cells()
    for cell in cells:
        plan.lab_options(cell).settings()  # what is wrong with them is said before anything runs
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make {out}", why=error.strerror or str(error)) from None
    results = {cell: read_cell(cell, out / cell.directory()) for cell in cells}
    for cell, result in results.items():
        again = result.state == "failed" or not result.complete or (plan.retry and not result.decided)
        if result.state != "waiting" and again:
            results[cell] = Result(cell, "waiting")
    waiting = [cell for cell, result in results.items() if result.state == "waiting"]
    if len(waiting) < len(cells):
        tell(f"{len(cells) - len(waiting)} of {len(cells)} cells were run before and are kept")
    stop: list[int] = []
    saved = {number: signal.signal(number, lambda n, _: stop.append(n)) for number in _signals()}
    try:
        for result in _run_all(plan, waiting, out, jobs=jobs, stop=stop, started=started):
            results[result.cell] = result
            finished(result)
            write(out, plan, results.values())
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
    matrix = write(out, plan, results.values())
    if stop:
        raise Interrupted(stop[0])
    return matrix


def _signals() -> Iterator[int]:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            yield number


@dataclass
class _Job:
    cell: Cell
    process: subprocess.Popen[bytes]
    partial: Path
    began: float
    memory: int
    cpus: int


def _run_all(
    plan: Plan,
    waiting: list[Cell],
    out: Path,
    *,
    jobs: int | None,
    stop: list[int],
    started: Callable[[Cell], None],
) -> Iterator[Result]:
    left, running = list(waiting), list[_Job]()
    cores, memory = os.cpu_count() or 1, int(available_memory() * 0.8)
    try:
        while left or running:
            while left and not stop and _fits(plan, left[0], running, jobs=jobs, cores=cores, memory=memory):
                cell = left.pop(0)
                running.append(_start(plan, cell, out))
                started(cell)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                yield _settle(job, out)
            if stop:
                return
            time.sleep(0.2)
    finally:
        for job in running:
            with suppress(ProcessLookupError):
                job.process.terminate()  # `lab run` gives everything back by itself
        for job in running:
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(60)


def _fits(
    plan: Plan, cell: Cell, running: Sequence[_Job], *, jobs: int | None, cores: int, memory: int
) -> bool:
    """Tell whether one more machine fits; the first one always does."""
    if not running:
        return True
    settings = plan.lab_options(cell).settings()
    used = sum(job.memory for job in running) + settings.memory + _OVERHEAD
    busy = sum(job.cpus for job in running) + settings.cpus
    return (jobs is None or len(running) < jobs) and used <= memory and busy <= cores


def _start(plan: Plan, cell: Cell, out: Path) -> _Job:
    final = out / cell.directory()
    partial = final.with_name(final.name + ".partial")
    for place in (partial, final):
        shutil.rmtree(place, ignore_errors=True)
    partial.mkdir(parents=True)
    settings = plan.lab_options(cell).settings()
    with (partial / _LOG).open("wb") as log:
        process = subprocess.Popen(
            plan.command(cell, partial),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is passed on once, by us
        )
    return _Job(cell, process, partial, time.monotonic(), settings.memory + _OVERHEAD, settings.cpus)


def _settle(job: _Job, out: Path) -> Result:
    """Give a finished cell its final name, and read what came of it."""
    final = out / job.cell.directory()
    job.partial.rename(final)
    seconds = round(time.monotonic() - job.began, 1)
    (final / "seconds").write_text(f"{seconds}\n", encoding="ascii")
    result = read_cell(job.cell, final)
    if result.state == "failed" and job.process.returncode not in _RUN_CODES:
        result.why = result.why or f"lab run exited with {job.process.returncode}"
    return result


def read_cell(cell: Cell, directory: Path) -> Result:
    """Return what is known of a cell from its directory."""
    if not directory.is_dir():
        return Result(cell, "waiting")
    seconds = None
    with suppress(OSError, ValueError):
        seconds = float((directory / "seconds").read_text(encoding="ascii"))
    if not (directory / FILE_NAME).is_file():
        return Result(cell, "failed", _last_words(directory / _LOG), seconds)
    try:
        record = read_record(directory)
    except RegreproError as error:
        return Result(cell, "failed", str(error), seconds)
    verdicts = judge.judge_record(record)
    keys = ("scenario", "variant", "verdict", "pin_owner", "basis", "errno", "layer", "reason", "as_declared")
    items = [{key: item.get(key) for key in keys} for item in verdicts["verdicts"]]
    node = record.header.get("node")
    release = node.get("kernel") if isinstance(node, Mapping) else None
    complete = verdicts["complete"] is True
    why = "" if complete else "; ".join(verdicts["problems"][:2])
    return Result(cell, "done", why, seconds, release, complete, items)


def _last_words(log: Path) -> str:
    """Return the last line that is an error of ours, else the last line."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "no record, and no log"
    errors = [line.removeprefix("regrepro: ") for line in lines if line.startswith("regrepro: ")]
    return (errors or [line for line in lines if line] or ["no record, and nothing was said"])[-1]


def write(out: Path, plan: Plan, results: Iterable[Result]) -> dict[str, Any]:
    """Write `matrix.json` whole or not at all; return what it holds."""
    matrix = {
        "schema": SCHEMA,
        "version": __version__,
        "command": as_command(plan),
        "scenarios": list(plan.scenarios),
        "cells": [result.as_json() for result in results],
    }
    from regrepro.cli import write_json

    write_json(out / FILE, matrix)
    return matrix


def as_command(plan: Plan) -> str:
    """Return the command that makes this matrix; what is the default is left out."""
    words = ["regrepro", "lab", "matrix"]
    for option, given, default in (
        ("--scenario", plan.scenarios, SCENARIOS),
        ("--kernel", plan.kernels, KERNELS),
        ("--boot", plan.boots, BOOTS),
        ("--place", plan.places, PLACES),
        ("--pin", plan.pins, PINS),
    ):
        if tuple(given) != tuple(default):
            words += [word for value in given for word in (option, value)]
    if plan.numa != 1:
        words += ["--numa", str(plan.numa)]
    if plan.memory is not None:
        words += ["--memory", str(plan.memory)]
    return shlex.join(words)


def exit_code(matrix: Mapping[str, Any], *, expect_declared: bool = False) -> int:
    """Return the exit code of all cells together, by the rules of a run."""
    cells = matrix["cells"]
    verdicts = {
        "verdicts": [item for cell in cells for item in cell["verdicts"]],
        "complete": all(cell["state"] == "done" and cell["complete"] for cell in cells),
    }
    return judge.exit_code(verdicts, expect_declared=expect_declared)


def read_matrix(path: Path) -> dict[str, Any]:
    """Read `matrix.json`. Raises `UsageError`."""
    file = path / FILE if path.is_dir() else path
    try:
        matrix = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {file}", why=str(error)) from None
    if not isinstance(matrix, dict) or matrix.get("schema") != SCHEMA:
        raise UsageError(f"{file} is no matrix", why=f"its schema is not {SCHEMA}")
    return matrix


def available_memory() -> int:
    """Return MemAvailable in bytes."""
    available = parse_meminfo(procfs.text(MEMINFO) or "").get("MemAvailable")
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if available is None else available


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text.replace("=", "-")).strip("-.")
