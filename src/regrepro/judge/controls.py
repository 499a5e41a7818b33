"""Controls: the same steps with one variable changed, which must give the opposite result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regrepro.judge import consistency, rules
from regrepro.judge.contracts import Contract
from regrepro.judge.facts import Facts, Pass, Pin, Registration
from regrepro.judge.frames import pins_on
from regrepro.judge.outcome import broken
from regrepro.judge.rules import Case, Check, missing


def under_test(run: Pass) -> Registration | None:
    """The registration of a pass that says most of this bug: the first that failed before a pin was released.

    If none failed, the first on a buffer that was asked to be unpinnable, else on one that was pinned before,
    else the first of all.
    """
    candidates = before_a_release(run)
    failed = (item for item in candidates if not item.succeeded)
    return next(failed, None) or best_success(run)


def best_success(run: Pass) -> Registration | None:
    """Of the registrations before a pin was released, the one that says most of this bug if it succeeds."""
    candidates = before_a_release(run)
    if candidates:
        return min(candidates, key=lambda item: (_aside(run, item), item.seq))
    return run.registrations[0] if run.registrations else None


def before_a_release(run: Pass) -> list[Registration]:
    """The registrations of a pass up to the first release of a pin."""
    released = [pin.release.seq for pin in run.pins.values() if pin.release is not None]
    first_release = min(released, default=None)
    return [item for item in run.registrations if first_release is None or item.seq < first_release]


def _aside(run: Pass, registration: Registration) -> int:
    """How far a registration is from what matters: 0 unpinnable was asked for, 1 pinned, 2 neither."""
    buffer = run.buffers.get(registration.buffer)
    if buffer is not None and buffer.asks_unpinnable:
        return 0
    pinned = pins_on(registration) or any(
        pin.buffer == registration.buffer and pin.seq < registration.seq and pin.errno is None
        for pin in run.pins.values()
    )
    return 1 if pinned else 2


def counterpart(main: Pass, registration: Registration, control: Pass) -> Registration | None:
    """The registration of a control that stands against one of its scenario.

    Against one that failed: whatever failed with the same errno, else the same call, the same time that it is
    made (a pass may make it in each of many rounds). Else the one that says most by itself.
    """
    if registration.succeeded:
        return under_test(control)
    failed = (item for item in control.registrations if item.errno == registration.errno)
    again = next(failed, None)
    if again is not None:
        return again
    wanted = _call(main, registration)
    earlier = sum(
        1 for item in main.registrations if item.seq < registration.seq and _call(main, item) == wanted
    )
    made = sorted((*control.registrations, *control.in_series), key=lambda item: item.seq)
    same = [item for item in made if _call(control, item) == wanted]
    # Of one in a series nothing was looked at: the first of the series stands for it.
    looked_at = earlier < len(same) and not same[earlier].in_series
    return same[earlier] if looked_at else under_test(control)


def _call(run: Pass, registration: Registration) -> tuple[object, ...]:
    """What is the same of one call in every pass: addresses are not."""
    buffer, address = run.buffers.get(registration.buffer), registration.address
    offset = address - buffer.address if buffer is not None and address is not None else None
    return (registration.buffer, offset, registration.length, registration.verb, registration.access)


def unheld(controls: list[dict[str, Any]]) -> list[Check]:
    """What the controls lack for a proof."""
    if not controls:
        return [missing("control", "no control was run", "declare one in the scenario file")]
    how = "run it again with its controls"
    lacking = (item for item in controls if not item["held"])
    return [missing("control", f"control {item['name']}: {item['reason']}", how) for item in lacking]


def moved_by_pin(case: Case) -> tuple[Pin, Contract] | None:
    """The held pin that moved unpinnable pages when it was taken, and what that says."""
    for pin in case.held:
        if pin.after is None:
            continue
        if pin.before is None:  # the call made the memory, too: its trace alone tells
            if case.contract(pin).kind == "longterm":
                return pin, case.contract(pin)
        elif pin.before.unpinnable & pin.spans & case.registration.spans & pin.before.moved(pin.after):
            return pin, case.contract(pin)
    return None


def judge_controls(
    facts: Facts,
    main: Pass,
    registration: Registration | None,
    others: Mapping[str | None, Pass],
    *,
    expect_failure: bool = False,
) -> list[dict[str, Any]]:
    """Judge every control that was declared or run. It must give the opposite of the main registration."""
    changes = main.declared.controls if main.declared is not None else {}
    names = list(dict.fromkeys([*changes, *(str(name) for name in others)]))
    case = None
    if registration is not None and registration.buffer in main.buffers:
        case = Case(facts, main, registration, main.buffers[registration.buffer])
    made = []
    for name in names:
        run = others.get(name)
        changed = changes.get(name) or (run.change if run is not None else "") or "not declared"
        contract = run.contract if run is not None else changed.removeprefix("pin=")
        # What the scenario left out, and this control puts back, must bring the failure back.
        puts_back = expect_failure and contract in ("pin", "get") and changed != "place=ordinary"
        made.append(_control(facts, name, changed, "failure" if puts_back else "success", run=run, main=case))
    return made


def _control(
    facts: Facts, name: str, changed: str, expected: str, *, run: Pass | None, main: Case | None
) -> dict[str, Any]:
    result: dict[str, Any] = {"name": name, "changed": changed, "expected": expected}
    result |= {"got": "nothing", "held": False, "valid": False}

    def told(reason: str) -> dict[str, Any]:
        return {**result, "reason": reason}

    if run is None:
        return told("it was not run")
    ended = broken(facts, run)
    if ended is not None:
        return told(ended.reason)
    if run.problems:
        return told(f"its record has a flaw: {run.problems[0]}")
    registration = counterpart(main.run, main.registration, run) if main is not None else under_test(run)
    if registration is None:
        return told("it registered nothing")
    result["got"] = "success" if registration.succeeded else "failure"
    result["errno"] = registration.errno
    case = None
    if registration.buffer in run.buffers:
        case = Case(facts, run, registration, run.buffers[registration.buffer])
    rests_on = case.seqs if case is not None else frozenset({registration.seq})
    for contradiction in consistency.touching(consistency.flaws(facts, run), rests_on):
        return told(f"its record contradicts itself: {contradiction.text}")
    flaw = "its buffer is not in the record" if case is None else _control_flaw(case, changed, main)
    result["valid"] = not flaw
    if result["got"] == "success" and expected == "failure" and not flaw:
        return told("it succeeded too: this kernel allows it with a plain pin as well")
    if result["got"] != expected:
        errno = f" with {registration.errno}" if registration.errno else ""
        return told(f"it gave {result['got']}{errno} where {expected} was due")
    if flaw:
        return told(f"it proves nothing: {flaw}")
    if expected == "failure" and case is not None:
        # The scenario itself is the release of this proof: the same without the pin succeeded.
        failing = (check for check in rules.prove(case) if not check.ok)
        bad = next(
            (check for check in failing if (check.name, check.state) != ("release", rules.MISSING)), None
        )
        if bad is not None:
            return told(f"it failed, but not provably by this bug: {bad.text}")
    result["held"] = True
    return told(f"{expected}, as it must be")


def _control_flaw(case: Case, changed: str, main: Case | None) -> str:
    """Why a control does not differ from its scenario in the one variable alone, or an empty string."""
    registration = case.registration
    before, after = registration.before, registration.after
    variable, _, value = changed.partition("=")
    same = main is None or all(
        getattr(main.registration, key) == getattr(registration, key) for key in ("verb", "device", "length")
    )
    if changed == "not declared":
        return "what it changes is not in the record"
    if variable in ("pin", "place") and not same:
        return "it made another call than its scenario"
    if before is None:
        return "its pages were not read"
    if variable == "pin" and value == "none":
        if case.held:
            return "a pin was held in it"
        in_place = main is not None and main.registration.succeeded and bool(case.unpinnable)
        return "" if in_place else _unpinnable_flaw(case)
    if variable == "place" and value == "ordinary":
        if not registration.spans <= before.placed("ordinary"):
            return "its pages were not provably ordinary"
        if main is not None and main.held and not case.held:
            return "no pin was held in it"
        return _dead_pin(case)
    if variable == "pin":
        pins = [pin for pin in case.held if pin.kind == value]
        if not pins:
            return f"no pin of kind {value} was held in it"
        if value == "longterm":
            moved = moved_by_pin(case)
            if moved is None and not case.unpinnable:
                return "its pin neither moved unpinnable pages nor left them unpinnable"
            return _dead_pin(case)
        return _dead_pin(case) or ("" if case.unpinnable else "no page was provably unpinnable in it")
    if case.buffer.asks_unpinnable and not case.held and registration.succeeded:
        return _unpinnable_flaw(case)
    if after is None:
        return "its pages were not read afterwards"
    return _dead_pin(case)


def _unpinnable_flaw(case: Case) -> str:
    """Without a pin the kernel must move the pages out; one that pins them in place proves nothing here."""
    before, after = case.registration.before, case.registration.after
    if not case.unpinnable:
        return "no page was provably unpinnable in it"
    if before is None or after is None:
        return "its pages were not read"
    left = case.unpinnable - (before.moved(after) & after.placed("ordinary"))
    return f"page {left} did not move out of unpinnable memory" if left else ""


def _dead_pin(case: Case) -> str:
    return next((flaw for pin in case.held for flaw in [rules.not_alive(case, pin)] if flaw), "")
