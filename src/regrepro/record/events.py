"""The header and the events of a record, each declared once: its keys, their types, and what they say.

The writer takes these keys and no others, the JSON Schema and the tables of docs/record.md are made from them
(`record.schema`), and the judge reads events as objects of these classes (`record.parse`). Lengths and
addresses are in bytes, times in seconds. A key that is `optional` may be absent; None says that the value is
not known, or that there is none, where the sentence of the key says nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

SCHEMA = "regrepro.record/2"


@dataclass(frozen=True)
class Shape:
    """The class whose keys a mapping has. The value is read as the mapping that it is."""

    cls: type[Any]


class Rule:
    """What the JSON Schema of a value says beside its type."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords


def key(doc: str = "", *, optional: bool = False) -> Any:
    """Declare a key of an event. `optional`: it may be absent, and is None then."""
    return field(default=None if optional else MISSING, metadata={"doc": doc, "optional": optional})


Count = Annotated[int, Rule(minimum=0)]
Number = Annotated[int, Rule(minimum=1)]
Seconds = Annotated[float, Rule(minimum=0)]
Errno = Annotated[str, Rule(pattern="^E[A-Z0-9]+$")]
Contract = Literal["pin", "get", "longterm", "none"]
PlaceName = Literal["ordinary", "cma", "isolate", "movable-zone", "unknown", "absent"]
CountRuns = list[tuple[Count, Number, int]]
Json = Mapping[str, Any]


@dataclass(kw_only=True)
class PageRuns:
    """The pages of a buffer at one moment; None where they could not be read, with the reason in
    `pages_unknown` of the event.
    """

    pages: Count = key("number of pages of `page_size`")
    pfn: list[tuple[Count, Count, Number]] = key(
        "runs `[first page index, first PFN, count]` of the present pages, with consecutive PFNs; a page "
        "in no run is not present"
    )
    place: list[tuple[Count, Number, PlaceName]] = key(
        "runs `[first page index, count, place]` that cover all pages, read at that moment"
    )
    refcount: CountRuns | None = key(
        "runs `[first page index, count, references]`. Raw `_refcount` of the page's head"
    )
    pincount: CountRuns | None = key("like `refcount`, for large folios only")
    mapcount: CountRuns | None = key("like `refcount`")
    node: CountRuns | None = key("runs `[first page index, count, NUMA node]`")
    traits: list[tuple[Count, Number, str]] = key(
        "runs `[first page index, count, words]` of the present pages: `anonymous` or `file`, `exclusive` "
        "(mapped once) or `shared`, `large`, `ksm` (merged; only where the kernel's flag can be believed), "
        "or alone `swapped`, `zero-page`, `special` (a frame without a page)",
        optional=True,
    )
    baseline: CountRuns | None = key(
        "like `refcount`: the references that mappings, page cache and swap cache account for", optional=True
    )
    how: Literal["observed", "inferred"] = key("`inferred`: no page has moved since it was read (below)")
    source: str = key("e.g. `/proc/self/pagemap, pageblock bitmap by /proc/kcore`")
    problems: list[str] = key("why something is not known", optional=True)


@dataclass(kw_only=True)
class StatePlace:
    """Where a page state is written whole: under `key` of event `seq`, or of this event without `seq`."""

    seq: Number = key("the event", optional=True)
    key: Literal["pages", "before", "after"] = key("its key")


@dataclass(kw_only=True)
class PageStateReference:
    """A page state that is written whole elsewhere."""

    same_as: StatePlace = key("where it is written")
    how: Literal["inferred"] = key("as in a page state", optional=True)
    source: str = key("as in a page state", optional=True)


State = Annotated[Json | None, Shape(PageRuns), Shape(PageStateReference)]


@dataclass(kw_only=True)
class TraceReturn:
    """The return of a kernel function."""

    t: float = key("since the trace began", optional=True)
    fn: str = key("function")
    ret: int | None = key("what it returned")
    caller: str | None = key("who called it", optional=True)
    args: Json | None = key("its arguments", optional=True)


