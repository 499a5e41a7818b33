"""`regrepro lab faults`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from regrepro.cli import Size
from regrepro.errors import UsageError
from regrepro.lab import faults as engine
from regrepro.lab.settings import ACCEL_CHOICES


@click.command("faults")
@click.argument("names", nargs=-1, metavar="[SCENARIO|FILE.py]...")
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="SERIES|PATH",
    help="A column. Can be repeated  [default: 7.3, 6.12, 6.1, 5.10]",
)
@click.option("--boot", default=engine.BOOT, show_default=True, metavar="ARGUMENTS", help="Boot arguments.")
@click.option("--memory", type=Size(), default="4G", show_default=True, metavar="SIZE", help="Of a machine.")
@click.option("--cpus", type=int, metavar="N", help="Virtual CPUs  [default: up to 4]")
@click.option("--accel", type=click.Choice(ACCEL_CHOICES), default="auto", show_default=True)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("regrepro-faults"),
    show_default=True,
    help="Where the runs lie; the same again goes on.",
)
@click.option("--retry", is_flag=True, help="Run again what is not as declared, or could not be decided.")
@click.option("--show", is_flag=True, help="Run nothing: show what lies in --out.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["terminal", "markdown", "json"]),
    default="terminal",
    show_default=True,
)
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@click.pass_context
def faults(  # noqa: PLR0917 - click passes by name
    ctx: click.Context,
    /,
    names: tuple[str, ...],
    kernels: tuple[str, ...],
    out: Path,
    show: bool,
    kind: str,
    quiet: bool,
    **values: Any,
) -> None:
    """Plant every fault on every kernel and show which layer is named for each.

    Exit codes: 0 each as its scenario declares, 10 one is not, 125 one could not be decided.
    """
    from regrepro.lab import progress

    plan = engine.Plan(names, kernels or engine.KERNELS, **values)
    if show:
        if not out.is_dir():
            raise UsageError(f"there is no {out}", hint="run it without --show first")
        table = engine.write(plan, plan.scenarios(), out)
    else:
        tell = progress.choose(quiet=quiet)
        try:
            table = engine.run_faults(plan, out, tell)
        finally:
            tell.close()
    _print(table, kind)
    ctx.exit(engine.exit_code(table))


def _print(table: dict[str, Any], kind: str) -> None:
    from regrepro.views import faults as view

    if kind == "json":
        click.echo(json.dumps(table, indent=2))
    elif kind == "markdown":
        click.echo(view.grid(table).markdown(), nl=False)
    else:
        view.grid(table).show(sys.stdout)
