"""Facts → verdicts: which registration is under test, what its outcome means, and the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regrepro.judge import rules
from regrepro.judge.declared import as_declared, declared
from regrepro.judge.facts import Facts, Pass, Pin, RecordLike, Registration, collect
from regrepro.judge.layers import Layer, blocked_in_device, classify, classify_pin, memory_cgroup
from regrepro.judge.questions import BOOT_NEED
from regrepro.judge.rules import CONTRADICTED, Case, Check, Contract, pin_contract
from regrepro.judge.spans import Spans
from regrepro.judge.watched import CAUGHT, judge_watched

SCHEMA = "regrepro.verdicts/1"
RECORD_SCHEMA = "regrepro.record/1"
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
    bug_class: dict[str, Any] | None = None
    pin_owner: str | None = None


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


def _never_begun(facts: Facts) -> list[dict[str, Any]]:
    """Scenarios that were asked for by name and of which the record holds nothing."""
    run = facts.header.get("run")
    given = run.get("names") if isinstance(run, Mapping) else None
    names = given if isinstance(given, list) else []
    begun = {item.scenario for item in facts.passes}
    left = [
        name
        for name in dict.fromkeys(name for name in names if isinstance(name, str))
        if name.isidentifier() and name not in begun
    ]
    seen = "; ".join(str(item.get("what")) for item in facts.lab if item.get("what") not in (None, "boot"))
    why = f"the run ended before it began{f' ({seen})' if seen else ''}"
    return [
        _written(
            facts, Pass(name, "default", None), None, Verdict(ERROR, f"{name} was asked for, but {why}"), []
        )
        for name in left
    ]


def _judge_scenario(facts: Facts, scenario: str, variant: str) -> dict[str, Any]:
    passes = {
        item.control: item for item in facts.passes if (item.scenario, item.variant) == (scenario, variant)
    }
    main = passes.pop(None, None) or Pass(scenario, variant, None)
    registration = under_test(main)
    verdict, controls = _decide(facts, main, registration, passes)
    verdict = _as_booted(facts, verdict)
    return _written(facts, main, registration, verdict, controls)


def _as_booted(facts: Facts, verdict: Verdict) -> Verdict:
    """Unmet where the boot did not give what `--boot` asked for: the run was not on the machine asked for."""
    lab = facts.header.get("lab")
    boot = lab.get("boot") if isinstance(lab, Mapping) else None
    given = boot if isinstance(boot, list) else []
    lacks = [event for event in facts.not_given if event.get("argument") in given]
    if not lacks or verdict.verdict == ERROR:
        return verdict
    needs = [
        {
            "need": BOOT_NEED,
            "why": f"--boot {event['argument']}: {event.get('why') or 'the kernel did not give it'}",
            "how": "mend the argument, give the machine more --memory, or take another kernel",
        }
        for event in lacks
    ]
    found = _unmet(*(needs[0][key] for key in ("need", "why", "how")))
    return Verdict(UNMET, found.reason, checks=verdict.checks, unmet=needs)


def under_test(run: Pass) -> Registration | None:
    """The registration that decides: the first that failed before a pin was released.

    If none failed, the first on a buffer that was asked to be unpinnable, else on one that was pinned before,
    else the first of all.
    """
    released = [pin.release.seq for pin in run.pins.values() if pin.release is not None]
    first_release = min(released, default=None)
    candidates = [item for item in run.registrations if first_release is None or item.seq < first_release]
    for item in candidates:
        if not item.succeeded:
            return item
    if candidates:
        return min(candidates, key=lambda item: (_aside(run, item), item.seq))
    return run.registrations[0] if run.registrations else None


def _aside(run: Pass, registration: Registration) -> int:
    """How far a registration is from what matters: 0 unpinnable was asked for, 1 pinned, 2 neither."""
    buffer = run.buffers.get(registration.buffer)
    if buffer is not None and buffer.asks_unpinnable:
        return 0
    pinned = any(
        pin.buffer == registration.buffer and pin.seq < registration.seq and pin.errno is None
        for pin in run.pins.values()
    )
    return 1 if pinned else 2


def _decide(
    facts: Facts, main: Pass, registration: Registration | None, others: Mapping[str | None, Pass]
) -> tuple[Verdict, list[dict[str, Any]]]:
    broken = _broken(facts, main)
    if broken is not None:
        return broken, _controls(facts, main, None, others)
    failed_pin = next((pin for pin in main.pins.values() if pin.errno is not None), None)
    if failed_pin is not None and (registration is None or failed_pin.seq < registration.seq):
        layer = classify_pin(facts, main, failed_pin)
        reason = f"the pin itself failed with {failed_pin.errno} ({layer.name}: {layer.why})"
        return Verdict(OTHER_FAILURE, reason, layer=layer), _controls(facts, main, None, others)
    if registration is None:
        why, how = "no registration was tried", "let the scenario register its buffer"
        return _unmet("registration", why, how), _controls(facts, main, None, others)
    if main.watched:
        return _caught(facts, main, registration), []
    if registration.succeeded:
        return _decide_success(facts, main, registration, others)
    return _decide_failure(facts, main, registration, others)


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


def _broken(facts: Facts, run: Pass) -> Verdict | None:
    """The harness failed, or a precondition was not met: nothing further is judged."""
    if not run.begun:
        return Verdict(ERROR, "the record holds no beginning of this scenario")
    end = run.end or {}
    outcome = end.get("outcome")
    for layer in (memory_cgroup(run), blocked_in_device(run)):
        if layer is not None:
            return Verdict(OTHER_FAILURE, layer.why, layer=layer)
    if run.exception is not None:
        event = run.exception
        where = f" ({event.get('file')}:{event.get('line')})" if event.get("file") else ""
        return Verdict(
            ERROR, f"{event.get('type') or 'an exception'}: {event.get('text') or 'no text'}{where}"
        )
    if run.unmet is not None:
        need, why, how = (str(run.unmet.get(key) or "") for key in ("need", "why", "how"))
        return _unmet(need or "a precondition", why or "no reason recorded", how)
    if run.end is None:
        seen = "; ".join(str(item.get("what")) for item in facts.lab if item.get("what") != "boot")
        return Verdict(ERROR, f"the record ends in the middle of this scenario{f' ({seen})' if seen else ''}")
    if outcome == "killed":
        return Verdict(ERROR, f"the scenario was killed by {end.get('signal') or 'a signal'}")
    if outcome == "timeout":
        return Verdict(ERROR, "the scenario did not end within its time limit and was killed")
    if outcome == "blocked":
        return Verdict(
            ERROR, "the scenario waits in the kernel and cannot be killed; what it waits for is not known"
        )
    if outcome == "unmet":
        return _unmet("a precondition", "the record does not say which", "run it again")
    if outcome != "finished":
        return Verdict(ERROR, f"the scenario ended in a way this version does not know: {outcome}")
    return None


def _unmet(need: str, why: str, how: str) -> Verdict:
    reason = f"{need} is not met: {why}" + (f" ({how})" if how else "")
    return Verdict(UNMET, reason, unmet=[{"need": need, "why": why, "how": how}])


def _unmet_checks(checks: list[Check]) -> Verdict:
    first = checks[0]
    more = f"; and {len(checks) - 1} more" if len(checks) > 1 else ""
    reason = f"not proven: {first.text}{f' ({first.how})' if first.how else ''}{more}"
    items = [{"need": check.name, "why": check.text, "how": check.how} for check in checks]
    return Verdict(UNMET, reason, checks=checks, unmet=items)


def _decide_failure(
    facts: Facts, main: Pass, registration: Registration, others: Mapping[str | None, Pass]
) -> tuple[Verdict, list[dict[str, Any]]]:
    controls = _controls(facts, main, registration, others)
    layer = classify(facts, main, registration)
    what = f"{registration.verb} failed with {registration.errno}"
    if registration.errno != "ENOMEM" or layer.name not in ("unknown", "page-migration"):
        return Verdict(
            OTHER_FAILURE, f"{what}, and not by this bug ({layer.name}: {layer.why})", layer=layer
        ), controls
    buffer = main.buffers.get(registration.buffer)
    if buffer is None:
        return Verdict(
            OTHER_FAILURE, f"{what} on a range that is no buffer of the scenario", layer=layer
        ), controls
    case = Case(facts, main, registration, buffer)
    if not case.plain:
        why = "no pin without FOLL_LONGTERM was held on these pages"
        return Verdict(OTHER_FAILURE, f"{what}, but {why} ({layer.name}: {layer.why})", layer=layer), controls
    checks = rules.prove(case)
    contradicted = [check for check in checks if check.state == CONTRADICTED]
    if contradicted:
        if layer.name == "page-migration":
            layer = Layer("unknown", contradicted[0].text, "missing")
        reason = f"{what}, but this bug is not what the evidence shows: {contradicted[0].text}"
        return Verdict(OTHER_FAILURE, reason, layer=layer, checks=checks), controls
    missing = [check for check in checks if not check.ok]
    missing += _control_checks(controls)
    if missing:
        return _unmet_checks(missing), controls
    found = Layer(
        "page-migration", "the pinned pages would not move", "observed", "__migrate_folio, mm/migrate.c"
    )
    return Verdict(REPRODUCED, _reproduced_because(case), layer=found, checks=checks), controls


def _control_checks(controls: list[dict[str, Any]]) -> list[Check]:
    if not controls:
        return [Check("control", rules.MISSING, "no control was run", "declare one in the scenario file")]
    return [
        Check(
            "control",
            rules.MISSING,
            f"control {item['name']}: {item['reason']}",
            "run it again with its controls",
        )
        for item in controls
        if not item["held"]
    ]


def _places(case: Case) -> str:
    before = case.registration.before
    names = [
        name for name in ("cma", "movable-zone", "isolate") if before and case.stuck & before.placed(name)
    ]
    words = {"cma": "CMA pageblocks", "movable-zone": "ZONE_MOVABLE", "isolate": "isolated pageblocks"}
    return " and ".join(words[name] for name in names) or "unpinnable memory"


def _reproduced_because(case: Case) -> str:
    owner = case.plain[0].owner
    held = "a reference" if case.plain[0].kind == "get" else "a pin"
    count = f"{case.stuck.total} of {case.registration.spans.total} pages in {_places(case)}"
    what = f"{case.registration.verb} failed with ENOMEM because"
    if owner == "cuda":
        driver = case.facts.node.get("nvidia_driver") or "of unknown version"
        return f"NVIDIA driver {driver} pins without FOLL_LONGTERM: {what} its pin kept {count} from moving"
    if owner == "own-code":
        return f"{case.plain[0].api} pins without FOLL_LONGTERM: {what} its pin kept {count} from moving"
    return (
        f"this kernel, with this placement, is susceptible: {what} {held} by {owner} kept {count} from moving"
    )


def _decide_success(
    facts: Facts, main: Pass, registration: Registration, others: Mapping[str | None, Pass]
) -> tuple[Verdict, list[dict[str, Any]]]:
    failed_transfer = next(
        (event for event in main.transfers if event.get("errno") or event.get("intact") is False), None
    )
    if failed_transfer is not None:
        errno = failed_transfer.get("errno")
        became = f"failed with {errno}" if errno else "changed the bytes"
        why = f"{failed_transfer.get('opcode')} through the MR {became}"
        layer = Layer("device" if errno else "unknown", why, "observed" if errno else "missing")
        verdict = Verdict(OTHER_FAILURE, f"the registration succeeded, but {why}", layer=layer)
        return verdict, _controls(facts, main, registration, others)
    buffer = main.buffers.get(registration.buffer)
    if buffer is None:
        verdict = _unmet(
            "buffer", "the registered range is no buffer of the scenario", "register a stage buffer"
        )
        return verdict, _controls(facts, main, registration, others)
    case = Case(facts, main, registration, buffer)
    checks = [rules.whole_record(case), *_pin_checks(case)]
    verdict = _basis(case, checks)
    expect_failure = verdict.basis == "pin" or (not case.plain and case.unpinnable.total > 0)
    controls = _controls(facts, main, registration, others, expect_failure=expect_failure)
    if verdict.basis == "pin" and any(_plain_pin_allowed(item) for item in controls):
        verdict.basis = "kernel"
        verdict.reason = (
            f"{verdict.reason}; the control shows that this kernel registers it with a plain pin as well"
        )
    return verdict, controls


def _plain_pin_allowed(control: Mapping[str, Any]) -> bool:
    return (
        control["changed"] in ("pin=pin", "pin=get")
        and control["got"] == "success"
        and bool(control["valid"])
    )


def _pin_checks(case: Case) -> list[Check]:
    """The pins that were held when a registration succeeded were still alive after it."""
    checks: list[Check] = []
    for pin in case.held:
        flaw = rules.not_alive(case, pin)
        if flaw:
            how = "keep the pin until the registration has returned"
            checks.append(Check("pin", rules.MISSING, flaw, how))
    taken = [pin for pin in case.run.pins.values() if pin.kind != "none"]
    if case.run.contract != "none" and not taken:
        checks.append(Check("pin", rules.MISSING, "no pin was ever taken", "let the scenario pin its buffer"))
    elif taken and not case.held and not any(pin.seq > case.registration.seq for pin in taken):
        why = "no pin was held on these pages when they were registered, and none was taken after"
        checks.append(Check("pin", rules.MISSING, why, "register while the pin is held"))
    return checks


def _basis(case: Case, checks: list[Check]) -> Verdict:
    """What a registration that succeeded rests on, or what is not proven."""
    memory_map, buffer = case.facts.memory_map, case.buffer
    if buffer.on_gpu:
        missing = [check for check in checks if not check.ok]
        if missing:
            return _unmet_checks(missing)
        reason = (
            f"{case.registration.verb} succeeded: memory of the GPU has no host page that this bug could hold"
        )
        return Verdict(NOT_REPRODUCED, reason, basis="kernel", checks=checks)
    needs = case.run.declared.get("needs")
    asks = buffer.asks_unpinnable or (isinstance(needs, list) and "unpinnable" in needs)
    what = f"{case.registration.verb} succeeded"
    before = case.registration.before
    if memory_map is not None and memory_map.complete and memory_map.has_unpinnable is False:
        ordinary = before is not None and case.registration.spans <= before.placed("ordinary", "absent")
        if not ordinary:
            text = "the pages were not provably ordinary, although the memory map knows no unpinnable memory"
            checks.append(Check("placement", rules.MISSING, text, "run as root"))
        missing = [check for check in checks if not check.ok]
        if missing:
            return _unmet_checks(missing)
        nothing = "this node has no unpinnable memory, so no page had to move; this says nothing of a driver"
        reason = f"{what}: {nothing}"
        return Verdict(NOT_REPRODUCED, reason, basis="placement", checks=checks)
    if not asks:
        missing = [check for check in checks if not check.ok]
        if missing:
            return _unmet_checks(missing)
        reason = (
            f"{what}: the kernel allowed it; no unpinnable memory was asked for, so this bug was not tried"
        )
        return Verdict(NOT_REPRODUCED, reason, basis="kernel", checks=checks)
    moved_first = _moved_by_pin(case)
    if moved_first is not None:
        pin, contract = moved_first
        if contract.kind != "longterm":
            checks.append(
                Check(
                    "pin contract",
                    rules.MISSING,
                    f"the pages moved, but {contract.why}",
                    "run as root, without a fork",
                )
            )
        missing = [check for check in checks if not check.ok]
        if missing:
            return _unmet_checks(missing)
        whose = (
            f"NVIDIA driver {case.facts.node.get('nvidia_driver') or 'of unknown version'}"
            if pin.owner == "cuda"
            else pin.api
            if pin.owner == "own-code"
            else pin.owner
        )
        reason = f"{what}: the pin of {whose} asked for FOLL_LONGTERM ({contract.why})"
        return Verdict(NOT_REPRODUCED, reason, basis="pin", checks=checks)
    checks += _kernel_checks(case)
    missing = [check for check in checks if not check.ok]
    if missing:
        return _unmet_checks(missing)
    return Verdict(NOT_REPRODUCED, f"{what}: {_kernel_allowed(case)}", basis="kernel", checks=checks)


def _moved_by_pin(case: Case) -> tuple[Pin, Contract] | None:
    """The held pin that moved unpinnable pages when it was taken, and what that says."""
    for pin in case.held:
        if pin.before is None and pin.after is not None:
            contract = pin_contract(case.buffer, pin)
            if contract.kind == "longterm":
                return pin, contract
        if pin.before is None or pin.after is None:
            continue
        if pin.before.unpinnable & pin.spans & case.registration.spans & pin.before.moved(pin.after):
            return pin, pin_contract(case.buffer, pin)
    return None


def _kernel_checks(case: Case) -> list[Check]:
    """That the kernel was asked at all: unpinnable pages, held by the pin that the scenario promises, or by
    none.
    """
    how = "run as root: the pageblock map needs /proc/kcore and /proc/self/pagemap"
    registration = case.registration
    before, after = registration.before, registration.after
    if before is None or after is None:
        why = registration.pages_unknown or "the pages were not read before and after the registration"
        return [Check("placement", rules.MISSING, why, how)]
    if not case.unpinnable:
        return [
            Check(
                "placement", rules.MISSING, "no page was provably unpinnable when the registration began", how
            )
        ]
    if not case.held:
        return []
    mine = Spans.of(pair for pin in case.held for pair in pin.spans.pairs) & case.unpinnable
    if not mine:
        return [Check("placement", rules.MISSING, "none of the pinned pages was unpinnable", how)]
    checks = []
    for when, state in (("before", before), ("after", after)):
        shared = before.shared & before.moved(after)
        look = mine - shared if when == "after" else mine
        for pin in case.held:
            wanted = pin.spans & look
            least = 1 if pin.kind == "get" else rules.PIN_BIAS
            if wanted - (state.known("refcount") | state.known("pincount")):
                text = f"the reference counts {when} the registration are not known"
                checks.append(
                    Check(
                        "references",
                        rules.MISSING,
                        text,
                        "run as root: struct page is read through /proc/kcore",
                    )
                )
            elif wanted - rules.held_now(state, case.buffer, wanted, least):
                text = f"the references of pin {pin.id} were not seen on its pages {when} the registration"
                checks.append(Check("references", rules.MISSING, text, "run it again"))
    gone = (mine & before.moved(after)) - before.shared
    if gone:
        text = f"pinned page {gone} moved, so the pin did not hold it"
        checks.append(Check("movement", rules.MISSING, text, "run it again"))
    return checks


def _kernel_allowed(case: Case) -> str:
    registration = case.registration
    assert registration.before is not None and registration.after is not None
    moved = case.unpinnable & registration.before.moved(registration.after)
    count = case.unpinnable.total
    later = [pin for pin in case.run.pins.values() if pin.errno is None and pin.seq > registration.seq]
    if not case.held:
        when = "before any pin was taken" if later else "while no pin held them"
        if moved:
            return f"the kernel moved {_pages(moved.total)} out of unpinnable memory {when}"
        return f"this kernel pinned {_pages(count)} in place, in unpinnable memory, {when}"
    if moved:
        return f"the pages were shared after a fork, so the registration copied {moved.total} of them"
    return f"this kernel pins {_pages(count)} in place, in unpinnable memory, although a pin is held on them"


def _pages(count: int) -> str:
    return "1 page" if count == 1 else f"{count} pages"


def _controls(
    facts: Facts,
    main: Pass,
    registration: Registration | None,
    others: Mapping[str | None, Pass],
    *,
    expect_failure: bool = False,
) -> list[dict[str, Any]]:
    """Judge every control that was declared or run. It must give the opposite of the main registration."""
    given = main.declared.get("controls")
    changes = {str(name): str(change) for name, change in given.items()} if isinstance(given, Mapping) else {}
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
    result: dict[str, Any] = {
        "name": name,
        "changed": changed,
        "expected": expected,
        "got": "nothing",
        "held": False,
    }
    result["valid"] = False

    def told(reason: str) -> dict[str, Any]:
        return {**result, "reason": reason}

    if run is None:
        return told("it was not run")
    broken = _broken(facts, run)
    if broken is not None:
        return told(broken.reason)
    if run.problems:
        return told(f"its record has a flaw: {run.problems[0]}")
    registration = under_test(run)
    if registration is None:
        return told("it registered nothing")
    result["got"] = "success" if registration.succeeded else "failure"
    result["errno"] = registration.errno
    case = None
    if registration.buffer in run.buffers:
        case = Case(facts, run, registration, run.buffers[registration.buffer])
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
        bad = next((check for check in rules.prove(case) if not _holds_in_control(check)), None)
        if bad is not None:
            return told(f"it failed, but not provably by this bug: {bad.text}")
    result["held"] = True
    return told(f"{expected}, as it must be")


def _holds_in_control(check: Check) -> bool:
    return check.ok or (check.name == "release" and check.state == rules.MISSING)


def _control_flaw(case: Case, changed: str, main: Case | None) -> str:
    """Why a control does not differ from its scenario in the one variable alone, or an empty string."""
    registration = case.registration
    before, after = registration.before, registration.after
    variable, _, value = changed.partition("=")
    same = main is None or (main.registration.verb, main.registration.length) == (
        registration.verb,
        registration.length,
    )
    if changed == "not declared":
        return "what it changes is not in the record"
    if variable in ("pin", "place") and not same:
        return "it made another call than its scenario"
    if before is None:
        return "its pages were not read"
    if variable == "pin" and value == "none":
        if case.run.held(registration.seq, case.buffer.id):
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
            moved = _moved_by_pin(case)
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


def _written(
    facts: Facts,
    main: Pass,
    registration: Registration | None,
    verdict: Verdict,
    controls: list[dict[str, Any]],
) -> dict[str, Any]:
    from regrepro.judge.evidence import gather

    owner = verdict.pin_owner or _pin_owner(main, registration)
    item: dict[str, Any] = {
        "scenario": main.scenario,
        "variant": main.variant,
        "verdict": verdict.verdict,
        "pin_owner": owner,
        "basis": verdict.basis,
        "errno": registration.errno if registration is not None else _failed_errno(main),
        "layer": verdict.layer.name if verdict.layer else None,
        "reason": verdict.reason,
        "contract": main.contract or None,
        "declared": declared(main.declared.get("expects"), main.contract, facts.kernel),
        "as_declared": None,
        "evidence": gather(facts, main, registration, verdict.layer),
        "controls": controls,
        "checks": [{"name": c.name, "state": c.state, "text": c.text} for c in verdict.checks],
        "unmet": verdict.unmet,
    }
    if verdict.bug_class is not None:
        item["class"] = verdict.bug_class
    if owner == "cuda":
        item["driver"] = facts.node.get("nvidia_driver")
    item["as_declared"] = as_declared(item)
    return item


def _failed_errno(run: Pass) -> str | None:
    return next((pin.errno for pin in run.pins.values() if pin.errno is not None), None)


def _pin_owner(run: Pass, registration: Registration | None) -> str:
    """Who held the pin under which the registration was made; else who took one in this pass; else none."""
    pins = [pin for pin in run.pins.values() if pin.kind != "none"]
    if registration is not None:
        pins = run.held(registration.seq, registration.buffer) or pins
    return pins[0].owner if pins else "none"