@dataclass(kw_only=True)
class TraceCall:
    """A call of a kernel function, of which no return was seen."""

    t: float = key("since the trace began", optional=True)
    fn: str = key("function")
    args: Json = key("its arguments")


@dataclass(kw_only=True)
class TracePoint:
    """A tracepoint of the kernel."""

    t: float = key("since the trace began", optional=True)
    tracepoint: str = key("name")
    fields: Json = key(
        'e.g. `{"nr_succeeded": 0, "nr_failed": 8, "mode": "MIGRATE_SYNC", "reason": "longterm_pin"}`'
    )


@dataclass(kw_only=True)
class TraceNode:
    """A line of the failing path as a person reads it. The deepest failure has `deepest`."""

    depth: Count = key("how many calls within the first")
    fn: str = key("function")
    ret: int | None = key("what it returned")
    errno: str | None = key("name")
    failing: bool = key("whether that is a failure")
    text: str = key("the line")


@dataclass(kw_only=True)
class Missing:
    """A function that this kernel does not let us see."""

    fn: str = key("function")
    why: str = key("reason")


@dataclass(kw_only=True)
class CallTrace:
    """What the kernel itself said during one call of ours."""

    status: Literal["complete", "spoiled", "unavailable", "off"] = key(
        "`spoiled`: events or probe hits were lost"
    )
    why: str | None = key("a sentence, for all but `complete`", optional=True)
    events: list[Annotated[Json, Shape(TraceReturn), Shape(TracePoint), Shape(TraceCall)]] = key(
        'in time order: `{"t", "fn", "ret", "caller", "args"}` for a return, `{"t", "tracepoint", '
        '"fields"}` for a tracepoint',
        optional=True,
    )
    tree: list[TraceNode] = key(
        "the failing path as a person reads it: `{depth, fn, ret, errno, failing, text}`", optional=True
    )
    missing: list[Missing] = key("`{fn, why}`: functions that this kernel does not let us see", optional=True)
    probed: list[str] = key("functions of which every return was in sight", optional=True)
    probed_failures: list[str] = key(
        "functions of which only failures were in sight: only of `probed` can it be said that they were "
        "not called",
        optional=True,
    )
    misses: int | Json | None = key("probe hits that the kernel missed, read after the call", optional=True)
    overrun: int | Json | None = key("events that the kernel lost, read after the call", optional=True)
    RULES: ClassVar[Json] = {
        "if": {"properties": {"status": {"const": "complete"}}},
        "then": {"required": ["events", "tree", "missing"]},
        "else": {"required": ["why"]},
    }


TraceOf = Annotated[Json | None, Shape(CallTrace)]


# The header


@dataclass(kw_only=True)
class OptionsOfRun:
    """The options of a run."""

    profile: str
    names: list[str]
    cuda: str
    rdma_device: str | None = key(optional=True)
    trace: str
    place: str
    expect: str | None = key(optional=True)


@dataclass(kw_only=True)
class NodeLimits:
    """Limits of the process, in bytes; None: unlimited."""

    memlock_soft: int | None
    memlock_hard: int | None


@dataclass(kw_only=True)
class NodeFacts:
    """Facts of the node."""

    hostname: str
    kernel: str
    kernel_version: str
    arch: str
    page_size: Number
    cmdline: str | None
    cpus: int | None
    memory_total: int | None
    euid: Count
    capabilities: list[str]
    lockdown: str | None
    vm: Json
    nvidia_module: bool = key(optional=True)
    nvidia_driver: str | None
    limits: NodeLimits


@dataclass(kw_only=True)
class StandIn:
    """What takes part in the place of the real thing."""

    name: str
    replaces: str
    what: str


