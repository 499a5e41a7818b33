"""`regrepro audit`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from regrepro.errors import RegreproError


@click.command()
@click.option(
    "--from",
    "place",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Audit what came from another machine: a run or bundle, a folder of scripts/collect.sh, an "
    "sosreport, "
    "an nvidia-bug-report.log(.gz), captured /proc and /sys files, or an archive of these.",
)
@click.option(
    "--driver", metavar="VERSION", help="Ask about this driver release instead of the installed one."
)
@click.option(
    "--driver-source",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Ask about the driver whose source lies here: a source tree, a DKMS folder, or a .run package.",
)
@click.option(
    "--kernel-headers",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Headers of the kernel that the driver would be built for.",
)
@click.option(
    "--arch", type=click.Choice(["x86_64", "aarch64"]), help="Architecture, where it is not this machine's."
)
@click.option(
    "--run",
    "run",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A run of this node that measured the pin (default: the newest below ./regrepro-runs).",
)
@click.option(
    "--class", "classes", type=click.Choice(["A", "B"]), multiple=True, help="Exit by this class only."
)
@click.option("--facts/--no-facts", "with_facts", default=True, help="Print the facts, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema regrepro.audit/1).")
def audit(
    *,
    place: Path | None,
    driver: str | None,
    driver_source: Path | None,
    kernel_headers: Path | None,
    arch: str | None,
    run: Path | None,
    classes: tuple[str, ...],
    with_facts: bool,
    as_json: bool,
) -> None:
    """Is this node exposed? Facts first, then findings, then what to do.

    Exit status: 0 not exposed, 10 exposed, 125 cannot tell, 2 usage.
    """
    try:
        code = _audit(
            place,
            driver,
            driver_source,
            kernel_headers,
            arch,
            run,
            classes,
            with_facts=with_facts,
            as_json=as_json,
        )
    except RegreproError as error:
        click.echo(f"regrepro audit: {error}", err=True)
        code = error.exit_code
    sys.exit(code)


def _audit(  # noqa: PLR0917
    place: Path | None,
    driver: str | None,
    driver_source: Path | None,
    headers: Path | None,
    arch: str | None,
    run: Path | None,
    classes: tuple[str, ...],
    *,
    with_facts: bool,
    as_json: bool,
) -> int:
    import contextlib

    from regrepro.audit.audit import audit as audit_reader
    from regrepro.audit.audit import exit_code
    from regrepro.audit.driver import recent_runs
    from regrepro.audit.places import open_place
    from regrepro.audit.reader import LiveReader, Reader
    from regrepro.audit.report import show

    with contextlib.ExitStack() as stack:
        reader: Reader = LiveReader() if place is None else stack.enter_context(open_place(place))
        runs = [run] if run is not None else recent_runs(Path("regrepro-runs")) if place is None else []
        result = audit_reader(
            reader, driver=driver, driver_source=driver_source, headers=headers, arch=arch, runs=runs
        )
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        show(result, with_facts=with_facts)
    return exit_code(result, classes or ("A", "B"))
