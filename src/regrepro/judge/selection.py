"""Which of all that a pass did is its verdict: every registration is judged, and the worst that is proven
counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regrepro.judge import consistency
from regrepro.judge.controls import best_success, judge_controls, under_test, unheld
from regrepro.judge.facts import Facts, Pass, Registration
from regrepro.judge.failure import judge_failure
from regrepro.judge.layers import classify_pin
from regrepro.judge.narrowing import Layer
from regrepro.judge.outcome import (
    NOT_REPRODUCED,
    OTHER_FAILURE,
    REPRODUCED,
    UNMET,
    Verdict,
    broken,
    unmet,
    unmet_checks,
)
from regrepro.judge.owners import owner_of
from regrepro.judge.rules import CONTRADICTED, OK, Case, Check
from regrepro.judge.success import judge_success
from regrepro.judge.watched import CAUGHT, judge_watched


@dataclass
class Candidate:
    """What one step of a pass shows. `seqs`: the events that this rests on."""

    verdict: Verdict
    registration: Registration | None
    seqs: frozenset[int]
    controls: list[dict[str, Any]] | None = None

    @property
    def rank(self) -> tuple[int, int, int]:
        """The lowest of a pass is its verdict: what is proven before what is not, failures before successes,
        then what lacks least, then what came first.
        """
        failed = self.registration is None or not self.registration.succeeded
        order = {REPRODUCED: 0, UNMET: 1 if failed else 3, OTHER_FAILURE: 2, NOT_REPRODUCED: 4}
        return order[self.verdict.verdict], len(self.verdict.unmet), min(self.seqs, default=0)


def decide(facts: Facts, main: Pass, others: Mapping[str | None, Pass]) -> Candidate:
    """Judge a scenario: the finding that is its verdict, with its controls."""
    ended = broken(facts, main)
    if ended is not None:
        found = Candidate(ended, under_test(main), frozenset())
        found.controls = judge_controls(facts, main, None, others)
        return found
    flaws = consistency.flaws(facts, main)
    caught = under_test(main) if main.watched else None
    if caught is not None:
        found = Candidate(_caught(facts, main, caught), caught, frozenset({caught.seq}), [])
        return _undermined(found, flaws)
    findings = [_undermined(found, flaws) for found in _findings(facts, main, others)]
    if not findings:
        why, how = "no registration was tried", "let the scenario register its buffer"
        findings = [Candidate(unmet("registration", why, how), None, frozenset())]
    worst = min(findings, key=lambda found: found.rank)
    if worst.controls is None:
        worst.controls = judge_controls(facts, main, worst.registration, others)
        if worst.verdict.verdict == UNMET and worst.registration is not None:
            worst.verdict.unmet += [check.as_unmet() for check in unheld(worst.controls)]
    return worst


def _undermined(found: Candidate, flaws: list[consistency.Flaw]) -> Candidate:
    """What a finding is worth once the record is held against itself: where its events contradict each other
    it decides nothing.
    """
    own = consistency.touching(flaws, found.seqs)
    if not own:
        text = "no two sources of the record contradict each other"
        found.verdict.checks.append(Check(consistency.NAME, OK, text))
        return found
    undecided = unmet_checks(
        [
            Check(consistency.NAME, CONTRADICTED, f"the record contradicts itself: {flaw.text}", flaw.how)
            for flaw in own
        ]
    )
    undecided.checks += found.verdict.checks
    undecided.unmet += found.verdict.unmet
    found.verdict = undecided
    return found


def _findings(facts: Facts, main: Pass, others: Mapping[str | None, Pass]) -> list[Candidate]:
    """All that a pass shows: each pin, registration and transfer that failed; where none did, the success
    that says most of this bug.

    A retry after a release that succeeds is a link of another registration's proof; one that fails is a
    finding of its own.
    """
    found = []
    for pin in main.pins.values():
        if pin.errno is not None:
            layer = classify_pin(facts, main, pin)
            reason = f"the pin itself failed with {pin.errno} ({layer.name}: {layer.why})"
            owner = owner_of(facts, main.buffers[pin.buffer], pin)
            verdict = Verdict(OTHER_FAILURE, reason, layer=layer, errno=pin.errno, pin_owner=owner)
            found.append(Candidate(verdict, None, frozenset({pin.seq})))
    found += [_failed(facts, main, item, others) for item in _failures(main)]
    found += _failed_transfers(main)
    success = best_success(main)
    if success is not None and not found:
        verdict, controls = judge_success(facts, main, success, others)
        found.append(Candidate(verdict, success, _rests_on(facts, main, success), controls))
    return found


def _failures(main: Pass) -> list[Registration]:
    """The registrations that failed. One in a series counts by the try that looked at everything, where that
    failed in the same way.
    """
    failed = [item for item in main.registrations if not item.succeeded]
    tried = {(item.buffer, item.address, item.length, item.errno) for item in failed}
    return failed + [
        item
        for item in main.in_series
        if not item.succeeded and (item.buffer, item.address, item.length, item.errno) not in tried
    ]


def _failed(
    facts: Facts, main: Pass, registration: Registration, others: Mapping[str | None, Pass]
) -> Candidate:
    found = Candidate(
        judge_failure(facts, main, registration), registration, _rests_on(facts, main, registration)
    )
    if found.verdict.verdict == REPRODUCED:
        found.controls = judge_controls(facts, main, registration, others)
        lacking = unheld(found.controls)
        if lacking:
            found.verdict = unmet_checks(lacking)
    return found


def _failed_transfers(main: Pass) -> list[Candidate]:
    found = []
    for event in main.transfers:
        errno = event.errno
        if not errno and event.intact is not False:
            continue
        became = f"failed with {errno}" if errno else "changed the bytes"
        why = f"{event.opcode} through the MR {became}"
        layer = Layer("device" if errno else "unknown", why, "observed" if errno else "missing")
        verdict = Verdict(OTHER_FAILURE, f"the registration succeeded, but {why}", layer=layer)
        made = next((item for item in main.registrations if item.id == event.registration), None)
        seqs = {event.seq, made.seq} if made is not None else {event.seq}
        found.append(Candidate(verdict, made, frozenset(seqs)))
    return found


def _rests_on(facts: Facts, main: Pass, registration: Registration) -> frozenset[int]:
    buffer = main.buffers.get(registration.buffer)
    if buffer is None:
        return frozenset({registration.seq})
    return Case(facts, main, registration, buffer).seqs


def _caught(facts: Facts, main: Pass, registration: Registration) -> Verdict:
    """A failure of somebody's program: this bug as far as it can be told without trying again, or another."""
    found = judge_watched(facts, main, registration)
    if not found.state:
        return Verdict(OTHER_FAILURE, found.reason, layer=found.layer, checks=found.checks)
    bug = {"name": "B", "state": found.state, "missing": found.missing}
    return Verdict(
        CAUGHT,
        found.reason,
        layer=found.layer,
        checks=found.checks,
        bug_class=bug,
        pin_owner=found.pin_owner,
    )
