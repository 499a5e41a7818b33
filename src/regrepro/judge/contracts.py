"""What a pin promises, by what it did to unpinnable pages: whether it asked for FOLL_LONGTERM."""

from __future__ import annotations

from dataclasses import dataclass, field

from regrepro.judge.facts import Buffer, Facts, Pass, Pin
from regrepro.judge.owners import calls_on, held_now, taken
from regrepro.judge.pagestate import PIN_BIAS, PageState, cache_references, where
from regrepro.judge.spans import Spans

ONE_CALL = ("process-vm", "vmsplice", "io-uring")
"""Pins of our own, and with them every stand-in's: one call each, which lets go of nothing (csrc/pin.c)."""

_TRACE_IT = "run with --trace on: the kernel's trace of the call shows what each pin in it asked for"


@dataclass(frozen=True)
class Contract:
    """What a pin did to unpinnable pages. `kind` is `longterm`, `plain` or `unknown`; `why` says on what it
    rests.
    """

    kind: str
    why: str
    spans: Spans = field(default_factory=Spans)
    how: str = "run as root, without a fork"


def _asked_short(pin: Pin) -> bool:
    """Whether the pin's trace shows a FOLL_PIN without FOLL_LONGTERM, by whatever address.

    What stands is a FOLL_PIN, which only pin_user_pages* takes (mm/gup.c); a process takes references by
    get_user_pages* for other ends, too (a futex in shared memory, execve).
    """
    return any(
        call["ret"] > 0 and not call["longterm"] and call["fn"].startswith("pin_user")
        for call in pin.trace.gup_calls
    )


def _which_pin_stands(buffer: Buffer, pin: Pin, moved: Spans) -> str:
    """Why the pin that stands may not be the one that moved these pages, or an empty string."""
    if pin.owner in ONE_CALL or pin.owner.startswith("standin:"):
        return ""
    if not pin.trace.complete:
        return (
            f"without a trace nobody knows whether the pin that stands is the one that moved its pages: "
            f"{pin.api or pin.owner} may have pinned them twice"
        )
    asked = Spans()
    for call in calls_on(buffer, pin):
        if call["longterm"]:
            start = call["start"]
            whole = pin.spans if start is None else buffer.pages(start, call["ret"] * buffer.page_size)
            asked = asked | whole
    if moved - asked:
        return f"no call that asked for FOLL_LONGTERM on page {moved - asked} was seen in its trace"
    return ""


def _contract_by_trace(buffer: Buffer, pin: Pin, after: PageState) -> Contract:
    """The same of a pin whose call made the memory, too (cudaHostAlloc): nobody saw the pages before it.

    Pages that lie in unpinnable memory under the pin show that it asked for no FOLL_LONGTERM. Else the trace
    of the call decides: `migrate_pages` moves pages for a pin (MR_LONGTERM_PIN) only where that asked for it.
    """
    if after.unpinnable & pin.spans:
        return Contract("plain", "its pages lie in unpinnable memory", after.unpinnable & pin.spans)
    moved = sum(step.succeeded or 0 for step in pin.trace.migrations)
    if not pin.trace.complete:
        why = "the call made the memory and pinned it, and no trace of it is complete"
        return Contract("unknown", why, how=_TRACE_IT)
    if _asked_short(pin):
        return Contract("plain", "the kernel saw it ask for no FOLL_LONGTERM")
    if not moved:
        return Contract("unknown", "none of its pages was unpinnable")
    if pin.spans - after.placed("ordinary"):
        return Contract("unknown", "its pages are not provably out of unpinnable memory")
    unsure = _which_pin_stands(buffer, pin, pin.spans)
    if unsure:
        return Contract("unknown", unsure, pin.spans, _TRACE_IT)
    why = f"the kernel moved {moved} of its pages out of unpinnable memory for this very pin"
    return Contract("longterm", why, pin.spans)


