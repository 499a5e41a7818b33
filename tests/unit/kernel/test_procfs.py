"""Texts of /proc and /sys, each read in one place."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from regrepro.kernel import procfs


def test_a_choice_stands_in_brackets(tmp_path: Path) -> None:
    file = tmp_path / "lockdown"
    file.write_text("none [integrity] confidentiality\n")
    assert procfs.chosen(file) == "integrity"
    assert procfs.chosen(tmp_path / "none") is None


def test_this_process() -> None:
    assert procfs.pid_namespace() == Path("/proc/self/ns/pid").stat().st_ino
    assert any(mount.place == Path("/proc") and mount.kind == "proc" for mount in procfs.mounts())
    assert procfs.boot_id() == procfs.boot_id()


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("0::/user.slice/a b\n", "/user.slice/a b"),
        ("12:memory:/old\n0::/\n", "/"),
        ("12:memory:/old\n", None),
        (None, None),
    ],
)
def test_the_control_group_of_version_2(
    monkeypatch: pytest.MonkeyPatch, text: str | None, group: str | None
) -> None:
    monkeypatch.setattr(procfs, "text", {"/proc/7/cgroup": text}.get)
    assert procfs.cgroup2_of(7) == group


def test_the_start_time_tells_processes_apart() -> None:
    assert procfs.start_time(os.getpid()) == procfs.start_time(os.getpid()) is not None
    assert procfs.start_time(2**22 + 1) is None
    child = os.fork()
    if child == 0:
        os._exit(0)
    time.sleep(0.05)
    assert procfs.start_time(child) is None  # a zombie
    os.waitpid(child, 0)
