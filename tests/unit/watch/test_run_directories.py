"""Run directories: begun, completed, and removed for the quota."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from regrepro.watch.run_directories import RunDirectories


def header() -> dict[str, Any]:
    return {"run": {}, "node": {}, "lab": None, "stand_ins": []}


def output(path: Path, **limits: int) -> RunDirectories:
    return RunDirectories(path, header, **{"rotate": 1 << 20, "quota": 1 << 20, **limits})


def test_a_record_that_is_full_or_moved_away_is_followed_by_a_new_one(tmp_path: Path) -> None:
    out = output(tmp_path, rotate=1000)
    out.event("watch", what="x" * 900)
    first = out.path
    assert out.due()
    out.begin()
    assert out.path != first and not out.due()
    assert '"run-end"' in (first / "record.jsonl").read_text()
    (out.path / "record.jsonl").rename(out.path / "record.jsonl.1")
    assert out.due()


def test_the_oldest_directories_give_way_to_the_quota_and_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "20200101-000000-someone").mkdir()
    ended: list[Path] = []
    out = output(tmp_path, quota=5000)
    out.on_end = ended.append
    for _ in range(4):
        out.begin()
        out.event("watch", what="x" * 2000)
    out.begin()
    assert len(ended) == 4 and out.removed >= 2
    assert (tmp_path / "notes").exists() and (tmp_path / "20200101-000000-someone").exists()
    assert out.path.exists() and out.used() <= 5000 + 3000
    assert sum(path.exists() for path in ended) < 4


@pytest.mark.parametrize("marker", [".watch", "program.bt"])
def test_directories_of_earlier_watches_are_the_quotas_too(marker: str, tmp_path: Path) -> None:
    for name, mine in (
        ("20200101-000000-host", True),
        ("20200102-000000-host-2", True),
        ("20200103-0-x", True),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.jsonl").write_text("x" * 3000)
        if mine:
            (tmp_path / name / marker).touch()
    others = tmp_path / "20200101-000000-other"
    others.mkdir()
    (others / "record.jsonl").write_text("x" * 3000)
    out = output(tmp_path, quota=5000)
    assert out.used() == 6000 and not out.room()
    for age, name in enumerate(("20200102-000000-host-2", "20200101-000000-host")):
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    out.begin()
    assert (out.path / ".watch").exists() and not (out.path / "program.bt").exists()
    assert out.removed == 1 and out.room() and out.used() < 5000
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"20200102-000000-host-2", "20200103-0-x", others.name, out.path.name}
