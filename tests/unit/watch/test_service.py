"""`watch` as a whole, with an engine that tells what a script says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from watch_fakes import (
    FLAGS,
    FUNCTIONS,
    SCHEMA,
    CollectingSink,
    FakeEngine,
    Node,
    hold_pin,
    later,
    waiting,
    word,
)

from regrepro.errors import EnvironmentProblem
from regrepro.judge import judge_record
from regrepro.record import read_record
from regrepro.watch import service, sinks
from regrepro.watch.attach import FollowedKernel
from regrepro.watch.evidence import LOOKS, Evidence
from regrepro.watch.failed_registration import FailedRegistration
from regrepro.watch.happenings import Looked, Proven, Sinks, Stopped
from regrepro.watch.libraries import Copy
from regrepro.watch.lock import Lock
from regrepro.watch.process import Process
from regrepro.watch.service import Service
from regrepro.watch.watch_settings import WatchSettings

Part = Callable[[FakeEngine], None]


def fail(engine: FakeEngine) -> None:
    """A held pin makes a registration fail, and libibverbs says so."""
    engine.correlator.library_speaks = True
    hold_pin(engine.correlator)
    engine.correlator.library_failed(word())


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that runs watch over what its engines do; it, what happened, and its records."""

    def run(*scripts: Sequence[Part], **settings: Any) -> tuple[Service, CollectingSink, Path]:
        waiting_scripts = list(scripts)
        seen = CollectingSink()

        def start(_kernel: FollowedKernel, correlator: Any, *_: object) -> FakeEngine:
            return FakeEngine(correlator, waiting_scripts.pop(0) if waiting_scripts else [])

        kernel = FollowedKernel(deepcopy(FUNCTIONS), FLAGS)
        monkeypatch.setattr(service, "require_rights", lambda: None)
        monkeypatch.setattr(service, "Lock", lambda out: Lock(out, tmp_path / "lock"))
        monkeypatch.setattr(service, "Observer", Node)
        monkeypatch.setattr(service.reclaim, "reclaim", lambda: ["given back"])
        monkeypatch.setattr(FollowedKernel, "read", lambda: kernel)
        monkeypatch.setattr(FollowedKernel, "start_engine", start)
        monkeypatch.setattr(FollowedKernel, "follow_modules", lambda *_: ([], []))
        monkeypatch.setattr(sinks, "SINKS", [*sinks.SINKS, lambda _: seen])
        duration = settings.pop("duration", 0.3)
        made = Service(WatchSettings(tmp_path / "out", libraries=False, duration=duration, **settings))
        made.run()
        return made, seen, tmp_path / "out"

    return run


