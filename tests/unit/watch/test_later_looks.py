"""Failures whose frames are looked at again."""

from __future__ import annotations

import itertools

from watch_fakes import later, waiting

from regrepro.watch.evidence import LOOKS
from regrepro.watch.later_looks import KEPT, KEPT_PAGES, CaughtFailure, LaterLooks


def test_looks_are_few_and_at_growing_distances_beyond_what_io_lasts() -> None:
    assert all(b > 2 * a for a, b in itertools.pairwise(LOOKS)) and LOOKS[-1] > 30
    item = waiting(since=100.0)
    kept = LaterLooks()
    kept.take(item)
    assert kept.next_due == 101.0 and not kept.due(100.9) and kept.due(101.0) == [item]
    item.add(later(1.0))
    assert kept.next_due == 103.0 and not kept.due(102.0)
    item.add(later(25.0))  # a busy node made it late
    assert kept.next_due == 132.0


def test_no_more_wait_than_the_bound_and_the_others_say_so() -> None:
    kept = LaterLooks()
    assert [kept.take(of(1)) for _ in range(48)] == [""] * 48
    assert kept.take(of(1)) == "48 other failures were being looked at again" and kept.left_out == 1
    assert [kept.take(of(2)) for _ in range(KEPT - 48)] == [""] * (KEPT - 48)
    assert kept.take(of(3)) == f"{KEPT} other failures were being looked at again"
    kept = LaterLooks()
    assert kept.take(of(1, pages=KEPT_PAGES - 1)) == "" and kept.take(of(1)) != "" and kept.take(of(2)) != ""


def of(uid: int, **keys: int) -> CaughtFailure:
    """A failure of a user."""
    item = waiting(**keys)
    item.failure.owner = uid, ""
    return item
