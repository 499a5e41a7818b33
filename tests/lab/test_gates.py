"""The gate of an upgrade, on a real kernel: pytest with the scenario in a machine, and runs side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]

SCENARIO = Path(__file__).parents[2] / "scenarios/pin_then_register.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def gate(folder: Path, name: str, pin: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the scenario as a test, in a machine of its own."""
    machine = ["--regrepro-lab", "6.1", "--regrepro-boot", "movablecore=512M", "--regrepro-cuda", pin]
    where = ["--regrepro-out", name, "--junitxml", f"{name}.xml", "-p", "no:cacheprovider"]
    return run(folder, "pytest", str(SCENARIO), *machine, *where, *more)


def properties(folder: Path, name: str) -> dict[str, str]:
    return {
        item.attrib["name"]: item.attrib["value"]
        for item in ElementTree.parse(folder / f"{name}.xml").iter("property")
    }


def test_a_driver_that_is_repaired(lab: Lab, tmp_path: Path) -> None:
    """The gate fails before and passes after; `compare` says fixed, and worse the other way round."""
    lab.require("6.1")
    before = gate(tmp_path, "before", "standin:pin")
    assert before.returncode == 1, before.stdout + before.stderr
    assert "reproduced" in before.stdout
    told = properties(tmp_path, "before")
    assert "ENOMEM" in told.values()
    assert "standin:pin" in told.values()
    [was] = (tmp_path / "before").glob("*/record.jsonl")

    after = gate(tmp_path, "after", "standin:longterm", "--baseline", str(was.parent))
    assert after.returncode == 0, after.stdout + after.stderr
    assert "not-reproduced" in properties(tmp_path, "after").values()
    [now] = (tmp_path / "after").glob("*/record.jsonl")

    fixed = run(tmp_path, "regrepro", "compare", str(was.parent), str(now.parent))
    assert fixed.returncode == 0, fixed.stdout + fixed.stderr
    assert "fixed" in fixed.stdout
    worse = run(tmp_path, "regrepro", "compare", str(now.parent), str(was.parent))
    assert worse.returncode == 10, worse.stdout + worse.stderr
