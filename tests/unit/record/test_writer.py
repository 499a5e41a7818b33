"""Whole lines, numbers without a gap, whoever dies, and no key that is not declared."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from regrepro.errors import UsageError
from regrepro.record import (
    FILE_NAME,
    RecordProblem,
    RecordWriter,
    UndeclaredError,
    encoded,
    read_record,
)

HEADER = {"run": {}, "node": {}, "lab": None, "stand_ins": []}


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    return RecordWriter(tmp_path / FILE_NAME, HEADER)


def test_what_is_written_is_read(writer: RecordWriter) -> None:
    assert writer.event("note", text="first", stand_in=None) == 1
    assert writer.event("step", name="x", values={"a": [1, 2]}, state=encoded({"pfn": [[0, 5, 1]]})) == 2
    writer.event("run-end", outcome="finished")
    record = read_record(writer.path.parent)
    assert record.header["schema"] == "regrepro.record/2"
    assert [event["seq"] for event in record.events] == [1, 2, 3]
    assert record.events[1]["state"] == {"pfn": [[0, 5, 1]]}
    assert record.problems == []
    times = [event["t"] for event in record.events]
    assert times == sorted(times)


def test_numpy_values(writer: RecordWriter) -> None:
    numpy = pytest.importorskip("numpy")
    writer.event("step", name="x", one=numpy.uint64(2**63), many=numpy.arange(3))
    assert read_record(writer.path).events[0]["one"] == 2**63
    assert read_record(writer.path).events[0]["many"] == [0, 1, 2]


def test_a_second_record_does_not_overwrite_the_first(writer: RecordWriter) -> None:
    with pytest.raises(UsageError, match="exists already"):
        RecordWriter(writer.path, HEADER)


def test_many_processes_and_threads_share_the_numbers(writer: RecordWriter) -> None:
    children = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            for i in range(200):
                writer.event("step", name="child", child=child, i=i)
            os._exit(0)
        children.append(pid)
    threads = [
        threading.Thread(target=lambda: [writer.event("step", name="t") for _ in range(100)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pid in children:
        os.waitpid(pid, 0)
    writer.event("run-end", outcome="finished")
    record = read_record(writer.path)
    assert record.problems == []
    assert [event["seq"] for event in record.events] == list(range(1, 1002))


def test_killed_writers_leave_whole_lines(writer: RecordWriter) -> None:
    """kill -9 at any moment: every line whole, no number lost or twice, and the next writer goes on."""
    for round_number in range(40):
        pid = os.fork()
        if pid == 0:
            while True:
                writer.event("step", name="x", filler="y" * 3000)
        time.sleep(0.002 + round_number * 0.0002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        writer.event("note", text="after", stand_in=None)
    writer.event("run-end", outcome="finished")
    assert read_record(writer.path).problems == []


class _Killed(BaseException):
    """The writer is killed here."""


class _Dying:
    """The cells that writers share, and the file, up to a kill after `left` stores and parts of a line."""

    def __init__(self, writer: RecordWriter, left: int) -> None:
        self.cells, self.left = writer._cells, left

    def _live(self) -> None:
        if not self.left:
            raise _Killed
        self.left -= 1

    def __getitem__(self, index: int) -> int:
        return self.cells[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._live()
        self.cells[index] = value

    def write(self, fd: int, line: bytes) -> int:
        for part in (line[:4], line[4:-1], line[-1:]):
            self._live()
            _WRITE(fd, part)
        return len(line)


_WRITE = os.write


def test_a_writer_killed_anywhere_is_put_right(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between any two steps of one line, and of the repair after an earlier kill."""
    texts = []
    for steps in range(20):
        for steps_of_repair in range(4):
            cells = writer._cells
            for left in (steps, steps_of_repair):
                dying = _Dying(writer, left)
                with monkeypatch.context() as patch:
                    patch.setattr(writer, "_cells", dying)
                    patch.setattr(os, "write", dying.write)
                    with contextlib.suppress(_Killed):
                        writer.event("note", text=f"dies after {left}", stand_in=None)
            assert writer._cells is cells
            texts.append(f"lives {steps} {steps_of_repair}")
            writer.event("note", text=texts[-1], stand_in=None)
    writer.event("run-end", outcome="finished")
    record = read_record(writer.path)
    assert record.problems == []
    lines = [event["text"] for event in record.of("note")]
    assert [text for text in lines if text.startswith("lives")] == texts
    assert len(lines) > len(texts)  # some of those killed had their line


def test_a_full_disk_leaves_no_partial_line(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel cut a write as a full disk does: partly written, then an error."""
    path = tmp_path / FILE_NAME
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            writer = RecordWriter(path, HEADER)
            limit = path.stat().st_size + 500
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            writer.event("note", text="fits", stand_in=None)
            try:
                writer.event("note", text="x" * 5000, stand_in=None)
            except RecordProblem as problem:
                assert "cannot write" in str(problem)
                writer.event("note", text="fits too", stand_in=None)
                os._exit(0)
            os._exit(3)
        except BaseException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    record = read_record(path)
    assert [event["text"] for event in record.events] == ["fits", "fits too"]
    assert [event["seq"] for event in record.events] == [1, 2]
    assert path.read_bytes().endswith(b"\n")


def test_no_space_is_said_in_words() -> None:
    writer = object.__new__(RecordWriter)
    writer.path = Path("/dev/full")
    writer._fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(RecordProblem, match=r"cannot write /dev/full: No space left.*make room"):
            writer._write_line(b"{}\n", 0)
    finally:
        os.close(writer._fd)


def test_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(RecordProblem, match="--out"):
        RecordWriter(tmp_path / "missing" / FILE_NAME, HEADER)


def test_what_is_not_declared_is_an_error_here(writer: RecordWriter) -> None:
    with pytest.raises(UndeclaredError, match="free: colour is not declared"):
        writer.event("free", buffer=1, colour="blue")
    with pytest.raises(UndeclaredError, match="of-the-future is not declared"):
        writer.event("of-the-future")
    assert writer.event("step", name="x", colour="blue") == 1


def test_what_is_not_declared_is_kept_and_marked_on_a_node(
    writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REGREPRO_STRICT_RECORD")
    writer.event("of-the-future", colour="blue")
    writer.event("free", buffer=1, colour="red")
    first, second = read_record(writer.path).events
    assert (first["event"], first["colour"], first["undeclared"]) == (
        "of-the-future",
        "blue",
        ["of-the-future"],
    )
    assert (second["buffer"], second["colour"], second["undeclared"]) == (1, "red", ["colour"])
