"""Rates beside a checkpoint: settings that differ in one switch, and intervals of what was counted."""

from __future__ import annotations

import pytest

from regrepro.stage import checkpoint


@pytest.mark.parametrize(
    ("failed", "rounds", "low", "high"),
    [(0, 100, 0.0, 0.0370), (20, 100, 0.1334, 0.2888), (100, 100, 0.9630, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_s_interval(failed: int, rounds: int, low: float, high: float) -> None:
    found = checkpoint.interval(failed, rounds)
    assert found == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_each_setting_has_its_switches() -> None:
    made = checkpoint.settings(workers=2, written=1 << 20, page_cache=1 << 20)
    assert made["without checkpoint"] == checkpoint.Switches()
    assert {one.when for one in made.values()} == {"none", "before", "during", "after"}
    plain, kept = made["touched before the fork"], made["touched before, MADV_DONTFORK"]
    assert (plain.dontfork, kept.dontfork) == (False, True)
    assert (plain.inherited, plain.workers) == (kept.inherited, kept.workers)
    alone = made["during, page cache alone"]
    assert (alone.workers, alone.writeback) == (0, False)


def test_what_is_switched_off_is_left_out() -> None:
    assert list(checkpoint.settings(0, 1 << 20, 0)) == ["without checkpoint"]
    assert not any(one.page_cache for one in checkpoint.settings(1, 1 << 20, 0).values())
    assert not any(one.workers for one in checkpoint.settings(0, 0, 1 << 20).values())
