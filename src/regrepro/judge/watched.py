"""The rules for a failure that `watch` caught: a program's own, of which nothing can be tried again.

Without a release and without controls `reproduced` cannot be said. What can: the kernel's path, the pages
that migrate_pages left behind, where they lay, and what they bore at that moment and for half a minute after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regrepro.judge.facts import Facts, Look, Pass, Registration
from regrepro.judge.layers import MOVE_REFUSED, classify
from regrepro.judge.leftbehind import Excess, LeftBehind, by_page
from regrepro.judge.narrowing import Layer
from regrepro.judge.pagestate import UNPINNABLE, whole_number
from regrepro.judge.rules import OK, Check, missing

CAUGHT = "caught"
PROVEN, LIKELY = "proven", "likely"
LASTS = 30.0
"""Seconds that I/O does not last: a block device's request is given up after them (`nvme_io_timeout`,
drivers/nvme/host/core.c; `SD_TIMEOUT`, drivers/scsi/sd.h).
"""
_LOOKS = 3  # at least, and at growing distances
_APART = 1.0  # seconds: looks that a busy node made late, one on the other, are one
_TRANSIENT = "a transient is not excluded"


@dataclass(frozen=True)
class Caught:
    """What a caught failure was. `state` is PROVEN or LIKELY for this bug, "" for any other cause."""

    layer: Layer
    state: str
    reason: str
    checks: list[Check]
    pin_owner: str = "unknown"
    missing: list[str] = field(default_factory=list)


def judge_watched(facts: Facts, run: Pass, registration: Registration) -> Caught:
    """Say what a failure that `watch` caught was."""
    what = f"{registration.verb} failed with {registration.errno}"
    left = LeftBehind(run, registration)
    if registration.errno != "ENOMEM" or not left.count:
        layer = classify(facts, run, registration)
        return Caught(layer, "", f"{what} ({layer.name}: {layer.why})", [])
    owner, holder = _holder(left)
    doubt = left.doubt()
    checks = [
        Check("errno", OK, "the registration failed with ENOMEM"),
        _trace(left),
        missing("pages", doubt) if doubt else Check("pages", OK, f"the frames of all {left.count} are known"),
        _placement(left),
        _references(left),
        _lasting(left),
        holder,
    ]
    lacking = [check for check in checks if not check.ok and check.name != "holder"]
    held = "pages in unpinnable memory were held and would not move"
    layer = Layer("page-migration", held, "inferred" if lacking else "observed", MOVE_REFUSED)
    by = f" by {owner}" if owner != "unknown" else " whose holder was not seen"
    if not lacking:
        held = "a pin" if _by_pins(left) else "a reference"
        reason = f"class B, proven: {what} because {held}{by} kept {left} in unpinnable memory from moving"
        return Caught(layer, PROVEN, reason, checks, owner)
    lacks = [check.text for check in lacking]
    reason = f"class B, likely: {what}, and migrate_pages left {left} behind; missing: {'; '.join(lacks)}"
    return Caught(layer, LIKELY, reason, checks, owner, lacks)


def _trace(left: LeftBehind) -> Check:
    """`migrate_pages` returns how many pages would not move (mm/migrate.c)."""
    trace = left.registration.trace
    if not trace.complete:
        return missing("trace", f"the trace is {trace.status}: {trace.why or 'no reason recorded'}")
    return Check("trace", OK, f"migrate_pages left {left} behind in a request for long-term pins")


def _placement(left: LeftBehind) -> Check:
    """Pages that were left behind lay in a CMA pageblock or in ZONE_MOVABLE (`folio_is_longterm_pinnable`,
    include/linux/mm.h).

    An isolated pageblock is unpinnable, too, but only for as long as its memory is taken offline or allocated
    (`start_isolate_page_range`, mm/page_isolation.c). The kernel asked for this migration because they lay in
    unpinnable memory: where they do no longer, that has changed since.
    """
    name, state = "placement", left.registration.before
    places = {str(page.get("place")) for page in left.told if page.get("place") not in (None, "unknown")}
    if state is not None:
        seen = by_page(state.place)
        places |= {seen[page] for page in left.frames if page in seen}
    if "isolate" in places:
        text = (
            "they lay in an isolated pageblock, as while memory goes offline or CMA is given out: that ends"
        )
        return missing(name, text)
    if places and places <= UNPINNABLE:
        return Check(name, OK, f"they lay in {', '.join(sorted(places))}")
    if "ordinary" in places:
        text = "some lay in ordinary memory right afterwards: their pageblock was isolated, or has changed"
        return missing(name, text)
    why = "" if state else f" ({left.registration.pages_unknown or 'the pages were not read'})"
    return missing(name, f"where the pages lay is not known{why}")


def _references(left: LeftBehind) -> Check:
    """Each page of which the kernel told bore references of a holder when it would not move."""
    name, moment = "references", left.at_the_moment()
    if not moment or left.told_frames - moment.keys():
        return missing(name, "the references of the pages left behind were not seen at that moment")
    if not all(excess.held for excess in moment.values()):
        return missing(name, "a page that was left behind bore no reference beyond what is due")
    if _by_pins(left):
        return Check(name, OK, "each bore at least one FOLL_PIN when it would not move")
    least = min(excess.references for excess in moment.values() if not excess.pins)
    return Check(name, OK, f"each bore {least} or more references beyond what is due")


def _by_pins(left: LeftBehind) -> bool:
    moment = left.at_the_moment()
    return bool(moment) and all(excess.pins for excess in moment.values())


def _lasting(left: LeftBehind) -> Check:
    """The same excess was on the same frames, on all of them, over a time that I/O does not last."""
    name, moment = "lasting", left.at_the_moment()
    seen: dict[int, list[Excess]] = {
        page: [moment[pfn]] if pfn in moment else [] for page, pfn in left.frames.items()
    }
    for look in left.looks:
        why = _not_held(left, look, seen)
        if why:
            return missing(name, f"{why}, and {_TRANSIENT}")
    times: list[float] = []  # seconds after the failure, each some time after the last
    for look in left.looks:
        if look.after is not None and (not times or look.after - times[-1] >= _APART):
            times.append(look.after)
    last = times[-1] if times else None
    if last is None or last < LASTS or len(times) < _LOOKS:
        return missing(name, _too_short(left, last))
    unseen = max(after - before for before, after in zip([0.0, *times], times, strict=False))
    if unseen >= LASTS:
        return missing(name, f"they were not looked at for {unseen:.0f} s: {_TRANSIENT}")
    if not left.frames or not all(_is_one_holder(found) for found in seen.values()):
        text = f"the references were not the same at each look: {_TRANSIENT}; an unpin would tell"
        return missing(name, text)
    return Check(name, OK, f"the same references were on all of them {len(times)} times over {last:.0f} s")


def _not_held(left: LeftBehind, look: Look, seen: dict[int, list[Excess]]) -> str:
    """Return why the pages were not held at a look, "" where all were, which is added to `seen`."""
    found, number = left.at(look), len(left.frames)
    after = f"{look.after:.1f} s later"
    if len(found) < number:
        return f"{number - len(found)} of {number} pages were no longer the same frames {after}"
    known = {page: excess for page, excess in found.items() if excess is not None}
    if len(known) < number:
        return f"the references of {number - len(known)} of {number} pages were not known {after}"
    free = [excess for excess in known.values() if not excess.held]
    if any(excess.references for excess in free):
        return f"what is left on {len(free)} of {number} pages {after} may be of a per-CPU LRU batch"
    if free:
        return f"the references were gone from {len(free)} of {number} pages {after}, as after I/O in flight"
    for pin in look.pins if _by_pins(left) else []:
        if "FOLL_LONGTERM" not in (pin.get("flags") or []) and _touches(left, pin):
            what = "had ended" if pin.get("held") is False else "was made since"
            return f"a pin by {pin.get('fn')} {what} {after}, so that what is seen may be another's"
    for page, excess in known.items():
        seen[page].append(excess)
    return ""


def _too_short(left: LeftBehind, last: float | None) -> str:
    told = f"the same references at looks over {LASTS:.0f} s would tell"
    ended = next((look.ended for look in left.run.looks if look.ended), "")
    if last is None:
        why = f" ({ended})" if ended else ""
        return f"the references were not looked at again{why}: {_TRANSIENT}; {told}"
    few = f", seen at less than {_LOOKS} looks that lay apart" if last >= LASTS else ""
    return f"they lasted {last:.1f} s{few}{f', until {ended}' if ended else ''}: {_TRANSIENT}; {told}"


def _is_one_holder(found: list[Excess]) -> bool:
    """Whether what was seen of a page can be the same holder's each time: as many pins, or without any as
    many references, but for those of batches.
    """
    if len({excess.pins for excess in found}) != 1:
        return False
    if found[0].pins:
        return True
    least = max(excess.references - excess.slack for excess in found)
    return 0 < least <= min(excess.references for excess in found)


def _holder(left: LeftBehind) -> tuple[str, Check]:
    """Who pinned these pages without FOLL_LONGTERM, where that was seen. A count never names its holder: the
    pin must be of these frames, one that makes what they bear, and not known to have ended.
    """
    name, why = "holder", "who took the pin was not seen"
    owners: set[str] = set()
    for pin in left.registration.short_term_pins:
        if "FOLL_LONGTERM" in _texts(pin.get("flags")) or not _covers(left, pin):
            continue
        owner = _owner(pin)
        if not _by_pins(left):
            why = f"{pin.get('fn')} pinned these pages before, but its FOLL_PIN is not what they bore"
        elif pin.get("held") is False or (owner == "process-vm" and pin.get("held") is not True):
            why = f"{pin.get('fn')} pinned these pages before, but it is not known to have held them still"
        else:
            owners.add(owner)
    if len(owners) != 1:
        why = f"several may hold them: {', '.join(sorted(owners))}" if owners else why
        return "unknown", missing(name, why)
    (owner,) = owners
    return owner, Check(name, OK, f"{owner} took a pin without FOLL_LONGTERM on these pages")


def _covers(left: LeftBehind, pin: Mapping[str, Any]) -> bool:
    """Whether a pin is of all of these frames. A pin of one page of a large folio is of that folio."""
    theirs = _pages_of(left, pin)
    if theirs is None:
        return False
    if not left.frames:
        return bool(left.told_frames) and pin.get("pfn") is not None and left.told_frames <= theirs
    return all(theirs & folio for folio in left.folios)


def _touches(left: LeftBehind, pin: Mapping[str, Any]) -> bool:
    """Whether a pin is of any of these frames."""
    theirs = _pages_of(left, pin)
    return theirs is not None and any(theirs & folio for folio in left.folios)


def _pages_of(left: LeftBehind, pin: Mapping[str, Any]) -> set[int] | None:
    """The pages of the range that a pin holds: as it found their frames, or by the addresses where they lie;
    where the range's frames are not known, of those that the kernel told. None where that is not known.
    """
    if pin.get("pfn") is not None:
        runs = _whole_numbers(pin["pfn"])
        frames = left.frames or {frame: frame for frame in left.told_frames}
        return {
            page
            for page, pfn in frames.items()
            if any(first <= pfn < first + count for _, first, count in runs)
        }
    start, pages = whole_number(pin.get("start")), whole_number(pin.get("nr_pages"))
    buffer = left.run.buffers.get(left.registration.buffer)
    if start is None or pages is None or buffer is None or not left.frames:
        return None
    size = buffer.page_size
    first = start // size - buffer.address // size
    return {page for page in left.frames if first <= page < first + pages}


def _whole_numbers(runs: object) -> list[tuple[int, int, int]]:
    """Return the runs of three numbers in what should be a list of them."""
    return [
        (run[0], run[1], run[2])
        for run in (runs if isinstance(runs, list) else [])
        if isinstance(run, list) and len(run) == 3 and all(type(number) is int for number in run)
    ]


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _owner(pin: Mapping[str, Any]) -> str:
    modules = _texts(pin.get("modules"))
    if any(name.startswith("nvidia") for name in modules):
        return "cuda"
    if modules:
        return modules[0]
    return "process-vm" if str(pin.get("fn", "")).endswith("_remote") else "unknown"
