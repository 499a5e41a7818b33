"""The picture of a buffer over physical memory: worked out from a record, drawn in letters and as SVG."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrepro.report import picture as svg
from regrepro.views.picture import Picture, as_text, buffer_under_test, legend, pictures

MIB_PAGES = 256


def zone(node: int, name: str, first: int, spanned: int) -> dict[str, Any]:
    return {"node": node, "zone": name, "start_pfn": first, "spanned": spanned, "present": spanned}


def memory_map(**changes: Any) -> dict[str, Any]:
    return {
        "event": "memory-map",
        "page_size": 4096,
        "complete": True,
        "has_unpinnable": True,
        "zones": [
            zone(0, "DMA32", 0, 1000 * MIB_PAGES),
            zone(0, "Movable", 1000 * MIB_PAGES, 200 * MIB_PAGES),
            zone(1, "Normal", 2000 * MIB_PAGES, 1000 * MIB_PAGES),
        ],
        "unpinnable_ranges": [
            [800 * MIB_PAGES, 900 * MIB_PAGES, "cma"],
            [1000 * MIB_PAGES, 1200 * MIB_PAGES, "movable-zone"],
        ],
        **changes,
    }


def state(*pfns: list[int]) -> dict[str, Any]:
    """Runs [first page, first PFN, count]."""
    pages = sum(count for _, _, count in pfns)
    return {
        "pages": pages,
        "pfn": [list(run) for run in pfns],
        "place": [[0, pages, "ordinary"]] if pages else [],
        "refcount": None,
        "pincount": None,
        "mapcount": None,
        "node": None,
        "how": "observed",
        "source": "test",
    }


def events(
    before: dict[str, Any], after: dict[str, Any], errno: str | None = "ENOMEM"
) -> list[dict[str, Any]]:
    labels = {"scenario": "one", "variant": "default", "control": None}
    return [
        memory_map(),
        {"event": "buffer", "buffer": 1, "place": "unpinnable", "page_size": 4096, "pages": before, **labels},
        {
            "event": "register",
            "registration": 1,
            "buffer": 1,
            "errno": errno,
            "before": before,
            "after": after,
            **labels,
        },
    ]


def rows(drawn: Picture, width: int = 76) -> dict[str, str]:
    lines = as_text(drawn, width)
    beside = len(lines[2]) - len(lines[2].removeprefix("memory").lstrip())
    return {line[:beside].strip(): line[beside:] for line in lines[1:]}


def test_before_and_after() -> None:
    first, second = (
        state([0, 800 * MIB_PAGES, 8]),
        state([0, 100 * MIB_PAGES, 7], [7, 800 * MIB_PAGES + 7, 1]),
    )
    [drawn] = pictures(events(first, second))
    assert (drawn.scenario, drawn.buffer) == ("one", 1)
    [node] = drawn.nodes
    assert [(moment.label, moment.count) for moment in node.moments] == [
        ("as placed", 8),
        ("registration 1: ENOMEM", 8),
    ]
    drawn_rows = rows(drawn)
    background = drawn_rows["memory"]
    placed, after = drawn_rows["as placed"], drawn_rows["registration 1: ENOMEM"]
    assert background[placed.index("8")] == "C"
    assert background[after.index("7")] == "·"
    assert background[after.index("1")] == "C"
    assert "M" in background
    assert "C CMA" in legend(drawn)
    assert "M ZONE_MOVABLE" in legend(drawn)


def test_a_buffer_on_two_nodes_is_drawn_on_both() -> None:
    [drawn] = pictures(events(state([0, 10, 4], [4, 2100 * MIB_PAGES, 4]), state([0, 10, 8])))
    assert [node.node for node in drawn.nodes] == [0, 1]
    assert [[moment.count for moment in node.moments] for node in drawn.nodes] == [[4, 8], [4, 0]]


def test_what_did_not_change_is_shown_once() -> None:
    same = state([0, 10, 4])
    [drawn] = pictures(events(same, same, errno=None))
    assert [moment.label for moment in drawn.nodes[0].moments] == ["as placed"]


def test_an_incomplete_map_says_not_known_instead_of_ordinary() -> None:
    made = events(state([0, 10, 4]), state([0, 10, 4]))
    made[0] = memory_map(complete=False)
    [drawn] = pictures(made)
    assert "·" not in rows(drawn)["memory"]
    assert "?" in rows(drawn)["memory"]


@pytest.mark.parametrize("changes", [{"zones": []}, {"zones": None}, {"zones": [{"node": 0}]}])
def test_no_zones_no_picture(changes: dict[str, Any]) -> None:
    made = events(state([0, 10, 4]), state([0, 10, 4]))
    made[0] = memory_map(**changes)
    assert pictures(made) == []


def test_no_map_and_no_pages_no_picture() -> None:
    made = events(state([0, 10, 4]), state([0, 10, 4]))
    assert pictures(made[1:]) == []
    made[1]["pages"] = made[2]["before"] = made[2]["after"] = None
    assert pictures(made) == []


def test_the_buffer_that_failed_is_the_one_shown() -> None:
    made = [
        {"event": "buffer", "buffer": 1, "place": "unpinnable"},
        {"event": "buffer", "buffer": 2, "place": "any"},
        {"event": "register", "buffer": 1, "errno": None},
        {"event": "register", "buffer": 2, "errno": "ENOMEM"},
    ]
    assert buffer_under_test(made) == 2
    assert buffer_under_test(made[:3]) == 1
    assert buffer_under_test(made[1:2]) == 2
    assert buffer_under_test([]) is None


def test_the_names_of_short_zones_stay_apart() -> None:
    made = events(state([0, 10, 4]), state([0, 10, 4]))
    made[0] = memory_map(zones=[zone(0, "DMA", 1, 4095), zone(0, "DMA32", 4096, 1000 * MIB_PAGES)])
    [drawn] = pictures(made)
    assert "DMA DMA32" in as_text(drawn)[1]


runs = st.lists(st.tuples(st.integers(0, 1199 * MIB_PAGES), st.integers(1, 4000)), min_size=1, max_size=40)


@given(runs, st.integers(40, 118))
def test_it_fits_and_shows_every_page(found: list[tuple[int, int]], width: int) -> None:
    at = 0
    pfns: list[list[int]] = []
    taken: set[int] = set()
    for first, count in found:
        pages = set(range(first, min(first + count, 1200 * MIB_PAGES)))
        if pages & taken or not pages:
            continue
        taken |= pages
        pfns.append([at, first, len(pages)])
        at += len(pages)
    [drawn] = pictures(events(state(*pfns), state(*pfns), errno=None))
    [node] = drawn.nodes
    assert node.moments[0].count == len(taken)
    assert all(len(line) <= width for line in as_text(drawn, width)[1:])
    row = rows(drawn, width)["as placed"]
    figures = sum(int(letter) for letter in row if letter.isdigit())
    assert row.count("#") * 10 + figures <= len(taken)
    root = ElementTree.fromstring("<div>" + "".join(svg.render(drawn)) + "</div>")
    marks = [rect for rect in root.iter("rect") if rect.get("class") == "page"]
    shown = sum(int(re.match(r"(\d+) page", str(rect[0].text))[1]) for rect in marks)  # type: ignore[index]
    assert shown == len(taken)
    left = [float(str(rect.get("x"))) + float(str(rect.get("width"))) for rect in root.iter("rect")]
    assert max(left) <= 190 + 770 + 2.5


def test_text_of_a_record_cannot_leave_the_svg() -> None:
    made = events(state([0, 10, 4]), state([0, 10, 4]), errno='<script>"')
    made[0]["zones"][0]["zone"] = "<b>&"
    [drawn] = pictures(made)
    text = "".join(svg.render(drawn))
    assert "<script" not in text
    assert "<b>" not in text
    ElementTree.fromstring(f"<div>{text}</div>")
