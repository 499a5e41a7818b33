"""The rules for a failure that `watch` caught: a program's own, of which nothing can be tried again.

Without a release and without controls `reproduced` cannot be said. What can: the kernel's path, the pages
that migrate_pages left behind, where they lay, and what they bore at that moment and a little later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regrepro.judge.facts import Facts, Pass, Registration
from regrepro.judge.layers import MOVE_REFUSED, Layer, classify
from regrepro.judge.pagestate import PIN_BIAS, UNPINNABLE, cache_references, whole_number
from regrepro.judge.rules import CONTRADICTED, MISSING, OK, Check
from regrepro.judge.spans import Spans

CAUGHT = "caught"
PROVEN, LIKELY = "proven", "likely"
_ISOLATED = 1
"""A page on migrate_pages' list has one reference of its isolation (`folio_isolate_lru`, mm/vmscan.c)."""


@dataclass(frozen=True)
class Finding:
    """What a caught failure was. `state` is PROVEN or LIKELY for this bug, "" for any other cause."""

    layer: Layer
    state: str
    reason: str
    checks: list[Check]
    pin_owner: str = "unknown"
    missing: list[str] = field(default_factory=list)


def judge_watched(facts: Facts, run: Pass, registration: Registration) -> Finding:
    """Say what a failure that `watch` caught was."""
    what = f"{registration.verb} failed with {registration.errno}"
    left = _left_behind(registration)
    if registration.errno != "ENOMEM" or left is None:
        layer = classify(facts, run, registration)
        return Finding(layer, "", f"{what} ({layer.name}: {layer.why})", [])
    checks = [
        Check("errno", OK, "the registration failed with ENOMEM"),
        _trace(registration, left),
        _placement(run, registration),
        _references(registration),
        _lasting(run, registration),
        _holder(registration),
    ]
    owner = _owner(registration)
    contradicted = [check for check in checks if check.state == CONTRADICTED]
    source = MOVE_REFUSED
    if contradicted:
        layer = Layer("page-migration", contradicted[0].text, "observed", source)
        reason = f"{what}: migrate_pages left {left} behind, but {contradicted[0].text}"
        return Finding(layer, "", reason, checks)
    missing = [check for check in checks if check.state == MISSING and check.name != "holder"]
    held = "pages in unpinnable memory were held and would not move"
    layer = Layer("page-migration", held, "observed" if not missing else "inferred", source)
    by = f" by {owner}" if owner != "unknown" else " whose holder was not seen"
    if not missing:
        held = "a pin" if min(_above(registration)) >= PIN_BIAS else "a reference"
        reason = f"class B, proven: {what} because {held}{by} kept {left} in unpinnable memory from moving"
        return Finding(layer, PROVEN, reason, checks, owner)
    lacks = [check.text for check in missing]
    reason = f"class B, likely: {what}, and migrate_pages left {left} behind; missing: {'; '.join(lacks)}"
    return Finding(layer, LIKELY, reason, checks, owner, lacks)


def _left_behind(registration: Registration) -> str | None:
    """How many pages the last migration left behind, None where it did not."""
    returned = [step.returned for step in registration.trace.migrations if step.returned is not None]
    if not returned or returned[-1] <= 0:
        return None
    return "1 page" if returned[-1] == 1 else f"{returned[-1]} pages"


def _trace(registration: Registration, left: str) -> Check:
    """`migrate_pages` returns how many pages would not move (mm/migrate.c)."""
    trace = registration.trace
    if not trace.complete:
        return Check("trace", MISSING, f"the trace is {trace.status}: {trace.why or 'no reason recorded'}")
    return Check("trace", OK, f"migrate_pages left {left} behind in a request for long-term pins")


def _stuck(registration: Registration) -> list[Mapping[str, Any]]:
    pages = registration.watched.get("stuck")
    return [page for page in pages if isinstance(page, Mapping)] if isinstance(pages, list) else []