@dataclass(kw_only=True)
class Header:
    """The first line."""

    schema: str = key(f'`"{SCHEMA}"`')
    version: str = key("version of regrepro")
    started: Annotated[str, Rule(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:\d\d|Z)$")] = key(
        "wall clock, ISO 8601 with zone"
    )
    run: OptionsOfRun = key(
        "the options of the run: `{profile, names, cuda, rdma_device, trace, place, expect, …}`"
    )
    node: NodeFacts = key(
        "facts: `{hostname, kernel (uname -r), kernel_version (uname -v), arch, page_size, cmdline, cpus, "
        "memory_total, euid, capabilities, lockdown, vm: {…}, nvidia_module (whether the kernel module is "
        "loaded), nvidia_driver (its version, or null), limits: {memlock_soft, memlock_hard}}`"
    )
    lab: Json | None = key(
        "null on a node; in a lab guest `{kernel, kernel_image, boot, memory, numa, accel}`"
    )
    stand_ins: list[StandIn] = key(
        "list of `{name, replaces, what}`; empty on a machine with everything real. `rdma_rxe` is one (in "
        "the place of a ConnectX)"
    )


# The events


@dataclass(kw_only=True)
class Event:
    """What every event has. `seq` counts from 1, without gaps; `t` is since `started`, monotonic clock."""

    NAME: ClassVar[str] = ""
    OPEN: ClassVar[bool] = False
    """Whether it takes keys that are not declared."""
    RULES: ClassVar[Json] = {}
    """What else its JSON Schema says."""

    seq: Number
    t: Seconds
    scenario: str = key(optional=True)
    variant: str = key(optional=True)
    control: str | None = key(optional=True)
    failure: str = key(optional=True)


@dataclass(kw_only=True)
class PassEvent(Event):
    """An event of one pass through a scenario body."""

    scenario: str
    variant: str
    control: str | None
    failure: str = key(optional=True)


@dataclass(kw_only=True)
class NoteEvent(Event):
    """Something worth telling a person."""

    NAME = "note"
    text: str = key("a sentence")
    stand_in: str | None = key("the stand-in that took part")


@dataclass(kw_only=True)
class ZoneFacts:
    """A memory zone of a NUMA node; all numbers are pages."""

    node: Count
    zone: str
    start_pfn: Count
    spanned: Count
    present: Count
    managed: Count
    blocks: dict[str, int] | None


@dataclass(kw_only=True)
class SelfCheck:
    """Whether the map says of the pageblocks what the kernel does."""

    passed: bool | None
    differences: list[Any]


@dataclass(kw_only=True)
class MemoryMapEvent(Event):
    """The node's memory as `kernel/memorymap.py` saw it before the passes that follow."""

    NAME = "memory-map"
    page_size: Number = key("bytes")
    pageblock_order: int | None = key("pages of a pageblock, as a power of two")
    complete: bool = key("every present pageblock's type is known and the self-check passed")
    has_unpinnable: bool | None = key("whether there is memory that a long-term pin must leave")
    zones: list[ZoneFacts] = key(
        'list of `{node, zone, start_pfn, spanned, present, managed, blocks: {"Unmovable": n, "Movable": n, '
        '"CMA": n, "Isolate": n, …} or null}`'
    )
    cma_areas: list[Any] | None = key("the CMA areas")
    cma_config: bool | None = key("whether the kernel is built with CMA", optional=True)
    unpinnable_ranges: list[tuple[Count, Count, Literal["cma", "isolate", "movable-zone"]]] = key(
        "list of `[first_pfn, last_pfn + 1, kind]`"
    )
    unregistered_cma: list[Any] | None = key(
        "pageblocks of CMA that no area has, `[first_pfn, last_pfn + 1]`", optional=True
    )
    selfcheck: SelfCheck | None = key("`{passed, differences}`")
    sources: list[str] = key("where this was read")
    problems: list[str] = key("sentences")


@dataclass(kw_only=True)
class MemoryMapCheckEvent(PassEvent):
    """Whether the map held, when a pass has ended."""

    NAME = "memory-map-check"
    complete: bool = key("as in `memory-map`, read again: zones, and the bits of every pageblock")
    has_unpinnable: bool | None = key("as in `memory-map`, read again")
    changed: bool | None = key(
        "unpinnable memory or zones are others than in the map; a `memory-map` with what is there now then "
        "follows the pass"
    )
    block_events: Count | None = key(
        "memory blocks that went online or offline during the pass, by the kernel's uevents"
    )
    sources: list[str] = key("where this was read")
    problems: list[str] = key("sentences")


