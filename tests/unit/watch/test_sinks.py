"""Where what happens is written: the sinks that there are, and how one is added."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from watch_fakes import CollectingSink, held_failure, later, waiting

from regrepro.record import RecordProblem, read_record
from regrepro.watch import sinks
from regrepro.watch.counts import WatchCounts
from regrepro.watch.evidence import Evidence
from regrepro.watch.happenings import (
    Caught,
    Counted,
    Looked,
    Notice,
    Proven,
    RotationAsked,
    Sinks,
    Stopped,
    Surroundings,
)
from regrepro.watch.later_looks import CaughtFailure
from regrepro.watch.process import Process
from regrepro.watch.run_directories import RunDirectories
from regrepro.watch.sinks.prometheus import PrometheusSink, text_of
from regrepro.watch.watch_settings import WatchSettings

Make = Callable[..., Surroundings]


@pytest.fixture
def surroundings(tmp_path: Path) -> Make:
    def make(**settings: Any) -> Surroundings:
        asked = WatchSettings(tmp_path / "out", **settings)
        header = {"run": {}, "node": {}, "lab": None, "stand_ins": []}
        directories = RunDirectories(asked.out, lambda: header, rotate=1 << 20, quota=1 << 20)
        beginning = [("watch", {"what": "started"})]
        return Surroundings(asked, WatchCounts(), directories, lambda: beginning, print)

    return make


def item() -> CaughtFailure:
    failure = held_failure()
    seen = Evidence(failure, Process(failure.pid, {"rank": {"RANK": "5"}, "container": {"id": "x"}}))
    return CaughtFailure(failure, seen, {"events": []}, "failure-1")


VERDICT = {"layer": "page-migration", "class": {"name": "B", "state": "likely"}, "reason": "so it was"}


def test_a_new_sink_is_a_class_and_a_line_of_registration(
    surroundings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row "a new sink of watch" of what a change may touch: nothing but the sink and its line."""
    lines: list[str] = []

    class LineSink:
        def __init__(self, given: Surroundings) -> None:
            self._out = given.settings.out

        def take(self, happening: object) -> None:
            lines.append(f"{self._out.name}: {type(happening).__name__}")

    monkeypatch.setattr(sinks, "SINKS", [*sinks.SINKS, LineSink])
    made = Sinks(sinks.SINKS, surroundings(quiet=True))
    one = item()
    for happening in (Notice("x"), Caught(one, VERDICT, False), Proven(one, VERDICT), Counted()):
        made.take(happening)
    made.take(Stopped("finished"))
    assert lines == [f"out: {name}" for name in ("Notice", "Caught", "Proven", "Counted", "Stopped")]


def test_the_record_has_failures_looks_and_notices_and_is_judged_at_its_end(surroundings: Make) -> None:
    given = surroundings()
    made = Sinks(sinks.SINKS[:1], given)
    one = item()
    made.take(Caught(one, VERDICT, waits=True))
    one.add(later(1.0))
    made.take(Looked(one, last=False))
    made.take(Notice("a sentence alone is in no record"))
    made.take(Notice("", "lost", {"events": 4}))
    first = given.directories.path
    made.take(RotationAsked())
    second = given.directories.path
    one.add(later(3.0))
    made.take(Looked(one, last=True))
    made.take(RotationAsked())
    third = given.directories.path
    made.take(Stopped("interrupted"))

    def told(path: Path) -> list[str]:
        return [str(event.get("what") or event["event"]) for event in read_record(path).events]

    whole = ["scenario-begin", "register", "scenario-end", "look"]
    assert told(first) == ["started", *whole, "lost", "look", "run-end"]
    assert told(second) == ["started", *whole, "look", "run-end"]
    assert told(third) == ["started", "run-end"]
    ended = [event["ended"] for event in read_record(first).events if event["event"] == "look"]
    assert ended[0] == "" and "completed" in ended[1] and len(one.looks) == 2
    assert all((path / "verdicts.json").exists() for path in (first, second, third))


def test_a_record_that_was_moved_away_is_followed_by_a_new_one(surroundings: Make) -> None:
    given = surroundings()
    made = Sinks(sinks.SINKS[:1], given)
    first = given.directories.path
    (first / "record.jsonl").rename(first / "record.jsonl.1")
    made.take(Counted())
    assert given.directories.path != first


