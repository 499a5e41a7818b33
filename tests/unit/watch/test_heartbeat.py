"""The heartbeat of watch."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from regrepro.watch.heartbeat import Heartbeat
from regrepro.watch.service import Service
from regrepro.watch.watch_settings import WatchSettings


def wait_for(said: list[str], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(said) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(said) == count, said


def test_a_loop_that_stands_still_is_told_once_and_that_it_goes_on() -> None:
    said: list[str] = []
    heart = Heartbeat(said.append, lambda: said.append("again"), seconds=0.08)
    heart.start()
    for _ in range(20):
        heart.beat("its loop")
        time.sleep(0.01)
    assert not said
    heart.beat("a look at process 7")
    wait_for(said, 1)
    time.sleep(0.2)
    assert len(said) == 1 and said[0].endswith("it stands still at a look at process 7")
    heart.beat("its loop")
    assert said[1:] == ["again"]
    heart.stop()


def test_metrics_say_that_nothing_is_watched_while_the_loop_stands_still(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "m.prom"
    service = Service(WatchSettings(out=tmp_path / "out", metrics=metrics))
    service.counts.watching = 1
    service._stands_still("it stands still at a look at process 7")
    assert "\nregrepro_watch_up 0\n" in metrics.read_text()
    assert "a look at process 7" in capsys.readouterr().err
    service._goes_on()
    assert service.counts.watching == 1