@dataclass(kw_only=True)
class ReservationEvent(Event):
    """A boot argument asked for something. In the lab also an argument of `--boot` that the kernel does not
    know. Where `ok` is false and the header's `lab.boot` holds the argument, every verdict is `unmet` (need
    `boot`).
    """

    NAME = "reservation"
    argument: str = key("as on the kernel command line")
    wanted: int | None = key("bytes; null where it names no amount")
    got: int | None = key("bytes; null where nobody tells; of `kernelcore` the memory that is not movable")
    ok: bool | None = key("whether its effect is there; null where nobody tells")
    why: str = key("what is missing", optional=True)
    kernel_lines: list[str] = key("what the kernel's log says of it")


@dataclass(kw_only=True)
class OnlineMovableEvent(Event):
    """A step of putting a memory block into ZONE_MOVABLE."""

    NAME = "online-movable"
    block: str | int | None = key("the memory block")
    range: tuple[Count, Count] | None = key("`[first_pfn, last_pfn + 1]`")
    step: Literal["offline", "online_movable", "given-back", "failed"] = key("what was done")
    errno: Errno | None = key("of a refusal")


@dataclass(kw_only=True)
class Declared:
    """What a scenario file declares."""

    shows: str
    needs: list[str]
    expects: dict[str, str | Json]
    controls: dict[str, str]
    profiles: list[str]
    timeout: Seconds
    tags: list[str] = key("of the scenario", optional=True)


@dataclass(kw_only=True)
class ScenarioBeginEvent(PassEvent):
    """A pass begins."""

    NAME = "scenario-begin"
    file: str = key("the scenario file")
    declared: Declared = key("`{shows, needs, expects, controls, profiles, timeout}`")
    contract: Contract = key("what the pin of this run promises")
    body: str = key(
        "the scenario whose body runs: another one in a control that is another scenario", optional=True
    )
    change: str | None = key("`pin=none`, `place=ordinary`, `fault=none`", optional=True)
    options: Json = key("the scenario's own options and their values in this pass", optional=True)
    pid: Count = key("process")
    watched: Json = key("the process of a failure that `watch` caught (below)", optional=True)


@dataclass(kw_only=True)
class UnmetEvent(PassEvent):
    """A precondition is not met. Ends the pass."""

    NAME = "unmet"
    need: str = key("its name")
    why: str = key("what is missing")
    how: str = key("how to meet it")


@dataclass(kw_only=True)
class PressureFacts:
    """The ordinary memory that was held to get CMA handed out."""

    node: Count
    held: Count
    limit: Count
    reserve: Count
    free: Count
    free_cma: Count
    seconds: Seconds
    stalled: float | None = key(optional=True)
    cgroup: str | None = key(optional=True)


@dataclass(kw_only=True)
class SearchFacts:
    """Where pages were looked for."""

    touched: Count = key(optional=True)
    limit: Count = key(optional=True)
    unpinnable: Count = key(optional=True)
    ordinary: Count = key(optional=True)
    helped: str = key(optional=True)
    pressure: PressureFacts = key(optional=True)


PLACE_RULE = Rule(
    anyOf=[
        {"enum": ["any", "unpinnable", "ordinary", "cma", "movable-zone"]},
        {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 1,
            "propertyNames": {"enum": ["unpinnable", "cma", "movable-zone"]},
            "additionalProperties": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        },
    ]
)