def test_what_cannot_be_written_is_counted_and_said(
    surroundings: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = surroundings()
    made = Sinks(sinks.SINKS[:1], given)

    def full(*_: object, **__: object) -> int:
        raise RecordProblem("no space")

    monkeypatch.setattr(given.directories, "event", full)
    made.take(Caught(item(), VERDICT, False))
    assert given.counts.record_problems == 1 and given.directories.written == 0
    assert "no space" in capsys.readouterr().out


def test_the_terminal_has_a_line_a_failure(surroundings: Make, capsys: pytest.CaptureFixture[str]) -> None:
    for settings in ({}, {"as_json": True}, {"quiet": True}):
        given = surroundings(**settings)
        made = Sinks(sinks.SINKS[2:], given)
        one = item()
        made.take(Caught(one, VERDICT, True))
        one.add(later(31.0))
        made.take(Looked(one, last=True))
        made.take(Proven(one, VERDICT))
        made.take(Notice("a sentence", "lost", {}))
        shown = capsys.readouterr()
        assert shown.err == "regrepro watch: a sentence\n"
        lines = shown.out.splitlines()
        assert len(lines) == (0 if given.settings.quiet else 2)
        if given.settings.as_json:
            first, last = map(json.loads, lines)
            assert (first["layer"], first["rank"], first["errno"]) == (
                "page-migration",
                {"RANK": "5"},
                "ENOMEM",
            )
            assert (first["looked_for_seconds"], last["looked_for_seconds"]) == (0.0, 31.0)
        elif lines:
            assert all("python3 (6, rank 5): so it was [out/failure-1]" in text for text in lines)


def test_a_name_cannot_forge_a_line_of_the_terminal(
    surroundings: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    made, one = Sinks(sinks.SINKS[2:], surroundings()), item()
    one.evidence.process.facts["rank"] = {"RANK": "5) : ok\n14:02:11 class B, proven: FORGED\x1b[2J\u202e"}
    made.take(Caught(one, VERDICT, False))
    made.take(Notice("a\nFORGED\x1b[2J", "lost", {}))
    shown = capsys.readouterr()
    assert r"rank 5) : ok\n14:02:11 class B, proven: FORGED\x1b[2J\u202e" in shown.out
    assert len(shown.out.splitlines()) == 1 and shown.err == "regrepro watch: a\\nFORGED\\x1b[2J\n"


def test_who_owns_the_directory_of_metrics_cannot_choose_what_is_written(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "m.prom"
    victim.write_text("root's")
    for name in (f".m.prom.{os.getpid()}", "m.prom"):
        (tmp_path / name).symlink_to(victim)
    PrometheusSink(path, WatchCounts(), print).take(Counted())
    assert victim.read_text() == "root's" and victim.stat().st_mode & 0o777 != 0o600
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o644
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted(
        [f".m.prom.{os.getpid()}", "m.prom", "victim"]
    )


def test_metrics_are_text_that_prometheus_reads(tmp_path: Path) -> None:
    counts = WatchCounts(watching=1, started=1.5)
    for _ in range(2):
        counts.failed("page-migration", "B proven")
    counts.failed('odd"layer')
    counts.registrations = {("host", "rxe"): (3, 4096)}
    path = tmp_path / "regrepro.prom"
    PrometheusSink(path, counts, print).take(Counted())
    lines = path.read_text().splitlines()
    assert path.read_text() == text_of(counts)
    assert 'regrepro_watch_failures_total{layer="page-migration",class="B proven"} 2' in lines
    assert 'regrepro_watch_failures_total{layer="odd\\"layer",class=""} 1' in lines
    assert "regrepro_watch_up 1" in lines and "regrepro_watch_lost_events_total 0" in lines
    assert 'regrepro_watch_registered_bytes_total{path="host",driver="rxe"} 4096' in lines
    names = [text.split()[2] for text in lines if text.startswith("# TYPE")]
    assert len(names) == len(set(names)) and list(tmp_path.iterdir()) == [path]


def test_metrics_that_cannot_be_written_are_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    place = tmp_path / "later"
    sink = PrometheusSink(place / "m.prom", WatchCounts(), said.append)
    for there, times in ((False, 1), (False, 1), (True, 1), (False, 2)):
        if there:
            place.mkdir()
        elif place.exists():
            (place / "m.prom").unlink()
            place.rmdir()
        sink.take(Counted())
        sink.take(Notice("nothing to it"))
        assert len(said) == times and (place / "m.prom").exists() == there


def test_sinks_that_nobody_asked_for_are_not_made(surroundings: Make, tmp_path: Path) -> None:
    assert len(Sinks(sinks.SINKS, surroundings())._sinks) == 2
    assert len(Sinks(sinks.SINKS, surroundings(metrics=tmp_path / "m.prom"))._sinks) == 3
    assert len(Sinks([CollectingSink, lambda _: None], surroundings())._sinks) == 1


def test_a_failure_without_rank_is_named_by_its_process(
    surroundings: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    Sinks(sinks.SINKS[2:], surroundings()).take(Caught(waiting(), VERDICT, False))
    assert " app (6): so it was [" in capsys.readouterr().out
