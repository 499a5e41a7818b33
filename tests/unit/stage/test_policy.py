"""What the page allocator hands out, on a machine made of numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from runner_fakes import FakeEnvironment
from stage_fakes import CMA, Bench, FakeBackend, FakeMap

from regrepro import judge, runner
from regrepro.errors import Unmet
from regrepro.kernel.zones import Zone
from regrepro.options import RunOptions
from regrepro.record import read_record
from regrepro.stage.policy import measure
from regrepro.stage.ports import PAGE_SIZE
from regrepro.views.policy import points

CHUNK = 16 * PAGE_SIZE


class HalfOfFree(FakeBackend):
    """Hands out CMA once more than half of what is free is CMA, as the kernel does."""

    def __init__(self, ordinary: int, cma: int) -> None:
        super().__init__(self._next_place)
        self.size = {0: ordinary, CMA: cma}

    def free(self, place: int) -> int:
        return self.size[place] - sum(at == place for _, at in self.pages.values())

    def _next_place(self, _: int) -> int:
        return CMA if self.free(CMA) > self.free(0) else 0

    def zones(self) -> list[Zone]:
        zone = Zone(0, "DMA32")
        zone.free, zone.free_cma = self.free(0) + self.free(CMA), self.free(CMA)
        return [zone]


def test_the_half_of_free_rule_is_seen(tmp_path: Path) -> None:
    backend = HalfOfFree(ordinary=600, cma=300)
    bench = Bench(tmp_path, backend)
    steps = measure(bench.stage, chunk=CHUNK)
    events = bench.events("step")
    assert len(events) == steps
    [found] = points([event | {"scenario": "s", "control": None} for event in events]).values()
    before = [point for point in found if point.phase == "fill" and point.free < 0.48]
    assert before
    assert all(point.handed == 0 for point in before)
    balance = [point for point in found if point.phase == "fill" and point.free >= 0.5]
    assert all(0.3 < point.handed < 0.7 for point in balance[1:])
    after = [point for point in found if point.phase == "refill"]
    assert after[0].free > 0.5
    assert after[0].handed == 1
    assert backend.ranges == []


def test_without_cma_there_is_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(Unmet, match="no zone has free CMA"):
        measure(Bench(tmp_path, HalfOfFree(ordinary=600, cma=0)).stage, chunk=CHUNK)


@dataclass
class MovableMap(FakeMap):
    """A complete map whose only unpinnable memory is ZONE_MOVABLE."""

    def as_record(self) -> dict[str, Any]:
        return super().as_record() | {"unpinnable_ranges": [[1000, 2000, "movable-zone"]]}


@pytest.mark.parametrize("memory_map", [MovableMap(), FakeMap(has_unpinnable=False)])
def test_on_a_node_without_cma_the_scenario_is_unmet_and_says_how_to_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_map: FakeMap
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environment = FakeEnvironment()
    environment.made_backend.memory_map = memory_map
    options = RunOptions(names=("placement_policy",))
    runner.run(options.names, options, tmp_path / "out", environment=environment)
    record = read_record(tmp_path / "out")
    assert [event["need"] for event in record.of("unmet")] == ["cma"]
    assert list(record.of("step")) == []
    verdicts = judge.judge_record(record)
    [verdict] = verdicts["verdicts"]
    assert (verdict["verdict"], verdict["as_declared"]) == ("unmet", None)
    assert "no CMA memory" in verdict["reason"]
    assert "cma=512M" in verdict["reason"]
    assert judge.exit_code(verdicts) == judge.exit_code(verdicts, expect_declared=True) == 125


def test_it_stops_before_memory_runs_low(tmp_path: Path) -> None:
    backend = HalfOfFree(ordinary=10**6, cma=10)
    backend.available = (160 << 20) + 4 * CHUNK
    with pytest.raises(Unmet, match="before memory ran low"):
        measure(Bench(tmp_path, backend).stage, chunk=CHUNK)
    assert backend.ranges == []
