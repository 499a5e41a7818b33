"""The evidence of a verdict: what was seen, how it is known, and from where."""

from __future__ import annotations

from typing import Any

from regrepro.judge import rules
from regrepro.judge.contracts import measured_contract
from regrepro.judge.facts import Facts, Pass, Registration
from regrepro.judge.narrowing import Layer
from regrepro.judge.pagestate import PageState
from regrepro.judge.rules import Case
from regrepro.judge.spans import Spans

OBSERVED, INFERRED, STAND_IN, MISSING = "observed", "inferred", "stand-in", "missing"


def _item(value: Any, how: str, source: str) -> dict[str, Any]:
    return {"value": value, "how": how, "source": source}


def gather(facts: Facts, run: Pass, registration: Registration | None, layer: Layer | None) -> dict[str, Any]:
    """Return the evidence of a scenario: everything that its verdict can rest on, present or missing."""
    found: dict[str, Any] = {"kernel": _item(facts.kernel, OBSERVED, "uname")}
    memory_map = run.memory_map or facts.memory_map
    if memory_map is None:
        found["memory_map"] = _item(None, MISSING, "the record holds no memory map")
    else:
        value: dict[str, Any] = {"complete": memory_map.complete}
        value["has_unpinnable"] = memory_map.has_unpinnable
        if memory_map.problems:
            value["problems"] = memory_map.problems
        if run.map_check is not None:
            value["after_the_pass"] = run.map_check.has_unpinnable
        found["memory_map"] = _item(value, OBSERVED, ", ".join(memory_map.sources) or "not recorded")
    stand_ins = _stand_ins(facts, run)
    if stand_ins:
        found["stand_ins"] = _item(stand_ins, STAND_IN, "the record's header and events")
    if layer is not None:
        found["layer"] = _item({"layer": layer.name, "why": layer.why}, layer.how, layer.source or layer.why)
    buffer = run.buffers.get(registration.buffer) if registration is not None else None
    if registration is None or buffer is None:
        return found
    case = Case(facts, run, registration, buffer)
    found["registrar"] = _registrar(facts, registration)
    found.update(_pages(case))
    found["pins"] = _pins(case)
    calls = [{"pin": pin.id, **call} for pin in case.held for call in pin.trace.gup_calls]
    if calls:
        found["pin_flags"] = _item(calls, OBSERVED, "the kernel's own trace of the pin")
    found["trace"] = _trace(registration)
    found["release"] = _release(case)
    contracts = {
        str(pin.id): {"contract": contract.kind, "owner": pin.owner, "why": contract.why}
        for pin in run.pins.values()
        if pin.errno is None
        for contract in [measured_contract(facts, run, pin)]
    }
    if contracts:
        found["pin_contract"] = _item(contracts, INFERRED, "movement of the pages when each pin was taken")
    return found


def _stand_ins(facts: Facts, run: Pass) -> list[str]:
    given = facts.header.get("stand_ins")
    items = given if isinstance(given, list) else []
    names = [str(item["name"]) for item in items if isinstance(item, dict) and item.get("name")]
    names += [item.stand_in for item in (*run.buffers.values(), *run.calls, *run.notes) if item.stand_in]
    return list(dict.fromkeys(names))


def _registrar(facts: Facts, registration: Registration) -> dict[str, Any]:
    value = {"verb": registration.verb, "device": registration.device}
    if not registration.through_umem:
        value["note"] = "io_uring in the place of an RDMA device: the same FOLL_LONGTERM pin, no verbs"
        return _item(value, STAND_IN, "io_uring_register(IORING_REGISTER_BUFFERS)")
    if registration.stand_in:
        value["note"] = registration.stand_in
        return _item(value, STAND_IN, registration.verb)
    return _item(value, OBSERVED, registration.verb)


