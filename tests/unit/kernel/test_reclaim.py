"""The cleanup journal: what dead owners left is given back once, what live ones hold is not touched."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from regrepro.kernel import reclaim
from regrepro.kernel.journal import Journal, ReclaimFailed


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json"))


def die_with(directory: Path, body: Callable[[Journal], None]) -> None:
    """Run `body` with a journal in a process that then is killed."""
    child = os.fork()
    if child == 0:
        try:
            body(Journal(directory))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_killed_owner_is_cleaned_up_after_once(tmp_path: Path) -> None:
    folder = tmp_path / "regrepro-made"
    journals = tmp_path / "journals"
    journals.mkdir()

    def body(journal: Journal) -> None:
        journal.add("directory", path=str(folder))
        folder.mkdir()
        (folder / "file").write_text("x")

    die_with(journals, body)
    assert folder.exists()
    said = reclaim.reclaim(journals)
    assert len(said) == 1 and str(folder) in said[0]
    assert not folder.exists() and files(journals) == []
    assert reclaim.reclaim(journals) == []


def test_a_process_is_ended_by_pid_and_start_time(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    other = subprocess.Popen(["sleep", "60"])
    try:

        def body(journal: Journal) -> None:
            journal.add("process", pid=sleeper.pid)
            journal.add("process", pid=other.pid, starttime=1)  # a PID that was given to someone else since

        die_with(tmp_path, body)
        assert len(reclaim.reclaim(tmp_path)) == 1
        assert sleeper.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (sleeper, other):
            process.kill()
            process.wait()


def test_what_a_live_owner_holds_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "regrepro-mine"
    folder.mkdir()
    journals = tmp_path / "journals"
    journals.mkdir()
    with Journal(journals) as journal:
        entry = journal.add("directory", path=str(folder))
        child = os.fork()
        if child == 0:
            os._exit(len(reclaim.reclaim(journals)))
        assert os.waitpid(child, 0)[1] == 0
        assert folder.exists() and len(files(journals)) == 1
        journal.remove(entry)


def test_a_forked_child_has_a_journal_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "regrepro-of-child"
    journals = tmp_path / "journals"
    journals.mkdir()
    journal = Journal(journals)
    mine = journal.add("directory", path=str(tmp_path / "regrepro-of-parent"))
    child = os.fork()
    if child == 0:
        journal.remove(mine)  # not its own
        journal.add("directory", path=str(folder))
        folder.mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(files(journals)) == 2
    assert len(reclaim.reclaim(journals)) == 1 and not folder.exists()
    assert [entry.id for entry in journal.entries] == [mine.id] and len(files(journals)) == 1
    journal.remove(mine)


def test_the_last_made_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setitem(reclaim._HANDLERS, "kprobe-group", lambda data: order.append(data["group"]))
    monkeypatch.setitem(reclaim._HANDLERS, "tracefs-instance", lambda data: order.append(data["name"]))

    def body(journal: Journal) -> None:
        journal.add("kprobe-group", group="probes")
        journal.add("tracefs-instance", name="instance")

    die_with(tmp_path, body)
    reclaim.reclaim(tmp_path)
    assert order == ["instance", "probes"]


def test_what_cannot_be_given_back_stays_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = [True]

    def handler(data: dict[str, object]) -> str:
        if busy[0]:
            raise ReclaimFailed("its pages are in use")
        return "given back"

    monkeypatch.setitem(reclaim._HANDLERS, "memory-block", handler)

    def body(journal: Journal) -> None:
        journal.add("memory-block", block=3, restore="online_kernel")
        journal.add("directory", path="/tmp/regrepro-not-there")

    die_with(tmp_path, body)
    assert "in use" in reclaim.reclaim(tmp_path)[0]
    (path,) = files(tmp_path)
    assert [entry["kind"] for entry in json.loads(path.read_text())["entries"]] == ["memory-block"]
    busy[0] = False
    assert reclaim.reclaim(tmp_path) == ["given back"] and files(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("directory", {"path": "/etc"}),
        ("directory", {"path": "relative/regrepro-x"}),
        ("cgroup", {"path": "/sys/fs/cgroup/system.slice"}),
        ("cgroup", {"path": "/etc/regrepro-x"}),
        ("tracefs-instance", {"path": "/etc/regrepro"}),
        ("kprobe-group", {"group": "kprobes"}),
    ],
)
def test_names_that_are_not_ours_are_refused(kind: str, data: dict[str, str]) -> None:
    with pytest.raises((ReclaimFailed, ValueError)):
        reclaim._HANDLERS[kind](data)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "regrepro.journal/9", "owner": {}, "entries": []}']
)
def test_files_that_are_not_journals_are_left(tmp_path: Path, text: str) -> None:
    path = tmp_path / "1-2.json"
    path.write_text(text)
    path.chmod(0o600)
    assert len(reclaim.reclaim(tmp_path)) == 1 and path.exists()


def test_a_file_that_others_may_write_is_left(tmp_path: Path) -> None:
    die_with(tmp_path, lambda journal: journal.add("directory", path=str(tmp_path / "regrepro-z")) and None)
    (path,) = files(tmp_path)
    path.chmod(0o666)
    (tmp_path / "regrepro-z").mkdir()
    assert "left alone" in reclaim.reclaim(tmp_path)[0] and (tmp_path / "regrepro-z").exists()


def test_another_boot_left_only_directories(tmp_path: Path) -> None:
    folder = tmp_path / "regrepro-old"
    folder.mkdir()

    def body(journal: Journal) -> None:
        journal.add("memory-block", block=1, restore="online")
        journal.add("directory", path=str(folder))

    die_with(tmp_path, body)
    (path,) = files(tmp_path)
    content = json.loads(path.read_text())
    content["owner"]["boot"] = "another"
    path.write_text(json.dumps(content))
    assert len(reclaim.reclaim(tmp_path)) == 1 and not folder.exists() and files(tmp_path) == []


def test_an_owner_in_another_pid_namespace_is_left(tmp_path: Path) -> None:
    die_with(tmp_path, lambda journal: journal.add("directory", path="/tmp/regrepro-x") and None)
    (path,) = files(tmp_path)
    content = json.loads(path.read_text())
    content["owner"]["pid_namespace"] = 1
    path.write_text(json.dumps(content))
    assert reclaim.reclaim(tmp_path) == [] and path.exists()


def _reclaim_into(directory: Path, queue: multiprocessing.Queue[int]) -> None:
    queue.put(len(reclaim.reclaim(directory)))


def test_two_starts_at_once_give_back_once(tmp_path: Path) -> None:
    def body(journal: Journal) -> None:
        for number in range(20):
            (tmp_path / f"regrepro-{number}").mkdir()
            journal.add("directory", path=str(tmp_path / f"regrepro-{number}"))

    journals = tmp_path / "journals"
    journals.mkdir()
    die_with(journals, body)
    queue: multiprocessing.Queue[int] = multiprocessing.Queue()
    starts = [multiprocessing.Process(target=_reclaim_into, args=(journals, queue)) for _ in range(4)]
    for start in starts:
        start.start()
    said = [queue.get(timeout=30) for _ in starts]
    for start in starts:
        start.join()
    assert sum(said) == 20 and not list(tmp_path.glob("regrepro-*"))
