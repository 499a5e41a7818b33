"""A run with `--place pressure`: the holder is started before the body, progress is told, nothing is left."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from runner_fakes import HEAD, FakeEnvironment, scenario

from regrepro import runner
from regrepro.errors import Unmet
from regrepro.options import RunOptions
from regrepro.progress import Silent
from regrepro.record import Record, read_record

OPTIONS = RunOptions(place="pressure", pressure_limit=1 << 30)


class Said(Silent):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def run(tmp_path: Path, environment: FakeEnvironment, body: str, options: RunOptions) -> tuple[Record, Said]:
    file = tmp_path / "file.py"
    file.write_text(HEAD + scenario(body, controls='{"no-pin": change(pin="none")}'))
    said = Said()
    out = runner.run([str(file)], options, tmp_path / "out", said, environment=environment)
    return read_record(out), said


def test_the_holder_is_started_before_the_body(tmp_path: Path) -> None:
    environment = FakeEnvironment()
    marker = tmp_path / "started"
    environment.made_backend.start_pressure = marker.touch  # type: ignore[method-assign]
    reclaimed: list[str] = []
    environment.reclaim = lambda: reclaimed.append("now") or []  # type: ignore[method-assign, func-returns-value]
    record, _ = run(tmp_path, environment, f"assert os.path.exists({str(marker)!r})", OPTIONS)
    ends = [event["outcome"] for event in record.events if event["event"] == "scenario-end"]
    assert ends == ["finished", "finished"]
    assert len(reclaimed) == 2  # at the start, and for a pass that was killed


def test_gpus_in_use_are_unmet(tmp_path: Path) -> None:
    environment = FakeEnvironment()

    def refuse() -> None:
        raise Unmet("pressure", "1 other processes use the GPUs: train (7)", "wait")

    environment.made_backend.start_pressure = refuse  # type: ignore[method-assign]
    record, _ = run(tmp_path, environment, "raise AssertionError('never')", OPTIONS)
    [unmet] = [event for event in record.events if event["event"] == "unmet"]
    assert unmet["need"] == "pressure"
    assert "train (7)" in unmet["why"]


def test_without_pressure_nothing_is_started(tmp_path: Path) -> None:
    environment = FakeEnvironment()

    def never() -> None:
        raise AssertionError("started")

    environment.made_backend.start_pressure = never  # type: ignore[method-assign]
    record, _ = run(tmp_path, environment, "pass", RunOptions())
    assert not [event for event in record.events if event["event"] == "exception"]


def test_progress_is_told_while_it_holds(tmp_path: Path) -> None:
    environment = FakeEnvironment()
    environment.made_backend.pressing = mmap.mmap(-1, mmap.PAGESIZE)  # type: ignore[attr-defined]
    environment.made_backend.pressing[:16] = (3 << 30).to_bytes(8, "little") + (6 << 30).to_bytes(8, "little")  # type: ignore[attr-defined]
    _, said = run(tmp_path, environment, "time.sleep(2.5)", OPTIONS)
    assert any("holding ordinary memory: 3 GiB of about 6 GiB" in text for text in said.texts)


@pytest.mark.parametrize("held", [0, 1 << 20])
def test_nothing_is_told_where_nothing_is_held(tmp_path: Path, held: int) -> None:
    environment = FakeEnvironment()
    environment.made_backend.pressing = mmap.mmap(-1, mmap.PAGESIZE)  # type: ignore[attr-defined]
    environment.made_backend.pressing[:8] = held.to_bytes(8, "little")  # type: ignore[attr-defined]
    _, said = run(tmp_path, environment, "time.sleep(1.2)", OPTIONS)
    assert not any("holding" in text for text in said.texts)