def _pages(case: Case) -> dict[str, Any]:
    registration, before, after = case.registration, case.registration.before, case.registration.after
    found = {"pages": _item(registration.spans.total, OBSERVED, "length of the registration")}
    names = ("placement", "pages_unpinnable", "pages_pinned", "pages_moved", "pages_unmoved", "references")
    if before is None:
        why = registration.pages_unknown or "the pages were not read before the registration"
        return found | {name: _item(None, MISSING, why) for name in names}
    how, source = before.how if before.how in (OBSERVED, INFERRED, STAND_IN) else MISSING, before.source
    places = {
        name: (before.placed(name) & registration.spans).total
        for name in ("cma", "movable-zone", "isolate", "ordinary", "unknown", "absent")
    }
    found["placement"] = _item({name: count for name, count in places.items() if count}, how, source)
    found["pages_unpinnable"] = _item(case.unpinnable.total, how, source)
    pinned = Spans.of(pair for pin in case.held for pair in pin.spans.pairs) & registration.spans
    found["pages_pinned"] = _item(pinned.total, OBSERVED, "the pins held when the registration began")
    if after is None:
        missing = "the pages were not read after the registration"
        found |= {name: _item(None, MISSING, missing) for name in ("pages_moved", "pages_unmoved")}
    else:
        found["pages_moved"] = _item((before.moved(after) & registration.spans).total, how, source)
        stayed = case.unpinnable & before.unmoved(after)
        found["pages_unmoved"] = _item((stayed & (case.reached or stayed)).total, how, source)
        if case.reached is not None and case.reached != registration.spans:
            batches = "batches of __ib_umem_get_va, drivers/infiniband/core/umem.c"
            found["pages_tried"] = _item(case.reached.total, INFERRED, batches)
    found["references"] = _references(case, pinned, before, after)
    return found


def _references(case: Case, pinned: Spans, before: PageState, after: PageState | None) -> dict[str, Any]:
    spans = case.stuck or pinned
    value: dict[str, Any] = {}
    for when, state in (("before", before), ("after", after)):
        for count in ("refcount", "mapcount", "pincount"):
            bounds = state.bounds(count, spans) if state is not None else None
            if bounds is not None:
                value.setdefault(when, {})[count] = bounds[0] if bounds[0] == bounds[1] else list(bounds)
    if not value:
        return _item(None, MISSING, "reference counts were not read")
    return _item(value, OBSERVED, before.source)


def _pins(case: Case) -> dict[str, Any]:
    value = []
    for pin in case.held:
        before, after = case.registration.alive.get(pin.id, (None, None))
        told = {"pin": pin.id, "kind": pin.kind, "owner": case.owner(pin), "api": pin.api}
        value.append(told | {"pages": pin.spans.total, "alive_before": before, "alive_after": after})
    stand_in = any(pin.stand_in or pin.owner.startswith("standin:") for pin in case.held)
    return _item(value, STAND_IN if stand_in else OBSERVED, "each pin's own sign of life")


def _trace(registration: Registration) -> dict[str, Any]:
    trace = registration.trace
    if trace.status in ("absent", "off", "unavailable"):
        return _item({"status": trace.status, "why": trace.why}, MISSING, trace.why or trace.status)
    value: dict[str, Any] = {"status": trace.status, "tree": trace.tree}
    if trace.why:
        value["why"] = trace.why
    if trace.migrations:
        value |= {"migrate_pages": trace.migrations[-1].returned, "reason": trace.migrations[-1].reason}
    if trace.missing:
        value["missing"] = [{"fn": name, "why": why} for name, why in sorted(trace.missing.items())]
    return _item(value, OBSERVED if trace.complete else MISSING, "the kernel's own trace of the call")


def _release(case: Case) -> dict[str, Any]:
    released = [pin for pin in case.held if pin.release is not None]
    if not released:
        return _item(None, MISSING, "no pin was released")
    kept = [pin.release.bytes_kept for pin in released if pin.release is not None]
    value: dict[str, Any] = {"released": len(released), "bytes_kept": None if None in kept else all(kept)}
    again = rules.same_call_after_release(case)
    if again is not None:
        value["again_errno"] = again.errno
        if again.before is not None and again.after is not None:
            value["again_moved"] = (again.before.moved(again.after) & again.spans).total
            if case.registration.after is not None:
                same = case.registration.after.unmoved(again.before) & again.before.unpinnable & case.stuck
                value["same_unpinnable_pages"] = same.total
    third = rules.pinned_again_succeeded(case)
    if third is not None:
        value["pinned_again_on_ordinary"] = "success" if third else "failure"
    return _item(value, OBSERVED, "the same call on the same buffer after the release")
