"""A buffer's pages over the node's physical memory, as SVG: what `views.picture` draws in letters."""

from __future__ import annotations

from collections.abc import Iterator

from regrepro.views import words
from regrepro.views.markup import html
from regrepro.views.picture import Moment, NodePicture, Picture, Range, size_text

_LEFT, _WIDTH = 190, 770
_BAR, _ROW, _HEAD = 20, 24, 34
# A page of a terabyte is a millionth of a pixel wide: nothing is drawn thinner than this.
_THINNEST = 2.0
_MOST_MARKS = 2000


def render(picture: Picture) -> Iterator[str]:
    """Yield an SVG for each node, with a caption."""
    for node in picture.nodes:
        yield f"<figure>{_svg(node, picture.buffer)}"
        yield f"<figcaption>{_caption(node, picture.buffer)}</figcaption></figure>"


def _caption(node: NodePicture, buffer: int) -> str:
    first, end = node.span
    size = size_text((end - first) * node.page_size)
    return html(
        f"buffer {buffer} over the physical memory of node {node.node} "
        f"(PFN {first:#x} to {end - 1:#x}, {size})"
    )


def _svg(node: NodePicture, buffer: int) -> str:
    rows = 1 + len(node.moments)
    height = _HEAD + rows * _ROW + 4
    label = html(
        f"node {node.node}, buffer {buffer}: "
        + ", ".join(f"{moment.label}: {moment.count} pages" for moment in node.moments)
    )
    return (
        f'<svg viewBox="0 0 {_LEFT + _WIDTH} {height}" class="map" role="img" aria-label="{label}">'
        f"{''.join(_zones(node))}{''.join(_memory(node))}"
        + "".join(
            part for number, moment in enumerate(node.moments, start=1) for part in _row(node, moment, number)
        )
        + "</svg>"
    )


def _x(node: NodePicture, pfn: int) -> float:
    first, end = node.span
    return _LEFT + (pfn - first) * _WIDTH / max(1, end - first)


def _bar(node: NodePicture, pages: Range, y: int, css: str, title: str) -> str:
    first, end = pages
    x = _x(node, first)
    wide = max(_x(node, end) - x, _THINNEST)
    return (
        f'<rect class="{html(css)}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}">'
        f"<title>{html(title)}</title></rect>"
    )


def _zones(node: NodePicture) -> Iterator[str]:
    """Name each zone where it begins, and draw its edge."""
    taken = 0.0
    bottom = _HEAD + (1 + len(node.moments)) * _ROW
    for name, first, _ in node.zones:
        x = _x(node, first)
        yield f'<line class="zone" x1="{x:.1f}" y1="{_HEAD - 14}" x2="{x:.1f}" y2="{bottom}"/>'
        at = max(x, taken)  # a short zone's name must not cover the next one's
        taken = at + 8.0 * len(name) + 10
        yield f'<text class="left" x="{at + 3:.1f}" y="{_HEAD - 18}">{html(name)}</text>'


def _memory(node: NodePicture) -> Iterator[str]:
    y = _HEAD
    yield f'<text class="left" x="2" y="{y + 15}">memory</text>'
    for first, end, kind in node.places():
        size = size_text((end - first) * node.page_size)
        yield _bar(node, (first, end), y, kind, f"{kind}: PFN {first:#x} to {end - 1:#x}, {size}")


def _row(node: NodePicture, moment: Moment, number: int) -> Iterator[str]:
    y = _HEAD + number * _ROW
    yield f'<text class="left" x="2" y="{y + 15}">{html(moment.label)}</text>'
    yield f'<line class="base" x1="{_LEFT}" y1="{y + _BAR}" x2="{_LEFT + _WIDTH}" y2="{y + _BAR}"/>'
    for first, end in _thinned(node, moment):
        pages = end - first
        yield _bar(node, (first, end), y, "page", f"{words.pages(pages)}: PFN {first:#x} to {end - 1:#x}")


def _thinned(node: NodePicture, moment: Moment) -> list[Range]:
    """Join runs that fall on the same pixel where there are too many of them to draw each."""
    if len(moment.pages) <= _MOST_MARKS:
        return list(moment.pages)
    pixel = max(1, (node.span[1] - node.span[0]) // _WIDTH)
    joined: list[Range] = []
    for first, end in moment.pages:
        if joined and first // pixel <= (joined[-1][1] - 1) // pixel:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((first, end))
    return joined
