"""Whether a map that shows no unpinnable memory stands for a whole pass.

The map is of one moment. Pageblocks change while the node runs: start_isolate_page_range()
(mm/page_isolation.c) isolates those of a block that goes offline, online_pages() (mm/memory_hotplug.c) puts
a block into ZONE_MOVABLE. So the map's "none" needs a second look when the pass has ended, and anything
that was seen in between overrules it.
"""

from __future__ import annotations

from collections.abc import Mapping

from regrepro.judge.facts import Facts, Pass, Pin
from regrepro.judge.pagestate import UNPINNABLE


def contrary(facts: Facts, run: Pass) -> str:
    """Why the node may have had unpinnable memory during a pass whose map shows none; empty where nothing
    says so.

    A record in which no pass has a second look is of a version that took none: it is not asked for there,
    and what was seen in any pass counts.
    """
    if flaw := _flaw(run):
        return flaw
    if run.map_check is None and any(item.map_check is not None for item in facts.passes):
        return "the node's memory was not looked at again when the pass had ended"
    for other in facts.passes:
        if other is run or not _explained(other):
            seen = _seen(other)
            if seen:
                return seen if other is run else f"{seen}, in another pass of this run"
    return ""


def _explained(run: Pass) -> bool:
    """Whether a pass' own map or second look tells of unpinnable memory, or of a change."""
    return (run.memory_map is not None and not run.memory_map.none) or bool(_flaw(run))


def _flaw(run: Pass) -> str:
    """Why the node may have had unpinnable memory during the pass by the look when it had ended, or ""."""
    check = run.map_check
    if check is None:
        return ""
    if check.has_unpinnable:
        return "there was unpinnable memory when the pass had ended"
    if not check.complete or check.has_unpinnable is None:
        why = f" ({check.problems[0]})" if check.problems else ""
        return f"whether there was none when the pass had ended is not known{why}"
    if check.changed is not False:
        return "the node's memory zones changed during the pass"
    if check.block_events:
        return f"memory blocks went online or offline {check.block_events} times during the pass"
    return ""


def _seen(run: Pass) -> str:
    """What in a pass can only be where there is unpinnable memory."""
    for what, _, _, state in run.states():
        if state.unpinnable:
            return f"{what} shows page {state.unpinnable} in unpinnable memory"
    for step in run.steps:
        pages = step.get("pages")
        if isinstance(pages, Mapping) and _names_unpinnable(pages.get("place")):
            return f"step {step.get('name')} shows pages in unpinnable memory"
    for call in run.calls:
        if call.trace.migrations:
            what = f"{'pin' if isinstance(call, Pin) else 'registration'} {call.id}"
            return f"the trace of {what} shows a migration out of unpinnable memory, for a long-term pin"
    return ""


def _names_unpinnable(place: object) -> bool:
    return isinstance(place, list) and any(
        isinstance(run, list) and bool(run) and isinstance(run[-1], str) and run[-1] in UNPINNABLE
        for run in place
    )