def _placement(run: Pass, registration: Registration) -> Check:
    """Pages that were left behind lay in a CMA or isolated pageblock or in ZONE_MOVABLE
    (`folio_is_longterm_pinnable`, include/linux/mm.h).
    """
    name = "placement"
    places = [page.get("place") for page in _stuck(registration)]
    known = [place for place in places if place not in (None, "unknown")]
    if known and all(place in UNPINNABLE for place in known):
        return Check(name, OK, f"the pages left behind lay in {', '.join(sorted(set(map(str, known))))}")
    if known:
        return Check(name, CONTRADICTED, "a page that was left behind lay in ordinary memory")
    state = registration.before
    if state is None:
        why = registration.pages_unknown or "the pages were not read"
        return Check(name, MISSING, f"where the pages lay is not known ({why})")
    if state.unpinnable & registration.spans:
        count = (state.unpinnable & registration.spans).total
        return Check(name, OK, f"{count} of the range's pages lay in unpinnable memory right afterwards")
    if registration.spans - state.placed("ordinary", "absent"):
        return Check(name, MISSING, "where the pages lay is not known")
    return Check(name, CONTRADICTED, "none of the range's pages lay in unpinnable memory right afterwards")


def _references(registration: Registration) -> Check:
    """At that moment, on migrate_pages' list: one reference for each mapping, one of the isolation, and the
    holder's (`folio_expected_ref_count`, include/linux/mm.h; `GUP_PIN_COUNTING_BIAS`).
    """
    name = "references"
    above = _above(registration)
    if not above:
        return Check(name, MISSING, "the reference counts of the pages left behind were not seen")
    least = min(above)
    if least >= PIN_BIAS:
        return Check(name, OK, f"each bore at least one FOLL_PIN when it would not move ({least} references)")
    if least > 0:
        return Check(name, OK, f"each bore {least} or more references beyond what is due")
    return Check(name, MISSING, "a page that was left behind bore no reference beyond what is due")


def _above(registration: Registration) -> list[int]:
    """References beyond what is due, of each page that was left behind, at that moment."""
    above = []
    for page in _stuck(registration):
        count, maps = whole_number(page.get("refcount")), whole_number(page.get("mapcount"))
        if count is not None and maps is not None and maps >= 0:
            above.append(count - maps - _ISOLATED)
    return above


def _lasting(run: Pass, registration: Registration) -> Check:
    """A reference that is still there afterwards is no passing one, such as I/O in flight."""
    name = "lasting"
    buffer = run.buffers.get(registration.buffer)
    first, again = registration.before, registration.after
    if buffer is None or first is None or again is None or again is first:
        why = registration.pages_unknown or "the pages were not read a second time"
        return Check(name, MISSING, f"whether what held the pages lasted is not known ({why})")
    look = first.unpinnable & again.unpinnable & first.unmoved(again) & registration.spans
    held = Spans()
    for state in (first, again):
        excess = state.excess(cache_references(buffer.backing))
        # A per-CPU LRU batch holds none: it was drained before the pages were migrated (mm/gup.c).
        counted = Spans.of((a, b) for a, b, value in excess if value > 0)
        found = (counted - state.known("pincount")) | state.where("pincount", lambda count: count > 0)
        held = found if state is first else held & found
    if held & look:
        return Check(name, OK, f"{(held & look).total} unpinnable pages of the range were still held later")
    if not look:
        return Check(name, MISSING, "no unpinnable page of the range was still there later")
    return Check(name, MISSING, "the references were gone a moment later: it may have been I/O in flight")


def _plain_pins(registration: Registration) -> list[Mapping[str, Any]]:
    pins = registration.watched.get("plain_pins")
    return [pin for pin in pins if isinstance(pin, Mapping)] if isinstance(pins, list) else []


def _holder(registration: Registration) -> Check:
    """Who pinned these pages without FOLL_LONGTERM, where that was seen. A count never names its holder."""
    pins = _plain_pins(registration)
    if not pins:
        return Check("holder", MISSING, "who took the pin was not seen")
    return Check("holder", OK, f"{_owner(registration)} took a pin without FOLL_LONGTERM on these pages")


def _owner(registration: Registration) -> str:
    for pin in reversed(_plain_pins(registration)):
        modules = [str(name) for name in pin.get("modules") or []]
        if any(name.startswith("nvidia") for name in modules):
            return "cuda"
        if modules:
            return modules[0]
        if str(pin.get("fn", "")).endswith("_remote"):
            return "process-vm"
    return "unknown"
