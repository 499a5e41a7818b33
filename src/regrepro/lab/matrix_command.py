"""`regrepro lab matrix`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from regrepro.cli import Size
from regrepro.foreign import visible
from regrepro.lab import matrix as engine
from regrepro.lab.settings import ACCEL_CHOICES
from regrepro.options import PLACE_CHOICES

_PINS = ("standin:pin", "standin:longterm", "none")


@click.command("matrix")
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="SERIES|PATH",
    help="A row. Can be repeated  [default: 5.10, 6.1, 6.12, 7.3]",
)
@click.option(
    "--boot",
    "boots",
    multiple=True,
    metavar="ARGUMENTS",
    help='Boot arguments of a row; "" for none. Can be repeated  [default: "", movablecore=512M]',
)
@click.option(
    "--place",
    "places",
    multiple=True,
    type=click.Choice(PLACE_CHOICES),
    help="Placement of a row  [default: gather]",
)
@click.option(
    "--pin",
    "pins",
    multiple=True,
    type=click.Choice(_PINS),
    help="A column: what the pin promises  [default: standin:pin, standin:longterm]",
)
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    metavar="NAME|FILE.py",
    help="What runs in each cell  [default: pin_then_register]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("regrepro-matrix"),
    show_default=True,
    help="Where the runs lie; the same again goes on.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Machines at a time  [default: as memory and cores allow]",
)
@click.option("--memory", type=Size(), metavar="SIZE", help="Of each machine.")
@click.option("--numa", type=int, default=1, show_default=True, metavar="N", help="NUMA nodes.")
@click.option("--cpus", type=int, metavar="N", help="Virtual CPUs of each  [default: up to 2]")
@click.option("--accel", type=click.Choice(ACCEL_CHOICES), default="auto", show_default=True)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Of each pass."
)
@click.option("--retry", is_flag=True, help="Run cells again that were run and could not be decided.")
@click.option("--show", is_flag=True, help="Run nothing: show what lies in --out.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["terminal", "markdown", "html", "json"]),
    default="terminal",
    show_default=True,
)
@click.option("--expect", type=click.Choice(["declared"]), help="Exit by what the scenario files declare.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@click.pass_context
def matrix(
    ctx: click.Context,
    /,
    *,
    out: Path,
    jobs: int | None,
    show: bool,
    kind: str,
    expect: str | None,
    quiet: bool,
    **values: Any,
) -> None:
    """Run one lab run for each kernel, boot arguments, placement and pin, and show a verdict for each.

    Exit codes: those of a run, for all cells together.
    """
    if show:
        found = engine.read_matrix(out)
    else:
        defaults = engine.Plan()
        rows = {
            name: values.pop(name) or getattr(defaults, name)
            for name in ("kernels", "boots", "places", "pins", "scenarios")
        }
        plan = engine.Plan(**rows, **values)
        progress = _Progress(len(plan.cells()), quiet=quiet)
        try:
            found = engine.run_matrix(
                plan, out, jobs=jobs, tell=progress.say, started=progress.started, finished=progress.finished
            )
        finally:
            progress.close()
    _print(found, kind)
    ctx.exit(engine.exit_code(found, expect_declared=expect == "declared"))


def _print(found: dict[str, Any], kind: str) -> None:
    from regrepro.views import matrix as view

    if kind == "json":
        click.echo(json.dumps(found, indent=2))
    elif kind == "markdown":
        click.echo(view.grid(found).markdown(), nl=False)
    elif kind == "html":
        click.echo(view.grid(found).html(), nl=False)
    else:
        view.grid(found).show(sys.stdout)


class _Progress:
    """One line for each cell as it starts and ends; on a terminal a bar beside it, by rich where it is "
    "there."""

    def __init__(self, cells: int, *, quiet: bool) -> None:
        self._quiet = quiet
        self._cells, self._ended, self._running = cells, 0, 0
        self._bar: Any = None
        self._task: Any = None
        if quiet or not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._bar.start()
        self._task = self._bar.add_task("cells", total=cells)

    def say(self, text: str) -> None:
        """Tell a line."""
        text = visible(text)
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            click.echo(text, err=True)

    def started(self, cell: engine.Cell) -> None:
        """A cell was begun."""
        self._running += 1
        self.say(f"{cell} …")
        self._update()

    def finished(self, result: engine.Result) -> None:
        """A cell has ended."""
        self._ended, self._running = self._ended + 1, self._running - 1
        words = ", ".join(str(item["verdict"]) for item in result.verdicts) or result.state
        took = f" after {result.seconds:.0f} s" if result.seconds is not None else ""
        why = f": {result.why}" if result.why else ""
        self.say(f"{result.cell}: {words}{took}{why}")
        self._update(1)

    def _update(self, advance: int = 0) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=advance, description=f"{self._running} running")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
