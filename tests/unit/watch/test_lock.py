"""One watch on a node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from regrepro.errors import EnvironmentProblem
from regrepro.watch.lock import Lock


def test_a_second_watch_says_who_holds_the_first(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "out", tmp_path / "lock")
    with pytest.raises(EnvironmentProblem, match=f"process {os.getpid()} since .*{tmp_path}/out"):
        Lock(tmp_path / "other", tmp_path / "lock")
    lock.release()
    Lock(tmp_path / "other", tmp_path / "lock").release()
