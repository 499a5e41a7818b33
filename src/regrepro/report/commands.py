"""`regrepro report RUN`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from regrepro.errors import EnvironmentProblem

FORMATS = ("html", "markdown", "text", "tap", "c")


@click.command("report")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(FORMATS), default="text", show_default=True)
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="File to write  [default: stdout]"
)
@click.option(
    "--scenario", metavar="NAME", help="With --format c: which scenario's steps, where the run has several."
)
@click.option(
    "--expect",
    type=click.Choice(["declared"]),
    help="With --format tap: ok is what the scenario files declare.",
)
def report(run_dir: Path, kind: str, output: Path | None, scenario: str | None, expect: str | None) -> None:
    """Make a report of a run directory: page, issue, mail, TAP, or a C program that does the same.

    It reads the record alone and needs neither the node nor a kernel. Exit codes: 0 written, 2 usage.
    """
    write(make(run_dir, kind, scenario=scenario, expect_declared=expect == "declared"), output)


def make(run_dir: Path, kind: str, *, scenario: str | None = None, expect_declared: bool = False) -> str:
    """Return a report. Raises `UsageError` where the run cannot be read or cannot be exported."""
    from regrepro.report.load import load
    from regrepro.report.model import build

    run = load(run_dir)
    if kind == "tap":
        from regrepro.report import tap

        return tap.render(run.verdicts, expect_declared=expect_declared)
    if kind == "c":
        from regrepro.report import cprogram

        return cprogram.render(run.record, scenario)
    from regrepro.report import html, markdown, text

    content = build(run)
    if kind == "html":
        return html.render(content)
    return markdown.render(content) if kind == "markdown" else text.render(content)


def write(text: str, output: Path | None) -> None:
    """Write a text to a file or to stdout. Raises `EnvironmentProblem`."""
    if output is None:
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.flush()
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {output}", why=error.strerror or str(error)) from None
