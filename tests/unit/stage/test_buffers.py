"""Buffers: their pages lie where they were asked for, or it is said why they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from stage_fakes import CMA, Bench, FakeBackend, places

from regrepro.errors import Unmet, UsageError
from regrepro.options import RunOptions
from regrepro.stage.ports import PAGE_SIZE


@pytest.mark.parametrize("pattern", [[3], [0], [7], [0, 1, 2, 7], [1, 3, 5]])
def test_a_pattern_is_met_exactly(tmp_path: Path, pattern: list[int]) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: n // 5 % 2))
    bench.stage.buffer(pages=8, place={"unpinnable": pattern})
    [made] = bench.events("buffer")
    assert places(made) == ["cma" if index in pattern else "ordinary" for index in range(8)]
    assert made["place"] == {"unpinnable": pattern}


def test_what_does_not_fit_is_given_back(bench: Bench) -> None:
    buffer = bench.stage.buffer(pages=8, place="unpinnable")
    assert len(bench.backend.ranges) == 1
    buffer.free()
    assert bench.backend.ranges == []
    assert bench.backend.pages == {}


def test_ordinary_pages_are_moved_out_where_there_are_none_at_first(bench: Bench) -> None:
    """ZONE_MOVABLE is handed out first: the kernel itself moves pages out, for a long-term pin."""
    bench.stage.buffer(pages=8, place="ordinary")
    [made] = bench.events("buffer")
    assert places(made) == ["ordinary"] * 8
    assert "long-term pin" in made["search"]["helped"]
    assert sum(bench.backend.pins.values()) == 0


def test_a_large_buffer(bench: Bench) -> None:
    bench.stage.buffer(pages=1025, place="unpinnable")
    assert set(places(bench.events("buffer")[0])) == {"cma"}


def test_out_of_reach_is_unmet_with_numbers(tmp_path: Path) -> None:
    backend = FakeBackend(lambda n: 0)
    backend.available = (96 << 20) + 40 * PAGE_SIZE
    bench = Bench(tmp_path, backend)
    with pytest.raises(Unmet) as unmet:
        bench.stage.buffer(pages=8, place="unpinnable")
    assert unmet.value.need == "unpinnable"
    assert "8 of 8 unpinnable pages" in unmet.value.why
    assert "160 KiB were touched" in unmet.value.why
    assert "online-movable" in unmet.value.how
    assert backend.ranges == []


def test_pressure_limit_bounds_what_is_touched(tmp_path: Path) -> None:
    options = RunOptions(place="pressure", pressure_limit=1 << 20)
    backend = FakeBackend(lambda n: 0, options=options)
    with pytest.raises(Unmet, match=r"1 MiB were touched \(limit 1 MiB\)"):
        Bench(tmp_path, backend).stage.buffer(pages=8, place="unpinnable")
    assert backend.handed_out * PAGE_SIZE <= 1 << 20


def test_no_unpinnable_memory_on_the_node(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: 0, has_unpinnable=False))
    bench.stage.buffer(pages=8, place="unpinnable")
    [made] = bench.events("buffer")
    assert made["placed"] == "none-on-node"
    assert places(made) == ["ordinary"] * 8


@pytest.mark.parametrize(
    "keys",
    [{"has_unpinnable": None, "complete": False, "problems": ["kcore is closed"]}, {"has_unpinnable": None}],
)
def test_an_unknown_map_is_unmet(tmp_path: Path, keys: dict[str, Any]) -> None:
    bench = Bench(tmp_path, FakeBackend(**keys))
    with pytest.raises(Unmet) as unmet:
        bench.stage.buffer(pages=8, place="unpinnable")
    assert unmet.value.need == "page-state"


def test_none_seen_but_map_incomplete_proves_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: 0, has_unpinnable=False, complete=False))
    bench.backend.available = (96 << 20) + 64 * PAGE_SIZE
    with pytest.raises(Unmet):
        bench.stage.buffer(pages=8, place="unpinnable")


def test_another_backing_is_drawn_until_it_fits(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: CMA if n >= 24 else 0))
    bench.stage.buffer(pages=8, place="unpinnable", backing="memfd")
    [made] = bench.events("buffer")
    assert places(made) == ["cma"] * 8
    assert len(bench.backend.ranges) == 1


def test_new_pages_at_the_same_addresses(tmp_path: Path) -> None:
    backend = FakeBackend()
    run = Bench(tmp_path, backend)
    buffer = run.stage.buffer(pages=4, place="unpinnable")
    before = numpy.array([backend.pages[buffer.address + i * PAGE_SIZE][0] for i in range(4)])
    run.stage.renew(buffer, "unpinnable")
    after = numpy.array([backend.pages[buffer.address + i * PAGE_SIZE][0] for i in range(4)])
    assert not (before == after).any()
    [step] = run.events("step")
    assert (step["name"], step["place"]) == ("renew", "unpinnable")
    shared = run.stage.buffer(pages=1, backing="memfd")
    with pytest.raises(UsageError, match="anonymous"):
        run.stage.renew(shared)


def test_the_best_of_many_draws_has_to_do(tmp_path: Path) -> None:
    """Near the point where CMA is handed out, ordinary and CMA pages come by turns."""
    run = Bench(tmp_path, FakeBackend(lambda n: CMA if n % 5 == 0 else 0))
    run.stage.buffer(pages=4, place="unpinnable", backing="memfd")
    [made] = run.events("buffer")
    assert sum(count for _, count, place in made["pages"]["place"] if place == "cma") == 1
    assert "12 draws" in made["search"]["helped"]
