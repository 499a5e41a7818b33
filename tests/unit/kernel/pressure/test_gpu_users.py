"""Who uses a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from regrepro.kernel.pressure import gpu_users


def process(proc: Path, pid: int, name: str, *files: str) -> None:
    folder = proc / str(pid) / "fd"
    folder.mkdir(parents=True)
    (proc / str(pid) / "comm").write_text(f"{name}\n")
    for number, file in enumerate(files):
        (folder / str(number)).symlink_to(file)


def test_who_uses_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_users.os, "getsid", lambda pid: 1 if pid in (0, 1000) else pid)
    process(tmp_path, 4000, "train", "/dev/null", "/dev/nvidia3")
    process(tmp_path, 4001, "shell", "/dev/nvidiactl")
    process(tmp_path, 4002, "nvidia-persiste", "/dev/nvidia0")
    process(tmp_path, 1000, "of our session", "/dev/nvidia0")
    process(tmp_path, os.getpid(), "ourselves", "/dev/nvidia0")
    assert gpu_users.gpu_users(tmp_path, ask_driver=False) == [(4000, "train")]


def test_nvidia_smi_is_asked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_users, "_asked_of_nvidia_smi", lambda: [(77, "python3")])
    assert gpu_users.gpu_users(tmp_path) == [(77, "python3")]
