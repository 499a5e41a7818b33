"""What the page allocator hands out, and gigantic pages beside a pin, on a machine made of numbers."""

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
from regrepro.stage import hugepages
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


# Gigantic pages


@pytest.fixture
def gigantic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hugepages" / "hugepages-1048576kB"
    folder.mkdir(parents=True)
    (folder / "nr_hugepages").write_text("0")
    monkeypatch.setattr(hugepages, "HUGEPAGES", tmp_path / "hugepages")
    return folder / "nr_hugepages"


def area(name: str, first: int | None, pages: int) -> dict[str, Any]:
    ranges = None if first is None else [[first, first + pages]]
    return {"name": name, "pages": pages, "ranges": ranges}


def bench_with(tmp_path: Path, areas: list[dict[str, Any]]) -> Bench:
    bench = Bench(tmp_path, FakeBackend())
    record = bench.backend.memory_map.as_record()  # type: ignore[union-attr]
    bench.backend.memory_map.as_record = lambda: record | {"cma_areas": areas}  # type: ignore[union-attr, method-assign]
    return bench


GIB_PAGES = (1 << 30) // PAGE_SIZE


def test_the_reserve_is_as_many_pages_as_its_areas_hold(tmp_path: Path, gigantic: Path) -> None:
    bench = bench_with(
        tmp_path,
        [area("hugetlb0", 1000, 2 * GIB_PAGES), area("hugetlb1", 9, GIB_PAGES), area("reserved", 5, 64)],
    )
    found = hugepages.reserve(bench.stage)
    assert (found.pages, found.size, len(found.ranges)) == (3, 1 << 30, 2)
    assert hugepages.ask(bench.stage, found, "pinned") == 3
    assert gigantic.read_text() == "0"
    [step] = bench.events("step")
    assert (step["name"], step["asked"], step["got"], step["when"]) == ("gigantic-pages", 3, 3, "pinned")


@pytest.mark.parametrize(
    ("areas", "says"),
    [
        ([], "no CMA area of hugetlb"),
        ([area("reserved", 5, GIB_PAGES)], "no CMA area of hugetlb"),
        ([area("hugetlb0", None, GIB_PAGES)], "is not known"),
    ],
)
def test_no_reserve_is_unmet(tmp_path: Path, gigantic: Path, areas: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(Unmet, match=says):
        hugepages.reserve(bench_with(tmp_path, areas).stage)


def test_no_gigantic_pages_is_unmet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugepages, "HUGEPAGES", tmp_path / "none")
    with pytest.raises(Unmet, match="no gigantic pages"):
        hugepages.reserve(bench_with(tmp_path, []).stage)


def test_a_buffer_in_another_area_proves_nothing_of_the_reserve(tmp_path: Path, gigantic: Path) -> None:
    bench = bench_with(tmp_path, [area("hugetlb0", 1000, GIB_PAGES)])
    inside = bench.stage.buffer(pages=4, place="cma")
    held = hugepages.reserve(bench.stage)
    hugepages.require_inside(bench.stage, inside, held)
    elsewhere = hugepages.Reserve(held.size, 1, ((5, 10),))
    with pytest.raises(Unmet, match="4 of 4 pages lie in another"):
        hugepages.require_inside(bench.stage, inside, elsewhere)
