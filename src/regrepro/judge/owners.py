"""Who holds a pin: what raised the references, and never a name that nothing in the record bears out.

A scenario's word for its pin is the call that it made. That CUDA's call pinned by NVIDIA's driver, and that
a user's own function pinned anything at all, must be seen.
"""

from __future__ import annotations

from typing import Any

from regrepro.judge.facts import Buffer, Facts, Pin
from regrepro.judge.pagestate import PIN_BIAS, PageState, cache_references, where
from regrepro.judge.spans import Spans

UNKNOWN = "unknown"
UNASKED = ("cuda", "own-code")
"""Owners that may be unable to say whether their pin still holds: its references must."""

DRIVER_MODULES = frozenset({"nvidia", "nvidia_uvm"})
_BY_CALLER = (("process_vm_rw", "process-vm"), ("io_pin_pages", "io-uring"), ("io_sqe_buffer", "io-uring"))
"""Functions above the one that pins (mm/process_vm_access.c, io_uring/memmap.c, io_uring/rsrc.c)."""


def nvidia_driver(facts: Facts) -> str:
    """Return what a person reads for the driver behind a pin by `cuda`."""
    return f"NVIDIA driver {facts.node.get('nvidia_driver') or 'of unknown version'}"


def owner_of(facts: Facts, buffer: Buffer, pin: Pin) -> str:
    """Name who holds a pin; `unknown` where the record does not bear out whose call it was."""
    if pin.owner not in UNASKED:
        return pin.owner
    refused = pin.errno is not None  # nothing was taken: whose call it was is all that there is
    if pin.owner == "own-code":
        return pin.owner if refused or pin.spans & taken(buffer, pin) else UNKNOWN
    if pin.trace.complete and not refused:
        return _of_stack(facts, calls_on(buffer, pin))
    return pin.owner if facts.driver_loaded else UNKNOWN


def _of_stack(facts: Facts, calls: list[dict[str, Any]]) -> str:
    """Who took a pin, by the stacks of the calls that took references to its pages."""
    modules = {name for call in calls for name in call["modules"]}
    if modules & DRIVER_MODULES and facts.driver_loaded:
        return "cuda"
    for call in calls:
        for part, owner in _BY_CALLER:
            if part in (call["caller"] or ""):
                return owner
    others = sorted(modules - DRIVER_MODULES)
    return others[0] if others else UNKNOWN


def calls_on(buffer: Buffer, pin: Pin) -> list[dict[str, Any]]:
    """The calls, in the pin's own trace, that took references to pages of the pin.

    One whose start was not recorded counts: it may have.
    """
    found = []
    for call in pin.trace.gup_calls:
        if call["ret"] <= 0:
            continue
        start = call["start"]
        if start is None or buffer.pages(start, call["ret"] * buffer.page_size) & pin.spans:
            found.append(call)
    return found


def taken(buffer: Buffer, pin: Pin) -> Spans:
    """The pages on which this very call raised the references.

    One FOLL_PIN adds GUP_PIN_COUNTING_BIAS; half of it allows for the few that come and go meanwhile (an LRU
    batch that is drained, a mapping). Nobody else can have held pages that the call itself made.
    """
    if pin.after is None:
        return Spans()
    if pin.before is None:
        return pin.spans
    least = 1 if pin.kind == "get" else PIN_BIAS // 2
    there = held_now(pin.after, buffer, pin.spans, least)
    # A page that got another frame meanwhile (copy-on-write) came without anybody's pin.
    return (rose(pin.before, pin.after, pin.spans, least) | pin.before.moved(pin.after)) & there


def held_now(state: PageState, buffer: Buffer, spans: Spans, least: int) -> Spans:
    """Those of the pages that have at least so many references beyond the baseline, or a pin count."""
    by_count = where(state.excess(cache_references(buffer.backing)), lambda excess: excess >= least)
    large = state.where("pincount", lambda count: count > 0)
    small = by_count - state.known("pincount")
    return (large | small) & spans


def rose(first: PageState | None, then: PageState | None, spans: Spans, least: int, sign: int = 1) -> Spans:
    """Those of the pages whose references rose (sign 1) or fell (-1) by at least so many, the PFN
    unchanged.
    """
    if first is None or then is None:
        return Spans()
    counted = where(first.change(then, "refcount"), lambda step: sign * step >= least)
    large = where(first.change(then, "pincount"), lambda step: sign * step >= 1)
    return (counted | large) & spans