@dataclass(kw_only=True)
class BufferEvent(PassEvent):
    """A buffer is there."""

    NAME = "buffer"
    buffer: Number = key("id, 1…")
    address: Count = key("of its first byte")
    length: Count = key("bytes")
    page_size: Number = key("bytes")
    backing: str = key(
        "`anonymous`, `memfd`, `shm`, `thp`, `hugetlb`, `file`, `cuda-host`, `cuda-device`, `cuda-vmm`"
    )
    owner: Literal["host", "cuda"] = key("whose memory it is")
    place: Annotated[Any, PLACE_RULE] = key(
        'what was asked: `any`, `unpinnable`, `cma`, `movable-zone`, `ordinary`, `{"unpinnable": [page '
        'indexes]}`, `{"cma": …}`, `{"movable-zone": …}`'
    )
    placed: Literal["gather", "pressure", "online-movable", "none-on-node", "as-allocated"] = key(
        "how it was got"
    )
    search: Annotated[Json, Shape(SearchFacts)] = key(
        "where pages were looked for: bytes `touched` and their `limit`, pages found `unpinnable` and "
        "`ordinary`, `helped`; with `--place pressure` its `pressure`: `node`, bytes `held` (of them "
        "`huge`), their `limit`, the `reserve` that stays free, `free` and `free_cma` while they were "
        "held, `excess` (so much was handed out of CMA first), `threads`, `seconds`, `stalled` (worst "
        "share of a second in which all waited for memory), `cgroup`",
        optional=True,
    )
    vma: str | None = key("line of `/proc/self/maps`")
    mappings: list[str] = key("of a caught failure: the first lines of its range", optional=True)
    flags: list[Any] = key("of memory that CUDA makes: the flags of the call", optional=True)
    pages: State = key("page state")
    pages_unknown: str = key("why there is none", optional=True)
    stand_in: str | None = key("the stand-in that took part")


@dataclass(kw_only=True)
class PinEvent(PassEvent):
    """A pin was made, or refused."""

    NAME = "pin"
    pin: Number = key("id")
    buffer: Number = key("the buffer")
    kind: Contract = key("what it promises")
    owner: str = key("see `pin_owner`")
    offset: Count = key("within the buffer", optional=True)
    length: Count = key("bytes", optional=True)
    ranges: list[tuple[Count, Count]] = key(
        "list of `[offset, length]`, in place of `offset` and `length`", optional=True
    )
    errno: Errno | None = key("null for success")
    message: str = key("where it failed", optional=True)
    cuda_error: str = key(
        "CUDA's own name of its refusal; CUDA hides the errno, and `errno` is then the nearest to it",
        optional=True,
    )
    seconds: Seconds = key("that the call took", optional=True)
    checksum: int | None = key("of the buffer before", optional=True)
    before: State = key(
        "page state of the whole buffer. A call that makes the memory as well (`cudaHostAlloc`) has none"
    )
    after: State = key("page state of the whole buffer")
    pages_unknown: str = key("why there is none", optional=True)
    trace: TraceOf = key("what the kernel said (below)")
    stand_in: str | None = key("the stand-in that took part")
    api: str | None = key(
        "e.g. `process_vm_writev+userfaultfd`, `vmsplice`, `io_uring_register`, `cudaHostRegister`, "
        "`cudaHostAlloc`"
    )
    RULES: ClassVar[Json] = {"anyOf": [{"required": ["ranges"]}, {"required": ["offset", "length"]}]}


@dataclass(kw_only=True)
class Alive:
    """Whether a pin lived before and after a registration."""

    pin: Number
    alive_before: bool | None
    alive_after: bool | None


@dataclass(kw_only=True)
class LockedMemory:
    """What the kernel counted as pinned and locked by the process, in bytes, right before the call."""

    vmpin: Count = key(optional=True)
    vmpin_after: Count = key(optional=True)
    vmlck: Count = key(optional=True)


@dataclass(kw_only=True)
class Stuck:
    """A page that migrate_pages left behind, then; `refcount` holds one reference of the isolation."""

    pfn: Count
    place: str
    refcount: int
    mapcount: int
    pincount: int = key(optional=True)


@dataclass(kw_only=True)
class ShortTermPin:
    """A pin without FOLL_LONGTERM that was seen on these pages."""

    fn: str
    start: int
    nr_pages: int
    flags: Any
    modules: list[str]
    age_seconds: float = key(optional=True)
    held: bool | None = key(optional=True)
    pfn: list[Any] | None = key(optional=True)


