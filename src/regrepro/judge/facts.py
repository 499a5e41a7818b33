"""One pass over a record: events → typed facts, so that rules need not look at JSON.

What is malformed becomes a problem of its pass and counts as unknown; reading never raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from regrepro.judge.pagestate import PageState, StateReader, value_runs, whole_number
from regrepro.judge.spans import Run, Spans
from regrepro.judge.tracefacts import Trace, read_trace


class RecordLike(Protocol):
    """What the judge needs of a record (`regrepro.record.Record` is one)."""

    @property
    def header(self) -> Mapping[str, Any]: ...

    @property
    def events(self) -> Iterable[Mapping[str, Any]]: ...

    @property
    def problems(self) -> Iterable[str]: ...


@dataclass
class Release:
    """The release of a pin."""

    seq: int
    errno: str | None
    was_alive: bool | None
    checksums: tuple[object, object]
    after: PageState | None

    @property
    def bytes_kept(self) -> bool | None:
        """Whether the buffer's checksum is the same after the release; None where it was not taken."""
        before, after = self.checksums
        return None if before is None or after is None else before == after


@dataclass
class Pin:
    """A pin, or the try of one (`errno`)."""

    id: int
    seq: int
    buffer: int
    kind: str
    owner: str
    api: str
    errno: str | None
    spans: Spans
    before: PageState | None
    after: PageState | None
    trace: Trace
    stand_in: str | None
    release: Release | None = None
    cuda_error: str | None = None


@dataclass
class Registration:
    """A registration, or the try of one. `errno` is None if it succeeded; `spans` are pages of the buffer."""

    id: int
    seq: int
    buffer: int
    verb: str
    device: str | None
    address: int | None
    length: int | None
    iova: int | None
    access: tuple[str, ...] | None
    errno: str | None
    before: PageState | None
    after: PageState | None
    alive: dict[int, tuple[bool | None, bool | None]]
    trace: Trace
    stand_in: str | None
    spans: Spans
    limits: Mapping[str, Any] = field(default_factory=dict)
    pages_unknown: str = ""
    deregistered: int | None = None
    watched: Mapping[str, Any] = field(default_factory=dict)
    in_series: str = ""
    """Of a `registered` line: "number 5 of series 1". The record holds no page states of it."""
    standing: list[Pin] = field(default_factory=list, repr=False)
    """The pins of the pass, on whatever buffer, that stood when it was made."""
    keys: tuple[object, ...] = ()  # lkey and rkey, as far as the event has them
    mappings: tuple[str, ...] | None = None
    refuses_writable_files: bool | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the verb gave an MR."""
        return self.errno is None

    @property
    def shape(self) -> tuple[object, ...]:
        """What must be equal for two registrations to be the same call."""
        return (self.buffer, self.verb, self.device, self.address, self.length, self.iova, self.access)

    @property
    def through_umem(self) -> bool:
        """Whether the kernel's RDMA core pins the pages (`ib_umem_get`), and not io_uring."""
        return not self.verb.startswith("io_uring")


@dataclass
class Look:
    """A later look of `watch` at the pages among which those are that a failed migration left behind.

    `first`: the buffer's page that the state begins with. `lists`: runs of words of /proc/kpageflags, None
    where it was not read. `ended`: why nothing further was to be seen, "" where there is more or it was seen.
    `pins`: those on the range that may be held and were made since, and those that have ended since.
    """

    after: float | None
    first: int
    state: PageState | None
    lists: list[Run[str]] | None
    ended: str
    pins: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass
