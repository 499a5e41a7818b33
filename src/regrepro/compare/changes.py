"""Which verdicts changed between two runs, in which direction, and whether the change proves anything.

A change is proven only when both sides were decided on the same ground: the same kind of pin owner, and pages
that were unpinnable in both. A `not-reproduced` that rests on `placement` was tested on a node without
unpinnable memory; held against a `reproduced` it says that the node has changed, and nothing of a driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regrepro.compare.facts import Difference, differences
from regrepro.errors import EXIT_DECIDED, EXIT_REPRODUCED, EXIT_UNDECIDED

SCHEMA = "regrepro.comparison/1"

DIRECTIONS = ("better", "worse", "same", "cannot-tell")

_DECIDED = ("reproduced", "not-reproduced", "other-failure")

# Facts by topic that can explain a changed verdict; others are shown, and not named as a cause.
_CAUSES = ("driver", "pin", "kernel", "boot", "limits", "placement", "registrar", "machine", "sysctl")


@dataclass(frozen=True)
class Change:
    """One scenario on both sides. `before` and `after` are verdicts, None where it did not run."""

    scenario: str
    variant: str
    direction: str
    proven: bool
    reason: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    goes_with: tuple[Difference, ...] = ()


@dataclass
class Comparison:
    """Everything that `compare` found."""

    facts: list[Difference]
    changes: list[Change]
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values, schema `regrepro.comparison/1`."""
        return {
            "schema": SCHEMA,
            "facts": [_fact(fact) for fact in self.facts],
            "changes": [
                {
                    "scenario": change.scenario,
                    "variant": change.variant,
                    "direction": change.direction,
                    "proven": change.proven,
                    "reason": change.reason,
                    "before": _short(change.before),
                    "after": _short(change.after),
                    "goes_with": [_fact(fact) for fact in change.goes_with],
                }
                for change in self.changes
            ],
            "problems": self.problems,
            "exit_code": exit_code(self),
        }


def compare(
    before_header: Mapping[str, Any],
    before_verdicts: Mapping[str, Any],
    after_header: Mapping[str, Any],
    after_verdicts: Mapping[str, Any],
) -> Comparison:
    """Compare two runs by their headers and their verdicts (as `judge_record` gives them)."""
    facts = differences(before_header, after_header)
    one, other = _by_name(before_verdicts), _by_name(after_verdicts)
    names = [*one, *(name for name in other if name not in one)]
    changes = [_change(name, one.get(name), other.get(name), facts) for name in names]
    problems = [f"before: {text}" for text in before_verdicts.get("problems", [])]
    problems += [f"after: {text}" for text in after_verdicts.get("problems", [])]
    return Comparison(facts, changes, problems)


def exit_code(comparison: Comparison) -> int:
    """Return 10 if anything is worse, else 125 if anything cannot be told or nothing was compared, else 0."""
    found = {change.direction for change in comparison.changes}
    if "worse" in found:
        return EXIT_REPRODUCED
    if "cannot-tell" in found or not found:
        return EXIT_UNDECIDED
    return EXIT_DECIDED


def _by_name(verdicts: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {
        (str(item.get("scenario")), str(item.get("variant", "default"))): item
        for item in verdicts.get("verdicts", [])
    }


def ground(item: Mapping[str, Any]) -> str:
    """Return on which pages a verdict was decided: `unpinnable`, `ordinary`, or `failure` (another cause)."""
    if item["verdict"] == "other-failure":
        return "failure"
    return "ordinary" if item.get("basis") == "placement" else "unpinnable"


def family(item: Mapping[str, Any]) -> str:
    """Return the kind of pin owner: versions of one driver, or contracts of the stand-in, are one."""
    return str(item.get("pin_owner") or "none").partition(":")[0]


def _change(
    name: tuple[str, str],
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    facts: Sequence[Difference],
) -> Change:
    scenario, variant = name

    def make(direction: str, proven: bool, reason: str, goes_with: tuple[Difference, ...] = ()) -> Change:
        return Change(scenario, variant, direction, proven, reason, before, after, goes_with)

    if before is None or after is None:
        side = "before" if before is None else "after"
        return make("cannot-tell", False, f"it did not run {side}")
    undecided = [
        f"{side} it is {item['verdict']}: {item.get('reason', '')}".rstrip(": ")
        for side, item in (("before", before), ("after", after))
        if item["verdict"] not in _DECIDED
    ]
    if undecided:
        return make("cannot-tell", False, "; ".join(undecided))
    weaker = _weaker(before, after)
    if before["verdict"] == after["verdict"]:
        if before.get("layer") != after.get("layer") and before["verdict"] == "other-failure":
            return make(
                "cannot-tell",
                False,
                f"it fails otherwise than before: {before.get('layer')}, now {after.get('layer')}",
                _causes(facts),
            )
        same = f"{after['verdict']}, as before"
        return make("same", weaker is None, same if weaker is None else f"{same}; but {weaker}")
    if weaker is not None:
        return make("cannot-tell", False, weaker, _causes(facts))
    causes = _causes(facts)
    if after["verdict"] == "not-reproduced":
        return make("better", True, f"fixed: {_why_now(after)}; {_goes_with(causes)}", causes)
    if before["verdict"] == "not-reproduced":
        return make("worse", True, f"newly broken: {after.get('reason', '')}; {_goes_with(causes)}", causes)
    return make(
        "cannot-tell",
        False,
        f"it fails otherwise than before: {before['verdict']}, now {after['verdict']}",
        causes,
    )


def _weaker(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return why the two sides may not be held against each other, None if they may."""
    if family(before) != family(after):
        return f"the pins were not of the same kind: {before.get('pin_owner')}, then {after.get('pin_owner')}"
    grounds = ground(before), ground(after)
    if "failure" in grounds or grounds[0] == grounds[1]:
        return None
    side = "before" if grounds[0] == "ordinary" else "after"
    return (
        f"{side} it rests on placement: that node provably had no unpinnable memory, "
        "which says nothing of the driver or of the kernel"
    )


def _why_now(item: Mapping[str, Any]) -> str:
    if item.get("basis") == "pin":
        return f"the pin of {item.get('pin_owner')} now moves the pages out first"
    return "the kernel now allows the registration"


def _causes(facts: Sequence[Difference]) -> tuple[Difference, ...]:
    return tuple(fact for fact in facts if fact.topic in _CAUSES)


def _goes_with(causes: Sequence[Difference]) -> str:
    if not causes:
        return "no recorded fact differs: run both again before you believe it"
    topics = {cause.topic for cause in causes}
    words = ", ".join(cause.sentence() for cause in causes[:3]) + (", …" if len(causes) > 3 else "")
    if len(topics) == 1:
        return f"it goes with the only change, {words}"
    return f"several things changed together, any of them can be the cause: {words}"


def _fact(fact: Difference) -> dict[str, Any]:
    return {"fact": fact.fact, "topic": fact.topic, "before": fact.before, "after": fact.after}


def _short(item: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if item is None:
        return None
    return {key: item.get(key) for key in ("verdict", "pin_owner", "basis", "errno", "layer", "reason")}
