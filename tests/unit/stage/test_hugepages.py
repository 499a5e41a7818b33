"""Gigantic pages out of a reserve, on a machine made of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_fakes import Bench, FakeBackend

from regrepro.errors import Unmet
from regrepro.stage import hugepages
from regrepro.stage.ports import PAGE_SIZE


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
