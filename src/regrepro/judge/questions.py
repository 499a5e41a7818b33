"""What a run answers: one of four questions, its exit code, and the line that says both.

Pure, over what `judge_record` gives and the record's header. How each verdict stands to the question is
decided in one place, `standing`: a run's exit code, `compare` and the tests of pytest rest on it alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regrepro.errors import (
    EXIT_DECIDED,
    EXIT_OTHER_FAILURE,
    EXIT_REPRODUCED,
    EXIT_UNDECIDED,
    UsageError,
)
from regrepro.judge.names import name_of, names_of

QUESTIONS = {
    "reproduce": "was this bug seen here?",
    "driver": "does this driver's pin keep pages in unpinnable memory?",
    "kernel": "does this kernel fail a registration of unpinnable memory that is pinned short-term?",
    "node": "does a registration fail on this node as it is?",
}
DECLARED = "declared"
"""In the place of a question: `--expect declared` holds verdicts against the scenario files."""
OPTIONAL_NEEDS = ("peer-memory", "dmabuf")
"""Needs that a healthy node may lack: nvidia-peermem, and dma-buf."""
BOOT_NEED = "boot"
"""The need of a run whose boot gave not what `--boot` asked for. Nothing can allow it."""
ALL = "all"
"""In the place of a need: whatever was not met is allowed (pytest's bare `--regrepro-allow-unmet`)."""

GOOD, BAD, OTHER, UNDECIDED, SILENT, ASIDE = "good", "bad", "other", "undecided", "silent", "aside"

_MEANING = {
    "reproduce": {
        EXIT_DECIDED: "nothing was reproduced, and everything was decided",
        EXIT_REPRODUCED: "something was reproduced",
        EXIT_OTHER_FAILURE: "something failed for another cause, and nothing was reproduced",
    },
    "driver": {
        EXIT_DECIDED: "its pin was tried on unpinnable memory, and moved the pages out first",
        EXIT_REPRODUCED: "its pin keeps pages in unpinnable memory",
    },
    "kernel": {
        EXIT_DECIDED: "it was tried on unpinnable memory, under a short-term pin, and allowed",
        EXIT_REPRODUCED: "it was tried, and refused",
    },
    "node": {
        EXIT_DECIDED: "all that is required succeeded",
        EXIT_REPRODUCED: "a registration failed by this bug",
        EXIT_OTHER_FAILURE: "something failed for another cause, and nothing by this bug",
    },
    DECLARED: {
        EXIT_DECIDED: "all as the scenario files declare",
        EXIT_REPRODUCED: "something is not as its scenario file declares",
    },
}
_UNDECIDED_MEANS = "it cannot be told from this run"
_OF_PLACE = ("unpinnable", "cma", "movable-zone")
# A missing one of these leaves untouched what a pin did to its pages (`rules.measured_contract`).
_BESIDE_THE_CONTRACT = frozenset({"trace", "release", "control"})


@dataclass(frozen=True)
class Standing:
    """How one verdict stands to a question.

    `state`: `good` (it shows "no"), `bad` (it shows "yes"), `other` (a failure for another cause),
    `undecided`, `silent` (it says nothing of this question), `aside` (unmet, and not required). `need`: what
    the last three lack.
    """

    state: str
    why: str
    need: str = ""


@dataclass(frozen=True)
class Answer:
    """What a run says to a question. `text`: the answer and its ground."""

    question: str
    code: int
    text: str

    @property
    def line(self) -> str:
        """The question, the answer, and what the exit code means: one line."""
        asked = QUESTIONS.get(self.question, "is all as the scenario files declare?")
        means = _MEANING[self.question].get(self.code, _UNDECIDED_MEANS)
        return f"Asked {self.question} ({asked}): {self.text}. Exit code {self.code}: {means}."

    def as_json(self) -> dict[str, Any]:
        """Return the keys beside the verdicts in what `--json` prints."""
        return {"question": self.question, "answer": self.text, "exit_code": self.code}


def check_terms(
    require: Iterable[str], allow_unmet: Iterable[str], *, scenarios: Iterable[str], needs: Iterable[str]
) -> None:
    """Check what `--require` and `--allow-unmet` name, against what there is. Raises `UsageError`."""
    scenarios, needs, require, allow_unmet = list(scenarios), list(needs), list(require), list(allow_unmet)
    terms = {"--require": (require, [*scenarios, *needs]), "--allow-unmet": (allow_unmet, needs)}
    for option, (given, known) in terms.items():
        for name in given:
            if name not in known and not name.startswith(("kernel>", "kernel<", "kernel=")):
                hint = f"there are {', '.join(dict.fromkeys(known))}"
                raise UsageError(f"{option} {name} is not known", hint=hint)
    for name in (item for item in require if item in allow_unmet):
        text = f"--require {name} and --allow-unmet {name} exclude each other"
        raise UsageError(text, hint="leave one out")


def check_declared(require: Iterable[str], scenarios: Mapping[str, Iterable[str]]) -> None:
    """Check that of each required need a scenario can tell; `scenarios`: each with its needs."""
    declared = {need for needs in scenarios.values() for need in needs}
    told = {*scenarios, *declared, "cuda", *(["rdma"] if "registrar" in declared else [])}
    told |= {"kernel" for need in declared if need.startswith("kernel")}
    for name in require:
        if name not in told:
            raise UsageError(
                f"--require {name}: no scenario of this run has that need, so none tells whether it is met",
                hint=f"they need {', '.join(sorted(declared)) or 'nothing'}",
            )


def standing(
    item: Mapping[str, Any],
    question: str,
    header: Mapping[str, Any],
    *,
    require: Sequence[str] = (),
    allow_unmet: Sequence[str] = (),
) -> Standing:
    """Return how a verdict stands to a question."""
    verdict, reason = str(item.get("verdict")), str(item.get("reason") or "")
    allowed = {*allow_unmet, *(need for need in OPTIONAL_NEEDS if need not in require)}
    needs = _unmet_needs(item)
    aside = (
        verdict == "unmet"
        and set(names_of(item)).isdisjoint(require)
        and bool(needs)
        and all(_is_allowed(need, allowed) for need in needs)
    )
    decide = {"driver": _of_a_driver, "kernel": _of_the_kernel}.get(question, _of_the_bug)
    found = decide(item, header)
    if question == "node" and found.state == GOOD and "rdma" not in allow_unmet and without_rdma(item):
        found = Standing(UNDECIDED, "no RDMA device registered anything, io_uring did in its place", "rdma")
    if found.state in (UNDECIDED, SILENT) and aside:
        return Standing(ASIDE, reason, needs[0])
    return found


def answer(
    verdicts: Mapping[str, Any],
    question: str = "reproduce",
    header: Mapping[str, Any] | None = None,
    *,
    require: Sequence[str] = (),
    allow_unmet: Sequence[str] = (),
) -> Answer:
    """Answer a question by the verdicts of a run and the header of its record.

    A run that did not reach its end, or has no verdict, is undecided unless it found something.
    """
    items = _items(verdicts)
    terms: dict[str, Any] = {"require": require, "allow_unmet": allow_unmet}
    stands = [(name_of(item), item, standing(item, question, header or {}, **terms)) for item in items]

    def of(*states: str) -> list[tuple[str, Mapping[str, Any], Standing]]:
        return [entry for entry in stands if entry[2].state in states]

    bad, other, good = of(BAD), of(OTHER), of(GOOD)
    if bad:
        return Answer(question, EXIT_REPRODUCED, f"yes, {_told(bad)}")
    if other and question in ("reproduce", "node"):
        no = "no, but a failure for another cause" if question == "reproduce" else "yes, for another cause"
        return Answer(question, EXIT_OTHER_FAILURE, f"{no}: {_told(other)}")
    undecided = of(UNDECIDED)
    lacks = [
        entry
        for entry in of(SILENT, ASIDE)
        if not set(require).isdisjoint([*names_of(entry[1]), *_unmet_needs(entry[1])])
    ]
    if undecided or lacks:
        return Answer(question, EXIT_UNDECIDED, f"not told, {_told([*undecided, *lacks])}")
    if lacking := ", ".join(not_shown(require, items)):
        why = f"not told, no scenario shows what is required: {lacking}"
        return Answer(question, EXIT_UNDECIDED, why)
    if not good:
        silent = of(SILENT) or of(ASIDE)
        why = _told(silent) if silent else "no scenario ran"
        return Answer(question, EXIT_UNDECIDED, f"not told, {why}")
    if verdicts.get("complete") is False:
        return Answer(question, EXIT_UNDECIDED, "not told, the run did not reach its end")
    return Answer(question, EXIT_DECIDED, f"no, {_told(good)}")


def declared_answer(verdicts: Mapping[str, Any]) -> Answer:
    """Return whether every verdict is what its scenario file declares."""
    items = _items(verdicts)
    wrong = [name_of(item) for item in items if item.get("as_declared") is False]
    open_ = [name_of(item) for item in items if item.get("as_declared") is None]
    if wrong:
        return Answer(DECLARED, EXIT_REPRODUCED, f"no, {_names(wrong)} is not as declared")
    if open_ or not items or verdicts.get("complete") is False:
        why = f"{_names(open_)} is undecided" if open_ else "the run did not reach its end"
        return Answer(DECLARED, EXIT_UNDECIDED, f"not told, {why}")
    return Answer(DECLARED, EXIT_DECIDED, f"yes, {len(items)} of {len(items)}")


def exit_code(verdicts: Mapping[str, Any], expect_declared: bool = False) -> int:
    """Return the exit code to `reproduce`, or, with `expect_declared`, to what the scenario files declare."""
    return (declared_answer(verdicts) if expect_declared else answer(verdicts)).code


def not_shown(require: Iterable[str], verdicts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the required needs that no decided verdict shows to be met.

    A scenario can be decided without them: `registrar` takes io_uring for an RDMA device, a pin of our own
    stands where CUDA is not, and `placement` is decided without unpinnable memory.
    """
    words = ("reproduced", "not-reproduced", "other-failure")
    decided = [item for item in verdicts if item.get("verdict") in words]
    shows = {
        "cuda": lambda item: str(item.get("pin_owner")).startswith(("cuda", "standin:")),
        "rdma": lambda item: _value(item, "registrar") is not None and not without_rdma(item),
        **dict.fromkeys(_OF_PLACE, _tried_on_unpinnable),
    }
    return [need for need in require if need in shows and not any(map(shows[need], decided))]


def _tried_on_unpinnable(item: Mapping[str, Any]) -> bool:
    pages = (_value(item, key) for key in ("pages_unpinnable", "pages_moved"))
    return item.get("verdict") == "reproduced" or item.get("basis") == "pin" or any(pages)


# One verdict, one question


def _of_the_bug(item: Mapping[str, Any], _header: Mapping[str, Any]) -> Standing:
    """`reproduce` and `node`: the verdict itself is the answer. Placement counts: nothing had to move."""
    verdict, reason = item.get("verdict"), str(item.get("reason") or "")
    if verdict in ("reproduced", "caught"):
        owner = item.get("pin_owner")
        return Standing(BAD, f"it failed under a pin by {owner}" if owner not in (None, "none") else reason)
    if verdict == "other-failure":
        return Standing(OTHER, f"it failed in layer {item.get('layer') or 'unknown'}")
    if verdict == "not-reproduced":
        return Standing(GOOD, f"it succeeded (basis {item.get('basis')})")
    return Standing(UNDECIDED, reason, next(iter(_unmet_needs(item)), ""))


def _of_a_driver(item: Mapping[str, Any], header: Mapping[str, Any]) -> Standing:
    """Only a pin of the driver tells of the driver, and only where it was tried on unpinnable memory."""
    verdict, reason = item.get("verdict"), str(item.get("reason") or "")
    owner = str(item.get("pin_owner") or "none")
    need = next(iter(_unmet_needs(item)), "")
    if verdict == "unmet" and owner == "none":
        return Standing(SILENT, reason, need)
    if verdict == "error":
        return Standing(UNDECIDED, reason)
    if not _is_driver(owner, header):
        whose = f"{owner} is a stand-in" if owner.startswith("standin:") else f"the pin was by {owner}"
        why = "no pin was taken" if owner == "none" else f"{whose}, which is no driver"
        return Standing(SILENT, why, "cuda")
    contracts = _contracts(item, owner) if _contract_stands(item) else set()
    if verdict == "reproduced" or _caught_proven(item):
        return Standing(BAD, f"{_named(item, owner)} pins without FOLL_LONGTERM")
    if "plain" in contracts:
        return Standing(BAD, f"the pages that {_named(item, owner)} pinned stayed in unpinnable memory")
    if verdict not in ("not-reproduced", "other-failure"):
        return Standing(UNDECIDED, reason, need)
    if verdict == "not-reproduced" and (item.get("basis") == "pin" or "longterm" in contracts):
        return Standing(GOOD, f"{_named(item, owner)} asked for FOLL_LONGTERM")
    if item.get("basis") == "placement":
        return Standing(SILENT, "this node has no unpinnable memory, so no pin was tried there", "unpinnable")
    return Standing(SILENT, f"what the pin of {owner} asked for was not seen")


def _of_the_kernel(item: Mapping[str, Any], _header: Mapping[str, Any]) -> Standing:
    """A short-term pin that was held on unpinnable memory: refused, or allowed. Anybody's pin tells."""
    verdict, reason = item.get("verdict"), str(item.get("reason") or "")
    if verdict == "reproduced" or _caught_proven(item):
        return Standing(BAD, f"refused under a pin by {item.get('pin_owner')}")
    if verdict not in ("not-reproduced", "other-failure"):
        never = verdict == "unmet" and item.get("pin_owner") in (None, "none")
        return Standing(SILENT if never else UNDECIDED, reason, next(iter(_unmet_needs(item)), ""))
    if verdict == "not-reproduced" and item.get("basis") != "placement":
        # A control that puts the pin back is held to the same rules of proof (`verdict._control`).
        for control in _mappings(item.get("controls")):
            if control.get("expected") == "failure" and control.get("valid") is True:
                if control.get("got") == "failure" and control.get("held") is True:
                    return Standing(BAD, f"refused in its control {control.get('name')}")
                if control.get("got") == "success":
                    return Standing(GOOD, f"allowed in its control {control.get('name')}")
        if item.get("basis") == "kernel" and _pinned_in_place(item):
            return Standing(GOOD, f"allowed under a pin by {item.get('pin_owner')}")
    if item.get("basis") == "placement":
        why = "this node has no unpinnable memory, so nothing was tried there"
        return Standing(SILENT, why, "unpinnable")
    return Standing(SILENT, "no short-term pin was held on unpinnable memory")


def _caught_proven(item: Mapping[str, Any]) -> bool:
    bug = item.get("class")
    return item.get("verdict") == "caught" and isinstance(bug, Mapping) and bug.get("state") == "proven"


def _is_driver(owner: str, header: Mapping[str, Any]) -> bool:
    """Whether a pin speaks for a driver: CUDA's, a driver's own source, in the lab the chosen stand-in."""
    if owner in ("cuda", "driver-source"):
        return True
    run = header.get("run")
    chosen = run.get("cuda") if isinstance(run, Mapping) else None
    return owner.startswith("standin:") and owner == chosen and isinstance(header.get("lab"), Mapping)


def _named(item: Mapping[str, Any], owner: str) -> str:
    if owner == "cuda":
        return f"NVIDIA driver {item.get('driver') or 'of unknown version'}"
    return f"{owner} (a stand-in)" if owner.startswith("standin:") else owner


def _contract_stands(item: Mapping[str, Any]) -> bool:
    """Whether what a pin did to its pages is told apart from what made the verdict undecided."""
    if any(check.get("state") == "contradicted" for check in _mappings(item.get("checks"))):
        return False
    verdict = item.get("verdict")
    if verdict == "unmet":
        needs = _unmet_needs(item)
        return bool(needs) and set(needs) <= _BESIDE_THE_CONTRACT
    return verdict in ("reproduced", "not-reproduced", "other-failure")


def _contracts(item: Mapping[str, Any], owner: str) -> set[str]:
    """What the pins of one owner promised, measured by the movement of their pages."""
    given = _value(item, "pin_contract")
    pins = given.values() if isinstance(given, Mapping) else ()
    return {str(pin.get("contract")) for pin in _mappings([*pins]) if pin.get("owner") == owner}


def _pinned_in_place(item: Mapping[str, Any]) -> bool:
    """Whether unpinnable pages under a held short-term pin stayed where they were while they were registered.

    Pinned and unpinnable pages overlap where together they are more than the pages that there are.
    """
    pins = _value(item, "pins")
    short = any(pin.get("kind") in ("pin", "get") for pin in _mappings(pins))
    counts = [_value(item, key) for key in ("pages", "pages_pinned", "pages_unpinnable", "pages_unmoved")]
    if not short or not all(isinstance(count, int) for count in counts):
        return False
    pages, pinned, unpinnable, unmoved = counts
    return pinned + unpinnable > pages and bool(unmoved)


def without_rdma(item: Mapping[str, Any]) -> bool:
    """Whether io_uring registered in the place of an RDMA device."""
    registrar = _value(item, "registrar")
    verb = registrar.get("verb") if isinstance(registrar, Mapping) else None
    return isinstance(verb, str) and verb.startswith("io_uring")


# Words and JSON


def _told(entries: Sequence[tuple[str, Mapping[str, Any], Standing]]) -> str:
    """Return whys with the names of their scenarios; of many, the first ones."""
    by_why: dict[str, list[str]] = {}
    for name, _, stands in entries:
        by_why.setdefault(" ".join(stands.why.split()).rstrip("."), []).append(name)
    parts = [f"{_names(names)}: {why}" for why, names in list(by_why.items())[:3]]
    left = sum(len(names) for names in list(by_why.values())[3:])
    return "; ".join(parts) + (f"; and {left} more" if left else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_allowed(need: str, allowed: set[str]) -> bool:
    if need == BOOT_NEED:
        return False
    return ALL in allowed or need in allowed or (need.startswith("kernel") and "kernel" in allowed)


def _unmet_needs(item: Mapping[str, Any]) -> list[str]:
    return [str(entry.get("need")) for entry in _mappings(item.get("unmet"))]


def _items(verdicts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _mappings(verdicts.get("verdicts"))


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _value(item: Mapping[str, Any], key: str) -> Any:
    evidence = item.get("evidence")
    entry = evidence.get(key) if isinstance(evidence, Mapping) else None
    return entry.get("value") if isinstance(entry, Mapping) else None
