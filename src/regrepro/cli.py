"""The command line. Each command calls one room; errors that a user can mend are one line on stderr."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

# Its threads would be forked away from, and starting them costs time: nothing here multiplies matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click

from regrepro import __version__
from regrepro.errors import EXIT_USAGE, EnvironmentProblem, RegreproError, UsageError
from regrepro.foreign import visible
from regrepro.judge import judge_record, questions
from regrepro.judge.names import names_of
from regrepro.options import (
    CUDA_CHOICES,
    PLACE_CHOICES,
    PROFILES,
    TRACE_CHOICES,
    RunOptions,
    parse_size,
)

if TYPE_CHECKING:
    from regrepro.record import Record

_Command = TypeVar("_Command", bound=Callable[..., Any])

# Commands of other rooms: module and name. A room that is not built yet has no command.
_ROOMS = {
    "lab": ("regrepro.lab.commands", "lab"),
    "audit": ("regrepro.audit.commands", "audit"),
    "explain": ("regrepro.explain.commands", "explain"),
    "compare": ("regrepro.compare.commands", "compare"),
    "report": ("regrepro.report.commands", "report"),
    "bundle": ("regrepro.bundle.commands", "bundle"),
    "watch": ("regrepro.watch.commands", "watch"),
}


class _Rooms(click.Group):
    """Finds the commands of other rooms, and imports a room only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        rooms = [name for name, (module, _) in _ROOMS.items() if importlib.util.find_spec(module)]
        return sorted({*super().list_commands(ctx), *rooms})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in _ROOMS:
            return own
        module, name = _ROOMS[cmd_name]
        if importlib.util.find_spec(module) is None:
            return None
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            import difflib

            known = self.list_commands(ctx)
            near = difflib.get_close_matches(args[0], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(known)}"
            raise click.UsageError(f"no command {args[0]!r} ({hint})", ctx) from None


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in new clicks only
    """A size in bytes: `512M`, `2G`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except RegreproError as error:
            self.fail(str(error), param, ctx)


def run_options(command: _Command) -> _Command:
    """Add the options that `run` and `lab run` share; `make_run_options` reads them."""
    options = [
        click.option("--profile", type=click.Choice(PROFILES), default="default", show_default=True,
                     help="Which scenarios to run when none is named."),
        click.option("--out", type=click.Path(file_okay=False, path_type=Path),
                     help="Run directory to make  [default: ./regrepro-runs/<time>-<host>]"),
        click.option("--cuda", type=click.Choice(CUDA_CHOICES), default="auto", show_default=True,
                     help="Who pins: the GPU's driver, a stand-in, or nobody."),
        click.option("--gpu", type=click.IntRange(min=0), default=0, show_default=True, help="Which GPU."),
        click.option("--rdma-device", default="auto", show_default=True, metavar="NAME|auto|none",
                     help="RDMA device to register with; none: io_uring in its place."),
        click.option("--port", type=click.IntRange(1, 255), default=1, show_default=True, help="Its port."),
        click.option("--gid-index", type=click.IntRange(min=0), help="GID index for transfers."),
        click.option("--trace", type=click.Choice(TRACE_CHOICES), default="auto", show_default=True,
                     help="The kernel's own trace of each pin and registration."),
        click.option("--place", type=click.Choice(PLACE_CHOICES), default="gather", show_default=True,
                     help="How pages are put into unpinnable memory."),
        click.option("--pressure-limit", type=Size(), metavar="SIZE",
                     help="With --place pressure: how much memory may be held meanwhile."),
        click.option("--pressure-beside-gpu-jobs", is_flag=True,
                     help="With --place pressure: go on though other processes use the GPUs."),
        click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
                     help="Time limit of each pass, in the place of the scenario's own."),
        click.option("--option", multiple=True, metavar="NAME=VALUE",
                     help="Set an option of the scenarios themselves (`regrepro list` shows them)."),
        click.option("--expect", type=click.Choice(["declared"]),
                     help="Judge by what the scenario files declare: exit 0 as declared, 10 not so."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True)
class Terms:
    """What a run is asked, and what it must and need not have met: `--ask`, `--require`, `--allow-unmet`."""

    question: str = "reproduce"
    require: tuple[str, ...] = ()
    allow_unmet: tuple[str, ...] = ()
    declared: bool = False

    def check(self, scenarios: Mapping[str, Iterable[str]]) -> None:
        """Check the names, `scenarios` being those that run or ran, with their needs. Raises `UsageError`."""
        from regrepro.scenario import NEEDS

        questions.check_terms(self.require, self.allow_unmet, scenarios=scenarios, needs=(*NEEDS, "kernel"))
        questions.check_declared(self.require, scenarios)

    def answer(self, verdicts: Mapping[str, Any], header: Mapping[str, Any]) -> questions.Answer:
        """Answer by the verdicts of a run."""
        if self.declared:
            return questions.declared_answer(verdicts)
        return questions.answer(
            verdicts, self.question, header, require=self.require, allow_unmet=self.allow_unmet
        )


def recorded_needs(record: Record) -> dict[str, list[str]]:
    """Return the scenarios of a record, each with the needs that its file declared."""
    found: dict[str, list[str]] = {}
    for event in record.events:
        if event.get("scenario"):
            declared = event.get("declared")
            needs = declared.get("needs") if isinstance(declared, Mapping) else None
            for name in names_of(event):
                kept = found.setdefault(name, [])
                kept += [str(need) for need in needs] if isinstance(needs, list) else []
    return found


def ask_options(default: str) -> Callable[[_Command], _Command]:
    """Add `--ask`, `--require` and `--allow-unmet`; `make_terms` reads them."""
    asked = "; ".join(f"{name}: {text}" for name, text in questions.QUESTIONS.items())
    options = [
        click.option("--ask", type=click.Choice(list(questions.QUESTIONS)),
                     help=f"The question that the exit code answers: {asked}  [default: {default}]"),
        click.option("--require", multiple=True, metavar="SCENARIO|NEED",
                     help="Undecided unless this scenario answers, or this need is met. Can be repeated."),
        click.option("--allow-unmet", multiple=True, metavar="NEED",
                     help="Leave out what this need kept from running. Can be repeated."),
    ]  # fmt: skip

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def make_terms(values: dict[str, Any], default: str = "reproduce") -> Terms:
    """Take the values that the options of `ask_options` gave, and `expect`. Raises `UsageError`."""
    ask, require, allow = values.pop("ask"), values.pop("require"), values.pop("allow_unmet")
    declared = values.get("expect") == "declared"
    if declared and (ask or require or allow):
        given = "--ask" if ask else "--require" if require else "--allow-unmet"
        raise UsageError(f"{given} and --expect declared exclude each other", hint="leave one out")
    return Terms(ask or default, tuple(require), tuple(allow), declared)


def make_run_options(names: tuple[str, ...], values: dict[str, Any]) -> RunOptions:
    """Make run options of the values that the options of `run_options` gave."""
    keys = set(RunOptions.__dataclass_fields__) - {"names"}
    return RunOptions(names=names, **{key: value for key, value in values.items() if key in keys})


def default_out() -> Path:
    """Return a run directory that does not exist yet: `./regrepro-runs/<time>-<host>`."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "host"
    base = Path("regrepro-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{host}"
    path, number = base, 2
    while True:
        # Made here and now: two runs that start in one second must not share it.
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            path, number = base.with_name(f"{base.name}-{number}"), number + 1
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot make {path}",
                why=error.strerror or str(error),
                hint="give --out a directory that can be written",
            ) from None


