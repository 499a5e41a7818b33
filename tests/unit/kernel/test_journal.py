"""The cleanup journal as a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from regrepro.errors import EnvironmentProblem
from regrepro.kernel import journal
from regrepro.kernel.journal import Journal


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json"))


def test_the_file_is_there_while_something_is(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        assert files(tmp_path) == []
        one = journal.add("cgroup", path="/nowhere/regrepro-a")
        two = journal.add("directory", path="/nowhere/regrepro-b")
        (path,) = files(tmp_path)
        assert path.stat().st_mode & 0o777 == 0o600
        content = json.loads(path.read_text())
        assert content["owner"]["pid"] == os.getpid()
        assert [entry["kind"] for entry in content["entries"]] == ["cgroup", "directory"]
        journal.remove(one)
        assert [entry.kind for entry in journal.entries] == ["directory"]
        journal.remove(two)
        assert files(tmp_path) == []
        journal.remove(two)  # again is no harm


def test_a_directory_that_others_may_open_is_closed_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "regrepro").mkdir(mode=0o755)
    monkeypatch.setattr(journal, "places", lambda: [tmp_path / "regrepro"])
    assert journal.journal_directory().stat().st_mode & 0o777 == 0o700


def test_an_unknown_kind_is_a_mistake_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory-block"):
        Journal(tmp_path).add("nonsense")


def test_no_journal_no_change(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem):
        Journal(tmp_path / "missing").add("directory", path="/tmp/regrepro-x")
