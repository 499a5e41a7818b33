"""The scripts: what they say without being run, the set-up's decisions, and the quickstart's table."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import record_builder

from regrepro import judge

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
SHELL = sorted(
    path
    for path in [*SCRIPTS.iterdir(), ROOT / ".ci/run"]
    if path.is_file() and (path.suffix == ".sh" or path.read_bytes().startswith(b"#!/bin/bash"))
)
COMMANDS = [path for path in SHELL if path.parent == SCRIPTS and not path.suffix]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


quickstart_table = load(SCRIPTS / "quickstart_table.py")


def bash(command: str, **keys: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60, **keys
    )


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_each_script_explains_itself_without_setting_anything_up(path: Path, tmp_path: Path) -> None:
    """`--help` on an empty PATH but for the base system's tools: nothing is installed or built for it."""
    done = subprocess.run(
        [str(path), "--help"], capture_output=True, text=True, check=False, timeout=20, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.lower().startswith(f"usage: scripts/{path.name}")
    assert "Installing" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_each_script_refuses_what_it_does_not_know(path: Path) -> None:
    done = subprocess.run(
        [str(path), "--no-such-option"], capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert "--no-such-option" in done.stderr


def test_ci_runs_the_whole_test_script() -> None:
    text = (ROOT / ".ci/run").read_text()
    assert text.rstrip().endswith("exec ./scripts/test")
    assert "export CI=true" in text


def test_missing_packages_names_exactly_those_that_are_not_installed() -> None:
    done = bash(
        f". {SCRIPTS}/lib.sh; "
        "dpkg-query() { printf 'installed/here config-files/gone-but-for-its-settings '; return 1; }; "
        "missing_packages here gone-but-for-its-settings never-there her"
    )
    assert done.stdout.split() == ["gone-but-for-its-settings", "never-there", "her"], done.stderr


def test_set_up_without_apt_says_what_is_needed() -> None:
    done = bash(
        f'. {SCRIPTS}/lib.sh; command() {{ [[ $2 != apt-get ]] && builtin command "$@"; }}; need_packages gcc'
    )
    assert done.returncode == 2
    assert "gcc" in done.stderr and len(done.stderr.splitlines()) == 1


def test_digest_follows_the_c_sources(tmp_path: Path) -> None:
    """The stamp of an installed checkout changes with the sources, and not with the Python code."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "src").mkdir()
    for name in ("pyproject.toml", "setup.py", "csrc/pin.c", "csrc/pin.h"):
        (tmp_path / name).write_text(name)

    def digest() -> str:
        done = bash(f". {SCRIPTS}/lib.sh; ROOT={tmp_path}; sources_digest")
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = digest()
    assert re.fullmatch(r"[0-9a-f]{64}\n", first)
    (tmp_path / "src/module.py").write_text("")
    assert digest() == first
    (tmp_path / "csrc/pin.c").write_text("changed")
    assert digest() != first


# --- the quickstart's table


def run_directory(path: Path, *records: record_builder.Record, boot: str = "") -> Path:
    """Write the verdicts of records as one run directory, with the header of a guest's record."""
    path.mkdir()
    (path / "record.jsonl").write_text(json.dumps({"lab": {"boot": boot.split()}}) + "\n")
    verdicts = [item for record in records for item in judge.judge_record(record)["verdicts"]]
    (path / "verdicts.json").write_text(json.dumps({"schema": judge.SCHEMA, "verdicts": verdicts}))
    return path


def test_table_of_what_it_should_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = run_directory(tmp_path / "one", record_builder.reproduced_record(), boot="hugetlb_cma=2G")
    two = run_directory(tmp_path / "two", record_builder.placement_record(), boot="hugetlb_cma=0")
    assert quickstart_table.main([str(one), str(two)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.split("\n")[0].split() == ["hugetlb_cma=2G", "hugetlb_cma=0"]
    row = next(line for line in shown.out.splitlines() if line.startswith("pin_then_register "))
    assert row.split(None, 1)[1].startswith("reproduced (ENOMEM)")
    assert row.endswith("not-reproduced (placement)")
    assert "control no-pin" in shown.out
    assert "8 of the buffer's 8 pages lay in unpinnable memory (8 cma)" in " ".join(shown.out.split())
    assert "nothing of any driver" in " ".join(shown.out.split())
    assert str(one) in shown.out and str(two) in shown.out


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (record_builder.placement_record, record_builder.placement_record),
        (record_builder.reproduced_record, record_builder.reproduced_record),
        (record_builder.reproduced_record, record_builder.kernel_record),
        (record_builder.no_pin_record, record_builder.placement_record),
    ],
)
def test_table_of_anything_else_is_a_failure_with_a_sentence(
    first: Any, second: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = run_directory(tmp_path / "one", first())
    two = run_directory(tmp_path / "two", second())
    assert quickstart_table.main([str(one), str(two)]) == 1
    shown = capsys.readouterr()
    assert "expected pin_then_register to be reproduced" in shown.err
    assert "Reproduced." not in shown.out


def test_table_without_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart_table.main([str(tmp_path), str(tmp_path)]) == 2
    assert "holds no verdicts" in capsys.readouterr().err