class Buffer:
    """A buffer. `place` is what was asked, `placed` how it was got."""

    id: int
    seq: int
    address: int
    length: int
    page_size: int
    backing: str
    owner: str
    place: object
    placed: str
    vma: str
    state: PageState | None
    stand_in: str | None

    @property
    def asks_unpinnable(self) -> bool:
        """Whether the scenario asked for unpinnable pages."""
        kinds = ("unpinnable", "cma", "movable-zone")
        if isinstance(self.place, Mapping):
            return any(kind in self.place for kind in kinds)
        return self.place in kinds

    @property
    def shared_mapping(self) -> bool:
        """Whether it is a shared mapping (`rw-s` in /proc/self/maps): all who map its pages have the same.

        Where the record has no such line: files that the stage maps, it maps shared.
        """
        words = self.vma.split()
        if len(words) < 2:
            return self.backing in ("memfd", "shm", "file")
        return words[1].endswith("s")

    @property
    def on_gpu(self) -> bool:
        """Whether it is memory of the GPU, which has no page of the host."""
        return self.owner == "cuda" and self.backing in ("cuda-device", "cuda-vmm")

    def pages(self, address: int, length: int) -> Spans:
        """The page indexes that a range of addresses touches, cut to the buffer."""
        start = max(address, self.address) - self.address
        end = min(address + length, self.address + self.length) - self.address
        return Spans.range(start // self.page_size, -(-end // self.page_size))


@dataclass
class Pass:
    """One pass through a scenario body: the scenario itself (`control` None) or one of its controls."""

    scenario: str
    variant: str
    control: str | None
    failure: str = ""  # of `watch`: which one that it caught
    begun: bool = False
    watched: bool = False  # a failure of somebody's program that `watch` caught
    first_seq: int | None = None
    last_seq: int | None = None
    file: str = ""
    declared: Mapping[str, Any] = field(default_factory=dict)
    contract: str = ""
    change: str = ""
    buffers: dict[int, Buffer] = field(default_factory=dict)
    pins: dict[int, Pin] = field(default_factory=dict)
    registrations: list[Registration] = field(default_factory=list)
    series: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """The `registered` lines of each series, until the event of its end."""
    in_series: list[Registration] = field(default_factory=list)
    """Registrations of series that have no `register` event of their own."""
    transfers: list[Mapping[str, Any]] = field(default_factory=list)
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[Mapping[str, Any]] = field(default_factory=list)
    memory_map: MemoryMap | None = None  # the last one before it began
    map_check: MapCheck | None = None
    looks: list[Look] = field(default_factory=list)
    unmet: Mapping[str, Any] | None = None
    exception: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    latest: tuple[int, float] = (0, 0.0)  # `seq` and `t` of the event that was read last
    disordered: list[int] = field(default_factory=list)  # seqs of events that come after a later one
    deregistrations: list[tuple[int, int, str | None]] = field(default_factory=list)  # seq, id, errno
    freed: list[tuple[int, int]] = field(default_factory=list)  # seq, buffer

    @property
    def calls(self) -> list[Pin | Registration]:
        """The calls into the kernel that have a trace, and page states around them."""
        return [*self.pins.values(), *self.registrations]

    @property
    def finished(self) -> bool:
        """Whether the body ran to its end."""
        return self.end is not None and self.end.get("outcome") == "finished"


@dataclass
class MemoryMap:
    """What the node's memory map proves."""

    complete: bool
    has_unpinnable: bool | None
    cma_blocks: int | None
    selfcheck: bool | None
    problems: list[str]
    sources: list[str]
    ranges: dict[str, Spans] | None = field(default_factory=dict)
    """The frames of each kind of unpinnable memory; None where they were not told."""

    def of_kind(self, *names: str) -> Spans:
        """The frames of these kinds of unpinnable memory."""
        ranges = self.ranges or {}
        return Spans.of(pair for name in names if name in ranges for pair in ranges[name].pairs)

    @property
    def none(self) -> bool:
        """Whether it proves that the node had no unpinnable memory when it was read."""
        return self.complete and self.has_unpinnable is False


@dataclass
class MapCheck:
    """The look at the node's memory when a pass had ended: whether the map held."""

    complete: bool
    has_unpinnable: bool | None
    changed: bool | None
    block_events: int | None  # memory blocks that went online or offline during the pass; None: not known
    problems: list[str]

    @property
    def flaw(self) -> str:
        """Why the node may have had unpinnable memory during the pass, or an empty string."""
        if self.has_unpinnable:
            return "there was unpinnable memory when the pass had ended"
        if not self.complete or self.has_unpinnable is None:
            why = f" ({self.problems[0]})" if self.problems else ""
            return f"whether there was none when the pass had ended is not known{why}"
        if self.changed is not False:
            return "the node's memory zones changed during the pass"
        if self.block_events:
            return f"memory blocks went online or offline {self.block_events} times during the pass"
        return ""


@dataclass
class Facts:
    """A record, read."""

    header: Mapping[str, Any]
    passes: list[Pass]
    memory_map: MemoryMap | None
    lab: list[Mapping[str, Any]]
    run_outcome: str | None
    problems: list[str]
    unknown_events: dict[str, int]
    not_given: list[Mapping[str, Any]] = field(default_factory=list)  # boot arguments without their effect
    read_state: StateReader = field(default_factory=StateReader, repr=False)

    @property
    def node(self) -> Mapping[str, Any]:
        """The header's node facts."""
        return _mapping(self.header.get("node"))

    @property
    def driver_loaded(self) -> bool:
        """Whether NVIDIA's kernel module was loaded when the run began."""
        told = self.node.get("nvidia_module")
        # A record from before that fact has the driver's version alone, which a loaded module tells.
        return told is True if "nvidia_module" in self.node else bool(self.node.get("nvidia_driver"))

    @property
    def could_trace(self) -> bool:
        """Whether the kernel traced at least one call of this run completely."""
        return any(call.trace.complete for item in self.passes for call in item.calls)

    @cached_property
    def probed(self) -> frozenset[str]:
        """Functions that the tracer of this run had in sight: it places its probes once."""
        calls = [call for item in self.passes if not item.watched for call in item.calls]
        return frozenset[str]().union(*(call.trace.in_sight for call in calls if call.trace.complete))

    @property
    def kernel(self) -> str:
        """`uname -r`, or "unknown kernel"."""
        return _text(self.node.get("kernel")) or "unknown kernel"

    @property
    def page_size(self) -> int | None:
        """Of the node; None where the record does not say."""
        size = whole_number(self.node.get("page_size"))
        return size if size and size > 0 else None

    @property
    def pages_per_batch(self) -> int | None:
        """How many pages `ib_umem_get` pins with one call: PAGE_SIZE / sizeof(struct page *)."""
        if self.page_size is None:
            return None
        arch = _text(self.node.get("arch"))
        pointer = 4 if arch in ("i386", "i486", "i586", "i686") or arch.startswith("armv") else 8
        return max(1, self.page_size // pointer)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


class _Malformed(Exception):
    """An event lacks what it cannot be understood without."""


def _number(event: Mapping[str, Any], key: str) -> int:
    value = whole_number(event.get(key))
    if value is None:
        raise _Malformed(f"{key} is no number")
    return value


def _errno(event: Mapping[str, Any]) -> str | None:
    """Return an errno name, None for success. A missing key is not a success."""
    if "errno" not in event or not (event["errno"] is None or isinstance(event["errno"], str)):
        raise _Malformed("errno is missing")
    return event["errno"]


KNOWN = frozenset(
    {
        "note",
        "memory-map",
        "memory-map-check",
        "reservation",
        "online-movable",
        "scenario-begin",
        "unmet",
        "buffer",
        "pin",
        "register",
        "register-many",
        "registered",
        "watch",
        "deregistered",
        "deregister-many",
        "release",
        "deregister",
        "free",
        "transfer",
        "step",
        "exception",
        "scenario-end",
        "look",
        "lab",
        "run-end",
    }
)


def collect(record: RecordLike) -> Facts:
    """Read a record once, in the order of its events."""
    facts = Facts(_mapping(record.header), [], None, [], None, [str(text) for text in record.problems], {})
    passes: dict[tuple[str, str, str | None, str], Pass] = {}
    seqs: list[int] = []
    for event in record.events:
        if not isinstance(event, Mapping) or not isinstance(event.get("event"), str):
            facts.problems.append("the record holds something that is no event")
            continue
        kind = event["event"]
        seq = whole_number(event.get("seq"))
        if seq is None:
            facts.problems.append(f"an event ({kind}) has no seq and was left out")
            continue
        seqs.append(seq)
        if kind not in KNOWN:
            facts.unknown_events[kind] = facts.unknown_events.get(kind, 0) + 1
        if not isinstance(event.get("scenario"), str):
            _of_the_run(facts, kind, event)
            continue
        key = (
            event["scenario"],
            _text(event.get("variant")) or "default",
            _text_or_none(event.get("control")),
            _text(event.get("failure")),
        )
        current = passes.get(key)
        if current is None:
            current = passes[key] = Pass(*key)
            facts.passes.append(current)
        current.first_seq = seq if current.first_seq is None else min(seq, current.first_seq)
        current.last_seq = seq if current.last_seq is None else max(seq, current.last_seq)
        _order(current, seq, event.get("t"))
        try:
            _of_a_pass(current, facts, kind, seq, event)
        except _Malformed as error:
            current.problems.append(f"the {kind} event with seq {seq} is malformed: {error}")
    for item in facts.passes:
        _note_standing(item)
    _find_gaps(facts, seqs)
    return facts


def _note_standing(current: Pass) -> None:
    """Tell each registration the pins that were taken before it and not released before it."""
    marks: list[tuple[int, int, Pin | Registration]] = [
        (item.seq, 1, item) for item in (*current.registrations, *current.in_series)
    ]
    for pin in current.pins.values():
        if pin.errno is None and pin.kind != "none":
            marks.append((pin.seq, 2, pin))
            if pin.release is not None:
                marks.append((pin.release.seq, 0, pin))
    standing: dict[int, Pin] = {}
    for _, what, item in sorted(marks, key=lambda mark: mark[:2]):
        if isinstance(item, Registration):
            item.standing = list(standing.values())
        elif what == 2 and (item.release is None or item.release.seq > item.seq):
            standing[item.id] = item
        elif what == 0:
            standing.pop(item.id, None)


def _order(current: Pass, seq: int, t: object) -> None:
    """A record is written in the order of its numbers, and of its clock."""
    last_seq, last_t = current.latest
    now = float(t) if isinstance(t, (int, float)) else last_t
    if seq < last_seq or now < last_t:
        current.disordered.append(seq)
    current.latest = (max(seq, last_seq), max(now, last_t))


def _find_gaps(facts: Facts, seqs: list[int]) -> None:
    """An event that is missing, or there twice, within a pass may have been the one that matters."""
    seen = set(seqs)
    twice = len(seen) != len(seqs)
    for item in facts.passes:
        if item.first_seq is None or item.last_seq is None:
            continue
        within = sum(1 for seq in seen if item.first_seq <= seq <= item.last_seq)
        gaps = item.last_seq - item.first_seq + 1 - within
        if gaps:
            item.problems.append(f"{gaps} of its events are missing from the record")
        if twice and len([seq for seq in seqs if item.first_seq <= seq <= item.last_seq]) != within:
            item.problems.append("some of its events bear the same number")


def _ranges(value: object) -> dict[str, Spans] | None:
    """Read the ranges of unpinnable memory, by kind; None where there are none to read, or not all."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for item in value if isinstance(value, list) else [None]:
        if not isinstance(item, list) or len(item) != 3 or not isinstance(item[2], str):
            return None
        first, end = whole_number(item[0]), whole_number(item[1])
        if first is None or end is None:
            return None
        pairs.setdefault(item[2], []).append((first, end))
    return {kind: Spans.of(found) for kind, found in pairs.items()}


def _of_the_run(facts: Facts, kind: str, event: Mapping[str, Any]) -> None:
    if kind == "memory-map":
        blocks: int | None = 0
        zones = event.get("zones")
        for zone in zones if isinstance(zones, list) else []:
            count = whole_number(_mapping(_mapping(zone).get("blocks")).get("CMA", 0))
            blocks = None if blocks is None or count is None else blocks + count
        facts.memory_map = MemoryMap(
            event.get("complete") is True,
            _flag(event.get("has_unpinnable")),
            blocks,
            _flag(_mapping(event.get("selfcheck")).get("passed")),
            _texts(event.get("problems")),
            _texts(event.get("sources")),
            _ranges(event.get("unpinnable_ranges")),
        )
    elif kind == "reservation":
        if event.get("ok") is False:
            facts.not_given.append(event)
    elif kind == "lab":
        facts.lab.append(event)
    elif kind == "run-end":
        facts.run_outcome = _text(event.get("outcome")) or "unknown"


def _of_a_pass(current: Pass, facts: Facts, kind: str, seq: int, event: Mapping[str, Any]) -> None:
    if kind == "scenario-begin":
        if current.begun:
            raise _Malformed("this pass began before")
        current.begun = True
        current.memory_map = facts.memory_map
        current.file = _text(event.get("file"))
        current.declared = _mapping(event.get("declared"))
        current.contract = _text(event.get("contract"))
        current.change = _text(event.get("change"))
        current.watched = isinstance(event.get("watched"), Mapping)
    elif kind == "unmet":
        current.unmet = current.unmet or event
    elif kind == "exception":
        current.exception = current.exception or event
    elif kind == "scenario-end":
        # The parent's word comes last: a child may have said "finished" and been killed then.
        current.end = event
    elif kind == "memory-map-check":
        current.map_check = MapCheck(
            event.get("complete") is True,
            _flag(event.get("has_unpinnable")),
            _flag(event.get("changed")),
            whole_number(event.get("block_events")),
            _texts(event.get("problems")),
        )
    elif kind == "buffer":
        _buffer(current, facts, seq, event)
    elif kind == "pin":
        _pin(current, facts, seq, event)
    elif kind == "register":
        _register(current, facts, seq, event)
    elif kind == "registered":
        current.series.setdefault(_number(event, "series"), []).append(event)
    elif kind == "register-many":
        _register_many(current, event)
    elif kind == "release":
        _release(current, facts, seq, event)
    elif kind == "deregister":
        number, errno = _number(event, "registration"), _errno(event)
        current.deregistrations.append((seq, number, errno))
        for made in current.registrations:
            if made.id == number and errno is None:
                made.deregistered = seq
    elif kind == "free":
        current.freed.append((seq, _number(event, "buffer")))
    elif kind == "transfer":
        current.transfers.append(event)
    elif kind == "step":
        current.steps.append(event)
    elif kind == "note":
        current.notes.append(event)
    elif kind == "look":
        _look(current, facts, seq, event)


def _buffer(current: Pass, facts: Facts, seq: int, event: Mapping[str, Any]) -> None:
    page_size = whole_number(event.get("page_size")) or facts.page_size
    if not page_size or page_size < 0:
        raise _Malformed("page_size is no number")
    made = Buffer(
        _number(event, "buffer"),
        seq,
        _number(event, "address"),
        _number(event, "length"),
        page_size,
        _text(event.get("backing")) or "unknown",
        _text(event.get("owner")) or "host",
        event.get("place"),
        _text(event.get("placed")),
        _text(event.get("vma")),
        facts.read_state(event.get("pages"), f"buffer (seq {seq})", current.problems),
        _text_or_none(event.get("stand_in")),
    )
    if made.id in current.buffers:
        raise _Malformed(f"buffer {made.id} is there already")
    current.buffers[made.id] = made


def _states(
    current: Pass, facts: Facts, kind: str, seq: int, event: Mapping[str, Any]
) -> tuple[PageState | None, PageState | None]:
    before = facts.read_state(event.get("before"), f"before of {kind} (seq {seq})", current.problems)
    after = facts.read_state(event.get("after"), f"after of {kind} (seq {seq})", current.problems)
    return before, after


def _pin(current: Pass, facts: Facts, seq: int, event: Mapping[str, Any]) -> None:
    number, buffer = _number(event, "pin"), _number(event, "buffer")
    if number in current.pins:
        raise _Malformed(f"pin {number} is there already")
    if buffer not in current.buffers:
        raise _Malformed(f"it names no buffer {buffer}")
    target = current.buffers[buffer]
    ranges = event.get("ranges")
    if ranges is None:
        ranges = [[_number(event, "offset"), _number(event, "length")]]
    pieces: list[Spans] = []
    for item in ranges if isinstance(ranges, list) else [None]:
        offset, length = (
            (whole_number(item[0]), whole_number(item[1]))
            if isinstance(item, list) and len(item) == 2
            else (None, None)
        )
        if offset is None or length is None or offset < 0 or length < 0:
            raise _Malformed("its range is malformed")
        pieces.append(target.pages(target.address + offset, length))
    before, after = _states(current, facts, "pin", seq, event)
    current.pins[number] = Pin(
        number,
        seq,
        buffer,
        _text(event.get("kind")),
        _text(event.get("owner")) or "unknown",
        _text(event.get("api")),
        _errno(event),
        Spans.of(pair for piece in pieces for pair in piece.pairs),
        before,
        after,
        read_trace(event.get("trace"), f"pin (seq {seq})", current.problems),
        _text_or_none(event.get("stand_in")),
        cuda_error=_text_or_none(event.get("cuda_error")),
    )


def _register(current: Pass, facts: Facts, seq: int, event: Mapping[str, Any]) -> None:
    buffer = _number(event, "buffer") if event.get("buffer") is not None else 0
    address, length = whole_number(event.get("address")), whole_number(event.get("length"))
    access = event.get("access")
    alive: dict[int, tuple[bool | None, bool | None]] = {}
    pins = event.get("pins")
    for item in pins if isinstance(pins, list) else []:
        number = whole_number(_mapping(item).get("pin"))
        if number is None or number in alive or not {"alive_before", "alive_after"} <= set(item):
            raise _Malformed("its list of pins is malformed")
        alive[number] = (_flag(item.get("alive_before")), _flag(item.get("alive_after")))
    before, after = _states(current, facts, "register", seq, event)
    target = current.buffers.get(buffer)
    spans = Spans()
    if target is not None and address is not None and length is not None and length > 0:
        spans = target.pages(address, length)
    limits = {key: event[key] for key in ("limits", "capabilities") if key in event}
    current.registrations.append(
        Registration(
            _number(event, "registration"),
            seq,
            buffer,
            _text(event.get("verb")),
            _text_or_none(event.get("device")),
            address,
            length,
            whole_number(event.get("iova")),
            tuple(item for item in access if isinstance(item, str)) if isinstance(access, list) else None,
            _errno(event),
            before,
            after,
            alive,
            read_trace(event.get("trace"), f"register (seq {seq})", current.problems),
            _text_or_none(event.get("stand_in")),
            spans,
            limits,
            _text(event.get("pages_unknown")),
            watched={key: event[key] for key in ("stuck", "plain_pins") if key in event},
            keys=tuple(event[key] for key in ("lkey", "rkey") if key in event),
            mappings=_mappings(event),
            refuses_writable_files=_flag(event.get("refuses_writable_files")),
        )
    )


def _register_many(current: Pass, event: Mapping[str, Any]) -> None:
    """The lines of a series become registrations: what they have in common stands in the event of its end."""
    series, buffer = _number(event, "series"), _number(event, "buffer")
    target, access = current.buffers.get(buffer), event.get("access")
    for line in current.series.pop(series, []):
        address, length = _number(line, "address"), _number(line, "length")
        current.in_series.append(
            Registration(
                0,
                _number(line, "seq"),
                buffer,
                _text(event.get("verb")),
                _text_or_none(event.get("device")),
                address,
                length,
                address,
                tuple(item for item in access if isinstance(item, str)) if isinstance(access, list) else None,
                _errno(line),
                None,
                None,
                {},
                Trace(why="a line of a series has none"),
                None,
                target.pages(address, length) if target is not None and length > 0 else Spans(),
                pages_unknown="the pages of one in a series are not looked at",
                in_series=f"number {_number(line, 'number')} of series {series}",
            )
        )


def _mappings(event: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Lines of /proc/self/maps at the time of the call; None where the event has none."""
    told = event.get("mappings")
    return tuple(_texts(told)) if isinstance(told, list) else None


def _look(current: Pass, facts: Facts, seq: int, event: Mapping[str, Any]) -> None:
    after, address = event.get("after_seconds"), whole_number(event.get("address"))
    buffer = next(iter(current.buffers.values()), None)
    first, state, lists = 0, None, None
    if event.get("pages") is not None:
        if buffer is None or address is None or type(after) not in (int, float):
            raise _Malformed("it says nothing of when or of which pages it was")
        first = (address - buffer.address // buffer.page_size * buffer.page_size) // buffer.page_size
        state = facts.read_state(event["pages"], f"look (seq {seq})", current.problems)
        lists = value_runs(event.get("lists"), state.pages, str) if state is not None else None
    pins = [pin for pin in event.get("pins") or [] if isinstance(pin, Mapping)]
    current.looks.append(Look(after, first, state, lists, _text(event.get("ended")), pins))


def _release(current: Pass, facts: Facts, seq: int, event: Mapping[str, Any]) -> None:
    pin = current.pins.get(_number(event, "pin"))
    if pin is None:
        raise _Malformed("it names no pin")
    if pin.release is not None:
        raise _Malformed(f"pin {pin.id} was released before")
    pin.release = Release(
        seq,
        _errno(event),
        _flag(event.get("was_alive")),
        (event.get("checksum_before"), event.get("checksum_after")),
        facts.read_state(event.get("after"), f"release (seq {seq})", current.problems),
    )
