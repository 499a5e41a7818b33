"""A buffer's pages over the node's physical memory, before and after: made of a record alone, drawn as text.

`pictures()` works out what is to be seen; `as_text()` draws it in letters. The report draws the same as SVG.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regrepro.judge.pagestate import UNPINNABLE, PageState, StateReader
from regrepro.record import key_of
from regrepro.views import words

LETTERS = {"cma": "C", "movable-zone": "M", "isolate": "I", "ordinary": "·", "unknown": "?", "hole": " "}
"""One letter for a stretch of memory by what Linux promises of it."""

_MOST_MOMENTS = 6
_RANK = ("hole", "ordinary", "unknown", "isolate", "movable-zone", "cma")  # what hides what in one column

Range = tuple[int, int]
"""First PFN, last PFN + 1."""


@dataclass(frozen=True)
class Moment:
    """Where the buffer's pages on one node lay; `elsewhere` counts those that lay on no node of the map."""

    label: str
    pages: tuple[Range, ...]

    @property
    def count(self) -> int:
        """Number of pages on this node."""
        return sum(end - first for first, end in self.pages)


@dataclass(frozen=True)
class NodePicture:
    """One node: its span, its zones, its unpinnable memory, and the buffer's pages at each moment."""

    node: int
    span: Range
    zones: tuple[tuple[str, int, int], ...]
    unpinnable: tuple[tuple[int, int, str], ...]
    moments: tuple[Moment, ...]
    page_size: int
    complete: bool

    def places(self) -> Iterator[tuple[int, int, str]]:
        """Yield stretches of the node with what they are, as in LETTERS, in order of their first PFN; the
        unpinnable ones come after, over the others.
        """
        plain = "ordinary" if self.complete else "unknown"
        for name, first, end in self.zones:
            yield first, end, "movable-zone" if name == "Movable" else plain
        yield from self.unpinnable


@dataclass(frozen=True)
class Picture:
    """What is drawn for one scenario: the buffer under test on each node that holds pages of it."""

    scenario: str
    part: str
    buffer: int
    nodes: tuple[NodePicture, ...]


def pictures(events: Iterable[Mapping[str, Any]]) -> list[Picture]:
    """Return a picture of each scenario of a record (not of its controls) whose pages and map are known."""
    memory_map: Mapping[str, Any] | None = None
    passes: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("event") == "memory-map":
            memory_map = event
        elif isinstance(event.get("scenario"), str) and event.get("control") is None:
            passes.setdefault(key_of(event), []).append(event)
    if memory_map is None:
        return []
    read = StateReader()
    made = []
    for (scenario, part), its in passes.items():
        buffer = buffer_under_test(its)
        moments = [] if buffer is None else list(_moments(its, buffer, read))
        nodes = tuple(_nodes(memory_map, moments))
        if buffer is not None and nodes:
            made.append(Picture(scenario, part, buffer, nodes))
    return made


