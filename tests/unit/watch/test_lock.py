"""One watch on a node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from regrepro.watch.lock import Lock, WatchedAlready


def test_a_second_watch_says_who_holds_the_first(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "out", tmp_path / "lock")
    with pytest.raises(WatchedAlready, match=f"process {os.getpid()} since .*{tmp_path}/out"):
        Lock(tmp_path / "other", tmp_path / "lock")
    assert WatchedAlready.exit_code == 125  # the unit tries again; after 2, "cannot be watched", it does not
    lock.release()
    Lock(tmp_path / "other", tmp_path / "lock").release()


def test_others_cannot_open_the_lock_and_hold_it(tmp_path: Path) -> None:
    (tmp_path / "lock").touch(0o644)  # as older versions made it
    lock = Lock(tmp_path / "out", tmp_path / "lock")
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    lock.release()
