"""One pass over a record: events → typed facts, so that rules need not look at JSON.

What is malformed becomes a problem of its pass and counts as unknown; reading never raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from regrepro.judge.pagestate import PageState, StateReader, value_runs, whole_number
from regrepro.judge.spans import Run, Spans
from regrepro.judge.tracefacts import Trace, read_trace
from regrepro.record import events
from regrepro.record.parse import Malformed, parse


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
    device: str | None = None
    address: int | None = None
    length: int | None = None
    iova: int | None = None
    access: tuple[str, ...] | None = None
    errno: str | None = None
    before: PageState | None = None
    after: PageState | None = None
    alive: dict[int, tuple[bool | None, bool | None]] = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    stand_in: str | None = None
    spans: Spans = field(default_factory=Spans)
    limits: Mapping[str, Any] = field(default_factory=dict)
    pages_unknown: str = ""
    deregistered: int | None = None
    stuck: list[Mapping[str, Any]] = field(default_factory=list)
    """Of `watch`: the pages that migrate_pages left behind."""
    short_term_pins: list[Mapping[str, Any]] = field(default_factory=list)
    """Of `watch`: pins without FOLL_LONGTERM that were seen on its pages."""
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

    def pages_of(self, size: int) -> int | None:
        """How many pages of this size in bytes it asks for (`ib_umem_num_pages`, include/rdma/ib_umem.h)."""
        if self.address is None or self.length is None:
            return None
        return -(-(self.address + self.length) // size) - self.address // size

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
    """A buffer. `place` is what was asked."""

    id: int
    seq: int
    address: int
    length: int
    page_size: int
    backing: str
    owner: str
    place: object
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
    declared: events.Declared | None = None
    contract: str = ""
    change: str = ""
    buffers: dict[int, Buffer] = field(default_factory=dict)
    pins: dict[int, Pin] = field(default_factory=dict)
    registrations: list[Registration] = field(default_factory=list)
    series: dict[int, list[events.RegisteredEvent]] = field(default_factory=dict)
    """The `registered` lines of each series, until the event of its end."""
    in_series: list[Registration] = field(default_factory=list)
    """Registrations of series that have no `register` event of their own."""
    transfers: list[events.TransferEvent] = field(default_factory=list)
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[events.NoteEvent] = field(default_factory=list)
    memory_map: MemoryMap | None = None  # the last one before it began
    map_check: events.MemoryMapCheckEvent | None = None  # the look at the node's memory when it had ended
    looks: list[Look] = field(default_factory=list)
    unmet: events.UnmetEvent | None = None
    exception: events.ExceptionEvent | None = None
    end: events.ScenarioEndEvent | None = None
    problems: list[str] = field(default_factory=list)
    latest: tuple[int, float] = (0, 0.0)  # `seq` and `t` of the event that was read last
    disordered: list[int] = field(default_factory=list)  # seqs of events that come after a later one
    deregistrations: list[tuple[int, int, str | None]] = field(default_factory=list)  # seq, id, errno
    freed: list[tuple[int, int]] = field(default_factory=list)  # seq, buffer

    @property
    def calls(self) -> list[Pin | Registration]:
        """The calls into the kernel that have a trace, and page states around them."""
        return [*self.pins.values(), *self.registrations]

    def states(self) -> Iterator[tuple[str, int, Buffer | None, PageState]]:
        """Every page state: what it is of, the event that holds it, the buffer, and itself."""
        told: list[tuple[str, int, int, PageState | None]] = [
            (f"buffer {buffer.id}", buffer.seq, buffer.id, buffer.state) for buffer in self.buffers.values()
        ]
        for call in self.calls:
            what = f"{'pin' if isinstance(call, Pin) else 'registration'} {call.id}"
            told += [(what, call.seq, call.buffer, state) for state in (call.before, call.after)]
            if isinstance(call, Pin) and call.release is not None:
                told.append((f"the release of {what}", call.release.seq, call.buffer, call.release.after))
        for what, seq, number, state in told:
            if state is not None:
                yield what, seq, self.buffers.get(number), state

    @property
    def finished(self) -> bool:
        """Whether the body ran to its end."""
        return self.end is not None and self.end.outcome == "finished"


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
class Facts:
    """A record, read."""

    header: Mapping[str, Any]
    passes: list[Pass]
    memory_map: MemoryMap | None
    lab: list[events.LabEvent]
    run_outcome: str | None
    problems: list[str]
    unknown_events: dict[str, int]
    not_given: list[events.ReservationEvent] = field(
        default_factory=list
    )  # boot arguments without their effect
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
        if kind not in events.EVENTS:
            facts.unknown_events[kind] = facts.unknown_events.get(kind, 0) + 1
        parsed, flaw = None, ""
        try:
            parsed = parse(event)
        except Malformed as error:
            flaw = f"the {kind} event with seq {seq} is malformed: {error}"
            if kind == "memory-map":
                facts.memory_map = None  # the one before does not hold any more
        if not isinstance(event.get("scenario"), str):
            _of_the_run(facts, parsed)
            facts.problems += [flaw] if flaw else []
            continue
        key = (
            event["scenario"],
            _text(event.get("variant")) or "default",
            _text(event.get("control")) or None,
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
            _of_a_pass(current, facts, event, parsed)
        except Malformed as error:
            flaw = f"the {kind} event with seq {seq} is malformed: {error}"
        current.problems += [flaw] if flaw else []
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
    for item in facts.passes:
        if item.first_seq is None or item.last_seq is None:
            continue
        within = [seq for seq in seqs if item.first_seq <= seq <= item.last_seq]
        gaps = item.last_seq - item.first_seq + 1 - len(set(within))
        if gaps:
            item.problems.append(f"{gaps} of its events are missing from the record")
        if len(within) != len(set(within)):
            item.problems.append("some of its events bear the same number")


def _of_the_run(facts: Facts, event: events.Event | None) -> None:
    match event:
        case events.MemoryMapEvent():
            facts.memory_map = _memory_map(event)
        case events.ReservationEvent(ok=False):
            facts.not_given.append(event)
        case events.LabEvent():
            facts.lab.append(event)
        case events.RunEndEvent():
            facts.run_outcome = event.outcome or "unknown"


def _memory_map(event: events.MemoryMapEvent) -> MemoryMap:
    pairs: dict[str, list[tuple[int, int]]] = {}
    for first, end, kind in event.unpinnable_ranges:
        pairs.setdefault(kind, []).append((first, end))
    return MemoryMap(
        event.complete,
        event.has_unpinnable,
        sum((zone.blocks or {}).get("CMA", 0) for zone in event.zones),
        event.selfcheck.passed if event.selfcheck is not None else None,
        event.problems,
        event.sources,
        {kind: Spans.of(found) for kind, found in pairs.items()},
    )


def _of_a_pass(current: Pass, facts: Facts, raw: Mapping[str, Any], event: events.Event | None) -> None:
    match event:
        case events.ScenarioBeginEvent():
            if current.begun:
                raise Malformed("this pass began before")
            current.begun = True
            current.memory_map = facts.memory_map
            current.file, current.declared = event.file, event.declared
            current.contract, current.change = event.contract, event.change or ""
            current.watched = event.watched is not None
        case events.UnmetEvent():
            current.unmet = current.unmet or event
        case events.ExceptionEvent():
            current.exception = current.exception or event
        case events.ScenarioEndEvent():
            # The parent's word comes last: a child may have said "finished" and been killed then.
            current.end = event
        case events.MemoryMapCheckEvent():
            current.map_check = event
        case events.BufferEvent():
            _buffer(current, facts, event)
        case events.PinEvent():
            _pin(current, facts, event)
        case events.RegisterEvent():
            _register(current, facts, event)
        case events.RegisteredEvent():
            current.series.setdefault(event.series, []).append(event)
        case events.RegisterManyEvent():
            _register_many(current, event)
        case events.ReleaseEvent():
            _release(current, facts, event)
        case events.DeregisterEvent():
            current.deregistrations.append((event.seq, event.registration, event.errno))
            for made in current.registrations:
                if made.id == event.registration and event.errno is None:
                    made.deregistered = event.seq
        case events.FreeEvent():
            current.freed.append((event.seq, event.buffer))
        case events.TransferEvent():
            current.transfers.append(event)
        case events.StepEvent():
            current.steps.append(raw)
        case events.NoteEvent():
            current.notes.append(event)
        case events.LookEvent():
            _look(current, facts, event)


def _buffer(current: Pass, facts: Facts, event: events.BufferEvent) -> None:
    if event.buffer in current.buffers:
        raise Malformed(f"buffer {event.buffer} is there already")
    if event.page_size <= 0:
        raise Malformed("page_size is no number of bytes")
    current.buffers[event.buffer] = Buffer(
        event.buffer,
        event.seq,
        event.address,
        event.length,
        event.page_size,
        event.backing,
        event.owner,
        event.place,
        event.vma or "",
        facts.read_state(event.pages, f"buffer (seq {event.seq})", current.problems),
        event.stand_in,
    )


def _states(
    current: Pass, facts: Facts, event: events.PinEvent | events.RegisterEvent
) -> tuple[PageState | None, PageState | None]:
    where = f"{event.NAME} (seq {event.seq})"
    before = facts.read_state(event.before, f"before of {where}", current.problems)
    return before, facts.read_state(event.after, f"after of {where}", current.problems)


def _pin(current: Pass, facts: Facts, event: events.PinEvent) -> None:
    if event.pin in current.pins:
        raise Malformed(f"pin {event.pin} is there already")
    if event.buffer not in current.buffers:
        raise Malformed(f"it names no buffer {event.buffer}")
    target, ranges = current.buffers[event.buffer], event.ranges
    if ranges is None:
        if event.offset is None or event.length is None:
            raise Malformed("its range is missing")
        ranges = [(event.offset, event.length)]
    if any(number < 0 for pair in ranges for number in pair):
        raise Malformed("its range is malformed")
    pieces = [target.pages(target.address + offset, length) for offset, length in ranges]
    before, after = _states(current, facts, event)
    current.pins[event.pin] = Pin(
        event.pin,
        event.seq,
        event.buffer,
        event.kind,
        event.owner,
        event.api or "",
        event.errno,
        Spans.of(pair for piece in pieces for pair in piece.pairs),
        before,
        after,
        read_trace(event.trace, f"pin (seq {event.seq})", current.problems),
        event.stand_in,
        cuda_error=event.cuda_error,
    )


def _register(current: Pass, facts: Facts, event: events.RegisterEvent) -> None:
    alive = {item.pin: (item.alive_before, item.alive_after) for item in event.pins}
    if len(alive) != len(event.pins):
        raise Malformed("its list of pins is malformed")
    buffer = event.buffer or 0
    before, after = _states(current, facts, event)
    target, spans = current.buffers.get(buffer), Spans()
    if target is not None and event.address is not None and event.length:
        spans = target.pages(event.address, event.length) if event.length > 0 else spans
    limits = {"limits": event.limits, "capabilities": event.capabilities}
    current.registrations.append(
        Registration(
            event.registration,
            event.seq,
            buffer,
            event.verb,
            event.device,
            event.address,
            event.length,
            event.iova,
            None if event.access is None else tuple(event.access),
            event.errno,
            before,
            after,
            alive,
            read_trace(event.trace, f"register (seq {event.seq})", current.problems),
            event.stand_in,
            spans,
            {key: value for key, value in limits.items() if value is not None},
            event.pages_unknown or "",
            stuck=event.stuck or [],
            short_term_pins=event.plain_pins or [],
            keys=(event.lkey, event.rkey),
            mappings=None if event.mappings is None else tuple(event.mappings),
            refuses_writable_files=event.refuses_writable_files,
        )
    )


def _register_many(current: Pass, event: events.RegisterManyEvent) -> None:
    """The lines of a series become registrations: what they have in common stands in the event of its end."""
    target = current.buffers.get(event.buffer)
    for line in current.series.pop(event.series, []):
        current.in_series.append(
            Registration(
                0,
                line.seq,
                event.buffer,
                event.verb,
                event.device,
                line.address,
                line.length,
                line.address,
                tuple(event.access),
                line.errno,
                trace=Trace(why="a line of a series has none"),
                spans=target.pages(line.address, line.length) if target and line.length > 0 else Spans(),
                pages_unknown="the pages of one in a series are not looked at",
                in_series=f"number {line.number} of series {event.series}",
            )
        )


def _look(current: Pass, facts: Facts, event: events.LookEvent) -> None:
    buffer = next(iter(current.buffers.values()), None)
    first, state, lists = 0, None, None
    if event.pages is not None:
        if buffer is None or event.address is None or event.after_seconds is None:
            raise Malformed("it says nothing of when or of which pages it was")
        first = (event.address - buffer.address // buffer.page_size * buffer.page_size) // buffer.page_size
        state = facts.read_state(event.pages, f"look (seq {event.seq})", current.problems)
        runs = None if event.lists is None else [list(run) for run in event.lists]
        lists = value_runs(runs, state.pages, str) if state is not None else None
    current.looks.append(Look(event.after_seconds, first, state, lists, event.ended, event.pins or []))


def _release(current: Pass, facts: Facts, event: events.ReleaseEvent) -> None:
    pin = current.pins.get(event.pin)
    if pin is None:
        raise Malformed("it names no pin")
    if pin.release is not None:
        raise Malformed(f"pin {pin.id} was released before")
    pin.release = Release(
        event.seq,
        event.errno,
        event.was_alive,
        (event.checksum_before, event.checksum_after),
        facts.read_state(event.after, f"release (seq {event.seq})", current.problems),
    )
