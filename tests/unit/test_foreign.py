"""Hostile text in every field of every input: nothing of it reaches a terminal, a report or a C program."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import record_builder as build

from regrepro import cli
from regrepro.foreign import visible

HOSTILE = "x\x1b]0;owned\x07\x1b[2J\r\nFORGED class B, proven\n\u202e\u2028\x9b31m\x7f*/"
FORMATS = ("text", "markdown", "tap", "html", "c")
COMMANDS = ["judge", "report", "compare", "audit --from", "explain", "bundle", "run"]


@pytest.mark.parametrize(
    ("text", "keep", "shown"),
    [
        ("plain, ü, 日本", "", "plain, ü, 日本"),
        ("a\nb\tc", "", r"a\nb\tc"),
        ("a\nb\tc", "\n", "a\nb" + r"\tc"),
        ("\x1b[2J\x07\x7f\x9b", "", r"\x1b[2J\x07\x7f\x9b"),
        ("\u202e\u2066\u200b\u2028\udc80", "", r"\u202e\u2066\u200b\u2028\udc80"),
    ],
)
def test_what_cannot_be_printed_is_written_out(text: str, keep: str, shown: str) -> None:
    assert visible(text, keep) == shown
    assert visible(shown, keep) == shown


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each text in a JSON value."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from paths(item, (*path, number))


def spoil(value: Any, path: tuple[Any, ...]) -> None:
    for part in path[:-1]:
        value = value[part]
    value[path[-1]] += HOSTILE


def records() -> Iterator[tuple[str, build.Record]]:
    """Yield records with a hostile text of the header, or of one key of all events of a kind."""
    whole = build.partly_pinned_record()
    for path in paths(whole.header):
        if path != ("schema",):
            record = copy.deepcopy(whole)
            spoil(record.header, path)
            yield f"header {path}", record
    fields = {
        (event["event"], path[0])
        for event in whole.events
        for path in paths({key: item for key, item in event.items() if key != "event"})
    }
    for kind, key in sorted(fields):
        record = copy.deepcopy(whole)
        for event in record.events:
            if event["event"] == kind:
                for path in list(paths(event.get(key), (key,))):
                    spoil(event, path)
        yield f"{kind}.{key}", record
    yield "a key", build.Record(whole.header, [{**event, HOSTILE: HOSTILE} for event in whole.events])


def assert_harmless(text: str, what: str, may: str = "\n") -> None:
    assert not {sign for sign in text if not sign.isprintable()} - set(may), what
    assert not [line for line in text.splitlines() if line.lstrip(" #>*-").startswith("FORGED")], what


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        cli.main(list(arguments))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out + captured.err


def test_a_hostile_record_shows_nothing_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = build.write(tmp_path / "good", build.partly_pinned_record())
    seen = 0
    for number, (what, record) in enumerate(records()):
        directory = build.write(tmp_path / str(number), record, verdicts=False)
        commands = [
            ["judge", str(directory)],
            ["compare", str(good), str(directory)],
            *(
                ["report", str(directory), "--format", kind]
                for kind in ("text", "markdown", "tap", "html", "c")
            ),
        ]
        outputs = [told(capsys, *command) for command in commands]
        for command, output in zip(commands, outputs, strict=True):
            assert_harmless(output, f"{command[0]}: {what}", may="\n\t" if command[-1] == "c" else "\n")
        seen += any("FORGED" in output for output in outputs)
    assert seen > 20, "what is hostile is shown nowhere: the test proves nothing"


def test_a_hostile_bundle_shows_nothing_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = build.partly_pinned_record()
    for event in record.events:
        if event["event"] == "scenario-begin":
            event["shows"] = HOSTILE
    record.header["node"]["hostname"] = HOSTILE
    directory = build.write(tmp_path / "run", record, verdicts=False)
    (directory / ("evil\x1b[2J\n.log")).write_text(HOSTILE)
    output = tmp_path / "bundle.tar.gz"
    assert_harmless(told(capsys, "bundle", str(directory), "--output", str(output)), "bundle")
    assert_harmless(told(capsys, "bundle", "--check", str(output)), "check")


@pytest.mark.parametrize(
    "command", ["judge", "report", "compare", "audit --from", "explain", "bundle", "run"]
)
def test_a_hostile_file_name_shows_nothing_of_its_own(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tmp_path / HOSTILE.replace("/", ""))
    names = [name, name] if command == "compare" else [name]
    output = told(capsys, *command.split(), *names)
    assert output
    assert_harmless(output, command)


def test_a_hostile_log_shows_nothing_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text(
        f"no\u202e\x7fde1:1:2 [0] misc/ibvwrap.cc:123 NCCL WARN Call to ibv_reg_mr_iova2 failed with error "
        f"Cannot allocate memory\n{HOSTILE}\n"
    )
    output = told(capsys, "explain", str(log))
    assert "ibv_reg_mr_iova2 failed with ENOMEM" in output
    assert_harmless(output, "explain")


def test_what_cannot_be_printed_in_a_record_is_read_as_text(tmp_path: Path) -> None:
    from regrepro.record import read_record

    record = build.no_pin_record()
    record.events[0]["x\x1b"] = ["\n", {"y": "\u202e"}, 1, None]
    read = read_record(build.write(tmp_path / "run", record, verdicts=False))
    assert read.events[0]["x\\x1b"] == ["\\n", {"y": "\\u202e"}, 1, None]
    assert json.loads(json.dumps(read.events)) == read.events
