"""What several sources say of one event, held against each other, before any rule of proof is asked.

The registration's errno, the kernel's own trace of the call, the page states around it and the events beside
it tell of the same thing. Where two of them cannot both be true the record contradicts itself: somebody has
edited it, or what was measured is not what is claimed. Such a record proves nothing, whichever of the two is
right. What a source does not say (unknown counts, a trace that is not complete, a function that cannot be
seen) contradicts nothing. Kernel functions are named with the file that holds them in Linux 7.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from regrepro.errors import errno_name
from regrepro.judge.facts import Buffer, Facts, Pass, Pin, Registration
from regrepro.judge.frames import pins_on, same_frames
from regrepro.judge.owners import DRIVER_MODULES, UNASKED
from regrepro.judge.pagestate import PIN_BIAS, UNPINNABLE, PageState, cache_references, where
from regrepro.judge.rules import reached
from regrepro.judge.spans import Run, Spans, together
from regrepro.judge.tracefacts import Trace
from regrepro.kernel_functions import Family, of_family
from regrepro.record.events import TransferEvent

NAME = "consistency"
_MAX_ERRNO = 4095
_UNTOLD = "EUNKNOWN"  # `watch`: nobody said the errno


RERUN = "run it again"


@dataclass(frozen=True)
class Flaw:
    """Where a record contradicts itself. `seqs`: the events involved, None where it is the whole pass."""

    text: str
    seqs: frozenset[int] | None
    how: str = RERUN


def flaws(facts: Facts, run: Pass) -> list[Flaw]:
    """Hold all that a pass says against itself."""
    return [flaw for rule in RULES for flaw in rule(facts, run)]


def touching(found: Iterable[Flaw], seqs: frozenset[int]) -> list[Flaw]:
    """Of a pass' flaws those of the whole pass, and those that any of these events is involved in."""
    return [flaw for flaw in found if flaw.seqs is None or flaw.seqs & seqs]


def _of(*events: Registration | Pin | Buffer) -> frozenset[int]:
    return frozenset(event.seq for event in events)


# The record as a whole