def buffer_under_test(events: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the number of the buffer that a pass is about: of the registration that failed first, else the
    first that was asked to be unpinnable and was registered, else the first registered, else the first.
    """
    asked: list[int] = []
    made: list[int] = []
    registered: list[int] = []
    for event in events:
        number = event.get("buffer")
        if not isinstance(number, int):
            continue
        if event.get("event") == "buffer":
            made.append(number)
            if event.get("place") not in ("any", "ordinary", None):
                asked.append(number)
        elif event.get("event") == "register":
            if event.get("errno"):
                return number
            registered.append(number)
    of_both = [number for number in registered if number in asked]
    return next(iter([*of_both, *registered, *asked, *made]), None)


def _moments(
    events: Iterable[Mapping[str, Any]], buffer: int, read: StateReader
) -> Iterator[tuple[str, list[Range]]]:
    """Yield where the buffer lay, each time that it changed and after each registration that failed."""
    last: list[Range] | None = None
    shown = 0
    for event in events:
        if event.get("buffer") != buffer:
            continue
        kind = event.get("event")
        states: list[tuple[str, str, bool]] = []
        if kind == "buffer":
            states = [("as placed", "pages", True)]
        elif kind == "pin" and not event.get("errno"):
            states = [(f"pin {event.get('pin')} taken", "after", False)]
        elif kind == "register":
            errno = event.get("errno")
            number = event.get("registration")
            states = [
                (f"before registration {number}", "before", False),
                (f"registration {number}: {errno or 'OK'}", "after", bool(errno)),
            ]
        for label, key, always in states:
            state = read(event.get(key), "", [])
            if state is None or shown >= _MOST_MOMENTS:
                continue
            pages = _pfns(state)
            if always or pages != last:
                shown += 1
                yield label, pages
            last = pages


def _pfns(state: PageState) -> list[Range]:
    """Return the PFNs of a state as ranges in order."""
    ranges: list[Range] = []
    for first, end in sorted((first + offset, end + offset) for first, end, offset in state.pfn):
        if ranges and ranges[-1][1] >= first:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((first, end))
    return ranges


def _nodes(
    memory_map: Mapping[str, Any], moments: Sequence[tuple[str, list[Range]]]
) -> Iterator[NodePicture]:
    zones: dict[int, list[tuple[str, int, int]]] = {}
    for zone in words.mappings_of(memory_map.get("zones")):
        first, spanned = zone.get("start_pfn"), zone.get("spanned")
        if isinstance(first, int) and isinstance(spanned, int) and spanned > 0 and zone.get("present"):
            node = words.number_of(zone.get("node"))
            zones.setdefault(node, []).append((str(zone.get("zone")), first, first + spanned))
    unpinnable = [
        (item[0], item[1], item[2] if str(item[2]) in UNPINNABLE else "unknown")
        for item in words.list_of(memory_map.get("unpinnable_ranges"))
        if isinstance(item, list) and len(item) == 3 and all(type(number) is int for number in item[:2])
    ]
    for node, its in sorted(zones.items()):
        its.sort(key=lambda zone: zone[1])
        on_node = tuple(Moment(label, tuple(_within(pages, its))) for label, pages in moments)
        if not any(moment.pages for moment in on_node):
            continue
        yield NodePicture(
            node,
            (its[0][1], max(end for _, _, end in its)),
            tuple(its),
            tuple((a, b, kind) for first, end, kind in unpinnable for a, b in _within([(first, end)], its)),
            on_node,
            words.number_of(memory_map.get("page_size")),
            bool(memory_map.get("complete")),
        )


def _within(ranges: Iterable[Range], zones: Sequence[tuple[str, int, int]]) -> list[Range]:
    """Return the parts of ranges that lie in any of the zones. Zones of a node may overlap."""
    found: set[Range] = set()
    for first, end in ranges:
        at = first
        for _, low, high in zones:
            a, b = max(at, low), min(end, high)
            if a < b:
                found.add((a, b))
                at = b
    return sorted(found)


def as_text(picture: Picture, width: int = 76) -> list[str]:
    """Draw a picture in letters, at most `width` columns wide.

    Above, the zones; then the memory, one letter a column; then a row for each moment: how many pages lie in
    a column, `#` for ten and more.
    """
    labels = [moment.label for node in picture.nodes for moment in node.moments]
    beside = max((len(label) for label in [*labels, "memory"]), default=0) + 2
    columns = max(16, width - beside)
    lines = []
    for node in picture.nodes:
        first, end = node.span
        size = max(1, -(-(end - first) // columns))
        used = -(-(end - first) // size)
        memory = size_text((end - first) * node.page_size)
        each = size_text(size * node.page_size)
        lines.append(f"node {node.node}: {memory} of physical addresses, one column is {each}")
        lines.append(" " * beside + _zone_names(node, size, used))
        lines.append("memory".ljust(beside) + _background(node, size, used))
        for moment in node.moments:
            lines.append(moment.label.ljust(beside) + _marks(moment, first, size, used))
    return [line.rstrip() for line in lines]


def legend(picture: Picture) -> str:
    """Return what the letters of a picture say."""
    kinds = {kind for node in picture.nodes for _, _, kind in node.places()}
    texts = {
        "cma": "C CMA",
        "movable-zone": "M ZONE_MOVABLE",
        "isolate": "I isolated",
        "ordinary": "· ordinary memory",
        "unknown": "? not known",
    }
    shown = [text for kind, text in texts.items() if kind in kinds]
    return f"{', '.join(shown)}; a figure is so many pages of the buffer, # ten or more"


def size_text(size: int) -> str:
    """Return bytes as a person reads them: `1.5 GiB`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


def _zone_names(node: NodePicture, size: int, columns: int) -> str:
    row = ""
    for name, first, _ in node.zones:
        at = (first - node.span[0]) // size
        if row and at <= len(row):
            row += " " + name  # a short zone's name reaches into the next zone
        else:
            row = row.ljust(at) + name
    return row[:columns]


def _background(node: NodePicture, size: int, columns: int) -> str:
    row = ["hole"] * columns
    for first, end, kind in node.places():
        low, high = (first - node.span[0]) // size, -(-(end - node.span[0]) // size)
        for at in range(max(0, low), min(columns, high)):
            if _RANK.index(kind) > _RANK.index(row[at]):
                row[at] = kind
    return "".join(LETTERS[kind] for kind in row)


def _marks(moment: Moment, start: int, size: int, columns: int) -> str:
    counts = [0] * columns
    for first, end in moment.pages:
        at = first
        while at < end:
            column = (at - start) // size
            upto = min(end, start + (column + 1) * size)
            if 0 <= column < columns:
                counts[column] += upto - at
            at = upto
    return "".join(" " if not count else str(count) if count < 10 else "#" for count in counts)
