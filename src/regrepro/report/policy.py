"""What the page allocator did, as SVG: share of CMA handed out over its share in what was free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from regrepro.views.policy import Point

_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 12, 640, 240


def render(points: Sequence[Point]) -> Iterator[str]:
    """Yield the chart, with a caption."""
    yield (
        f'<figure><svg viewBox="0 0 {_LEFT + _WIDTH + 20} {_TOP + _HEIGHT + 44}" class="map" role="img" '
        f'aria-label="{len(points)} chunks of memory: share of CMA in each over its share in what was free">'
    )
    for step in range(0, 11, 2):
        x, y = _x(step / 10), _y(step / 10)
        yield f'<line class="base" x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 24}" y="{y + 4:.1f}">{step * 10} %</text>'
        yield f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}">{step * 10} %</text>'
    half = _x(0.5)
    yield f'<line x1="{half}" y1="{_TOP}" x2="{half}" y2="{_TOP + _HEIGHT}" stroke-dasharray="4 3"/>'
    yield f'<text x="{_LEFT + _WIDTH / 2}" y="{_TOP + _HEIGHT + 38}">CMA in what was free</text>'
    for point in points:
        css = "cma" if point.phase == "refill" else "page"
        told = f"{point.free:.1%} of what was free, {point.handed:.1%} of what came"
        yield (
            f'<rect class="{css}" x="{_x(point.free) - 3:.1f}" y="{_y(point.handed) - 3:.1f}" width="6" '
            f'height="6"><title>{told}</title></rect>'
        )
    yield (
        "</svg><figcaption>How much of each chunk of memory came out of CMA; the dashed line is half of what "
        "was free. Dark: while ordinary memory grew scarce; light: after CMA was given back."
        "</figcaption></figure>"
    )


def _x(share: float) -> float:
    return _LEFT + share * _WIDTH


def _y(share: float) -> float:
    return _TOP + (1 - share) * _HEIGHT
