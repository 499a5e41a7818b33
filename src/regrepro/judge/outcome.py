"""What became of a scenario, before it is written out; passes that cannot be judged further."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regrepro.judge.facts import Facts, Pass, Registration
from regrepro.judge.layers import blocked_in_device, memory_cgroup
from regrepro.judge.narrowing import Layer
from regrepro.judge.rules import Check

REPRODUCED, NOT_REPRODUCED, OTHER_FAILURE = "reproduced", "not-reproduced", "other-failure"
UNMET, ERROR = "unmet", "error"


@dataclass
class Verdict:
    """What became of one scenario, before it is written out."""

    verdict: str
    reason: str
    basis: str | None = None
    layer: Layer | None = None
    checks: list[Check] = field(default_factory=list)
    unmet: list[dict[str, str]] = field(default_factory=list)
    errno: str | None = None
    """Of a pin that failed; a registration has its own."""
    bug_class: dict[str, Any] | None = None
    pin_owner: str | None = None


def broken(facts: Facts, run: Pass) -> Verdict | None:
    """The harness failed, or a precondition was not met: nothing further is judged."""
    if not run.begun:
        return Verdict(ERROR, "the record holds no beginning of this scenario")
    for layer in (memory_cgroup(run), blocked_in_device(run)):
        if layer is not None:
            return Verdict(OTHER_FAILURE, layer.why, layer=layer)
    if run.exception is not None:
        event = run.exception
        where = f" ({event.file}:{event.line})" if event.file else ""
        return Verdict(ERROR, f"{event.type or 'an exception'}: {event.text or 'no text'}{where}")
    if run.unmet is not None:
        lack = run.unmet
        return unmet(lack.need or "a precondition", lack.why or "no reason recorded", lack.how)
    if run.end is None:
        return Verdict(ERROR, f"the record ends in the middle of this scenario{lab_saw(facts)}")
    outcome = run.end.outcome
    if outcome == "unmet":
        return unmet("a precondition", "the record does not say which", "run it again")
    ends = {
        "killed": f"was killed by {run.end.signal or 'a signal'}",
        "timeout": "did not end within its time limit and was killed",
        "blocked": "waits in the kernel and cannot be killed; what it waits for is not known",
    }
    why = ends.get(outcome, f"ended in a way this version does not know: {outcome}")
    return None if outcome == "finished" else Verdict(ERROR, f"the scenario {why}")


def lab_saw(facts: Facts) -> str:
    """What the lab saw from outside, but for the boot: " (panic)", or nothing."""
    seen = "; ".join(item.what for item in facts.lab if item.what != "boot")
    return f" ({seen})" if seen else ""


def unmet(need: str, why: str, how: str) -> Verdict:
    """A precondition that was not met."""
    reason = f"{need} is not met: {why}" + (f" ({how})" if how else "")
    return Verdict(UNMET, reason, unmet=[{"need": need, "why": why, "how": how}])


def unmet_checks(checks: list[Check], which: str = "") -> Verdict:
    """Checks that do not hold. `which`: of which registration, where a pass has several."""
    first = checks[0]
    more = f"; and {len(checks) - 1} more" if len(checks) > 1 else ""
    reason = f"{which}not proven: {first.text}{f' ({first.how})' if first.how else ''}{more}"
    return Verdict(UNMET, reason, checks=checks, unmet=[check.as_unmet() for check in checks])


def named(run: Pass, registration: Registration) -> str:
    """Name a registration by its verb and, where a pass makes several different ones or one fails again, by
    its number.
    """
    if registration.in_series:
        return f"{registration.verb} ({registration.in_series})"
    made = run.registrations
    shapes = {item.shape for item in made}
    if len(made) == 1 or (len(shapes) == 1 and all(item.succeeded for item in made[1:])):
        return registration.verb
    return f"{registration.verb} (registration {made.index(registration) + 1} of {len(made)})"