def conclude(run_dir: Path, terms: Terms, *, as_json: bool, write: bool = True) -> int:
    """Judge a run directory, write `verdicts.json`, show verdicts and answer; return the exit code."""
    from regrepro.record import read_record

    record = read_record(run_dir)
    verdicts = judge_record(record)
    answer = terms.answer(verdicts, record.header)
    verdicts |= answer.as_json()
    directory = run_dir if run_dir.is_dir() else run_dir.parent
    if write:
        write_json(directory / "verdicts.json", verdicts)
    if as_json:
        click.echo(json.dumps(verdicts, indent=2))
    else:
        from regrepro.views import terminal

        terminal.show(verdicts, record, directory, file=sys.stdout)
        click.echo(answer.line)
    return answer.code


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all. Raises `EnvironmentProblem`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise EnvironmentProblem(
            f"cannot write {path}",
            why=error.strerror or str(error),
            hint="make room there; `regrepro judge` gives the verdicts again",
        ) from None


@click.group(cls=_Rooms, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="regrepro")
def group() -> None:
    """Reproduce, prove and report RDMA registrations that fail because of a pin without FOLL_LONGTERM.

    Exit codes are of the question that is asked (--ask): 0 no, 10 yes, 11 another failure, 125 undecided; 2
    usage or environment. Without --ask: 0 nothing reproduced and everything decided, 10 something reproduced.
    """