@dataclass(kw_only=True)
class RegisterEvent(PassEvent):
    """A registration was made, or refused."""

    NAME = "register"
    registration: Number = key("id")
    buffer: int | None = key("the buffer")
    verb: str = key(
        "`ibv_reg_mr_iova2`, `ibv_reg_mr`, `ibv_reg_dmabuf_mr`, `io_uring_register_buffers`, `pyverbs.MR`"
    )
    device: str | None = key("RDMA device")
    address: Count | None = key("of its first byte")
    length: Count | None = key("bytes")
    iova: int | None = key("I/O virtual address")
    access: list[str] | None = key("names of the flags")
    errno: Errno | None = key("null for success; `EUNKNOWN` where nobody said it")
    errno_how: Literal["observed", "inferred", "missing"] = key("of a caught failure", optional=True)
    verb_how: Literal["observed", "inferred"] = key("of a caught failure", optional=True)
    devices_open: list[str] = key(
        "of a caught failure: RDMA devices that the process has open", optional=True
    )
    lkey: int | None = key("of the MR")
    rkey: int | None = key("of the MR")
    seconds: Seconds = key("that the call took")
    before: State = key("page state of the whole buffer")
    after: State = key("page state of the whole buffer")
    after_seconds: Seconds | None = key("of a caught failure: when `after` was read", optional=True)
    pages_unknown: str = key("why there is no page state", optional=True)
    pins: list[Alive] = key("`{pin, alive_before, alive_after}` of every pin that is held")
    trace: TraceOf = key("what the kernel said (below)")
    stand_in: str | None = key("the stand-in that took part")
    limits: Annotated[Json, Shape(LockedMemory)] = key(
        "`{vmpin, vmlck}` in bytes right before the call (`VmPin` and `VmLck` of `/proc/self/status`: "
        "mm->pinned_vm, which counts MRs and io_uring's fixed buffers against RLIMIT_MEMLOCK, and "
        "mm->locked_vm of mlock()); of a refused call also `vmpin_after`",
        optional=True,
    )
    capabilities: list[str] | None = key("of a caught failure: those of the process", optional=True)
    mappings: list[str] | None = key(
        "of a refused call: the lines of `/proc/self/maps` that the range touches when the call has "
        "returned, 64 at most; neighbours of anonymous memory that differ in their offsets alone stand as "
        "one",
        optional=True,
    )
    refuses_writable_files: bool | None = key(
        "where one of these is shared and writable: whether this kernel refuses long-term pins for writing "
        "of files that it writes back, by its symbols",
        optional=True,
    )
    stuck: list[Annotated[Json, Shape(Stuck)]] = key("of a caught failure (below)", optional=True)
    plain_pins: list[Annotated[Json, Shape(ShortTermPin)]] = key("of a caught failure (below)", optional=True)
    library_silent: bool = key("of a caught failure: whether libibverbs said nothing of it", optional=True)


@dataclass(kw_only=True)
class RegisterManyEvent(PassEvent):
    """A series of registrations has ended. The first of them is a `register` event, and so is the second try
    of one that was refused.
    """

    NAME = "register-many"
    series: Number = key("id")
    buffer: Number = key("the buffer")
    verb: str = key("as in `register`")
    device: str | None = key("as in `register`", optional=True)
    access: list[str] = key("as in `register`")
    count: Number = key("asked for")
    length: Number = key("bytes of each")
    keep: bool = key("whether the MRs stayed")
    succeeded: Count = key("how many did")
    errno: Errno | None = key("of the refusal that ended it")
    seconds: Seconds = key("of all but the first")
    before: State = key("page state", optional=True)
    after: State = key("page state", optional=True)
    pages_unknown: str = key("why there is no page state", optional=True)


@dataclass(kw_only=True)
class RegisteredEvent(PassEvent):
    """One of a series, without page states."""

    NAME = "registered"
    series: Number = key("the series")
    number: Number = key("1…")
    address: Count = key("of its first byte")
    length: Number = key("bytes")
    errno: Errno | None = key("null for success")
    lkey: int | None = key("of the MR", optional=True)
    rkey: int | None = key("of the MR", optional=True)
    seconds: Seconds = key("that the call took")


@dataclass(kw_only=True)
class DeregisteredEvent(PassEvent):
    """An MR of a series could not be taken back."""

    NAME = "deregistered"
    series: Number = key("the series")
    number: Number = key("which of them")
    address: Count = key("of its first byte", optional=True)
    length: Number = key("bytes", optional=True)
    errno: Errno | None = key("of the refusal")
    seconds: Seconds = key("that the call took", optional=True)


