"""The reader says what is amiss, puts page states in their places, and knows records of schema 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regrepro.errors import UsageError
from regrepro.record import FILE_NAME, SCHEMA, RecordWriter, part_of, read_record

HEADER = {"run": {}, "node": {}, "lab": None, "stand_ins": []}


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    return RecordWriter(tmp_path / FILE_NAME, HEADER)


def test_a_cut_record_is_read_up_to_the_cut(writer: RecordWriter) -> None:
    for i in range(3):
        writer.event("step", name="x", i=i)
    data = writer.path.read_bytes()
    lines = data.split(b"\n")
    for cut in range(len(lines[0]) + 2, len(data)):
        writer.path.write_bytes(data[:cut])
        record = read_record(writer.path)
        whole = data[:cut].count(b"\n") - 1
        assert [event["i"] for event in record.events] == list(range(whole))
        assert any("is cut" in problem for problem in record.problems) == (data[cut - 1 : cut] != b"\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b'{"schema": "regrepro', "first line is cut"),
        (b"hello\n", "first line is no header"),
        (b"[1]\n", "first line is no header"),
        (b"\xff\xfe\n", "first line is no header"),
        (b'{"schema": "regrepro.record/9", "version": "7.0"}\n', "regrepro.record/9"),
    ],
)
def test_what_is_no_record(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_record(tmp_path)


def test_where_there_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no record"):
        read_record(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        read_record(tmp_path / "nothing")


def test_damage_in_the_middle_is_told(writer: RecordWriter) -> None:
    for i in range(4):
        writer.event("step", name="x", i=i)
    lines = writer.path.read_bytes().split(b"\n")
    lines[2] = b"\x00garbage"
    del lines[3]
    writer.path.write_bytes(b"\n".join(lines))
    record = read_record(writer.path)
    assert [event["i"] for event in record.events] == [0, 3]
    assert any("line 3 is no event" in problem for problem in record.problems)
    assert any("lines are missing" in problem for problem in record.problems)


def test_references_to_page_states_are_resolved(writer: RecordWriter) -> None:
    state = {"pfn": [[0, 5, 1]], "how": "observed"}
    writer.event("register", before=state, after={"same_as": {"key": "before"}})
    writer.event("register", before={"same_as": {"seq": 1, "key": "before"}, "how": "inferred"}, after=None)
    writer.event("register", before={"same_as": {"seq": 9, "key": "after"}}, after=None)
    writer.event("run-end", outcome="finished")
    record = read_record(writer.path)
    first, second, third = record.events[:3]
    assert first["after"] == state
    assert second["before"] == {**state, "how": "inferred"}
    assert third["before"] is None
    assert record.problems == ["seq 3: before refers to a page state that is not there"]


def test_a_record_of_schema_1_is_read_as_one_of_today(tmp_path: Path) -> None:
    """There the failures that `watch` caught were variants."""
    lines = [
        {"schema": "regrepro.record/1", "version": "0.1.0"},
        {"event": "free", "scenario": "watch", "variant": "failure-2", "control": None, "buffer": 1},
        {"event": "free", "scenario": "no_pin", "variant": "failure-2", "control": None, "buffer": 1},
        {"event": "future", "scenario": "watch", "variant": 7},
        {"event": "run-end", "outcome": "finished"},
    ]
    text = "".join(json.dumps({"seq": seq, "t": 0.0, **line}) + "\n" for seq, line in enumerate(lines))
    (tmp_path / FILE_NAME).write_text(text, encoding="utf-8")
    record = read_record(tmp_path)
    assert record.header["schema"] == SCHEMA
    watched, variant, odd = record.events[:3]
    assert (watched["variant"], watched["failure"]) == ("default", "failure-2")
    assert variant["variant"] == "failure-2" and "failure" not in variant
    assert odd["variant"] == 7
    assert [part_of(event) for event in record.events[:2]] == ["failure-2", "failure-2"]


def test_unknown_events_and_keys_are_kept(tmp_path: Path) -> None:
    lines = [{"schema": SCHEMA}, {"seq": 1, "t": 0.0, "event": "of-the-future", "colour": "blue"}]
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert read_record(tmp_path).events == lines[1:]
