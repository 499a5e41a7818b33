"""The control group of what pressure holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from regrepro.kernel.journal import Journal
from regrepro.kernel.pressure import cgroup


def fake_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: str, on: str) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text(controllers)
    (root / "cgroup.subtree_control").write_text(on)
    monkeypatch.setattr(cgroup, "CGROUP_ROOTS", (tmp_path / "none", root))
    return root


def test_a_control_group_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fake_root(tmp_path, monkeypatch, "cpu memory", "cpu")
    journal = Journal(tmp_path)
    group = cgroup.Cgroup(journal, 4096)
    assert group.path is not None
    assert (group.path / "memory.max").read_text() == "4096"
    assert (root / "cgroup.subtree_control").read_text() == "+memory"
    [entry] = journal.entries
    assert entry.data == {"path": str(group.path), "enabled": str(root / "cgroup.subtree_control")}
    for file in group.path.iterdir():  # the kernel's files go with the directory
        file.unlink()
    group.remove()
    assert journal.entries == []
    assert (root / "cgroup.subtree_control").read_text() == "-memory"
    assert not list(root.glob("regrepro-*"))


def test_no_control_group_is_no_obstacle_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "CGROUP_ROOTS", (tmp_path / "none",))
    assert "no control groups" in cgroup.Cgroup(Journal(tmp_path), 1).why
    fake_root(tmp_path, monkeypatch, "cpu", "")
    group = cgroup.Cgroup(Journal(tmp_path), 1)
    assert group.path is None
    assert "do not control memory" in group.why