@dataclass(kw_only=True)
class DeregisterManyEvent(PassEvent):
    """All MRs that a series kept were taken back."""

    NAME = "deregister-many"
    series: Number = key("the series")
    errno: Errno | None = key("null for success")


@dataclass(kw_only=True)
class ReleaseEvent(PassEvent):
    """A pin was released."""

    NAME = "release"
    pin: Number = key("the pin")
    errno: Errno | None = key("null for success")
    checksum_before: int | None = key("of the buffer")
    checksum_after: int | None = key("of the buffer")
    was_alive: bool | None = key("whether it was held until then")
    after: State = key("page state")
    pages_unknown: str = key("why there is none", optional=True)
    stand_in: str | None = key("the stand-in that took part", optional=True)


@dataclass(kw_only=True)
class DeregisterEvent(PassEvent):
    """A registration was taken back."""

    NAME = "deregister"
    registration: Number = key("the registration")
    errno: Errno | None = key("null for success")


@dataclass(kw_only=True)
class FreeEvent(PassEvent):
    """A buffer was freed."""

    NAME = "free"
    buffer: Number = key("the buffer")
    stand_in: str | None = key("the stand-in that took part", optional=True)


@dataclass(kw_only=True)
class LookEvent(PassEvent):
    """A later look of `watch` (below). Of a look that there was not, all but `registration` and `ended` are
    null. It comes after the pass' `scenario-end`.
    """

    NAME = "look"
    registration: Number = key("the failure")
    after_seconds: Seconds | None = key("since the failure")
    address: Count | None = key("of the pages that were looked at")
    length: Count | None = key("of the pages that were looked at")
    pages: State = key("page state")
    lists: list[tuple[Any, Any, Any]] | None = key(
        "runs `[first page index, count, words]` of what `/proc/kpageflags` says of pages that a per-CPU "
        "batch may refer to: `lru`, `active`, `mlocked`"
    )
    ended: str = key(
        "why nothing further is to be seen: the process has ended, too many others are looked at, the "
        "record was completed; else empty"
    )
    pins: list[Annotated[Json, Shape(ShortTermPin)]] | None = key(
        "as `plain_pins` below: those on these pages that the process made since and may hold, and those "
        "that it held then and that have ended",
        optional=True,
    )


@dataclass(kw_only=True)
class TransferEvent(PassEvent):
    """Bytes were moved through an MR."""

    NAME = "transfer"
    registration: Number = key("the registration")
    opcode: Literal["RDMA_WRITE", "RDMA_READ"] = key("what was done")
    bytes: Count = key("how many")
    errno: Errno | None = key("null for success")
    intact: bool | None = key("whether they arrived as they were")


@dataclass(kw_only=True)
class StepEvent(PassEvent):
    """Anything else a scenario does, with keys of its own (those of CUDA's and NCCL's steps: below). The
    judge reads `memlock_soft` (bytes, null = unlimited) and `capabilities` (list) of a step that changes them
    for this process, `memory_events` (of its memory cgroup, `{oom_kill: n, …}`), and `vma` with `buffer` (the
    buffer's line of `/proc/self/maps` from now on).
    """

    NAME = "step"
    OPEN = True
    name: str = key("which step")


@dataclass(kw_only=True)
class ExceptionEvent(Event):
    """The scenario file or the harness itself failed."""

    NAME = "exception"
    type: str = key("class of the exception")
    text: str = key("what it says")
    file: str | None = key("where it was raised")
    line: int | None = key("where it was raised")
    traceback: str | list[Any] | None = key("of Python")


