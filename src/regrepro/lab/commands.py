"""The commands `regrepro lab run` and `regrepro lab kernels`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import click

from regrepro.cli import (
    Size,
    ask_options,
    conclude,
    default_out,
    make_run_options,
    make_terms,
    run_options,
)
from regrepro.errors import RegreproError, UsageError
from regrepro.lab.archive import Index
from regrepro.lab.settings import ACCEL_CHOICES, parse_nodes
from regrepro.options import format_size
from regrepro.views.lines import Line, columns, emit


@click.group("lab")
def lab() -> None:
    """Real kernels in a virtual machine: no GPU, no RDMA card, no KVM needed."""


@lab.command("run")
@click.argument("names", nargs=-1, metavar="[SCENARIO|FILE.py]...")
@click.option(
    "--kernel",
    default="latest",
    show_default=True,
    metavar="SERIES|latest|PATH|host",
    help="Kernel to boot; latest: the newest in Debian's archive that has CMA.",
)
@click.option(
    "--boot",
    multiple=True,
    metavar="ARGUMENTS",
    help='Boot arguments, such as "hugetlb_cma=2G". Can be repeated.',
)
@click.option(
    "--memory", type=Size(), metavar="SIZE", help="Of all nodes together  [default: what --boot needs]"
)
@click.option(
    "--numa",
    default="1",
    show_default=True,
    metavar="N|SIZE,SIZE…",
    help="NUMA nodes, of equal size, or the size of each.",
)
@click.option("--cpus", type=int, metavar="N", help="Virtual CPUs  [default: up to 4]")
@click.option(
    "--accel",
    type=click.Choice(ACCEL_CHOICES),
    default="auto",
    show_default=True,
    help="auto: KVM where a short probe shows that it works, else TCG. icount: TCG, the guest's clock counts "
    "its instructions.",
)
@run_options
@ask_options("reproduce")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@click.pass_context
def run_command(  # noqa: PLR0917 - click passes by name
    ctx: click.Context,
    /,
    names: tuple[str, ...],
    kernel: str,
    boot: tuple[str, ...],
    memory: int | None,
    numa: str,
    cpus: int | None,
    accel: str,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Boot a kernel and run scenarios in it, on soft-RoCE; judge what was seen."""
    from regrepro.lab import progress
    from regrepro.lab.run import Interrupted, LabOptions, lab_run
    from regrepro.scenario import Library, check_options, needs_by_name

    terms = make_terms(values)
    options = make_run_options(names, values)
    lab_options = LabOptions(kernel, boot, memory, parse_nodes(numa), cpus, accel)
    # What is wrong with names and options is said before anything is fetched or made.
    scenarios = Library().select(names, options.profile)
    check_options(scenarios, options.option)
    terms.check(needs_by_name(scenarios))
    lab_options.settings()
    made = out is None
    directory = default_out() if out is None else out
    tell = progress.choose(quiet=quiet)
    try:
        lab_run(names, options, lab_options, directory, tell)
    except Interrupted as interrupted:
        tell.close()
        with contextlib.suppress(RegreproError):
            conclude(directory, terms, as_json=as_json)
        raise interrupted from None
    except RegreproError:
        if made:
            _remove_if_nothing_was_recorded(directory)
        raise
    finally:
        tell.close()
    ctx.exit(conclude(directory, terms, as_json=as_json))


def _remove_if_nothing_was_recorded(directory: Path) -> None:
    from regrepro.lab.run import CONSOLE_FILE

    if not (directory / "record.jsonl").exists():
        with contextlib.suppress(OSError):
            (directory / CONSOLE_FILE).unlink(missing_ok=True)
            directory.rmdir()


