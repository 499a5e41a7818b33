"""Which verdicts changed between two runs, in which direction, and whether the change proves anything.

It is asked one question of `judge.questions`. `node`: how the node fares as it is; a `not-reproduced` that
rests on `placement` is as good there as any, and a change from it or to it is one of the node. For
`reproduce` a change is proven only when both sides were decided on the same ground: unpinnable pages in
both. `driver` and `kernel`: what tells of the driver or of the kernel, on both sides. In all of them the
pins must be of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from regrepro.compare.facts import Difference, differences
from regrepro.errors import EXIT_DECIDED, EXIT_REPRODUCED, EXIT_UNDECIDED
from regrepro.judge import questions
from regrepro.judge.names import name_of, names_of
from regrepro.judge.questions import ASIDE, SILENT, UNDECIDED, Standing, standing
from regrepro.record import key_of

SCHEMA = "regrepro.comparison/1"

_MEANING = {
    EXIT_DECIDED: "the same as before, or better",
    EXIT_REPRODUCED: "worse than before",
    EXIT_UNDECIDED: "it cannot be told",
}

# Facts by topic that can explain a changed verdict; others are shown, and not named as a cause.
_CAUSES = ("driver", "pin", "kernel", "boot", "limits", "placement", "registrar", "machine", "sysctl")


@dataclass(frozen=True)
class Change:
    """One scenario on both sides. `before` and `after` are verdicts, None where it did not run.

    `counts`: whether the exit code rests on it: not on what is not required, nor on what says nothing of the
    question.
    """

    scenario: str
    part: str
    direction: str
    proven: bool
    reason: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    goes_with: tuple[Difference, ...] = ()
    counts: bool = True


@dataclass(frozen=True)
class _Asked:
    """What is asked of the two sides, and the headers that say whose pins were whose."""

    question: str
    headers: tuple[Mapping[str, Any], Mapping[str, Any]]
    require: tuple[str, ...]
    allow_unmet: tuple[str, ...]

    def standings(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Standing, Standing]:
        # Without an RDMA device in either run the two can still be held side by side.
        question = "reproduce" if self.question == "node" else self.question
        one, other = (
            standing(item, question, header, require=self.require, allow_unmet=self.allow_unmet)
            for item, header in zip((before, after), self.headers, strict=True)
        )
        return one, other


@dataclass
class Comparison:
    """Everything that `compare` found."""

    facts: list[Difference]
    changes: list[Change]
    problems: list[str] = field(default_factory=list)
    question: str = "node"
    lacks: list[str] = field(default_factory=list)  # why no success can be told, whatever has changed

    @property
    def answer(self) -> str:
        """The answer in words, with the scenarios that it rests on."""
        code = exit_code(self)
        kind = {EXIT_REPRODUCED: ("worse",), EXIT_UNDECIDED: ("cannot-tell",)}.get(code, ("better", "same"))
        names = [
            name_of(change.after or change.before or {})
            for change in self.changes
            if change.counts and change.direction in kind
        ]
        if code == EXIT_UNDECIDED and self.lacks:
            return f"{_MEANING[code]}: {'; '.join(self.lacks)}"
        if not names:
            return f"{_MEANING[code]}: nothing in the two tells of it"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{_MEANING[code]}: {', '.join(names[:3])}{more}"

    @property
    def line(self) -> str:
        """The question, the answer, and what the exit code means: one line."""
        code = exit_code(self)
        asked = f"{self.question}, before and after ({questions.QUESTIONS[self.question]})"
        return f"Asked {asked}: {self.answer}. Exit code {code}: {_MEANING[code]}."

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values, schema `regrepro.comparison/1`."""
        return {
            "schema": SCHEMA,
            "facts": [asdict(fact) for fact in self.facts],
            "changes": [
                {
                    "scenario": change.scenario,
                    **_labels(change.after or change.before or {}),
                    "direction": change.direction,
                    "proven": change.proven,
                    "counts": change.counts,
                    "reason": change.reason,
                    "before": _short(change.before),
                    "after": _short(change.after),
                    "goes_with": [asdict(fact) for fact in change.goes_with],
                }
                for change in self.changes
            ],
            "problems": self.problems,
            "question": self.question,
            "answer": self.answer,
            "exit_code": exit_code(self),
        }


