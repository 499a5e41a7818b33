"""What a record's passes did, step by step, and what became of the pages: for logs and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from regrepro.judge.pagestate import PageState, StateReader
from regrepro.judge.spans import Spans
from regrepro.record import key_of
from regrepro.views import words

LETTERS = {
    "cma": "C",
    "movable-zone": "M",
    "isolate": "I",
    "ordinary": "o",
    "unknown": "?",
    "absent": ".",
}
"""One letter for a page by its place, for pictures that must read without colour."""


@dataclass(frozen=True)
class Step:
    """One line of the log. `seconds` since the record's start; `ok` is None where nothing could fail."""

    seconds: float
    name: str
    what: str
    result: str
    ok: bool | None
    event: Mapping[str, Any]


@dataclass(frozen=True)
class Moment:
    """The pages of a buffer at one moment. `cells` are runs `(first, end, place, pinned)`."""

    label: str
    cells: tuple[tuple[int, int, str, bool], ...]
    pfns: str
    note: str = ""


@dataclass
class Pass:
    """One way through a scenario's body: the scenario itself (`control` None) or one of its controls."""

    scenario: str
    part: str
    control: str | None
    begin: Mapping[str, Any]
    events: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """How it ended; `not ended` where the record stops before."""
        ends = [event for event in self.events if event.get("event") == "scenario-end"]
        return str(ends[-1].get("outcome")) if ends else "not ended"

    @property
    def changed(self) -> str:
        """What is different in this pass, in words."""
        if self.control is None:
            return "nothing: the scenario itself"
        if self.begin.get("change"):
            return str(self.begin["change"])
        return f"another scenario: {self.begin.get('body')}"

    def under_test(self, number: object = None) -> Mapping[str, Any] | None:
        """Return the registration that a verdict is of, by its `registration`; without one, what
        `judge.controls.under_test` chooses.
        """
        for event in self.events:
            if event.get("event") == "register" and number == event.get("registration") is not None:
                return event
        candidates: list[Mapping[str, Any]] = []
        asked: list[object] = []
        pinned: list[object] = []
        for event in self.events:
            kind, place = event.get("event"), event.get("place")
            if kind == "release":
                break
            if kind == "buffer" and (
                isinstance(place, Mapping) or place in ("unpinnable", "cma", "movable-zone")
            ):
                asked.append(event.get("buffer"))
            elif kind == "pin" and not event.get("errno"):
                pinned.append(event.get("buffer"))
            elif kind == "register":
                if event.get("errno"):
                    return event
                buffer = event.get("buffer")
                candidates.append(
                    {"aside": 0 if buffer in asked else 1 if buffer in pinned else 2, "of": event}
                )
        if candidates:
            chosen: Mapping[str, Any] = min(candidates, key=lambda item: item["aside"])["of"]
            return chosen
        return next((event for event in self.events if event.get("event") == "register"), None)


def passes(events: Iterable[Mapping[str, Any]]) -> list[Pass]:
    """Return the passes of a record in order."""
    found: dict[tuple[str, str, str | None], Pass] = {}
    for event in events:
        if not isinstance(event.get("scenario"), str):
            continue
        control = event.get("control")
        key = (*key_of(event), None if control is None else str(control))
        if key not in found:
            found[key] = Pass(*key, begin=event if event.get("event") == "scenario-begin" else {})
        found[key].events.append(event)
    return list(found.values())


