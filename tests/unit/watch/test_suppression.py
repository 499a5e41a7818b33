"""Which failures are recorded in full, and how the others are counted."""

from __future__ import annotations

from regrepro.watch.counts import WatchCounts
from regrepro.watch.failed_registration import FailedRegistration
from regrepro.watch.suppression import Limiter, Suppression


def test_the_limiter_lets_bursts_through_and_not_the_same_over_and_over() -> None:
    time = [0.0]
    limiter = Limiter(rate=1.0, burst=4, each=2, window=60.0, now=lambda: time[0])
    assert [limiter.allows("a") for _ in range(3)] == [True, True, False]
    assert [limiter.allows(key) for key in "bcd"] == [True, True, False]
    time[0] = 1.0
    assert limiter.allows("e") and not limiter.allows("f")
    time[0] = 61.0
    assert limiter.allows("a")


def failed(pid: int) -> FailedRegistration:
    return FailedRegistration(7, pid, "app", 1, ret=-12)


def test_what_is_not_recorded_is_counted_under_the_layer_of_its_kind_once_that_is_known() -> None:
    counts = WatchCounts()
    made = Suppression(counts)
    for pid in (1, 1, 2):
        made.suppress(failed(pid))
    made.count_unjudged({failed(1).key(), failed(2).key()})
    assert made.some and not made.take() and counts.total == 0
    made.judged(failed(1), "page-migration", "B likely")
    made.count_unjudged(set())  # of the other kind none will be judged
    made.suppress(failed(1))
    assert counts.failures == {("page-migration", "B likely"): 3, ("not-judged", ""): 1}
    assert [(row["layer"], row["count"]) for row in made.take()] == [("not-judged", 1), ("page-migration", 3)]
    assert not made.some and counts.suppressed == 4
