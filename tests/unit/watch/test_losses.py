"""What was lost or missed, and which failures are near it."""

from __future__ import annotations

import pytest
from watch_fakes import FakeEngine, Seen

from regrepro.watch import losses
from regrepro.watch.counts import WatchCounts
from regrepro.watch.losses import Lately, Losses


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(losses, "time", made)
    return made


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(Seen().correlator)


def test_what_was_counted_between_two_looks_is_near_what_happened_then(clock: Clock) -> None:
    made = Lately(2.0)
    made.add(110.0, 3)
    made.add(130.0, 0)
    made.add(140.0, 4)
    near = {97.0: 0, 99.0: 3, 105.0: 3, 111.0: 3, 113.0: 0, 127.0: 0, 129.0: 4, 143.0: 0}
    assert {moment: made.near(moment) for moment in near} == near
    assert made.near(105.0, 141.0) == 7


def test_losses_spoil_what_happened_since_the_last_look_and_around(clock: Clock, engine: FakeEngine) -> None:
    made = Losses(WatchCounts())
    made.follow(engine)
    told = []
    for clock.now, engine.lost in ((110.0, 0), (120.0, 4), (130.0, 4)):
        told += made.look_for_lost()
    assert [(item.what, dict(item.keys)) for item in told if item.what] == [("lost", {"events": 4})]
    assert sum("4 events were lost" in item.sentence for item in told) == 1
    near = {107.9: 0, 108.1: 4, 115.0: 4, 121.9: 4, 122.1: 0, 130.0: 0}
    assert {moment: made.lost_near(moment) for moment in near} == near
    engine.lost = 5  # nobody has looked yet
    assert made.lost_near(500.0) == 1


def test_hits_that_were_missed_are_looked_for_once_a_second_or_at_once(
    clock: Clock, engine: FakeEngine
) -> None:
    counts = WatchCounts()
    made = Losses(counts)
    made.follow(engine)
    assert made.look_for_missed(at_once=True) == [] and made.missed_near(100.0) == 0
    engine.hits = 3
    assert made.look_for_missed() == [] and counts.missed == 0  # too soon
    (told,) = made.look_for_missed(at_once=True)
    assert (told.what, told.keys) == ("missed", {"hits": 3}) and made.missed_near(100.0) == 3
    clock.now, engine.hits = 101.5, 5
    made.look_for_missed()
    assert made.missed_near(101.0) == 5 and made.missed_near(102.5) == 2 and made.missed_near(104.0) == 0
    assert counts.missed == 5


def test_where_the_kernel_does_not_say_what_it_missed_that_is_not_known(
    clock: Clock, engine: FakeEngine
) -> None:
    made = Losses(WatchCounts())
    engine.hits = None
    made.follow(engine)
    assert made.look_for_missed(at_once=True) == [] and made.missed_near(100.0) is None


def test_what_engines_lost_and_missed_counts_once_when_one_follows_another(
    clock: Clock, engine: FakeEngine
) -> None:
    counts = WatchCounts()
    made = Losses(counts)
    made.follow(engine)
    engine.lost, engine.hits = 6, 5
    made.look_for_missed(at_once=True)
    made.follow(None)
    assert made.lost == 6 and made.look_for_missed(at_once=True) == []
    other = FakeEngine(engine.correlator)
    other.lost, other.hits = 1, 2
    made.follow(other)
    made.look_for_missed(at_once=True)
    told = [*made.look_for_lost(), *made.look_for_lost()]
    assert counts.missed == 7 and [item.keys["events"] for item in told if item.what] == [7]
