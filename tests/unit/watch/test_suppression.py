"""Which failures are recorded in full, and how the others are counted."""

from __future__ import annotations

from regrepro.watch.counts import WatchCounts
from regrepro.watch.failed_registration import FailedRegistration
from regrepro.watch.suppression import Limiter, Suppression


def test_the_limiter_lets_bursts_through_and_not_the_same_over_and_over() -> None:
    time = [0.0]
    limiter = Limiter(rate=1.0, burst=4, each=2, window=60.0, share=1, now=lambda: time[0])
    assert [limiter.allows("a", 1) for _ in range(3)] == [True, True, False]
    assert [limiter.allows(key, 1) for key in "bcd"] == [True, True, False]
    time[0] = 1.0
    assert limiter.allows("e", 1) and not limiter.allows("f", 1)
    time[0] = 61.0
    assert limiter.allows("a", 1)


def test_one_user_does_not_keep_the_failures_of_another_from_being_recorded() -> None:
    time, fresh, kept = [0.0], 0, 0
    limiter = Limiter(rate=10.0, burst=50, each=5, window=60.0, share=1 << 20, now=lambda: time[0])
    for second in range(60):
        time[0] = float(second)
        for _ in range(1200):  # each by a process of its own
            fresh += 1
            limiter.allows(("noise", fresh), (1001, ""))
        kept += limiter.allows(("victim", second), (1002, ""))
    assert kept == 60


def test_one_users_records_do_not_push_out_those_of_others() -> None:
    time = [0.0]
    limiter = Limiter(rate=10.0, burst=50, each=5, window=60.0, share=1000, now=lambda: time[0])
    assert limiter.allows("a", 1)
    limiter.spent(1, 1000)
    assert not limiter.allows("b", 1) and limiter.allows("c", 2)
    time[0] = 86400.0
    assert limiter.allows("d", 1)


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
