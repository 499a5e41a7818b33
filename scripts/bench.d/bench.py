"""scripts/bench: runs the measurements, here and in one guest of the lab, and shows a table."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from measuring import HERE, Measurement, Row, Work, all_measurements

SOURCE = HERE.parent.parent / "src"
GUEST_MEMORY = 4 << 30


def table(rows: list[Row]) -> str:
    """Return rows as a plain table."""

    def seconds(value: float | None) -> str:
        if value is None:
            return ""
        for unit, scale in (("s", 1.0), ("ms", 1e3)):
            if value * scale >= 1:
                return f"{value * scale:.3g} {unit}"
        return f"{value * 1e6:.3g} us"

    lines = [("measured", "regrepro", "bare", "result", "spread", "bound", "")]
    for row in rows:
        lines.append(
            (
                row.what,
                seconds(row.ours),
                seconds(row.bare),
                f"{row.value:.3g} {row.unit}".strip(),
                f"{row.spread[0]:.3g} to {row.spread[1]:.3g}" if row.spread else "",
                f"{row.bound:g}" if row.bound is not None else "",
                ("ok" if row.within else "TOO MUCH") if row.bound is not None else "",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(7)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"bench: {message} (see --help)\n")


@contextlib.contextmanager
def work_directory(given: Path | None) -> Iterator[Path]:
    """Yield the directory of the measurements' files, a temporary one where none was given."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="regrepro-bench-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def in_guest(names: list[str], work: Work) -> list[Row]:
    """Run measurements in one guest. Raises SystemExit when it did not finish."""
    from regrepro.lab.progress import choose
    from regrepro.lab.run import LabOptions, run_commands

    out = work.directory / "guest"
    rows = out / "rows.json"
    inside = [sys.executable, str(HERE / "bench.py"), "--inside", str(rows), "--work", str(work.directory)]
    inside += ["--rounds", str(work.rounds), "--accel", work.accel, *names]
    # The programs were compiled beside the guest's directory, which it sees, and may write only in its own.
    command = f"PYTHONPATH={shlex.quote(str(SOURCE))} {shlex.join(inside)}"
    tell = choose(quiet=False)
    # What is measured takes turns; a second CPU, where both are emulated in one thread, would only add noise.
    options = LabOptions(kernel=work.kernel, memory=GUEST_MEMORY, cpus=1, accel=work.accel)
    try:
        ending, results = run_commands([command], options, out, tell)
    finally:
        tell.close()
    code, text = results[0]
    if ending.what != "finished" or code != 0:
        raise SystemExit(f"bench: the guest's part failed ({ending.why or f'exit {code}'}):\n{text}")
    return [Row.from_json(row) for row in json.loads(rows.read_text())]


def main() -> int:
    """Measure and show; return 0 when every bound holds, else 1."""
    measurements = all_measurements()
    known = "\n".join(f"  {item.name:16} {item.about} ({item.where})" for item in measurements.values())
    parser = Parser(
        prog="scripts/bench",
        usage="scripts/bench [OPTION]... [MEASUREMENT]...",
        add_help=False,
        description="Measures what regrepro costs, by turns with the bare thing, and holds ratios to "
        "their bounds.",
        epilog=f"measurements (all, where none is named):\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="MEASUREMENT", help=argparse.SUPPRESS)
    parser.add_argument("--help", action="help", help="show this and exit")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each pair (default: 5)")
    parser.add_argument("--kernel", default="latest", metavar="K", help="the lab's kernel (default: latest)")
    parser.add_argument(
        "--accel", default="auto", choices=("auto", "kvm", "tcg", "icount"), help="the lab's (default: auto)"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the measurements' files here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--check-arguments", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds must be 1 at least")
    unknown = sorted(set(given.names) - set(measurements))
    if unknown:
        parser.error(f"unknown measurement {unknown[0]!r} (known: {', '.join(measurements)})")
    if given.check_arguments:  # before anything is set up
        return 0
    chosen = [measurements[name] for name in given.names or measurements]

    if given.inside is not None:  # in the guest
        work = Work(given.work, given.rounds, given.kernel, given.accel)
        rows = [row for item in chosen for row in item.measure(work)]
        given.inside.write_text(json.dumps([row.as_json() for row in rows]))
        return 0

    from regrepro.errors import RegreproError

    try:
        return measure(given, chosen)
    except RegreproError as problem:  # of the lab: a kernel, a machine, or a signal that ended it
        print(f"bench: {problem}", file=sys.stderr)
        return problem.exit_code


def measure(given: argparse.Namespace, chosen: list[Measurement]) -> int:
    """Measure in a guest and here, and show; return 0 when every bound holds, else 1."""
    with work_directory(given.work) as directory:
        work = Work(directory, given.rounds, given.kernel, given.accel)
        work.compile()
        rows = []
        inside = [item.name for item in chosen if item.where == "guest"]
        if inside:
            print(f"measuring in a guest: {', '.join(inside)}", file=sys.stderr)
            rows += in_guest(inside, work)
        for item in chosen:
            if item.where == "host":
                print(f"measuring here: {item.name}", file=sys.stderr)
                rows += item.measure(work)
    print(table(rows))
    if given.json is not None:
        given.json.write_text(json.dumps([row.as_json() for row in rows], indent=2) + "\n")
    return 0 if all(row.within for row in rows) else 1


def _stop(signum: int, _frame: object) -> NoReturn:
    """End so that the working directory and whoever measures go, too."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