def compare(
    before_header: Mapping[str, Any],
    before_verdicts: Mapping[str, Any],
    after_header: Mapping[str, Any],
    after_verdicts: Mapping[str, Any],
    question: str = "node",
    *,
    require: Sequence[str] = (),
    allow_unmet: Sequence[str] = (),
) -> Comparison:
    """Compare two runs by their headers and their verdicts (as `judge_record` gives them)."""
    asked = _Asked(question, (before_header, after_header), tuple(require), tuple(allow_unmet))
    facts = differences(before_header, after_header)
    one, other = _by_name(before_verdicts), _by_name(after_verdicts)
    names = [*one, *(name for name in other if name not in one)]
    changes = [_change(one.get(name), other.get(name), facts, asked) for name in names]
    problems = [f"before: {text}" for text in before_verdicts.get("problems", [])]
    problems += [f"after: {text}" for text in after_verdicts.get("problems", [])]
    lacks = []
    for side, verdicts, items in (("before", before_verdicts, one), ("after", after_verdicts, other)):
        if verdicts.get("complete") is False:
            lacks.append(f"the run {side} did not reach its end")
        if missing := questions.not_shown(require, items.values()):
            lacks.append(f"nothing {side} shows what is required: {', '.join(missing)}")
    return Comparison(facts, changes, problems, question, lacks)


def exit_code(comparison: Comparison) -> int:
    """Return 10 if anything is worse, else 125 if anything cannot be told or nothing was compared, else 0."""
    found = {change.direction for change in comparison.changes if change.counts}
    if "worse" in found:
        return EXIT_REPRODUCED
    if "cannot-tell" in found or not found or comparison.lacks:
        return EXIT_UNDECIDED
    return EXIT_DECIDED