@group.command("list")
@click.option("--profile", type=click.Choice(PROFILES), help="Only those of one profile.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.argument("files", nargs=-1)
def list_command(profile: str | None, as_json: bool, files: tuple[str, ...]) -> None:
    """Show the scenarios: the shipped ones, or those of FILES."""
    from regrepro.scenario import Library, in_words

    library = Library()
    scenarios = library.select(files, "default") if files else library.shipped()
    if profile:
        scenarios = [item for item in scenarios if profile in item.profiles]
    if as_json:
        click.echo(
            json.dumps(
                [
                    {
                        "name": item.name,
                        "scenario": item.function,
                        "variant": item.variant,
                        "summary": item.summary,
                        "file": item.file,
                        "tags": list(item.tags),
                        **item.declared(),
                    }
                    for item in scenarios
                ],
                indent=2,
            )
        )
        return
    width = max((len(item.name) for item in scenarios), default=0)
    for item in scenarios:
        click.echo(f"{item.name:<{width}}  {item.summary}")
        expects = ", ".join(f"{in_words(it)} with {contract}" for contract, it in item.expects.items())
        click.echo(f"{'':<{width}}  expects {expects}; needs {', '.join(item.needs) or 'nothing'}")
        if item.tags:
            click.echo(f"{'':<{width}}  tags {', '.join(item.tags)}")
        if item.options:
            options = ", ".join(f"{name}={value}" for name, value in item.option_values(()).items())
            click.echo(f"{'':<{width}}  options {options}")


@group.command("run")
@click.argument("names", nargs=-1, metavar="[SCENARIO|FILE.py]...")
@run_options
@ask_options("reproduce")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@click.pass_context
def run_command(
    ctx: click.Context, /, names: tuple[str, ...], out: Path | None, as_json: bool, quiet: bool, **values: Any
) -> None:
    """Run scenarios on this machine and judge what was seen."""
    from regrepro import runner
    from regrepro.progress import Lines, Silent
    from regrepro.scenario import Library, check_options, needs_by_name

    terms = make_terms(values)
    options = make_run_options(names, values)
    library = Library()
    # What is wrong with names and files is said before anything is made.
    scenarios = library.select(names, options.profile)
    check_options(scenarios, options.option)
    terms.check(needs_by_name(scenarios))
    made = out is None
    directory = default_out() if out is None else out
    progress = Silent() if quiet else Lines()
    try:
        runner.run(names, options, directory, progress, library=library)
    except runner.Interrupted as interrupted:
        with contextlib.suppress(RegreproError):
            conclude(directory, terms, as_json=as_json)
        raise interrupted from None
    except RegreproError:
        if made:
            with contextlib.suppress(OSError):
                directory.rmdir()  # nothing was recorded
        raise
    ctx.exit(conclude(directory, terms, as_json=as_json))


@group.command("judge")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--expect", type=click.Choice(["declared"]), help="Exit by what the scenario files declare.")
@ask_options("reproduce")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
@click.option("--write/--no-write", default=False, help="Also write verdicts.json into the run directory.")
@click.pass_context
def judge_command(ctx: click.Context, /, run_dir: Path, as_json: bool, write: bool, **values: Any) -> None:
    """Judge a run directory again, on any machine, from its record alone. It answers each question."""
    from regrepro.record import read_record

    terms = make_terms(values)
    if terms.require or terms.allow_unmet:
        terms.check(recorded_needs(read_record(run_dir)))
    ctx.exit(conclude(run_dir, terms, as_json=as_json, write=write))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. Exit code 1 means a crash of regrepro itself, never a user's mistake."""
    try:
        # Not group.main(): it ends a broken pipe with exit code 1.
        given = sys.argv[1:] if arguments is None else arguments
        with group.make_context("regrepro", list(given)) as context:
            code = group.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    except click.ClickException as error:
        where = getattr(error, "ctx", None)
        hint = f" (see {where.command_path} --help)" if where is not None else ""
        code = _complain(" ".join(error.format_message().split()) + hint, EXIT_USAGE)
    except RegreproError as error:
        code = _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        code = _complain("interrupted", 128 + signal.SIGINT)
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        # The reader of our output went away: not ours to complain, and nobody to complain to.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code if isinstance(code, int) else 0)


def _complain(text: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"regrepro: {visible(text)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
