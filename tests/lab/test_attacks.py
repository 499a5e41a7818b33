"""Attacks on the verdicts, on real kernels: scenarios that once misled the judge, or were meant to.

The whole table, with every kernel, is `./scripts/attack-table`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from regrepro.lab import faults
from regrepro.lab.progress import Silent
from regrepro.views.faults import notes, state

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]

ATTACKS = sorted((Path(__file__).parents[1] / "attacks").glob("*.py"))


@pytest.mark.parametrize("kernel", ["7.3", "6.12", "6.1"])
def test_no_verdict_is_wrong_under_attack(kernel: str, lab: Lab, tmp_path: Path) -> None:
    lab.require(kernel)
    plan = faults.Plan(tuple(map(str, ATTACKS)), (kernel,), memory=2 << 30)
    table = faults.run_faults(plan, tmp_path, Silent())
    rows = {fault["scenario"]: fault["cells"][kernel] for fault in table["faults"]}
    wrong = [name for name, cell in rows.items() if state(cell) != "right"]
    assert wrong == [], "\n".join(notes(table))
    assert faults.exit_code(table) == 0
