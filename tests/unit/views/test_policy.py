"""What the page allocator did: worked out from a record's steps, drawn as bars and as SVG."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from regrepro.report import policy as svg
from regrepro.views.policy import Point, as_text, bins, points


def step(free: int, free_cma: int, cma: int, **more: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "name": "placement-policy",
        "scenario": "placement_policy",
        "variant": "default",
        "control": None,
        "phase": "fill",
        "node": 0,
        "zone": "DMA32",
        "free": free,
        "free_cma": free_cma,
        "touched": 100,
        "cma": cma,
        **more,
    }


KEY = ("placement_policy", "default")


def test_the_half_of_free_rule_as_a_record_holds_it() -> None:
    made = [step(1000, 300, 0), step(800, 300, 0), step(590, 300, 60), step(500, 450, 100, phase="refill")]
    found = points(made)[KEY]
    assert [(round(point.free, 2), point.handed) for point in found] == [
        (0.3, 0.0),
        (0.38, 0.0),
        (0.51, 0.6),
        (0.9, 1.0),
    ]
    text = as_text(found, 76)
    assert [line.count("#") > 0 for line in text[1:]] == [False, False, True, True]
    assert all(len(line) <= 76 for line in text)


@pytest.mark.parametrize(
    "event",
    [
        step(0, 0, 0),
        step(1000, 300, 0) | {"touched": 0},
        step(1000, 300, 0) | {"free": "many"},
        step(1000, 300, 0, control="with-pin"),
        step(1000, 300, 0, name="look"),
        step(1000, 300, True),
    ],
)
def test_what_is_no_measurement_is_left_out(event: dict[str, Any]) -> None:
    assert points([event]) == {}


def test_bins_hold_every_point() -> None:
    found = [Point("fill", share / 100, share / 100) for share in range(101)]
    assert sum(count for _, count, _ in bins(found)) == 101
    assert all(edge <= share <= edge + 0.05 for edge, _, share in bins(found))


def test_every_point_is_drawn_inside() -> None:
    found = [Point("fill", 0.0, 0.0), Point("refill", 1.0, 1.0), Point("fill", 0.5, 0.25)]
    root = ElementTree.fromstring("<div>" + "".join(svg.render(found)) + "</div>")
    marks = list(root.iter("rect"))
    assert len(marks) == 3
    assert all(
        0 <= float(str(mark.get("x"))) <= 720 and 0 <= float(str(mark.get("y"))) <= 300 for mark in marks
    )