@lab.command("kernels")
@click.option("--fetch", multiple=True, metavar="SERIES", help="Download a kernel now: 6.12, latest, …")
@click.option("--prune", is_flag=True, help="Remove kept kernels but the newest of each series.")
@click.option("--refresh", is_flag=True, help="Ask the archive even if it was asked lately.")
@click.option("--all", "everything", is_flag=True, help="Every image, also rt, cloud and older ones.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def kernels_command(
    fetch: tuple[str, ...], prune: bool, refresh: bool, everything: bool, as_json: bool
) -> None:
    """Show the kernels that Debian's archive offers, and those that are kept here."""
    from regrepro.lab import progress
    from regrepro.lab.kernels import Kernels

    if prune and fetch:
        raise UsageError("--prune and --fetch do not go together")
    tell = progress.choose(quiet=as_json)
    kernels = Kernels(watcher=tell)
    try:
        if prune:
            gone = kernels.prune()
            if as_json:
                click.echo(json.dumps({"removed": gone}, indent=2))
            else:
                click.echo("\n".join(f"removed {name}" for name in gone) or "nothing to remove")
            return
        if fetch:
            found = [kernels.get(name) for name in fetch]
            if as_json:
                click.echo(json.dumps([_kernel_as_json(kernel) for kernel in found], indent=2))
            else:
                for kernel in found:
                    click.echo(f"{kernel.release}  {kernel.image}")
            return
        _show(kernels, refresh=refresh, everything=everything, as_json=as_json)
    finally:
        tell.close()


def _kernel_as_json(kernel: Any) -> dict[str, Any]:
    return {
        "release": kernel.release,
        "version": kernel.version,
        "origin": kernel.origin,
        "image": str(kernel.image),
        "cma": kernel.has_option("CONFIG_CMA"),
    }


def _show(kernels: Any, *, refresh: bool, everything: bool, as_json: bool) -> None:
    cached = kernels.cached()
    try:
        index = kernels.on_offer(max_age=0) if refresh else kernels.on_offer()
    except RegreproError as problem:
        if not cached:
            raise
        index = Index(0.0, "", (), {}, stale=str(problem))
    kept = {(kernel.release, kernel.version): kernel for kernel in cached}
    newest: dict[str, Any] = {}
    for offer in index.offers:
        if offer.is_ordinary(index.architecture):
            newest.setdefault(offer.series, offer)
    offers = list(index.offers) if everything else list(newest.values())
    offered = {(offer.release, offer.version) for offer in index.offers}
    if as_json:
        value = {
            "fetched": index.fetched,
            "stale": index.stale or None,
            "missing_suites": index.missing,
            "offers": [
                {
                    "series": offer.series,
                    "release": offer.release,
                    "version": offer.version,
                    "suites": list(offer.suites),
                    "size": offer.size,
                    "kept": (offer.release, offer.version) in kept,
                }
                for offer in offers
            ],
            "kept": [_kernel_as_json(kernel) for kernel in cached],
        }
        click.echo(json.dumps(value, indent=2))
        return
    rows: list[Line] = []
    for offer in offers:
        here = kept.get((offer.release, offer.version))
        cma = (
            {True: "kept, has CMA", False: "kept, no CMA", None: "kept"}[here.has_option("CONFIG_CMA")]
            if here
            else ""
        )
        suites = ", ".join(offer.suites)
        cells = (offer.series, offer.release, offer.version, suites, format_size(offer.size), cma)
        rows.append([(cell, "") for cell in cells])
    emit(columns(("series", "release", "package version", "suites", "size", "here"), rows))
    for kernel in cached:
        if (kernel.release, kernel.version) not in offered:
            click.echo(f"kept, no longer on offer: {kernel.release} ({kernel.version})")
    for suite, why in index.missing.items():
        click.echo(f"suite {suite} could not be read: {why}", err=True)
    if index.stale:
        click.echo(index.stale, err=True)


def _add_tables() -> None:
    from regrepro.lab.faults_command import faults
    from regrepro.lab.matrix_command import matrix

    lab.add_command(matrix)
    lab.add_command(faults)


_add_tables()
