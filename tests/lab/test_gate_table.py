"""The gate table of docs/gates.md is what the commands in it answer: four questions in six situations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).parents[2] / "scripts/gate_table.py"


def test_the_table_is_what_the_gates_answer(lab: Lab) -> None:
    lab.require("latest")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
