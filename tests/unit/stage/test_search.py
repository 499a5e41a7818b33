"""The search for pages: by kind, by count, on a node, by pressure, and what a run may not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from stage_fakes import CMA, Bench, FakeBackend, FakeState, places

from regrepro.errors import Unmet
from regrepro.kernel.zones import Zone
from regrepro.options import RunOptions
from regrepro.stage.buffers import place_as_record, wanted
from regrepro.stage.ports import PAGE_SIZE
from regrepro.stage.search import Wanted, consume_first

MOVABLE = 3
PRESSURE = RunOptions(place="pressure", pressure_limit=1 << 30)


def test_so_many_pages(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: n % 2))
    bench.stage.buffer(pages=8, place={"cma": 3})
    [made] = bench.events("buffer")
    assert places(made) == ["cma"] * 3 + ["ordinary"] * 5
    assert made["place"] == {"cma": [0, 1, 2]}


def test_a_kind_is_not_met_by_another(tmp_path: Path) -> None:
    backend = FakeBackend(lambda n: MOVABLE)
    backend.available = (96 << 20) + 64 * PAGE_SIZE
    bench = Bench(tmp_path, backend)
    with pytest.raises(Unmet, match="4 of 4 cma pages"):
        bench.stage.buffer(pages=4, place="cma")
    assert backend.ranges == []


def test_a_kind_that_is_not_there_is_not_looked_for(tmp_path: Path) -> None:
    backend = FakeBackend(lambda n: CMA)
    with pytest.raises(Unmet, match="no memory of this node is of the kind movable-zone"):
        Bench(tmp_path, backend).stage.buffer(pages=4, place="movable-zone")
    assert backend.handed_out == 0


@pytest.mark.parametrize(
    ("place", "record"),
    [("cma", "cma"), ({"cma": 2}, {"cma": [0, 1]}), ({"unpinnable": (3, 1)}, {"unpinnable": [3, 1]})],
)
def test_what_was_asked_for_as_the_record_holds_it(place: Any, record: Any) -> None:
    assert place_as_record(place, 8) == record


def state(places: list[int], nodes: list[int] | None) -> FakeState:
    made = FakeState(numpy.arange(len(places), dtype=numpy.uint64), numpy.array(places, dtype=numpy.uint8))
    if nodes is not None:
        made.node = numpy.array(nodes)  # type: ignore[attr-defined]
    return made


def test_a_page_is_right_only_on_the_node_asked_for() -> None:
    seen = state([0, CMA, MOVABLE, CMA], [0, 0, 1, 1])
    assert wanted("cma", 4, 1).right(seen, True).tolist() == [False, False, False, True]
    assert wanted("unpinnable", 4, 1).right(seen, True).tolist() == [False, False, True, True]
    assert wanted("ordinary", 4, 0).right(seen, False).tolist() == [True, False, False, False]
    assert wanted("any", 4, 1).right(seen, True).tolist() == [False, False, True, True]
    # Where the node of a page is not known, it is not taken to be the right one.
    assert not wanted("cma", 4, 1).right(state([CMA] * 4, None), True).any()
    assert Wanted((None,)).anywhere
    assert not Wanted((None,), node=0).anywhere


def test_a_node_that_is_not_there_is_unmet(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: CMA))
    with pytest.raises(Unmet, match="node 7"):
        bench.stage.buffer(pages=4, place="unpinnable", node=7)
    assert bench.backend.ranges == []


def test_the_node_is_asked_for_while_searching_and_no_longer(tmp_path: Path) -> None:
    backend = FakeBackend(lambda n: CMA)
    asked: list[int | None] = []
    backend.allocate_on_node = asked.append  # type: ignore[method-assign]
    backend.available = (96 << 20) + 64 * PAGE_SIZE
    with pytest.raises(Unmet, match="of node 1"):  # this machine's pages have no node
        Bench(tmp_path, backend).stage.buffer(pages=4, place="unpinnable", node=1)
    assert asked == [1, None]


def test_ordinary_pages_are_taken_once_pressure_is_gone(tmp_path: Path) -> None:
    backend = FakeBackend(options=PRESSURE)
    backend.pattern = lambda n: CMA if backend.pressed and backend.pressed[-1][0] else 0
    bench = Bench(tmp_path, backend)
    bench.stage.buffer(pages=8, place={"unpinnable": [0, 7]})
    [made] = bench.events("buffer")
    assert places(made) == ["cma"] + ["ordinary"] * 6 + ["cma"]
    assert made["placed"] == "pressure"
    assert backend.pressed[0][0] >= 2 * PAGE_SIZE
    assert backend.pressed[1:] == [(0, None)]
    assert "helped" not in made["search"]


def test_no_pressure_where_only_ordinary_pages_are_wanted(tmp_path: Path) -> None:
    backend = FakeBackend(lambda n: 0, options=PRESSURE)
    Bench(tmp_path, backend).stage.buffer(pages=8, place="ordinary")
    assert backend.pressed == []


def test_pressure_is_given_back_where_it_did_not_help(tmp_path: Path) -> None:
    backend = FakeBackend(lambda n: 0, options=PRESSURE)
    backend.available = (96 << 20) + (1 << 20)
    with pytest.raises(Unmet, match="pages could not be had"):
        Bench(tmp_path, backend).stage.buffer(pages=8, place="unpinnable")
    assert backend.pressed[-1] == (0, None)
    assert backend.ranges == []


def test_pages_that_are_moved_away_meanwhile_are_sought_again(tmp_path: Path) -> None:
    backend = FakeBackend(lambda n: n % 2)
    gather, moves = backend.gather, [2]

    def moving(sources: Any, target: int) -> None:
        gather(sources, target)
        if moves[0]:
            moves[0] -= 1
            backend.pages[target] = (9000, 1 - backend.pages[target][1])

    backend.gather = moving  # type: ignore[method-assign]
    bench = Bench(tmp_path, backend)
    bench.stage.buffer(pages=4, place="unpinnable")
    assert places(bench.events("buffer")[0]) == ["cma"] * 4
    moves[0] = 10**6
    with pytest.raises(Unmet, match="moved away again"):
        bench.stage.buffer(pages=4, place="unpinnable")


def test_what_drivers_live_on_is_left_to_them(tmp_path: Path) -> None:
    backend = FakeBackend(lambda n: CMA)
    backend.cap = 4 * PAGE_SIZE
    bench = Bench(tmp_path, backend)
    with pytest.raises(Unmet, match="a run may hold 16 KiB" if PAGE_SIZE == 4096 else "a run may hold"):
        bench.stage.buffer(pages=5, place="cma")
    bench.stage.buffer(pages=4, place="cma")
    assert places(bench.events("buffer")[-1]) == ["cma"] * 4


def test_pressure_asks_for_a_limit() -> None:
    from regrepro.errors import UsageError

    with pytest.raises(UsageError, match="--pressure-limit"):
        RunOptions(place="pressure")


def zone(node: int, name: str, free: int, free_cma: int = 0) -> Zone:
    return Zone(node, name, free=free, free_cma=free_cma)


def test_what_is_handed_out_before_unpinnable_memory() -> None:
    assert consume_first([zone(0, "Normal", 1000), zone(0, "Movable", 50)]) == {0: 0}
    assert consume_first([zone(0, "Normal", 1000, 600)]) == {0: 0}
    assert consume_first([zone(0, "Normal", 1000, 100)]) == {0: 800}
    assert consume_first([zone(0, "DMA32", 300, 100), zone(0, "Normal", 1000)]) == {0: 1100}
    assert consume_first([zone(0, "Normal", 1000), zone(1, "Normal", 10, 3)]) == {1: 4}
    assert consume_first([]) == {}
