"""`regrepro compare BEFORE AFTER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from regrepro import judge
from regrepro.cli import ask_options, make_terms, recorded_needs
from regrepro.compare.changes import compare as compare_runs
from regrepro.compare.changes import exit_code
from regrepro.record import read_record


@click.command("compare")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@ask_options("node")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def compare(ctx: click.Context, /, before: Path, after: Path, as_json: bool, **values: Any) -> None:
    """Hold two run directories side by side: what differs, which verdicts changed, what that proves.

    Exit codes: 0 same or better, 10 worse, 125 cannot tell, 2 usage; all of the question that is asked.
    """
    terms = make_terms(values, "node")
    one, other = read_record(before), read_record(after)
    judged = judge.judge_record(one), judge.judge_record(other)
    terms.check(recorded_needs(one) | recorded_needs(other))
    found = compare_runs(
        one.header,
        judged[0],
        other.header,
        judged[1],
        terms.question,
        require=terms.require,
        allow_unmet=terms.allow_unmet,
    )
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        from regrepro.views import comparison

        comparison.show(found.as_json(), file=sys.stdout)
        click.echo(found.line)
    ctx.exit(exit_code(found))
