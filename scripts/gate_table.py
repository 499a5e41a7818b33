"""The gate table of docs/gates.md: what each question answers in each situation, exit code and last line.

    .venv/bin/python scripts/gate_table.py [--write | --check] [--runs DIR]

One boot (or, without rights, one run here) for each situation, and `regrepro judge --ask` on its record for
each question. Prints the table; --write puts it into docs/gates.md between its markers, --check exits 1 where
another stands there. With --runs, runs that lie in DIR already are not made again.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs/gates.md"
BEGIN, END = "<!-- gate table: ./scripts/gate-table --write -->", "<!-- end of the gate table -->"
SCENARIOS = ("pin_contract", "pin_then_register")
NOBODY = 65534

LAB = ("lab", "run", *SCENARIOS)
SITUATIONS: dict[str, tuple[str, ...]] = {
    "fixed driver": (*LAB, "--cuda", "standin:longterm", "--boot", "cma=512M"),
    "old driver": (*LAB, "--cuda", "standin:pin", "--boot", "cma=512M"),
    "no unpinnable memory": (*LAB, "--cuda", "standin:pin", "--boot", "hugetlb_cma=0"),
    "failed reservation": (*LAB, "--cuda", "standin:pin", "--boot", "cma=9G", "--memory", "2G"),
    "no rights": ("run", *SCENARIOS, "--cuda", "standin:pin"),
    "no RDMA": (*LAB, "--cuda", "standin:longterm", "--boot", "cma=512M", "--rdma-device", "none"),
}
QUESTIONS = ("reproduce", "driver", "kernel", "node")


def regrepro(*arguments: str, **keys: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "regrepro", *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd="/", **keys
    )


def make(run: Path, arguments: tuple[str, ...]) -> None:
    """Make the run of one situation. Raises `SystemExit` where none came of it."""
    if (run / "record.jsonl").exists():
        return
    keys: dict[str, int] = {}
    if arguments[0] == "run" and os.geteuid() == 0:
        run.mkdir(parents=True, exist_ok=True)
        os.chown(run, NOBODY, NOBODY)
        keys = {"user": NOBODY, "group": NOBODY}
    done = regrepro(*arguments, "--quiet", "--out", str(run), **keys)
    if done.returncode not in (0, 10, 11, 125):
        raise SystemExit(f"gate-table: {' '.join(arguments)}: {done.stderr.strip()}")


def rows(runs: Path) -> list[str]:
    """Return the rows: a situation, a question, the exit code, the last line."""
    made = []
    for situation, arguments in SITUATIONS.items():
        run = runs / situation.replace(" ", "-")
        make(run, arguments)
        for number, question in enumerate(QUESTIONS):
            done = regrepro("judge", str(run), "--ask", question)
            line = done.stdout.splitlines()[-1] if done.stdout else done.stderr.strip()
            line = re.sub(r"as user \d+", f"as user {NOBODY}", line).replace("|", "\\|")
            made.append(f"| {'' if number else situation} | {question} | {done.returncode} | {line} |")
    return made


def table(runs: Path) -> str:
    """Return the table as it stands in the document."""
    head = ["| situation | `--ask` | exit code | last line |", "| --- | --- | --- | --- |"]
    return "\n".join([BEGIN, *head, *rows(runs), END])


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="gate-table", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--runs", type=Path)
    given = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    first, last = text.find(BEGIN), text.find(END)
    if first < 0 or last < 0:
        print(f"gate-table: {DOCUMENT} has no place for the table", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # a run without rights goes into it, too
        made = table(given.runs.resolve() if given.runs else Path(folder))
    print(made)
    stands = text[first : last + len(END)]
    if given.check and stands != made:
        print("gate-table: docs/gates.md has another table", file=sys.stderr)
        return 1
    if given.write:
        DOCUMENT.write_text(text.replace(stands, made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
