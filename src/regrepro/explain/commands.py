"""`regrepro explain`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from regrepro.errors import EXIT_UNDECIDED, RegreproError, UsageError
from regrepro.foreign import visible


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option(
    "--audit",
    "audit_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="An audit of the node, made by `regrepro audit --json`: it narrows the causes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema regrepro.explain/1).")
def explain(*, files: tuple[str, ...], audit_file: Path | None, as_json: bool) -> None:
    """What does this log mean? Finds failed memory registrations and says what they can and cannot be.

    Reads logs of NCCL, UCX, libfabric, PyTorch, perftest and the kernel, and traces of ftrace,
    trace-cmd, bpftrace and retsnoop; from standard input without FILE or with `-`. What is packed is
    unpacked. Exit codes: 0, 125 where only lines were found that no rule knows, 2 usage.
    """
    try:
        code = _explain(files or ("-",), audit_file, as_json=as_json)
    except RegreproError as error:
        click.echo(f"regrepro explain: {error}", err=True)
        code = error.exit_code
    sys.exit(code)


def _explain(files: tuple[str, ...], audit_file: Path | None, *, as_json: bool) -> int:
    from regrepro.audit.archive import BROKEN
    from regrepro.explain.explain import Explainer
    from regrepro.explain.opening import Texts
    from regrepro.explain.report import show

    explainer = Explainer(read_audit(audit_file) if audit_file is not None else None)
    damaged: list[str] = []
    for given in files:
        with contextlib.ExitStack() as stack:
            shown = "standard input" if given == "-" else given
            texts = Texts(stack)
            if given == "-" and sys.stdin.isatty():
                click.echo("regrepro explain: reading what you type or paste, until Ctrl-D", err=True)
            try:
                for name, text in texts.of(given):
                    explainer.read_file(name, text)
            except (*BROKEN, OSError, EOFError) as error:
                why = getattr(error, "strerror", None) or str(error) or "it ends too early"
                raise UsageError(f"{shown} cannot be read", why=why) from None
            damaged += texts.damaged
    for sentence in damaged:
        click.echo(f"regrepro explain: {visible(sentence)}", err=True)
    result = explainer.result()
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        show(result)
    missed = bool(damaged) and not result["groups"]
    return EXIT_UNDECIDED if result["closest"] or missed else 0


def read_audit(path: Path) -> dict[str, Any]:
    """Read the output of `regrepro audit --json`. Raises UsageError where it is none."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(64 << 20))
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=str(error.strerror or error)) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON", hint="make it by `regrepro audit --json`") from None
    well_formed = (
        isinstance(value, dict)
        and str(value.get("schema", "")).startswith("regrepro.audit/")
        and all(isinstance(value.get(name), list) for name in ("facts", "findings", "exposure"))
    )
    if not well_formed:
        raise UsageError(f"{path} is no audit", hint="make it by `regrepro audit --json`")
    return dict(value)