def _by_name(verdicts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return verdicts by the last of their names, which a variant shares with a scenario that was one."""
    return {names_of(item)[-1]: item for item in verdicts.get("verdicts", [])}


def _labels(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"variant": "default"} | {key: item[key] for key in ("variant", "failure") if key in item}


def ground(item: Mapping[str, Any]) -> str:
    """Return on which pages a verdict was decided: `unpinnable`, `ordinary`, or `failure` (another cause)."""
    if item["verdict"] == "other-failure":
        return "failure"
    return "ordinary" if item.get("basis") == "placement" else "unpinnable"


def family(item: Mapping[str, Any]) -> str:
    """Return the kind of pin owner: versions of one driver, or contracts of the stand-in, are one."""
    return str(item.get("pin_owner") or "none").partition(":")[0]


def _change(
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    facts: Sequence[Difference],
    asked: _Asked,
) -> Change:
    item = after or before or {}
    scenario, part = key_of(item)

    def make(
        direction: str,
        proven: bool,
        reason: str,
        goes_with: tuple[Difference, ...] = (),
        *,
        counts: bool = True,
    ) -> Change:
        return Change(scenario, part, direction, proven, reason, before, after, goes_with, counts)

    if before is None or after is None:
        side = "before" if before is None else "after"
        return make("cannot-tell", False, f"it did not run {side}")
    stands = asked.standings(before, after)
    silence = _silence(stands, (before, after), asked)
    if silence is not None:
        direction, reason, counts = silence
        return make(direction, False, reason, counts=counts)
    bare = questions.without_rdma(before), questions.without_rdma(after)
    if asked.question == "node" and bare[0] != bare[1]:
        side = "before" if bare[0] else "after"
        return make("cannot-tell", False, f"{side} io_uring registered in the place of an RDMA device")
    if asked.question in ("driver", "kernel"):
        verdicts = stands[0].state, stands[1].state
    else:
        verdicts = before["verdict"], after["verdict"]
    weaker = _weaker(before, after, asked.question)
    if verdicts[0] == verdicts[1]:
        if before.get("layer") != after.get("layer") and before["verdict"] == "other-failure":
            return make(
                "cannot-tell",
                False,
                f"it fails otherwise than before: {before.get('layer')}, now {after.get('layer')}",
                _causes(facts),
            )
        same = f"{after['verdict']}, as before"
        remark = weaker or _other_ground(before, after)
        return make("same", remark is None, same if remark is None else f"{same}; but {remark}")
    if weaker is not None:
        return make("cannot-tell", False, weaker, _causes(facts))
    causes = _causes(facts)
    if verdicts[1] in ("not-reproduced", questions.GOOD):
        return make("better", True, f"{_why_now(before, after)}; {_goes_with(causes)}", causes)
    if verdicts[0] in ("not-reproduced", questions.GOOD):
        return make("worse", True, f"newly broken: {after.get('reason', '')}; {_goes_with(causes)}", causes)
    return make(
        "cannot-tell",
        False,
        f"it fails otherwise than before: {before['verdict']}, now {after['verdict']}",
        causes,
    )


def _silence(
    stands: tuple[Standing, Standing],
    items: tuple[Mapping[str, Any], Mapping[str, Any]],
    asked: _Asked,
) -> tuple[str, str, bool] | None:
    """Return direction, reason and weight where a side does not answer, None where both do."""
    states = {one.state for one in stands}
    sides = list(zip(("before", "after"), stands, items, strict=True))
    if UNDECIDED in states:
        undecided = [
            f"{side} it is {item['verdict']}: {one.why}".rstrip(": ")
            for side, one, item in sides
            if one.state in (UNDECIDED, ASIDE)
        ]
        return "cannot-tell", "; ".join(undecided), True
    if not states & {ASIDE, SILENT}:
        return None
    told = {name for item in items for name in names_of(item)} | {one.need for one in stands}
    needed = not told.isdisjoint(asked.require)
    if states <= {ASIDE, SILENT}:
        whys = "; ".join(dict.fromkeys(one.why for one in stands))
        if needed:
            return "cannot-tell", whys, True
        return "same", f"neither side tells: {whys}", False
    reason = "; ".join(f"{side} nothing is told: {one.why}" for side, one, _ in sides if not _tells(one))
    # What is not required weighs nothing; what fell silent does.
    return "cannot-tell", reason, needed or SILENT in states


def _tells(stands: Standing) -> bool:
    return stands.state not in (ASIDE, SILENT)


def _weaker(before: Mapping[str, Any], after: Mapping[str, Any], question: str) -> str | None:
    """Return why the two sides may not be held against each other, None if they may."""
    if family(before) != family(after):
        return f"the pins were not of the same kind: {before.get('pin_owner')}, then {after.get('pin_owner')}"
    return _other_ground(before, after) if question == "reproduce" else None


def _other_ground(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    grounds = ground(before), ground(after)
    if "failure" in grounds or grounds[0] == grounds[1]:
        return None
    side = "before" if grounds[0] == "ordinary" else "after"
    return (
        f"{side} it rests on placement: that node provably had no unpinnable memory, "
        "which says nothing of the driver or of the kernel"
    )


def _why_now(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    other = _other_ground(before, after)
    if other is not None:
        return f"better for this node: {other}"
    if after.get("basis") == "pin":
        return f"fixed: the pin of {after.get('pin_owner')} now moves the pages out first"
    return "fixed: the kernel now allows the registration"


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


def _short(item: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if item is None:
        return None
    return {key: item.get(key) for key in ("verdict", "pin_owner", "basis", "errno", "layer", "reason")}
