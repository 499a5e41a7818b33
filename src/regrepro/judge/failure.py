"""What a registration that failed proves, and what it lacks."""

from __future__ import annotations

from regrepro.judge import rules
from regrepro.judge.facts import Facts, Pass, Registration
from regrepro.judge.layers import MOVE_REFUSED, classify
from regrepro.judge.narrowing import Layer
from regrepro.judge.outcome import OTHER_FAILURE, REPRODUCED, Verdict, named, unmet_checks
from regrepro.judge.owners import UNASKED, nvidia_driver
from regrepro.judge.rules import Case, missing


def judge_failure(facts: Facts, run: Pass, registration: Registration) -> Verdict:
    """Judge one registration that failed, all but its controls.

    It is another failure only where the record shows another cause. What merely does not prove this bug (a
    second holder, a pin that was gone, a page that stayed for no known reason) leaves the cause open.
    """
    layer = classify(facts, run, registration)
    what = f"{named(run, registration)} failed with {registration.errno}"
    buffer = run.buffers.get(registration.buffer)
    on_gpu = buffer is not None and buffer.on_gpu  # no host page that this bug could hold
    by_errno = rules.can_be_refused_migration(registration)
    if not by_errno or on_gpu or layer.name not in ("unknown", "page-migration"):
        reason = f"{what}, and not by this bug ({layer.name}: {layer.why})"
        return Verdict(OTHER_FAILURE, reason, layer=layer)
    if buffer is None:
        text = f"{what} on a range that is no buffer of the scenario"
        return unmet_checks([missing("buffer", text, "register a buffer of the stage")])
    case = Case(facts, run, registration, buffer)
    if run.contract == "none" and not case.held and layer.name == "page-migration":
        # Somebody's reference that came and went: the scenario pins nothing, and none is asked after.
        reason = f"{what}, and no pin was held on these pages ({layer.name}: {layer.why})"
        return Verdict(OTHER_FAILURE, reason, layer=layer)
    checks = rules.prove(case)
    if any(not check.ok for check in checks):
        found = unmet_checks([check for check in checks if not check.ok], f"{what}, ")
        found.checks, found.layer = checks, layer
        return found
    moved = "the pinned pages would not move"
    layer = Layer("page-migration", moved, "observed", MOVE_REFUSED)
    return Verdict(REPRODUCED, _because(case, what), layer=layer, checks=checks)


def _places(case: Case) -> str:
    before = case.registration.before
    words = {"cma": "CMA pageblocks", "movable-zone": "ZONE_MOVABLE", "isolate": "isolated pageblocks"}
    found = (word for name, word in words.items() if before and case.stuck & before.placed(name))
    return " and ".join(found) or "unpinnable memory"


def _because(case: Case, what: str) -> str:
    pin = case.plain[0]
    owner = case.owner(pin)
    held = "a reference" if pin.kind == "get" else "a pin"
    count = f"{case.stuck.total} of {case.registration.spans.total} pages in {_places(case)}"
    if owner in UNASKED:
        whose = nvidia_driver(case.facts) if owner == "cuda" else pin.api
        return f"{whose} pins without FOLL_LONGTERM: {what} because its pin kept {count} from moving"
    by = f" by {owner}" if owner != "unknown" else ", by whom was not seen,"
    why = f"{what} because {held}{by} kept {count} from moving"
    return f"this kernel, with this placement, is susceptible: {why}"
