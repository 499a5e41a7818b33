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

ATTACKS = Path(__file__).parents[1] / "attacks"
# Those for a node without unpinnable memory run on one kernel here; the table has them on all.
# It waits half a minute for memory that cannot go offline.
SLOW = ("block_isolated_with_pin",)
ROWS = [
    ("7.3", ATTACKS, faults.BOOT),
    ("6.12", ATTACKS, faults.BOOT),
    ("6.1", ATTACKS, faults.BOOT),
    ("7.3", ATTACKS / "bare", ""),
]


@pytest.mark.parametrize(("kernel", "folder", "boot"), ROWS, ids=[f"{k} {b or 'bare'}" for k, _, b in ROWS])
def test_no_verdict_is_wrong_under_attack(
    kernel: str, folder: Path, boot: str, lab: Lab, tmp_path: Path
) -> None:
    lab.require(kernel)
    names = tuple(str(file) for file in sorted(folder.glob("*.py")) if file.stem not in SLOW)
    table = faults.run_faults(faults.Plan(names, (kernel,), boot, 2 << 30), tmp_path, Silent())
    rows = {fault["scenario"]: fault["cells"][kernel] for fault in table["faults"]}
    wrong = [name for name, cell in rows.items() if state(cell) != "right"]
    assert wrong == [], "\n".join(notes(table))
    assert faults.exit_code(table) == 0
