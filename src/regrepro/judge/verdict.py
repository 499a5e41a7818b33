"""Facts → verdicts.json: each scenario's verdict, the evidence for it, and what all of them come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regrepro.judge.declared import as_declared, declared
from regrepro.judge.evidence import gather
from regrepro.judge.facts import Facts, Pass, RecordLike, Registration, collect
from regrepro.judge.names import called, parsed
from regrepro.judge.outcome import ERROR, UNMET, Verdict, lab_saw, unmet
from regrepro.judge.owners import owner_of
from regrepro.judge.questions import BOOT_NEED
from regrepro.judge.rules import Case
from regrepro.judge.selection import Candidate, decide
from regrepro.record.events import SCHEMA as RECORD_SCHEMA

SCHEMA = "regrepro.verdicts/1"


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
        for key in dict.fromkeys((item.scenario, item.variant, item.failure) for item in facts.passes):
            verdicts.append(_judge_scenario(facts, *key))
        verdicts += _never_begun(facts)
    complete = facts.run_outcome == "finished" and bool(verdicts)
    if facts.run_outcome is None and not any("run-end" in text for text in problems):
        problems.append("the record ends without run-end: the run was killed or is still going on")
    elif facts.run_outcome not in (None, "finished"):
        problems.append(f"the run was {facts.run_outcome}: what it had not begun is not judged")
    return {"schema": SCHEMA, "verdicts": verdicts, "complete": complete, "problems": problems}


def _never_begun(facts: Facts) -> list[dict[str, Any]]:
    """Scenarios that were asked for by name and of which the record holds nothing."""
    run = facts.header.get("run")
    given = run.get("names") if isinstance(run, Mapping) else None
    names = given if isinstance(given, list) else []
    begun = {(item.scenario, item.variant) for item in facts.passes}
    asked = dict.fromkeys(parsed(name) for name in names if isinstance(name, str))
    left = [key for key in asked if key[0].isidentifier() and key not in begun]
    why = f"the run ended before it began{lab_saw(facts)}"
    texts = {key: f"{called(*key)} was asked for, but {why}" for key in left}
    return [
        _written(facts, Pass(*key, None), Candidate(Verdict(ERROR, text), None, frozenset()))
        for key, text in texts.items()
    ]


def _judge_scenario(facts: Facts, scenario: str, variant: str, failure: str) -> dict[str, Any]:
    labels = (scenario, variant, failure)
    passes = {
        item.control: item for item in facts.passes if (item.scenario, item.variant, item.failure) == labels
    }
    main = passes.pop(None, None) or Pass(scenario, variant, None, failure)
    found = decide(facts, main, passes)
    found.verdict = _as_booted(facts, found.verdict)
    return _written(facts, main, found)


def _as_booted(facts: Facts, verdict: Verdict) -> Verdict:
    """Unmet where the boot did not give what `--boot` asked for: the run was not on the machine asked for."""
    lab = facts.header.get("lab")
    boot = lab.get("boot") if isinstance(lab, Mapping) else None
    given = boot if isinstance(boot, list) else []
    lacks = [event for event in facts.not_given if event.argument in given]
    if not lacks or verdict.verdict == ERROR:
        return verdict
    how = "mend the argument, give the machine more --memory, or take another kernel"
    found = [
        unmet(BOOT_NEED, f"--boot {event.argument}: {event.why or 'the kernel did not give it'}", how)
        for event in lacks
    ]
    needs = [need for item in found for need in item.unmet]
    return Verdict(UNMET, found[0].reason, checks=verdict.checks, unmet=needs)


def _written(facts: Facts, main: Pass, found: Candidate) -> dict[str, Any]:
    verdict, registration = found.verdict, found.registration
    owner = verdict.pin_owner or _pin_owner(facts, main, registration)
    item: dict[str, Any] = {
        "scenario": main.scenario,
        "variant": main.variant,
        **({"failure": main.failure} if main.failure else {}),
        "verdict": verdict.verdict,
        "pin_owner": owner,
        "basis": verdict.basis,
        "errno": registration.errno if registration is not None else verdict.errno,
        "layer": verdict.layer.name if verdict.layer else None,
        "registration": registration.id if registration is not None and not registration.in_series else None,
        "reason": verdict.reason,
        "contract": main.contract or None,
        "declared": declared(main.declared.expects if main.declared else {}, main.contract, facts.kernel),
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
