"""Rates beside a checkpoint: settings that differ in one switch, and intervals of what was counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_fakes import FakeBackend

from regrepro.record import RecordWriter, read_record
from regrepro.stage import Stage, checkpoint


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


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: str | None = None) -> list[Any]:
    """Measure with rounds that fail where CMA is handed out, which is earlier by what workers write."""
    calls: list[tuple[str, int]] = []

    def one_round(
        stage: Stage, switches: checkpoint.Switches, ground: object, length: int, distance: int
    ) -> checkpoint._Outcome:
        calls.append((switches.when, distance))
        pressed = switches.workers * switches.written if switches.when == "during" else 0
        fails = distance < pressed
        return checkpoint._Outcome("ENOMEM" if fails else None, None, int(fails), 0.5)

    monkeypatch.setattr(checkpoint, "_round", one_round)
    monkeypatch.setattr(checkpoint, "_consume", lambda *_, **__: None)
    writer = RecordWriter(tmp_path / "record.jsonl", {"run": {}, "node": {}, "stand_ins": []})
    stage = Stage(FakeBackend(), writer, scenario="s", control=control)
    chosen = checkpoint.settings(workers=2, written=2 << 20, page_cache=0)
    checkpoint.measure(stage, chosen, rounds=100, length=32 << 10, fill=0.2, spread=16 << 20)
    distances: dict[str, list[int]] = {}
    for when, distance in calls:
        distances.setdefault(when, []).append(distance)
    if calls:
        assert sorted(distances["none"]) == sorted(distances["after"]), "settings began elsewhere"
    return [event for event in read_record(tmp_path).events if event.get("name") == "checkpoint-rate"]


def test_rates_tell_the_settings_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {event["setting"]: event for event in measured(tmp_path, monkeypatch)}
    plain, during = rates["without checkpoint"], rates["registered during"]
    assert 5 <= plain["failed"] <= 50
    assert plain["failed"] == rates["registered before"]["failed"]
    assert during["interval_95"][0] > plain["rate"]
    assert during["errnos"] == {"ENOMEM": during["failed"]}
    assert during["rate"] == during["failed"] / 100
    assert (during["rounds"], during["seconds"]) == (100, 50.0)


def test_controls_measure_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(tmp_path, monkeypatch, control="no-pin") == []
