"""`regrepro bundle RUN`."""

from __future__ import annotations

from pathlib import Path

import click

from regrepro.errors import EXIT_REPRODUCED, EnvironmentProblem, UsageError
from regrepro.foreign import visible
from regrepro.options import format_size


@click.command("bundle")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Archive to write  [default: ./regrepro-TIME.tar.gz]",
)
@click.option(
    "--redact/--no-redact", default=True, help="Replace private details (the default), or keep them."
)
@click.option(
    "--nvidia-bug-report", is_flag=True, help="Run nvidia-bug-report.sh first and attach its report."
)
@click.option(
    "--audit",
    "audit_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Attach this output of `regrepro audit --json`.",
)
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send this wheel of regrepro along, so that the receiver can judge the record again.",
)
@click.option("--check", is_flag=True, help="RUN is a bundle: check its sums, judge its record again.")
@click.pass_context
def bundle(
    ctx: click.Context,
    /,
    *,
    run_dir: Path,
    output: Path | None,
    redact: bool,
    nvidia_bug_report: bool,
    audit_file: Path | None,
    wheel: Path | None,
    check: bool,
) -> None:
    """Pack a run as the attachment of a bug report: report, record, audit, log lines, C programs.

    The same run gives the same bytes. Exit codes: 0 made, or whole; 10 a checked bundle is not what it says;
    2 usage.
    """
    from regrepro.bundle.make import check_bundle, make_bundle, run_nvidia_bug_report

    if check:
        wrong = check_bundle(run_dir)
        for text in wrong:
            click.echo(visible(text))
        if not wrong:
            click.echo("whole, and the record gives the verdicts that it says")
        ctx.exit(EXIT_REPRODUCED if wrong else 0)
    if nvidia_bug_report:
        if not run_dir.is_dir():
            raise UsageError(f"{run_dir} is no directory", hint="name a run directory")
        click.echo("running nvidia-bug-report.sh (it takes minutes)", err=True)
        run_nvidia_bug_report(run_dir)
    made = make_bundle(run_dir, redact=redact, audit_file=audit_file, wheel=wheel)
    data = made.archive()
    target = output or Path(f"{made.name}.tar.gz")
    try:
        target.write_bytes(data)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {target}", why=error.strerror or str(error)) from None
    click.echo(f"{target}: {len(made.files)} files, {format_size(len(data))}")
    for placeholder, original in made.redactor.originals():
        shown = original if len(original) <= 90 else original[:89] + "…"
        click.echo(f"  {placeholder:<12} in the place of {visible(shown)}")
    for name, why in sorted(made.left_out.items()):
        click.echo(f"  left out: {visible(name)} ({visible(why)})")
    if made.redactor.enabled:
        click.echo("Private names that have neither form nor label cannot be found: look before you send it.")
