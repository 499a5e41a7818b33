"""Planted faults on one real kernel. The whole table is `regrepro lab faults`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from regrepro.lab import faults
from regrepro.lab.progress import Silent
from regrepro.views.faults import notes, text

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]

# These take two minutes each, and more memory: half a million registrations, all memory made into huge pages.
SLOW = ("mrs_exhausted", "no_page_to_move_to")


def test_the_layer_is_named_for_each_fault(lab: Lab, tmp_path: Path) -> None:
    lab.require("7.3")
    names = [item.name for item in faults.Plan().scenarios() if item.name not in SLOW]
    plan = faults.Plan(tuple(names), ("7.3",), memory=2 << 30)
    table = faults.run_faults(plan, tmp_path, Silent())
    wrong = [note for note in notes(table) if "dmabuf_without_support" not in note]
    assert wrong == []
    assert faults.exit_code(table) == 0
    said = {fault["scenario"]: text(fault["cells"]["7.3"]) for fault in table["faults"]}
    assert said["transient_reference"] == "page-migration (ENOMEM)"
    assert said["locked_memory_limit"] == "memlock-accounting (ENOMEM)"
    assert said["fork_after_get"] == "succeeds (kernel)"


def test_the_layer_is_named_for_faults_that_take_minutes(lab: Lab, tmp_path: Path) -> None:
    lab.require("7.3")
    table = faults.run_faults(faults.Plan(SLOW, ("7.3",)), tmp_path, Silent())
    assert list(notes(table)) == []
    assert faults.exit_code(table) == 0
    said = {fault["scenario"]: text(fault["cells"]["7.3"]) for fault in table["faults"]}
    assert said == {"mrs_exhausted": "mkey (EINVAL)", "no_page_to_move_to": "migration-target (ENOMEM)"}
