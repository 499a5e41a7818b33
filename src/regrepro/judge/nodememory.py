"""Whether a map that shows no unpinnable memory stands for a whole pass.

The map is of one moment. Pageblocks change while the node runs: start_isolate_page_range()
(mm/page_isolation.c) isolates those of a block that goes offline, online_pages() (mm/memory_hotplug.c) puts
a block into ZONE_MOVABLE. So the map's "none" needs a second look when the pass has ended, and anything
that was seen in between overrules it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from regrepro.judge.facts import Facts, Pass
from regrepro.judge.pagestate import UNPINNABLE, PageState
from regrepro.judge.tracefacts import Trace


def contrary(facts: Facts, run: Pass) -> str:
    """Why the node may have had unpinnable memory during a pass whose map shows none; empty where nothing
    says so.

    A record in which no pass has a second look is of a version that took none: it is not asked for there,
    and what was seen in any pass counts.
    """
    flaw = run.map_check.flaw if run.map_check is not None else ""
    if flaw:
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
    map_tells = run.memory_map is not None and not run.memory_map.none
    return map_tells or (run.map_check is not None and bool(run.map_check.flaw))


def _seen(run: Pass) -> str:
    """What in a pass can only be where there is unpinnable memory."""
    for what, state in _states(run):
        if state is not None and state.unpinnable:
            return f"{what} shows page {state.unpinnable} in unpinnable memory"
    for step in run.steps:
        pages = step.get("pages")
        if isinstance(pages, Mapping) and _names_unpinnable(pages.get("place")):
            return f"step {step.get('name')} shows pages in unpinnable memory"
    for what, trace in _traces(run):
        if trace.migrations:
            return f"the trace of {what} shows a migration out of unpinnable memory, for a long-term pin"
    return ""


def _names_unpinnable(place: object) -> bool:
    return isinstance(place, list) and any(
        isinstance(run, list) and bool(run) and isinstance(run[-1], str) and run[-1] in UNPINNABLE
        for run in place
    )


def _states(run: Pass) -> Iterator[tuple[str, PageState | None]]:
    for buffer in run.buffers.values():
        yield f"buffer {buffer.id}", buffer.state
    for pin in run.pins.values():
        yield f"pin {pin.id}", pin.before
        yield f"pin {pin.id}", pin.after
        if pin.release is not None:
            yield f"the release of pin {pin.id}", pin.release.after
    for call in run.registrations:
        yield f"registration {call.id}", call.before
        yield f"registration {call.id}", call.after


def _traces(run: Pass) -> Iterator[tuple[str, Trace]]:
    for pin in run.pins.values():
        yield f"pin {pin.id}", pin.trace
    for call in run.registrations:
        yield f"registration {call.id}", call.trace
