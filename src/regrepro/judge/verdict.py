"""Facts → verdicts.json: each scenario's verdict, the evidence for it, and what all of them come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regrepro.errors import EXIT_DECIDED, EXIT_OTHER_FAILURE, EXIT_REPRODUCED, EXIT_UNDECIDED
from regrepro.judge.declared import as_declared, declared
from regrepro.judge.evidence import gather
from regrepro.judge.facts import Facts, Pass, RecordLike, Registration, collect
from regrepro.judge.outcome import ERROR, NOT_REPRODUCED, OTHER_FAILURE, REPRODUCED, Verdict
from regrepro.judge.owners import owner_of
from regrepro.judge.rules import Case
from regrepro.judge.selection import Finding, decide
from regrepro.judge.watched import CAUGHT

SCHEMA = "regrepro.verdicts/1"
RECORD_SCHEMA = "regrepro.record/1"


def judge_record(record: RecordLike) -> dict[str, Any]:
    """Judge a record; return the object of `verdicts.json`. Pure: the same record gives the same answer
    anywhere.

    Never raises for what a record holds: what is malformed counts as not seen, and is named.
    """
    facts = collect(record)
    problems = list(facts.problems)
    for kind, count in sorted(facts.unknown_events.items()):
        problems.append(f"{count} events of type {kind!r} are not known to this version and were left out")
    schema = facts.header.get("schema")
    if schema != RECORD_SCHEMA:
        problems.append(f"the record's schema is {schema!r}; this version judges {RECORD_SCHEMA}")
    verdicts: list[dict[str, Any]] = []
    if schema == RECORD_SCHEMA:
        for key in dict.fromkeys((item.scenario, item.variant) for item in facts.passes):
            verdicts.append(_judge_scenario(facts, *key))
        verdicts += _never_begun(facts)
    complete = facts.run_outcome == "finished" and bool(verdicts)
    if facts.run_outcome is None and not any("run-end" in text for text in problems):
        problems.append("the record ends without run-end: the run was killed or is still going on")
    elif facts.run_outcome not in (None, "finished"):
        problems.append(f"the run was {facts.run_outcome}: what it had not begun is not judged")
    return {"schema": SCHEMA, "verdicts": verdicts, "complete": complete, "problems": problems}


def exit_code(verdicts: Mapping[str, Any], expect_declared: bool = False) -> int:
    """Return the exit code of `run`, `lab run` and `judge` for a verdicts object.

    0 nothing reproduced and all decided, 10 something reproduced, 11 another failure and nothing
    reproduced, 125 undecided. With `expect_declared`: 0 all as declared, 10 something is not, 125
    undecided. A run that did not reach its end, or has no verdict, is undecided unless it found something.
    """
    items = verdicts.get("verdicts")
    items = [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []
    undecided = not items or verdicts.get("complete") is False
    names = [item.get("verdict") for item in items]
    if expect_declared:
        if any(item.get("as_declared") is False for item in items):
            return EXIT_REPRODUCED
        undecided = undecided or any(item.get("as_declared") is not True for item in items)
        return EXIT_UNDECIDED if undecided else EXIT_DECIDED
    if REPRODUCED in names or CAUGHT in names:
        return EXIT_REPRODUCED
    if OTHER_FAILURE in names:
        return EXIT_OTHER_FAILURE
    if undecided or any(name != NOT_REPRODUCED for name in names):
        return EXIT_UNDECIDED
    return EXIT_DECIDED


def _never_begun(facts: Facts) -> list[dict[str, Any]]:
    """Scenarios that were asked for by name and of which the record holds nothing."""
    run = facts.header.get("run")
    names = run.get("names") if isinstance(run, Mapping) else None
    begun = {item.scenario for item in facts.passes}
    left = [
        name
        for name in dict.fromkeys(names if isinstance(names, list) else [])
        if isinstance(name, str) and name.isidentifier() and name not in begun
    ]
    seen = "; ".join(str(item.get("what")) for item in facts.lab if item.get("what") not in (None, "boot"))
    why = f"the run ended before it began{f' ({seen})' if seen else ''}"
    return [
        _written(
            facts,
            Pass(name, "default", None),
            Finding(Verdict(ERROR, f"{name} was asked for, but {why}"), None, frozenset()),
        )
        for name in left
    ]


def _judge_scenario(facts: Facts, scenario: str, variant: str) -> dict[str, Any]:
    passes = {
        item.control: item for item in facts.passes if (item.scenario, item.variant) == (scenario, variant)
    }
    main = passes.pop(None, None) or Pass(scenario, variant, None)
    return _written(facts, main, decide(facts, main, passes))


def _written(facts: Facts, main: Pass, found: Finding) -> dict[str, Any]:
    verdict, registration = found.verdict, found.registration
    owner = verdict.pin_owner or _pin_owner(facts, main, registration)
    item: dict[str, Any] = {
        "scenario": main.scenario,
        "variant": main.variant,
        "verdict": verdict.verdict,
        "pin_owner": owner,
        "basis": verdict.basis,
        "errno": registration.errno if registration is not None else verdict.errno,
        "layer": verdict.layer.name if verdict.layer else None,
        "registration": registration.id if registration is not None and not registration.in_series else None,
        "reason": verdict.reason,
        "contract": main.contract or None,
        "declared": declared(main.declared.get("expects"), main.contract, facts.kernel),
        "as_declared": None,
        "evidence": gather(facts, main, registration, verdict.layer),
        "controls": found.controls or [],
        "checks": [{"name": c.name, "state": c.state, "text": c.text} for c in verdict.checks],
        "unmet": verdict.unmet,
    }
    if verdict.bug_class is not None:
        item["class"] = verdict.bug_class
    if owner == "cuda":
        item["driver"] = facts.node.get("nvidia_driver")
    item["as_declared"] = as_declared(item)
    return item


def _pin_owner(facts: Facts, run: Pass, registration: Registration | None) -> str:
    """Who held the pin under which the registration was made, one without FOLL_LONGTERM before others; else
    who took one in this pass; else none.
    """
    pins = [pin for pin in run.pins.values() if pin.kind != "none"]
    if registration is not None and registration.buffer in run.buffers:
        case = Case(facts, run, registration, run.buffers[registration.buffer])
        pins = (case.plain if not registration.succeeded else []) or case.held or pins
    return owner_of(facts, run.buffers[run.pins[pins[0].id].buffer], run.pins[pins[0].id]) if pins else "none"