@dataclass(kw_only=True)
class ScenarioEndEvent(PassEvent):
    """A pass has ended. Written by the parent, always."""

    NAME = "scenario-end"
    outcome: Literal["finished", "unmet", "exception", "killed", "timeout", "blocked"] = key(
        "`blocked`: it cannot be killed"
    )
    signal: str | int | None = key("of `killed`", optional=True)
    memory_events: Json = key("of `killed`: of the memory cgroup of its own that it was in", optional=True)
    where: str | list[Any] | None = key(
        "of `blocked` and `timeout`: where in the kernel it is", optional=True
    )
    why: str = key("of `killed`: who killed it, where that is known", optional=True)
    seconds: Seconds = key("that the pass took")
    RULES: ClassVar[Json] = {
        "if": {"properties": {"outcome": {"const": "killed"}}},
        "then": {"required": ["signal"]},
    }


@dataclass(kw_only=True)
class LabEvent(Event):
    """What the lab saw from outside."""

    NAME = "lab"
    what: Literal["boot", "panic", "hang", "out-of-memory", "guest-ended"] = key("what happened")
    why: str = key("a sentence", optional=True)
    console: list[Any] | str | None = key("last lines")
    seconds: Seconds = key("that the guest was up", optional=True)
    cut: str = key("the line that the guest had begun to write", optional=True)


@dataclass(kw_only=True)
class WatchEvent(Event):
    """What `watch` did or counted (docs/watch.md). `what` says which of the keys it has."""

    NAME = "watch"
    what: Literal[
        "started",
        "copies",
        "copies-not-followed",
        "engine-ended",
        "modules",
        "missed",
        "suppressed",
        "lost",
        "registrations",
        "stopped",
    ] = key("what happened; `modules`: modules were loaded since")
    engine: str = key("of `started`: `bpf`", optional=True)
    functions: list[str] = key("of `started` and `modules`: functions that are followed", optional=True)
    by_kprobe: list[str] = key("of `started`: those of them that kprobes follow", optional=True)
    missing: Json = key(
        "of `started` and `modules`: functions that cannot be followed, and why", optional=True
    )
    copies: list[Any] = key(
        "of `started` and `copies`: copies of libibverbs that are followed", optional=True
    )
    followed: list[Any] = key(
        'of `started` and `copies`: list of `{copy, verb, at: "failure" | "return" | "nowhere", why}`',
        optional=True,
    )
    not_followed: Any = key("of `started`: copies that cannot be followed, and why", optional=True)
    modules: list[str] = key("of `modules`: those that were loaded", optional=True)
    why: str = key("of `engine-ended` and `copies-not-followed`", optional=True)
    failures: int | list[Any] = key(
        "of `suppressed`: list of `{layer, errno, comm, count}` that were not recorded in full; of "
        "`stopped`: how many there were in all",
        optional=True,
    )
    suppressed: int = key("of `stopped`: how many were not recorded in full", optional=True)
    events: int = key("of `lost`: how many were lost", optional=True)
    hits: int = key("of `missed`: hits of probes", optional=True)
    registrations: list[Any] = key("of `registrations`: counts by function, path and process", optional=True)
    sizes: list[Any] = key("of `registrations`: counts by size", optional=True)
    uncounted: int = key("of `registrations`: those that the kernel had no room to count", optional=True)
    missed: int = key(
        "of `registrations`: hits of probes that were missed in all, by which counts may be too low and host "
        "memory may stand under another path",
        optional=True,
    )


@dataclass(kw_only=True)
class RunEndEvent(Event):
    """The run has ended."""

    NAME = "run-end"
    outcome: Literal["finished", "interrupted"] = key("how")
    cut: str = key("the line that a lab guest had begun to write", optional=True)


EVENTS: dict[str, type[Event]] = {
    cls.NAME: cls
    for cls in (
        NoteEvent,
        MemoryMapEvent,
        MemoryMapCheckEvent,
        ReservationEvent,
        OnlineMovableEvent,
        ScenarioBeginEvent,
        UnmetEvent,
        BufferEvent,
        PinEvent,
        RegisterEvent,
        RegisterManyEvent,
        RegisteredEvent,
        DeregisteredEvent,
        DeregisterManyEvent,
        ReleaseEvent,
        DeregisterEvent,
        FreeEvent,
        LookEvent,
        TransferEvent,
        StepEvent,
        ExceptionEvent,
        ScenarioEndEvent,
        LabEvent,
        WatchEvent,
        RunEndEvent,
    )
}