class Reader:
    """Reads page states and turns a pass into steps and moments."""

    def __init__(self) -> None:
        self._states = StateReader()

    def state(self, value: object) -> PageState | None:
        """Return a page state of the record, None where there is none or it is malformed."""
        return self._states(value, "", [])

    def steps(self, one: Pass) -> Iterator[Step]:
        """Yield the steps of a pass; what is only bookkeeping (begin, end) is left out."""
        for event in one.events:
            kind = str(event.get("event"))
            made = getattr(self, f"_{kind.replace('-', '_')}", None)
            if made is None:
                continue
            what, result, ok = made(event)
            if event.get("stand_in"):
                what += f" [stand-in: {event['stand_in']}]"
            seconds = event.get("t")
            yield Step(
                float(seconds) if isinstance(seconds, (int, float)) else 0.0, kind, what, result, ok, event
            )

    def _buffer(self, event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
        state = self.state(event.get("pages"))
        size, page = words.number_of(event.get("length")), words.number_of(event.get("page_size"))
        count = words.pages(size // page) if page else f"{size} bytes"
        return (
            f"buffer {event.get('buffer')}: {count}, {event.get('backing')}",
            _where(state, event, "pages"),
            None,
        )

    def _pin(self, event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
        kind = str(event.get("kind"))
        flags = f"{words.FLAGS.get(kind, kind)} by {event.get('api')}"
        what = f"pin {event.get('pin')} on buffer {event.get('buffer')}: {flags}"
        if kind == "none":
            return f"no pin is taken on buffer {event.get('buffer')}", "", None
        if event.get("errno"):
            return what, f"{event['errno']}: {event.get('message') or 'refused'}", False
        return what, f"held; {self._movement(event)}", True

    def _register(self, event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
        pins = [str(pin.get("pin")) for pin in words.mappings_of(event.get("pins"))]
        held = f"while pin {', '.join(pins)} is held" if pins else "no pin held"
        what = f"{event.get('verb')} of buffer {event.get('buffer')}, {held}"
        errno = event.get("errno")
        before = _where(self.state(event.get("before")), event, "before")
        return what, f"{errno or 'OK'}; {before}; {self._movement(event)}", not errno

    def _release(self, event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
        same = event.get("checksum_before") == event.get("checksum_after")
        kept = ""
        if event.get("checksum_before") is not None and event.get("checksum_after") is None:
            kept = ", its memory is gone with it"
        elif event.get("checksum_before") is not None:
            kept = ", no byte of the buffer changed" if same else ", the buffer's bytes CHANGED"
        return (
            f"release pin {event.get('pin')}",
            f"{event.get('errno') or 'OK'}{kept}",
            not event.get("errno"),
        )

    def _deregister(self, event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
        return (
            f"deregister {event.get('registration')}",
            str(event.get("errno") or "OK"),
            not event.get("errno"),
        )

    def _transfer(self, event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
        good = not event.get("errno") and event.get("intact") is True
        intact = "" if event.get("intact") is None else ", intact" if event["intact"] else ", NOT intact"
        what = f"{event.get('opcode')} of {event.get('bytes')} bytes"
        return what, f"{event.get('errno') or 'OK'}{intact}", good

    def _unmet(self, event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
        how = f" ({event['how']})" if event.get("how") else ""
        return f"{event.get('need')} is not met", f"{event.get('why')}{how}", False

    def _exception(self, event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
        return f"{event.get('file')}:{event.get('line')}", f"{event.get('type')}: {event.get('text')}", False

    def _step(self, event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
        told = _STEPS.get(str(event.get("name")))
        return told(event) if told is not None else (str(event.get("name")), "", None)

    def _movement(self, event: Mapping[str, Any]) -> str:
        before, after = self.state(event.get("before")), self.state(event.get("after"))
        if before is None or after is None:
            return f"movement not known: {event.get('pages_unknown') or 'no page state'}"
        moved = before.moved(after).total
        return f"{words.pages(moved)} moved, {before.unmoved(after).total} stayed"

    def moments(self, one: Pass, buffer: object) -> list[Moment]:
        """Return how a buffer's pages lay, each time that something changed."""
        pinned: dict[str, Spans] = {}
        made: list[tuple[str, PageState, Spans]] = []
        page = 0

        def add(label: str, state: PageState | None) -> None:
            if state is not None:
                held = Spans()
                for spans in pinned.values():
                    held = held | spans
                made.append((label, state, held))

        for event in one.events:
            kind, pin = event.get("event"), str(event.get("pin"))
            if kind == "release" and pin in pinned:
                del pinned[pin]
                add(f"pin {event.get('pin')} released", self.state(event.get("after")))
                continue
            if event.get("buffer") != buffer:
                continue
            if kind == "buffer":
                page = words.number_of(event.get("page_size"))
                add("as placed", self.state(event.get("pages")))
            elif kind == "pin" and not event.get("errno") and event.get("kind") != "none":
                pinned[pin] = _pinned(event, page)
                add(f"pin {event.get('pin')} taken", self.state(event.get("after")))
            elif kind == "register":
                number, errno = event.get("registration"), event.get("errno")
                add(f"before registration {number}", self.state(event.get("before")))
                add(f"after registration {number}: {errno or 'OK'}", self.state(event.get("after")))
        return list(_told(made))


def _cuda_memory(event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
    """What the memory is that CUDA made or pinned: section 9's question, by observation."""
    what = f"{event.get('call')}, buffer {event.get('buffer')}: {event.get('length')} bytes"
    pointer = words.mapping_of(event.get("pointer"))
    said = f"CUDA calls it {pointer.get('type') or pointer.get('error') or 'nothing'} memory"
    if event.get("page_kind") is None:
        return what, said, None
    places = words.mapping_of(event.get("places"))
    lie = ", ".join(f"{count} {place}" for place, count in places.items()) or "places not known"
    line = " ".join(str(event.get("vma") or "no mapping").split())
    return what, f"{event['page_kind']} pages ({lie}); mapping {line}; {said}", None


def _nccl_registration(event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
    what = (
        f"{event.get('connection')} connection, {event.get('direction')}, {event.get('protocol')}: "
        f"{event.get('length')} bytes of {event.get('memory')} memory, {event.get('mr')} MR"
    )
    outcome = str(event.get("outcome"))
    result = str(event.get("errno") or outcome) + (f": {event['why']}" if event.get("why") else "")
    if event.get("cached"):
        result += ", found in the MR cache"
    return what, result, {"registered": True, "failed": False}.get(outcome)


def _dmabuf_export(event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
    what = f"dma-buf of buffer {event.get('buffer')}: {event.get('length')} bytes"
    errno = event.get("errno")
    return what, f"{errno}: {event.get('message')}" if errno else "OK", not errno


def _checkpoint_rate(event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
    low, high = (*words.list_of(event.get("interval_95")), None, None)[:2]
    around = f" ({100 * low:.0f} to {100 * high:.0f} % at 95 %)" if _are_numbers(low, high) else ""
    result = f"{event.get('failed')} of {event.get('rounds')} failed{around}"
    return f"rate, {event.get('setting')}", result, None


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def _gigantic_pages(event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
    asked, got = event.get("asked"), event.get("got")
    size = words.number_of(event.get("size")) >> 20
    what = f"ask for {asked} gigantic pages of {size} MiB, {event.get('when')}"
    return what, f"{got} came", asked == got


def _placement_policy(event: Mapping[str, Any]) -> tuple[str, str, bool | None]:
    free, cma = words.number_of(event.get("free")), words.number_of(event.get("free_cma"))
    share = f"{cma / free:.0%}" if free else "none"
    what = f"touch {event.get('touched')} pages; {share} of what is free in {event.get('zone')} is CMA"
    return what, f"{event.get('cma')} came out of CMA", None


_STEPS = {
    "gigantic-pages": _gigantic_pages,
    "placement-policy": _placement_policy,
    "cuda-memory": _cuda_memory,
    "nccl-registration": _nccl_registration,
    "dmabuf-export": _dmabuf_export,
    "checkpoint-rate": _checkpoint_rate,
}


def _told(made: list[tuple[str, PageState, Spans]]) -> Iterator[Moment]:
    """Yield moments; "before registration" only where it differs from what was last shown."""
    last: tuple[PageState, Spans] | None = None
    for label, state, held in made:
        moved = last[0].moved(state).total if last is not None else 0
        same = last is not None and not moved and last[1] == held and last[0].place == state.place
        if same and label.startswith("before"):
            continue
        note = f"{words.pages(moved)} moved" if moved else "none moved" if label.startswith("after") else ""
        yield Moment(label, tuple(_cells(state, held)), _pfns(state), note)
        last = (state, held)


def _cells(state: PageState, held: Spans) -> Iterator[tuple[int, int, str, bool]]:
    for first, end, place in state.place:
        whole = Spans.range(first, end)
        parts = [(a, b, True) for a, b in (whole & held).pairs] + [
            (a, b, False) for a, b in (whole - held).pairs
        ]
        for a, b, is_held in sorted(parts):
            yield a, b, place, is_held


def _pfns(state: PageState) -> str:
    """Return the PFNs as ranges; many are cut short."""
    shown = []
    for first, end, offset in state.pfn[:3]:
        low, high = first + offset, end - 1 + offset
        shown.append(f"{low:#x}" if low == high else f"{low:#x}-{high:#x}")
    more = f", … ({len(state.pfn)} runs)" if len(state.pfn) > 3 else ""
    return ("PFN " + ", ".join(shown) + more) if shown else "no page present"


def _pinned(event: Mapping[str, Any], page: int) -> Spans:
    if page <= 0:
        return Spans()
    ranges = event.get("ranges")
    if not isinstance(ranges, list):
        ranges = [[event.get("offset"), event.get("length")]]
    pairs = []
    for item in ranges:
        if isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item):
            pairs.append((item[0] // page, -(-(item[0] + item[1]) // page)))
    return Spans.of(pairs)


def _where(state: PageState | None, event: Mapping[str, Any], key: str) -> str:
    if state is None:
        return f"place not known: {event.get('pages_unknown') or f'no page state {key}'}"
    return ", ".join(words.places(counted(state))) or "no page"


def counted(state: PageState) -> dict[str, int]:
    """Return how many pages of a state lie in each place."""
    counts: dict[str, int] = {}
    for first, end, place in state.place:
        counts[place] = counts.get(place, 0) + end - first
    return counts