def test_failures_are_recorded_judged_and_counted(
    watched: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made, seen, out = watched([fail], metrics=tmp_path / "m.prom")
    assert made.counts.failures == {("page-migration", "B likely"): 1}
    shown = capsys.readouterr()
    assert "python3 (6, rank 5): class B, likely" in shown.out and "failure-1]" in shown.out
    assert "regrepro watch: given back" in shown.err
    assert any(text.startswith("watching: ") for text in seen.said)
    (run,) = out.iterdir()
    record = read_record(run)
    assert not record.problems
    verdicts = json.loads((run / "verdicts.json").read_text())
    assert verdicts["complete"] and verdicts["verdicts"][0]["class"]["state"] == "likely"
    assert verdicts == judge_record(record)
    assert 'layer="page-migration",class="B likely"} 1' in (tmp_path / "m.prom").read_text()
    for event in record.events:
        jsonschema.Draft202012Validator(SCHEMA).validate(event)


def test_what_exceeds_the_rate_is_counted_under_the_layer_of_its_kind(watched: Any) -> None:
    made, _, out = watched([lambda engine: [fail(engine) for _ in range(30)]], each=3, quiet=True)
    assert made.counts.suppressed == 27
    # They came together, before the first was judged.
    assert made.counts.failures == {("page-migration", "B likely"): 30}
    (run,) = out.iterdir()
    events = read_record(run).events
    assert sum(event["event"] == "register" for event in events) == 3
    told = [event["failures"] for event in events if event.get("what") == "suppressed"]
    assert sum(item["count"] for items in told for item in items) == 27


@pytest.mark.parametrize(
    ("name", "count", "said"), [("lost", 4, "4 events were"), ("hits", 5, "missed 5 hits")]
)
def test_what_is_lost_or_missed_is_said_and_spoils_what_is_near(
    name: str, count: int, said: str, watched: Any
) -> None:
    def lose(engine: FakeEngine) -> None:
        setattr(engine, name, count)

    made, seen, out = watched([lose, fail], quiet=True)
    assert {"lost": made.counts.lost, "hits": made.counts.missed}[name] == count
    assert any(said in text for text in seen.said)
    (run,) = out.iterdir()
    (register,) = [event for event in read_record(run).events if event["event"] == "register"]
    assert register["trace"]["status"] == "spoiled"
    assert register["trace"]["overrun" if name == "lost" else "misses"] == count


def test_a_word_alone_is_doubted_where_events_were_lost_just_before(watched: Any) -> None:
    def lose(engine: FakeEngine) -> None:
        engine.lost += 1
        engine.correlator.library_failed(word())

    _, _, out = watched([lose], quiet=True)
    (register,) = [e for e in read_record(next(out.iterdir())).events if e["event"] == "register"]
    assert "events were lost near this failure" in register["trace"]["why"]


def test_an_engine_that_ended_is_begun_anew_and_what_it_lost_counts_once(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(engine: FakeEngine) -> None:
        engine.lost += 4

    def end(engine: FakeEngine) -> None:
        engine.lost += 2
        engine.ended = True

    made, seen, _ = watched([lose, end], [lose, fail], quiet=True, limit=1, duration=5.0)
    assert made.counts.engine_restarts == 1 and made.counts.lost == 10 and made.counts.total == 1
    assert any("starting it anew" in text for text in seen.said)
    assert sum(keys["events"] for what, keys in seen.told if what == "lost") == 10


def test_a_restart_that_fails_still_tells_what_was_seen(
    watched: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def end(engine: FakeEngine) -> None:
        def refuse(*_: object) -> FakeEngine:
            raise EnvironmentProblem("no more")

        fail(engine)
        engine.ended = True
        monkeypatch.setattr(FollowedKernel, "start_engine", refuse)

    with pytest.raises(EnvironmentProblem, match="no more"):
        watched([end], quiet=True)
    events = read_record(next((tmp_path / "out").iterdir())).events
    assert {"engine-ended", "stopped"} <= {event.get("what") for event in events}
    assert events[-1]["event"] == "run-end" and any(event["event"] == "register" for event in events)


@pytest.mark.parametrize(
    ("number", "outcome"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "finished")]
)
def test_a_signal_ends_it_and_another_begins_a_new_record(
    number: signal.Signals, outcome: str, watched: Any
) -> None:
    script = [
        lambda _engine: os.kill(os.getpid(), signal.SIGHUP),
        lambda _engine: os.kill(os.getpid(), number),
    ]
    _, seen, out = watched(script, duration=30.0, quiet=True)
    assert seen.all[-1] == Stopped(outcome) and len(list(out.iterdir())) == 2


# Its parts, at a time that is set


class Parts:
    """A service that does not run, with an engine that does nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.now = 100.0
        clock = SimpleNamespace(
            monotonic=lambda: self.now, time=lambda: self.now, sleep=lambda _seconds: None
        )
        monkeypatch.setattr(service, "time", clock)
        self.seen = CollectingSink()
        self.node = Node()
        self.service: Any = Service(WatchSettings(path))
        self.service._kernel = FollowedKernel(deepcopy(FUNCTIONS), FLAGS)
        self.service._observer = self.node
        self.service._sinks = Sinks([lambda _: self.seen], None)  # type: ignore[arg-type]
        self.service._judge = lambda _item: {"class": {"name": "B", "state": "proven"}}
        monkeypatch.setattr(
            FollowedKernel, "start_engine", lambda _kernel, correlator, *_: FakeEngine(correlator)
        )
        self.service._start_engine()
        self.engine: FakeEngine = self.service._engine


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Parts]:
    made = Parts(monkeypatch, tmp_path)
    yield made
    for fd in made.service._waker:
        os.close(fd)


def test_a_process_that_opens_devices_in_a_loop_is_looked_at_once_a_second_and_once_more(
    parts: Parts,
) -> None:
    def go_on() -> None:
        for pid in list(parts.service._opened_again):
            parts.service._opened(pid)

    parts.service.settings.libraries = False
    for _ in range(50):
        parts.service._opened(6)
        parts.service._opened(7)
        go_on()
        parts.now += 0.01
    assert parts.node.met == [6, 7] and parts.service._opened_again == {6, 7}
    for seconds, met in ((1.0, 4), (5.0, 4)):
        parts.now += seconds
        go_on()
        assert len(parts.node.met) == met
    assert not parts.service._opened_again
    parts.service._opened(6)
    assert len(parts.node.met) == 5


def test_openings_of_very_many_processes_are_not_remembered_for_ever(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_OPENED_KEPT", 10)
    parts.service.settings.libraries = False
    for pid in range(100):
        parts.service._opened(pid)
    assert parts.node.met == list(range(100)) and len(parts.service._opened_at) <= 11


def test_a_new_copy_is_followed_and_copies_of_containers_that_are_gone_are_let_go(parts: Parts) -> None:
    gone = Copy((1, 2), "/old/libibverbs.so.1", os.open(os.devnull, os.O_RDONLY), users={1 << 30})
    new = Copy((3, 4), "/new/libibverbs.so.1", -1, {"ibv_reg_mr": 16}, {os.getpid()})
    known = parts.service._copies.known
    known[gone.key] = gone

    def look_at(_pid: int) -> bool:
        known[new.key] = new
        return True

    parts.service._copies.look_at = look_at
    parts.service._opened(os.getpid())
    assert list(known) == [new.key] == parts.engine.followed and parts.engine.forgotten == [gone.key]
    assert parts.engine.correlator.library_speaks
    followed = [{"copy": new.shown, "verb": "ibv_reg_mr", "at": "return", "why": ""}]
    assert parts.seen.told == [("copies", {"copies": [new.shown], "followed": followed})]


def test_a_copy_that_cannot_be_followed_is_followed_nowhere(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_engine: FakeEngine, copies: Iterable[Copy]) -> list[tuple[Copy, OSError]]:
        return [(copy, PermissionError(13, "Permission denied", "ibv_reg_mr")) for copy in copies]

    monkeypatch.setattr(FakeEngine, "follow", refuse)
    copy = Copy((3, 4), "/x/libibverbs.so.1", -1, {"ibv_reg_mr": 16})
    parts.service._copies.known[copy.key] = copy
    parts.service._follow_copies(parts.engine, [copy.key])
    (row,) = parts.service._how_followed()
    assert row["at"] == "nowhere" and row["why"] == "Permission denied (ibv_reg_mr)"
    assert parts.service.counts.attach_failures == 1 and not parts.engine.correlator.library_speaks


@pytest.mark.parametrize(
    ("late", "lost"), [(0.0, 0), (95.0, 4), (-95.0, 0)], ids=["in time", "late", "from ahead"]
)
def test_a_failure_that_came_late_is_spoiled_by_what_was_lost_when_it_happened(
    late: float, lost: int, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.service._losses, "lost_near", lambda *at: 4 if min(at) < 110.0 else 0)
    failure = FailedRegistration(7, 6, "app", 1, since=200.0, late=late)
    parts.service._record(failure, Evidence(failure, Process(6)))
    assert parts.seen.all[-1].item.trace["overrun"] == lost  # type: ignore[union-attr]


def look_on(parts: Parts, *moments: float) -> None:
    for moment in moments:
        parts.service._look_again(100.0 + moment)


def test_it_is_told_again_when_the_last_look_has_proven_it(parts: Parts) -> None:
    item = waiting(since=100.0)
    parts.service._looks.take(item)
    look_on(parts, *LOOKS[:-1])
    assert parts.seen.all == [Looked(item, last=False)] * 3
    look_on(parts, LOOKS[-1])
    assert isinstance(parts.seen.all[-1], Proven) and parts.seen.all[-2] == Looked(item, last=True)
    assert parts.service.counts.proven == 1 and not parts.service._looks.waiting
    assert {keys["failure"] for keys in item.looks} == {"failure-1"}


def test_what_stays_likely_is_not_told_again(parts: Parts) -> None:
    item = waiting(since=100.0)
    parts.service._looks.take(item)
    parts.service._judge = lambda _item: {"class": {"name": "B", "state": "likely"}}
    parts.node.look_at_frames = lambda _seen: {**later(1.0), "ended": "process 6 has ended"}  # type: ignore[method-assign]
    look_on(parts, 1.0)
    assert parts.seen.all == [Looked(item, last=True)] and not parts.service._looks.waiting


def test_where_watch_ends_before_it_says_so(parts: Parts) -> None:
    item = waiting(since=100.0)
    parts.service._looks.take(item)
    parts.service._finish()
    assert item.looks[-1]["ended"] == "watch ended before" and not parts.service._looks.waiting
    assert parts.engine.stopped == 1