def pin_contract(buffer: Buffer, pin: Pin) -> Contract:
    """Whether a pin asked for FOLL_LONGTERM, by movement alone.

    A pin with FOLL_LONGTERM moves unpinnable pages out first (`__gup_longterm_locked`, mm/gup.c). Movement
    means that only if nothing else can have moved them: after fork() any pin for writing breaks copy-on-write
    (`do_wp_page`, mm/memory.c), and so it does with a file's pages in a private mapping, so each page of a
    private mapping must have been anonymous and mapped once; it must now bear exactly one pin more than its
    baseline; and pages that were not pinned must have stayed: NUMA balancing and compaction move pages, too.
    And the pin that moved them must be the one that stands: code that is not our own may pin for long, let
    go, and pin again without FOLL_LONGTERM.
    """
    before, after = pin.before, pin.after
    if after is None:
        return Contract("unknown", "the pages around the pin were not read")
    if before is None:
        return _contract_by_trace(buffer, pin, after)
    was = before.unpinnable & pin.spans
    if not was:
        return Contract("unknown", "none of its pages was unpinnable")
    moved = before.moved(after) & was
    if not moved:
        if was <= (before.unmoved(after) & after.unpinnable):
            return Contract("plain", "its pages stayed in unpinnable memory", was)
        return Contract("unknown", "whether its pages moved was not seen")
    if was - moved:
        return Contract("unknown", f"page {was - moved} did not move, others did")
    if moved - after.placed("ordinary"):
        return Contract("unknown", "its pages did not provably leave unpinnable memory")
    shared = before.copied_by_a_write(shared_mapping=buffer.shared_mapping) & moved
    if shared:
        why = f"page {shared} was not this mapping's alone: copy-on-write moves it, too"
        return Contract("unknown", why, moved)
    alone = before.where("mapcount", lambda count: count == 1 or (count > 1 and buffer.shared_mapping))
    if moved - alone:
        return Contract("unknown", "that nobody else mapped its pages is not known", moved)
    excess = after.excess(cache_references(buffer.backing))
    once = where(excess, lambda count: PIN_BIAS <= count < 2 * PIN_BIAS) - after.known("pincount")
    once = once | after.where("pincount", lambda count: count > 0)
    if moved - once:
        return Contract("unknown", f"page {moved - once} does not provably bear exactly one pin", moved)
    if before.moved(after) - pin.spans:
        return Contract("unknown", "pages that were not pinned moved as well", moved)
    if _asked_short(pin):
        why = "the kernel saw a pin taken without FOLL_LONGTERM as well"
        return Contract("unknown", why, moved, "let it pin once")
    unsure = _which_pin_stands(buffer, pin, moved)
    if unsure:
        return Contract("unknown", unsure, moved, _TRACE_IT)
    neighbours = before.unpinnable - pin.spans
    beside = f", the {neighbours.total} unpinned ones beside them stayed" if neighbours else ""
    return Contract("longterm", f"the pin moved its {moved.total} unpinnable pages out first{beside}", moved)


def measured_contract(facts: Facts, run: Pass, pin: Pin) -> Contract:
    """What a pin's movement says of it, with what only the rest of the run can tell.

    "Did not move" also fits a page that was never pinned, and every pin on a kernel before 5.13: the pin's
    own references must stand on its pages, and where this run took a FOLL_LONGTERM pin by io_uring on
    unpinnable pages, that must have moved them.
    """
    contract = pin_contract(run.buffers[pin.buffer], pin)
    if contract.kind != "plain" or pin.after is None:
        return contract
    least = 1 if pin.kind == "get" else PIN_BIAS
    bare = contract.spans - held_now(pin.after, run.buffers[pin.buffer], contract.spans, least)
    strange = contract.spans - taken(run.buffers[pin.buffer], pin)
    if strange and not bare:
        why = f"page {strange} stayed, but its references did not rise with this pin: somebody else holds it"
        return Contract("unknown", why, contract.spans)
    if bare:
        return Contract("unknown", f"page {bare} stayed, but bears no reference of a pin", contract.spans)
    compared = [
        pin_contract(other.buffers[its.buffer], its).kind
        for other in facts.passes
        for its in other.pins.values()
        if its.errno is None and its.kind == "longterm" and its.owner == "io-uring" and its is not pin
    ]
    if "longterm" in compared:
        return Contract("plain", f"{contract.why}, and a FOLL_LONGTERM pin moved such pages", contract.spans)
    if "plain" in compared:
        why = "its pages stayed, but on this kernel those of a FOLL_LONGTERM pin stay as well"
        return Contract("unknown", why, contract.spans)
    why = "its pages stayed, and no FOLL_LONGTERM pin was taken beside it that would have moved them"
    return Contract("unknown", why, contract.spans)