def _order(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """One writer numbers all events and reads one clock (`record/writer.py`)."""
    if run.disordered:
        yield Flaw(f"event {run.disordered[0]} comes after a later one", None)


def _memory_map(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """A map that knows no unpinnable memory cannot hold any. Memory blocks may become movable in a run, and
    pageblocks isolated; CMA areas are made at boot (`cma_init_reserved_areas`, mm/cma.c).
    """
    known = run.memory_map
    if known is None:
        return
    if known.complete and known.selfcheck is False:
        yield Flaw("the memory map is called complete though its self-check failed", None)
    check = run.map_check
    again = check is not None and check.complete and check.changed is False and check.has_unpinnable is False
    if known.complete and known.has_unpinnable and again:
        yield Flaw("the unpinnable memory of the map is gone, and it is called unchanged", None)
    if known.has_unpinnable is not False:
        return
    if known.cma_blocks or known.ranges:
        yield Flaw("the memory map holds unpinnable memory and says that there is none", None)
    for _, seq, buffer, state in run.states():
        if buffer is not None and known.complete and state.placed("cma"):
            text = f"page {state.placed('cma')} lies in CMA, and the memory map knows no unpinnable memory"
            yield Flaw(text, frozenset({seq}))


def _identities(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """Numbers are given once, and what ends has begun: an MR is deregistered once, and only one that was
    given; a buffer is not used once it was freed.
    """
    made: dict[int, Registration] = {}
    for registration in run.registrations:
        if registration.id in made:
            text = f"registration {registration.id} is there twice"
            yield Flaw(text, _of(registration, made[registration.id]))
        made.setdefault(registration.id, registration)
    ended: set[int] = set()
    for seq, number, errno in run.deregistrations:
        mr = made.get(number)
        if mr is None:
            yield Flaw(f"registration {number} was deregistered, and the record holds none", None)
            continue
        seqs = _of(mr) | {seq}
        if not mr.succeeded:
            yield Flaw(f"registration {number} failed, and was deregistered", seqs)
        elif seq < mr.seq:
            yield Flaw(f"registration {number} was deregistered before it was made", seqs)
        elif number in ended:
            yield Flaw(f"registration {number} was deregistered twice", seqs)
        if errno is None:
            ended.add(number)
    for event in run.transfers:
        yield from _transfer(run, made.get(event.registration), event)
    freed: dict[int, int] = {}
    for seq, number in run.freed:
        if number in freed:
            yield Flaw(f"buffer {number} was freed twice", None)
        freed.setdefault(number, seq)
    for use in run.calls:
        if freed.get(use.buffer, use.seq) < use.seq:
            yield Flaw(f"buffer {use.buffer} was used after it was freed", _of(use))


def _transfer(run: Pass, mr: Registration | None, event: TransferEvent) -> Iterator[Flaw]:
    """A key lets nothing through before it was given, after it was taken back, or beyond its MR
    (`mr_check_range` in drivers/infiniband/sw/rxe/rxe_mr.c; a device's own tables alike).
    """
    if event.errno:
        return
    seq, size = event.seq, event.bytes
    if mr is None:
        if not run.series:
            yield Flaw("a transfer went through a registration that the record does not hold", None)
    elif not mr.succeeded:
        yield Flaw(f"registration {mr.id} failed, and a transfer went through it", _of(mr))
    elif seq < mr.seq or (mr.deregistered is not None and seq > mr.deregistered):
        yield Flaw(f"a transfer went through registration {mr.id} when it was none", _of(mr))
    elif mr.length is not None and size > mr.length:
        yield Flaw(f"a transfer of {size} bytes went through registration {mr.id}, of {mr.length}", _of(mr))


def _changes(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """The scenario itself changes nothing; a control changes what the scenario declares for it."""
    change = run.declared.controls.get(run.control or "") if run.declared is not None else None
    if run.control is None and run.change:
        yield Flaw(f"the scenario itself is said to have changed {run.change}, as a control does", None)
    elif run.change and change is not None and change != run.change:
        yield Flaw(f"control {run.control} changes {change}, and is said to have changed {run.change}", None)


def _states_once(run: Pass) -> Iterator[tuple[int, Buffer, PageState]]:
    """Every page state of the pass, with the first event that holds it."""
    seen: set[int] = set()
    for _, seq, buffer, state in run.states():
        if buffer is not None and id(state) not in seen:
            seen.add(id(state))
            yield seq, buffer, state


def _page_states(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """A state has as many pages as its buffer; a page has a place where it has a frame, and no other does."""
    for seq, buffer, state in _states_once(run):
        pages = buffer.pages(buffer.address, buffer.length).total
        if not run.watched and state.pages != pages:
            yield Flaw(f"buffer {buffer.id} has {pages} pages, and its state {state.pages}", frozenset({seq}))
        framed, absent = state.placed(*UNPINNABLE, "ordinary"), state.placed("absent")
        if lost := (framed - state.present) | (absent & state.present):
            yield Flaw(f"page {lost} has a place without a frame, or the reverse", frozenset({seq}))


def _frames(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """Where a frame lies the memory map says as well: CMA areas stay where they were made at boot
    (`cma_init_reserved_areas`, mm/cma.c), ZONE_MOVABLE as long as no memory block comes or goes. A page that
    is mapped once lies at one address.
    """
    known, check = run.memory_map, run.map_check
    settled = check is not None and check.changed is False and check.block_events == 0
    kinds = [name for name in ("cma", "movable-zone") if name == "cma" or settled]
    for seq, _, state in _states_once(run):
        who = frozenset({seq})
        once = [(a, b, None) for a, b in state.where("mapcount", lambda count: count == 1).pairs]
        single = [(a + step, b + step) for a, b, step, _ in together(state.pfn, once)]
        if Spans.of(single).total < sum(b - a for a, b in single):
            yield Flaw("two pages of the buffer have one frame, which is mapped once", who)
        if known is None or not known.complete or known.ranges is None or run.watched:
            continue
        for kind in kinds:
            others = known.of_kind("isolate")  # a block of either kind may be isolated for a while
            said = _frames_in(state, kind) - known.of_kind(kind) - others
            if said:
                yield Flaw(f"frame {said} is called {kind}, and the memory map has none there", who)
            said = _frames_in(state, "ordinary") & (known.of_kind(kind) - others)
            if said:
                yield Flaw(f"frame {said} is called ordinary, and is {kind} in the memory map", who)


def _frames_in(state: PageState, place: str) -> Spans:
    """The frames of a buffer's pages in one place."""
    found = together(state.pfn, state.place)
    return Spans.of((a + step, b + step) for a, b, step, name in found if name == place)


def _places(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """A frame in use keeps its zone, and its pageblock stays in CMA or outside of it: to change them the
    kernel first moves the page away (`offline_pages`, mm/memory_hotplug.c). It may be isolated meanwhile
    (`set_migratetype_isolate`, mm/page_isolation.c).
    """
    settled = UNPINNABLE - {"isolate"} | {"ordinary"}
    for event in run.calls:
        before, after = event.before, event.after
        if before is None or after is None or before is after:
            continue
        changed = Spans.of(
            (a, b)
            for a, b, was, now in together(before.place, after.place)
            if was != now and {was, now} <= settled
        ) & before.unmoved(after)
        if changed:
            yield Flaw(f"page {changed} kept its frame, and lies in another kind of memory", _of(event))


# Registrations: what came back


def _outcomes(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """`ib_uverbs_reg_mr` (drivers/infiniband/core/uverbs_cmd.c) hands on what the provider's `reg_user_mr`
    returned, and `io_uring_register` what `io_sqe_buffers_register` (io_uring/rsrc.c) did. An MR has keys.
    """
    for registration in run.registrations:
        who, errno = _of(registration), registration.errno
        keys = registration.keys
        if registration.through_umem and not run.watched:
            if registration.succeeded and None in keys:
                yield Flaw("the registration is called a success, and gave no key", who)
            if not registration.succeeded and any(key is not None for key in keys):
                yield Flaw(f"the registration is said to have failed with {errno}, and gave a key", who)
        if not registration.trace.complete or errno == _UNTOLD:
            continue
        name, returned = _outermost(registration)
        if returned is None:
            pass
        elif registration.succeeded and returned < 0:
            yield Flaw(f"the registration is called a success, and {name} returned {returned}", who)
        elif errno is not None and errno != "EFAULT" and not -_MAX_ERRNO <= returned < 0:
            # EFAULT: the answer could not be copied to the process.
            yield Flaw(f"the registration failed with {errno}, and {name} succeeded", who)
        elif errno is not None and returned < 0 and _differs(errno, returned, registration):
            yield Flaw(f"the registration failed with {errno}, and {name} returned {returned}", who)
        yield from _within(run, registration)


def _differs(errno: str, returned: int, registration: Registration) -> bool:
    """libibverbs turns some errnos of a dma-buf registration into EOPNOTSUPP (libibverbs/cmd_mr.c)."""
    name = errno_name(-returned)
    named = name.startswith("E") and registration.verb != "ibv_reg_dmabuf_mr"
    return named and {errno, name} != {"ENOTSUP", "EOPNOTSUPP"} and errno != name


def _outermost(registration: Registration) -> tuple[str, int | None]:
    """The function next to the system call whose return was seen, and the last that it returned."""
    trace = registration.trace
    if registration.verb == "ibv_reg_dmabuf_mr":
        family = Family.DMABUF_REQUEST
    elif registration.through_umem:
        seen = trace.driver()
        return "the provider", seen[-1] if seen else None
    else:
        family = Family.IO_URING
    values = trace.of(family)
    return of_family(family)[0], values[-1] if values else None


def _within(run: Pass, registration: Registration) -> Iterator[Flaw]:
    """`__ib_umem_get_va` (drivers/infiniband/core/umem.c) returns what `pin_user_pages_fast` refused with,
    and a provider fails with it. Memory of a GPU may be had by another way (a peer-memory client).
    """
    trace, who = registration.trace, _of(registration)
    if _on_gpu(run, registration):
        return
    gup, umem, driver = trace.of(Family.GUP), trace.of(Family.UMEM), trace.driver()
    for name, values in (("pin_user_pages_fast", gup), ("ib_umem_get", umem)):
        if registration.succeeded and values and values[-1] < 0:
            yield Flaw(f"the registration is called a success, and {name} returned {values[-1]}", who)
    if gup and umem and gup[-1] < 0 and umem[-1] != gup[-1]:
        yield Flaw(f"pin_user_pages_fast returned {gup[-1]}, and ib_umem_get {umem[-1]}", who)
    if umem and driver and umem[-1] < 0 and driver[-1] >= 0:
        yield Flaw(f"ib_umem_get returned {umem[-1]}, and the provider succeeded", who)
    inner = trace.of(Family.LONGTERM)
    if inner and gup and gup[-1] < 0 and inner[-1] != gup[-1]:
        yield Flaw(f"__gup_longterm_locked returned {inner[-1]}, and pin_user_pages_fast {gup[-1]}", who)


# Traces


def _traces(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """A trace agrees with itself, and with those of the other calls: probes are placed once a run."""
    decoded: dict[int, frozenset[str]] = {}
    for call in run.calls:
        trace, who = call.trace, _of(call)
        if trace.status == "unavailable" and facts.could_trace:
            yield Flaw("the call has no trace, though the kernel traced others of this run", who)
        elif trace.status == "off" and facts.could_trace:
            yield Flaw("the call was not traced, and others of this run were", who)
        if trace.overstated and call.errno is None:  # of one that failed nothing is proven by it anyway
            yield Flaw("the call's trace is called complete, and counts what it lost", who)
        if not trace.complete:
            continue
        if not run.watched and trace.unpaired:
            yield Flaw("migrate_pages and its own tracepoint were not seen equally often", who)
        for bits, words in trace.flag_words.items():
            if decoded.setdefault(bits, words) != words:
                yield Flaw(f"gup_flags {bits:#x} has other names in another call's trace", None)
        in_sight = trace.in_sight if run.watched else trace.in_sight | facts.probed
        hidden = sorted(name for name in in_sight if trace.hidden(name))
        if hidden:
            yield Flaw(f"{hidden[0]} is called hidden, though it was probed", who)
        seen = sorted({name for name, _ in trace.returns if trace.hidden(name)})
        if seen:
            yield Flaw(f"{seen[0]} is called hidden, though it was seen", who)
        unprobed = sorted({name for name, _ in trace.returns} - trace.in_sight)
        if unprobed and trace.probed is not None and not run.watched:
            yield Flaw(f"{unprobed[0]} was seen, though it was not probed", who)
        for node in trace.tree:
            value = node.get("ret")
            if value is not None and (node.get("fn"), value) not in trace.returns:
                yield Flaw(f"the trace's tree shows {node.get('fn')} = {value}, which no event says", who)
                break


def _requests(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """The trace is that of this very call: `ib_umem_get` and io_uring pin each page of the range once, with
    FOLL_LONGTERM (drivers/infiniband/core/umem.c, `io_pin_pages` in io_uring/memmap.c).
    """
    for registration in run.registrations:
        trace, who = registration.trace, _of(registration)
        if not trace.complete or run.watched:
            continue
        if registration.through_umem and trace.of(Family.IO_URING) and not trace.driver():
            yield Flaw("the trace is that of io_uring, not of a verb", who)
        if not registration.through_umem and trace.driver():
            yield Flaw("the trace is that of a verb, not of io_uring", who)
        calls = [call for call in trace.gup_calls if call["fn"] in of_family(Family.GUP)]
        size, address, pages = facts.page_size, registration.address, _pages(facts, registration)
        if any(not call["longterm"] for call in calls):
            yield Flaw("the registration's own trace shows a pin without FOLL_LONGTERM", who)
        if not calls or not size or address is None or not pages:
            continue
        first = address // size * size
        starts = [call["start"] for call in calls if call["start"] is not None]
        if any(not first <= start < first + pages * size for start in starts):
            yield Flaw("the trace shows a pin of other addresses than those that were registered", who)
        pinned = sum(max(call["ret"], 0) for call in calls)
        whole = len(calls) == len(trace.of(Family.GUP)) and not _on_gpu(run, registration)
        if registration.succeeded and whole and pinned != pages:
            yield Flaw(f"{pages} pages were registered, and the trace shows {pinned} pinned", who)


def _on_gpu(run: Pass, registration: Registration) -> bool:
    """Whether the range is a GPU's own memory, which a peer-memory client may have where the pin failed."""
    buffer = run.buffers.get(registration.buffer)
    return buffer is not None and buffer.on_gpu


def _pages(facts: Facts, registration: Registration) -> int | None:
    """How many pages the call asks for."""
    return registration.pages_of(facts.page_size) if facts.page_size and registration.length else None


# Movement


def _small(state: PageState, spans: Spans) -> bool:
    """Whether these pages are known to be no part of large folios, which migration counts otherwise."""
    return spans & state.present <= state.known("refcount") and not spans & (
        state.known("pincount") | state.trait("large")
    )


def _movement(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """`migrate_pages` (mm/migrate.c) counts what moved and what did not; `migrate_longterm_unpinnable_folios`
    (mm/gup.c) gives it the unpinnable pages of one call, and no others.
    """
    for call in run.calls:
        before, after, spans = call.before, call.after, call.spans
        if run.watched or before is None or after is None or not call.trace.complete or not spans:
            continue
        if any(state.how != "observed" or not _small(state, spans) for state in (before, after)):
            continue
        texts = [*_counts(call.trace), *_moved(call, before, after)]
        if isinstance(call, Registration):
            if spans.total != _pages(facts, call):
                continue  # it goes beyond the buffer, whose pages alone were read
            texts += _left(facts, call)
        for text in texts:
            yield Flaw(text, _of(call))


def _counts(trace: Trace) -> Iterator[str]:
    """The tracepoint lies in `migrate_pages` and prints what that returns; -ENOMEM says nothing of counts."""
    for step in trace.migrations:
        told = step.returned is not None and step.returned >= 0 and step.failed is not None
        if told and step.returned != step.failed:
            yield f"migrate_pages left {step.returned} pages, and its tracepoint counts {step.failed}"


def _moved(call: Registration | Pin, before: PageState, after: PageState) -> Iterator[str]:
    """A page that is shared may be copied by a pin for writing, and so "moves" without migration; NUMA
    balancing may move those of a pin that does not say it asks for it, and another thread may take it.
    """
    spans, trace = call.spans, call.trace
    moved, unseen = before.moved(after) & spans, spans - before.present
    tried = [step for step in trace.migrations if step.reason == "longterm_pin"]
    any_page = any((step.succeeded or 0) + (step.failed or 0) for step in tried)
    if any_page and spans <= before.placed("ordinary"):
        yield "the kernel tried to migrate pages for the pin, and all of them are said to be ordinary"
    hidden = trace.hidden("mm_migrate_pages") or trace.hidden("migrate_pages")
    if hidden or any(step.succeeded is None for step in trace.migrations):
        return
    counted = sum(step.succeeded or 0 for step in trace.migrations)
    if counted > moved.total + unseen.total:
        yield f"the trace counts {counted} pages that migrated, and {moved.total} have another frame"
    alone = before.where("mapcount", lambda count: count == 1) - before.shared
    left = (moved & before.unpinnable & alone).total
    own = isinstance(call, Registration) or (call.kind == "longterm" and call.owner not in UNASKED)
    if own and left > counted:
        yield f"{left} pages have another frame, and the trace counts {counted} that migrated"


def _left(facts: Facts, registration: Registration) -> Iterator[str]:
    """A positive count is that of the last call's pages that stayed (`rules.reached` says which it tried)."""
    before, after = registration.before, registration.after
    returned = registration.trace.migrations[-1].returned if registration.trace.migrations else None
    if before is None or after is None or returned is None or returned <= 0:
        return
    unpinnable = before.unpinnable & registration.spans
    stayed = unpinnable & before.unmoved(after)
    if registration.succeeded or registration.errno != "ENOMEM":
        if returned > stayed.total:
            yield f"migrate_pages left {returned} pages behind, and {stayed.total} stayed"
        return
    if registration.through_umem:
        if facts.pages_per_batch is None:
            return
        asked, present = registration.spans, before.present
        stayed = stayed & reached(asked, unpinnable, present, stayed, facts.pages_per_batch)
    if returned != stayed.total:
        yield f"migrate_pages left {returned} pages behind, and of those it was given {stayed.total} stayed"


# References


def _borne(state: PageState, buffer: Buffer) -> list[Run[int]]:
    """How many FOLL_PINs each page bears, where that is known: GUP_PIN_COUNTING_BIAS references each on a
    small page, `_pincount` of a large folio (`try_grab_folio`, mm/gup.c). Rounded: LRU batches, FOLL_GET and
    the like add less than that.
    """
    large = state.known("pincount")
    small: list[Run[None]] = [(a, b, None) for a, b in (Spans.range(0, state.pages) - large).pairs]
    excess = state.excess(cache_references(buffer.backing))
    found = [(a, b, (value + PIN_BIAS // 2) // PIN_BIAS) for a, b, value, _ in together(excess, small)]
    return sorted([*found, *state.counts.get("pincount", [])])


def _rise(before: PageState | None, after: PageState, buffer: Buffer, spans: Spans) -> tuple[Spans, Spans]:
    """The pages that bear more pins than before, and those that do not. A page with another frame, or one
    whose frame was not known before, bore none.
    """
    now = _borne(after, buffer)
    more, fewer = where(now, lambda count: count > 0), where(now, lambda count: count <= 0)
    if before is not None and before is not after:
        kept = before.unmoved(after)
        steps = [(a, b, new - old) for a, b, old, new in together(_borne(before, buffer), now)]
        known = Spans.of((a, b) for a, b, _ in steps)
        more = (more - kept) | (where(steps, lambda step: step > 0) & kept)
        fewer = (fewer - kept) | (where(steps, lambda step: step <= 0) & kept & known)
    elif before is after:
        more, fewer = Spans(), Spans.of((a, b) for a, b, _ in now)
    return more & spans, fewer & spans


def _by_registrations(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """A registration of host memory pins each of its pages until it is deregistered, and one that failed lets
    all of them go (`__ib_umem_release`, drivers/infiniband/core/umem.c). An on-demand MR pins nothing.
    """
    for registration in run.registrations:
        before, after = registration.before, registration.after
        buffer = run.buffers.get(registration.buffer)
        if run.watched or before is None or after is None or buffer is None or buffer.on_gpu:
            continue
        if registration.verb == "ibv_reg_dmabuf_mr":
            continue
        who, trace = _of(registration), registration.trace
        more, fewer = _rise(before, after, buffer, registration.spans)
        pinned = any(pin.kind != "none" and pin.seq < registration.seq for pin in run.pins.values())
        alone = before.where("mapcount", lambda count: count == 1) - before.shared - before.known("pincount")
        stuck = where(_borne(before, buffer), lambda count: count > 0) & alone & before.moved(after)
        if stuck & registration.spans and not pinned:  # else a pin may have gone meanwhile
            yield Flaw(f"page {stuck & registration.spans} bore a pin, and moved all the same", who)
        if not registration.succeeded:
            more = more & before.unmoved(after)
            if more:
                text = f"the registration failed with {registration.errno}, and page {more} bears a pin more"
                yield Flaw(text, who)
        elif any(alive[1] is False for alive in registration.alive.values()):
            continue  # a pin went while this one came
        elif fewer and trace.absent(Family.GUP):
            text = "the registration succeeded and pinned nothing: no pin_user_pages in its trace, "
            text += f"no reference more on page {fewer}"
            yield Flaw(text, who, "register without ON_DEMAND: such an MR says nothing of pins")
        elif fewer:
            yield Flaw(f"the registration succeeded, and page {fewer} bears no pin more", who)
        elif more and trace.probed is not None and trace.absent(Family.GUP):
            yield Flaw(f"page {more} bears a pin more, and the trace shows no pin_user_pages", who)


def _by_pins(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """A pin that was taken stands on its pages: a FOLL_PIN by GUP_PIN_COUNTING_BIAS or `_pincount`, a
    FOLL_GET by one reference (`try_grab_folio`, mm/gup.c). Of a driver's or a user's own code only that it
    took any.
    """
    for pin in run.pins.values():
        buffer, before, after = run.buffers[pin.buffer], pin.before, pin.after
        if pin.kind == "none" or after is None or buffer.on_gpu:
            continue
        if before is None and pin.owner in UNASKED:
            continue  # the call made the memory, too, and of what is not known
        more, fewer = _rise(before, after, buffer, pin.spans)
        small = pin.spans - after.known("pincount")
        if pin.errno is not None:
            more = more & before.unmoved(after) if before is not None else Spans()
            if more:
                text = f"pin {pin.id} failed with {pin.errno}, and page {more} bears a pin more"
                yield Flaw(text, _of(pin))
        elif pin.kind == "get" and pin.owner not in UNASKED:
            excess = after.excess(cache_references(buffer.backing))
            bare = where(excess, lambda count: count < 1) & small
            if bare:
                yield Flaw(f"pin {pin.id} (get) put no reference on page {bare}", _of(pin))
            more = more & before.unmoved(after) & small if before is not None else Spans()
            if more:
                yield Flaw(f"pin {pin.id} is called a FOLL_GET, and page {more} bears a FOLL_PIN", _of(pin))
        else:
            if pin.owner in UNASKED and before is not None:
                fewer = fewer - where(before.change(after, "refcount"), lambda step: step > 0)
            if fewer:
                text = f"pin {pin.id} ({pin.kind}) put no pin on page {fewer}"
                yield Flaw(text, _of(pin), f"look whether {pin.api or pin.owner} pins at all")


def _while_held(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """A pin that says it is alive stands on its pages, as long as these are the frames that it took: fork()
    may give the process other ones (`do_wp_page`, mm/memory.c).
    """
    for registration in run.registrations:
        buffer = run.buffers.get(registration.buffer)
        if buffer is None or run.watched:
            continue
        held = pins_on(registration)
        for state, when in ((registration.before, 0), (registration.after, 1)):
            if state is None:
                continue
            bare_of_pins = where(_borne(state, buffer), lambda count: count < 1)
            bare = where(state.excess(cache_references(buffer.backing)), lambda count: count < 1)
            for pin in held:
                if pin.after is None or registration.alive.get(pin.id, (None, None))[when] is not True:
                    continue
                its = pin.spans & pin.after.unmoved(state)
                lost = its & (bare - state.known("pincount") if pin.kind == "get" else bare_of_pins)
                if lost:
                    word = ("before", "after")[when]
                    text = f"pin {pin.id} was alive {word} the registration, and page {lost} bore none"
                    plain = pin.owner in UNASKED and not lost & bare
                    how = "if your code takes references by FOLL_GET, write kind='get'" if plain else RERUN
                    yield Flaw(text, _of(pin, registration), how)


def _flags(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """What a pin asked the kernel for, as its own trace shows it, against its kind. Of a driver's own pin and
    of a user's code the kind is but what is expected; it is their movement that tells, where they asked for
    FOLL_LONGTERM and their pages stayed (`__gup_longterm_locked`, mm/gup.c).
    """
    for pin in run.pins.values():
        if pin.kind == "none" or pin.errno is not None or not pin.trace.complete:
            continue
        who, taken = _of(pin), [call for call in pin.trace.gup_calls if call["ret"] > 0]
        refused = pin.trace.failed(Family.IO_URING)
        if refused is not None and pin.owner not in UNASKED:
            yield Flaw(f"pin {pin.id} was taken, and {of_family(Family.IO_URING)[0]} returned {refused}", who)
        longterm = any(call["longterm"] for call in taken)
        if pin.owner in UNASKED:
            stayed = pin.after.unpinnable & pin.spans if pin.after is not None else Spans()
            if longterm and pin.kind != "longterm" and stayed and not _pins_in_place(facts):
                text = f"pin {pin.id} asked for FOLL_LONGTERM, and page {stayed} stayed in unpinnable memory"
                yield Flaw(text, who)
            continue
        if longterm and pin.kind != "longterm":
            yield Flaw(f"pin {pin.id} is one without FOLL_LONGTERM, and its trace shows FOLL_LONGTERM", who)
        if taken and pin.kind == "longterm" and not longterm:
            yield Flaw(f"pin {pin.id} is one with FOLL_LONGTERM, and its trace shows none", who)
        family = Family.TAKES_REFERENCES if pin.kind == "get" else Family.TAKES_PINS
        got = pin.trace.of(Family.TAKES_PINS, Family.TAKES_REFERENCES)
        if got and not pin.trace.of(family):
            yield Flaw(f"pin {pin.id} ({pin.kind}) was taken by a function that takes no such reference", who)
        elif got and max(got) <= 0:
            yield Flaw(f"pin {pin.id} was taken, and its trace shows that the kernel refused it", who)
        elif not got and pin.trace.probed is not None and pin.trace.probed.issuperset(of_family(family)):
            yield Flaw(f"pin {pin.id} was taken, and its trace shows no call that takes references", who)


_KIND_OF_OWNER = {
    "process-vm": "pin",
    "standin:pin": "pin",
    "vmsplice": "get",
    "io-uring": "longterm",
    "standin:longterm": "longterm",
}
"""What each call of the harness' own takes."""


def _owners(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """The harness' own calls take what they always take, of the pages that they were given: process_vm_writev
    a FOLL_PIN (mm/process_vm_access.c), vmsplice a FOLL_GET (fs/splice.c), io_uring a FOLL_LONGTERM pin
    (io_uring/rsrc.c); and no driver stands in their stack.
    """
    for pin in run.pins.values():
        kind, who = _KIND_OF_OWNER.get(pin.owner), _of(pin)
        if kind is None or pin.kind == "none" or pin.errno is not None or not pin.trace.complete:
            continue
        if pin.kind != kind:
            yield Flaw(f"pin {pin.id} is called {pin.kind}, and {pin.owner} takes none of that kind", who)
        buffer, calls = run.buffers[pin.buffer], [call for call in pin.trace.gup_calls if call["ret"] > 0]
        if any(DRIVER_MODULES.intersection(call["modules"]) for call in calls):
            yield Flaw(f"pin {pin.id} is called one of {pin.owner}, and a driver stands in its stack", who)
        if not calls or any(call["start"] is None for call in calls):
            continue
        taken = [buffer.pages(call["start"], call["ret"] * buffer.page_size) for call in calls]
        left = pin.spans - Spans.of(pair for spans in taken for pair in spans.pairs)
        if left:
            yield Flaw(f"pin {pin.id} was taken, and its trace shows no call that took page {left}", who)


def _pins_in_place(facts: Facts) -> bool:
    """Whether this kernel gave a long-term pin in unpinnable memory in this run, as it did before 5.13."""
    return any(
        call.after is not None and call.after.unpinnable & call.spans
        for run in facts.passes
        for call in run.calls
        if call.errno is None and (isinstance(call, Registration) or call.kind == "longterm")
    )


def _named_pins(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """A registration names every pin that was held at it, and no other; what is dead stays dead."""
    dead: dict[int, Registration] = {}
    for registration in run.registrations:
        if run.watched:
            continue
        held = {pin.id: pin for pin in registration.standing}
        for number, pin in held.items():
            if number not in registration.alive:
                text = f"pin {number} was held, and the registration does not name it"
                yield Flaw(text, _of(registration, pin))
        for number, (before, after) in registration.alive.items():
            if number not in held:
                yield Flaw(f"the registration names pin {number}, which was not held", _of(registration))
            elif (before is False and after) or (number in dead and before):
                yield Flaw(f"pin {number} was dead, and alive later", _of(registration, held[number]))
            if after is False and number in held:
                dead.setdefault(number, registration)
    for number, registration in dead.items():
        pin = run.pins[number]
        if pin.release is not None and pin.release.was_alive:
            yield Flaw(f"pin {number} was dead, and alive when it was released", _of(registration, pin))


def _releases(facts: Facts, run: Pass) -> Iterator[Flaw]:
    """A release lets go of a living pin, changes no byte, and takes the pin's references from its pages
    (`unpin_user_page`, mm/gup.c).
    """
    for pin in run.pins.values():
        release, buffer = pin.release, run.buffers[pin.buffer]
        if release is None:
            continue
        who = frozenset({pin.seq, release.seq})
        if release.bytes_kept is False:
            text = f"bytes of the buffer changed while pin {pin.id} was released"
            yield Flaw(text, who, "run it again, with nothing that writes into the buffer meanwhile")
        if release.was_alive is False and release.errno is None:
            yield Flaw(f"pin {pin.id} was dead when it was released", who)
        if pin.errno is not None:
            yield Flaw(f"pin {pin.id} failed with {pin.errno}, and was released", who)
        looked, last = _last_state(run, pin)
        if pin.after is None or last is None or release.after is None or release.errno is not None:
            continue
        if run.in_series or pin.kind not in ("pin", "longterm"):
            continue
        same = pin.spans & pin.after.unmoved(last) & last.unmoved(release.after)
        for call in run.calls:  # by another mapping of the same frames
            if looked < call.seq < release.seq and call.buffer != pin.buffer and call.after is not None:
                same = same - same_frames(call.after, call.spans, release.after)
        _, fewer = _rise(release.after, last, buffer, same)
        if pin.owner in UNASKED:
            fewer = fewer - where(last.change(release.after, "refcount"), lambda step: step < 0)
        if fewer:
            yield Flaw(f"the release of pin {pin.id} let no pin go on page {fewer}", who)


def _last_state(run: Pass, pin: Pin) -> tuple[int, PageState | None]:
    """The buffer's pages as they were seen last before this pin's release, and the event that saw them."""
    assert pin.release is not None
    seen = [(call.seq, call.after) for call in run.calls if call.buffer == pin.buffer]
    seen += [
        (other.release.seq, other.release.after)
        for other in run.pins.values()
        if other.release is not None and other.buffer == pin.buffer
    ]
    told = [item for item in seen if item[0] < pin.release.seq and item[1] is not None]
    return max(told, key=lambda item: item[0], default=(0, None))


RULES: tuple[Callable[[Facts, Pass], Iterable[Flaw]], ...] = (
    _order,
    _memory_map,
    _identities,
    _changes,
    _page_states,
    _frames,
    _places,
    _outcomes,
    _traces,
    _requests,
    _movement,
    _by_registrations,
    _by_pins,
    _while_held,
    _flags,
    _owners,
    _named_pins,
    _releases,
)
