"""What a registration that succeeded rests on, or what is not proven of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regrepro.judge import owners, rules
from regrepro.judge.controls import judge_controls, moved_by_pin
from regrepro.judge.facts import Facts, Pass, Registration
from regrepro.judge.nodememory import contrary
from regrepro.judge.outcome import NOT_REPRODUCED, Verdict, named, unmet, unmet_checks
from regrepro.judge.pagestate import PIN_BIAS
from regrepro.judge.rules import Case, Check, missing
from regrepro.judge.spans import Spans, pages_text


def judge_success(
    facts: Facts, main: Pass, registration: Registration, others: Mapping[str | None, Pass]
) -> tuple[Verdict, list[dict[str, Any]]]:
    """Judge a registration that succeeded, with its controls: they may show what the basis is."""
    buffer = main.buffers.get(registration.buffer)
    if buffer is None:
        verdict = unmet(
            "buffer", "the registered range is no buffer of the scenario", "register a stage buffer"
        )
        return verdict, judge_controls(facts, main, registration, others)
    case = Case(facts, main, registration, buffer)
    checks = [rules.whole_record(case), *_pin_checks(case)]
    verdict = _basis(case, checks)
    expect_failure = verdict.basis == "pin" or (not case.plain and case.unpinnable.total > 0)
    controls = judge_controls(facts, main, registration, others, expect_failure=expect_failure)
    plain = [item for item in controls if item["changed"] in ("pin=pin", "pin=get") and item["valid"]]
    if verdict.basis == "pin" and any(item["got"] == "success" for item in plain):
        verdict.basis = "kernel"
        verdict.reason += "; the control shows that this kernel registers it with a plain pin as well"
    return verdict, controls


def _pin_checks(case: Case) -> list[Check]:
    """The pins that were held when a registration succeeded were still alive after it."""
    checks: list[Check] = []
    for pin in case.held:
        flaw = rules.not_alive(case, pin)
        if flaw:
            how = "keep the pin until the registration has returned"
            checks.append(missing("pin", flaw, how))
    taken = [pin for pin in case.run.pins.values() if pin.kind != "none"]
    if case.run.contract != "none" and not taken:
        checks.append(missing("pin", "no pin was ever taken", "let the scenario pin its buffer"))
    elif taken and not case.held and not any(pin.seq > case.registration.seq for pin in taken):
        why = "no pin was held on these pages when they were registered, and none was taken after"
        how = "register while the pin is held, and map nothing anew meanwhile"
        checks.append(missing("pin", why, how))
    return checks


def _basis(case: Case, checks: list[Check]) -> Verdict:
    """What a registration that succeeded rests on, or what is not proven."""

    def rests_on(basis: str, why: str, what: str = "") -> Verdict:
        lacks = [check for check in checks if not check.ok]
        if lacks:
            return unmet_checks(lacks)
        what = what or named(case.run, case.registration)
        return Verdict(NOT_REPRODUCED, f"{what} succeeded: {why}", basis=basis, checks=checks)

    memory_map, buffer = case.run.memory_map, case.buffer
    if buffer.on_gpu:
        why = "memory of the GPU has no host page that this bug could hold"
        return rests_on("kernel", why, case.registration.verb)
    needs = case.run.declared.needs if case.run.declared is not None else []
    asks = buffer.asks_unpinnable or "unpinnable" in needs
    before = case.registration.before
    moved_first = moved_by_pin(case)
    if memory_map is not None and memory_map.none:
        # Pages that were unpinnable all the same are judged as such, whoever asked for them.
        asks = bool(case.unpinnable) or moved_first is not None
    if memory_map is not None and memory_map.none and not asks:
        why = contrary(case.facts, case.run)
        if why:
            text = f"the memory map knows no unpinnable memory, but {why}"
            checks.append(missing("placement", text, "run it again, while no memory changes"))
        ordinary = before is not None and case.registration.spans <= before.placed("ordinary", "absent")
        if not ordinary:
            text = "the pages were not provably ordinary, although the memory map knows no unpinnable memory"
            checks.append(missing("placement", text, "run as root"))
        why = "this node has no unpinnable memory, so no page had to move; this says nothing of a driver"
        return rests_on("placement", why)
    if not asks:
        why = "the kernel allowed it; no unpinnable memory was asked for, so this bug was not tried"
        return rests_on("kernel", why)
    if moved_first is not None:
        pin, contract = moved_first
        if contract.kind != "longterm":
            checks.append(missing("pin contract", f"the pages moved, but {contract.why}", contract.how))
        owner = whose = case.owner(pin)
        if owner == "cuda":
            whose = owners.nvidia_driver(case.facts)
        elif owner == "own-code":
            whose = pin.api
        elif owner == "unknown":
            whose = "an owner that was not seen"
        return rests_on("pin", f"the pin of {whose} asked for FOLL_LONGTERM ({contract.why})")
    lacks = _kernel_checks(case)
    checks += lacks
    return rests_on("kernel", "" if lacks else _kernel_allowed(case))


def _kernel_checks(case: Case) -> list[Check]:
    """That the kernel was asked at all: unpinnable pages, held by the pin that the scenario promises, or by
    none.
    """
    how = "run as root: the pageblock map needs /proc/kcore and /proc/self/pagemap"
    registration = case.registration
    before, after = registration.before, registration.after
    if before is None or after is None:
        why = registration.pages_unknown or "the pages were not read before and after the registration"
        return [missing("placement", why, how)]
    if not case.unpinnable:
        known = before.placed("ordinary", "absent")
        if before.how == "observed" and registration.spans <= known:
            absent = registration.spans & before.placed("absent")
            why = f"page {absent} had no frame yet" if absent else "every page was ordinary"
            text, how = f"{why} when the registration began", "place them, by place= or renew()"
            return [missing("placement", text, how)]
        text = "no page was provably unpinnable when the registration began"
        return [missing("placement", text, how)]
    if not case.held:
        return []
    mine = Spans.of(pair for pin in case.held for pair in pin.spans.pairs) & case.unpinnable
    if not mine:
        text, how = "none of the pinned pages was unpinnable", "pin unpinnable ones: see place="
        return [missing("placement", text, how)]
    checks = []
    for when, state in (("before", before), ("after", after)):
        copied = case.may_be_copied(before) & before.moved(after)
        look = mine - copied if when == "after" else mine
        for pin in case.held:
            wanted = pin.spans & look
            least = 1 if pin.kind == "get" else PIN_BIAS
            if wanted - (state.known("refcount") | state.known("pincount")):
                text = f"the reference counts {when} the registration are not known"
                how = "run as root: struct page is read through /proc/kcore"
                checks.append(missing("references", text, how))
            elif wanted - owners.held_now(state, case.buffer, wanted, least):
                text = f"the references of pin {pin.id} were not seen on its pages {when} the registration"
                checks.append(missing("references", text, "run it again"))
    not_taken = _not_taken(case, mine)
    if not_taken is not None:
        checks.append(not_taken)
    gone = (mine & before.moved(after)) - case.may_be_copied(before)
    if gone:
        text = f"pinned page {gone} moved, so the pin did not hold it"
        checks.append(missing("movement", text, "run it again"))
    return checks


def _not_taken(case: Case, mine: Spans) -> Check | None:
    """The pin of a driver or of a user's own code must have raised the references that stand."""
    for pin in case.held:
        strange = (pin.spans & mine) - owners.taken(case.buffer, pin)
        if pin.owner in owners.UNASKED and strange:
            called = pin.api or pin.owner
            text = f"the references of page {strange} did not rise when {called} was called"
            return missing("references", text, "let it pin what it is called with")
    return None


def _kernel_allowed(case: Case) -> str:
    registration = case.registration
    assert registration.before is not None and registration.after is not None
    moved = case.unpinnable & registration.before.moved(registration.after)
    copied = moved & case.may_be_copied(registration.before)
    count = case.unpinnable.total
    later = [pin for pin in case.run.pins.values() if pin.errno is None and pin.seq > registration.seq]
    if not case.held:
        when = "before any pin was taken" if later else "while no pin held them"
        if copied:
            return f"{pages_text(copied.total)} that others map as well were copied, not migrated, {when}"
        if moved:
            return f"the kernel moved {pages_text(moved.total)} out of unpinnable memory {when}"
        return f"this kernel pinned {pages_text(count)} in place, in unpinnable memory, {when}"
    if copied:
        what = f"{pages_text(copied.total)} that others map as well were copied, not migrated"
        return f"{what}: the pin holds what they were copied from, so that this bug was not tried on them"
    return (
        f"this kernel pins {pages_text(count)} in place, in unpinnable memory, although a pin is held on them"
    )
