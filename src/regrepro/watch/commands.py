"""`regrepro watch`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from regrepro.errors import RegreproError

DEFAULT_OUT = Path("/var/lib/regrepro/watch")


def _size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    from regrepro.options import parse_size

    try:
        return parse_size(value)
    except RegreproError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_OUT,
    show_default=True,
    help="Where run directories are made, one after another.",
)
@click.option(
    "--registrations",
    is_flag=True,
    help="Also count the registrations that succeed: path, size, driver, process.",
)
@click.option(
    "--pins",
    type=click.Choice(["off", "driver", "all", "unpins"]),
    default="driver",
    show_default=True,
    help="Remember pins without FOLL_LONGTERM: of drivers (NVIDIA's), of process_vm_readv, too, or of all "
    "these, and their unpins (which lie in the path of O_DIRECT).",
)
@click.option(
    "--libraries/--no-libraries",
    default=True,
    show_default=True,
    help="Follow libibverbs itself, every copy of it; without, the kernel alone.",
)
@click.option(
    "--metrics",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.prom",
    help="Keep a file for Prometheus' textfile collector.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0.01),
    default=10.0,
    show_default=True,
    help="Failures a second that are recorded in full; the others are counted.",
)
@click.option(
    "--burst",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Failures that may be recorded in full at once.",
)
@click.option(
    "--each",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="The same failure of one process is recorded in full so often a minute.",
)
@click.option(
    "--rotate",
    default="16M",
    show_default=True,
    callback=_size,
    metavar="SIZE",
    help="A record of this size is completed and a new one begun (SIGHUP does so at once).",
)
@click.option(
    "--quota",
    default="256M",
    show_default=True,
    callback=_size,
    metavar="SIZE",
    help="All run directories together; the oldest give way.",
)
@click.option(
    "--failures",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop after N failures, once none of them waits for later looks.",
)
@click.option(
    "--duration", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Stop after so long."
)
@click.option("--json", "as_json", is_flag=True, help="Print each failure as one line of JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Print no failures; the records have them.")
def watch(  # noqa: PLR0917
    out: Path,
    registrations: bool,
    pins: str,
    libraries: bool,
    metrics: Path | None,
    rate: float,
    burst: int,
    each: int,
    rotate: int,
    quota: int,
    failures: int | None,
    duration: float | None,
    as_json: bool,
    quiet: bool,
) -> None:  # fmt: skip
    """Catch registrations that fail, of every process on this node, and keep what the kernel knows of each.

    Needs root, and Linux 5.11 or later with BTF. Silent while nothing fails. Exit status: 0
    stopped as asked, 2 usage or environment.
    """
    from regrepro.watch.service import Service
    from regrepro.watch.watch_settings import WatchSettings

    settings = WatchSettings(
        out=out,
        pins=pins,
        registrations=registrations,
        libraries=libraries,
        rate=rate,
        burst=burst,
        each=each,
        rotate=rotate,
        quota=quota,
        metrics=metrics,
        as_json=as_json,
        quiet=quiet,
        limit=failures or 0,
        duration=duration or 0.0,
    )
    try:
        Service(settings).run()
    except RegreproError as error:
        click.echo(f"regrepro watch: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
