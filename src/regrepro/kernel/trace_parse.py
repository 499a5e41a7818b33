"""The text of a trace instance's trace_pipe, read into events (docs/record.md, "Trace").

The kernel writes the text: it resolves symbols with their modules and prints a tracepoint's enums by name, so
nothing here depends on a kernel's layouts. Pure; works on recorded text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regrepro.kernel.trace_flags import FlagNames
from regrepro.kernel.trace_probes import kept

# "  comm-123   [001] .....    69.759541: event: rest"; a thread-group id may stand before the CPU. Searched
# for, not matched: a command's name may hold anything, and matching it lazily takes most of the time.
_HEAD = r"-(\d+)\s+(?:\([ \d-]+\)\s+)?\[(\d+)\]\s+\S+\s+(\d+)\.(\d{6}): "
_LINE = re.compile(_HEAD + r"([\w.]+): ?(.*)$")
_STACK = re.compile(_HEAD + r"<stack trace>$")
_LOST = re.compile(r"^CPU:(?P<cpu>\d+) \[LOST(?: (?P<count>\d+))? EVENTS\]$")
# What stands in a frame without a symbol, or whose return address another return probe has taken.
_TRAMPOLINES = (
    "0x",
    "[unknown/kretprobe'd]",
    "arch_rethook_trampoline",
    "kretprobe_trampoline",
    "return_to_handler",
)


@dataclass
class Parsed:
    """Events in time order with raw `tid`, `us` (µs of the instance's clock); what was lost, by CPU."""

    events: list[dict[str, Any]] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)
    """CPU -> events overwritten before they were read and that may be younger than `since_us`."""


def symbol(text: str) -> str | None:
    """Return `name` or `name [module]` of a printed address, None where the kernel could not tell."""
    text = text.strip()
    if not text or text.startswith(_TRAMPOLINES):
        return None
    place, bracket, module = text.partition(" [")
    return place.partition("+0x")[0] + bracket + module


def parse(
    text: str,
    names: Mapping[str, tuple[str, str]],
    flags: FlagNames,
    *,
    since_us: int = 0,
) -> Parsed:
    """Read the text of a trace_pipe.

    `names`: event name -> (function or tracepoint, "return" | "entry" | "tracepoint"); other events are none
    of ours and are passed over, as is what lies before `since_us`. An event that was lost on a CPU counts
    unless something older than `since_us` follows it there: then only older ones were lost.
    """
    parsed = Parsed()
    pending: dict[int, int] = {}
    stack_owner: dict[str, Any] | None = None
    last_of: dict[str, dict[str, Any] | None] = {}
    for line in text.splitlines():
        if line.startswith(" => "):
            if stack_owner is not None:
                stack_owner.setdefault("stack", []).append(symbol(line[4:]) or line[4:].strip())
            continue
        stack_owner = None
        found = _LINE.search(line)
        if not found:
            if lost := _LOST.match(line.strip()):
                cpu = int(lost["cpu"])
                pending[cpu] = pending.get(cpu, 0) + int(lost["count"] or 1)
            elif stack := _STACK.search(line):
                stack_owner = last_of.get(stack[1])
            continue
        tid, cpu_text, seconds, micro, name, rest = found.groups()
        us = int(seconds) * 1_000_000 + int(micro)
        if us < since_us:
            pending.pop(int(cpu_text), None)
            last_of[tid] = None
            continue
        known = names.get(name)
        event = _event(known, rest, flags) if known else None
        if event is not None:
            event["us"], event["tid"] = us, int(tid)
            parsed.events.append(event)
        last_of[tid] = event
    parsed.lost = pending
    return parsed


def _event(known: tuple[str, str], rest: str, flags: FlagNames) -> dict[str, Any] | None:
    name, kind = known
    if kind == "tracepoint":
        return {"tracepoint": name, "fields": _values(rest)}
    # "(caller+0x1/0x2 [module] <- function) key=value …" or "(function+0x0/0x60) key=value …"
    place, closed, pairs = rest.partition(") ")
    if not closed or not place.startswith("("):
        return None
    values = _values(pairs)
    event: dict[str, Any] = {"fn": name}
    if kind == "return":
        ret = values.pop("ret", None)
        event["ret"] = kept(name, ret) if isinstance(ret, int) else ret
        event["caller"] = symbol(place[1:].partition(" <- ")[0])
    if values:
        bits = values.get("gup_flags")
        if isinstance(bits, int) and flags.values:
            values["flags"] = flags.decode(bits)
        event["args"] = values
    return event


def _values(pairs: str) -> dict[str, Any]:
    return {
        key: _value(value) for key, equals, value in (pair.partition("=") for pair in pairs.split()) if equals
    }


def _value(text: str) -> Any:
    try:
        return int(text, 0)
    except ValueError:
        return text


def pair_entries(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the arguments of an entry event into the return event of the same call.

    A call that has not returned keeps its entry event, which has no `ret`.
    """
    open_calls: dict[tuple[int, str], list[dict[str, Any]]] = {}
    gone: set[int] = set()
    for event in events:
        if "fn" not in event:
            continue
        calls = open_calls.setdefault((event["tid"], event["fn"]), [])
        if "ret" not in event:
            calls.append(event)
        elif calls:
            entry = calls.pop()
            event.setdefault("args", entry.get("args", {}))
            if "stack" in entry:
                # The better one: before 6.0 a stack at a return ends at the probe's own trampoline.
                own = entry["stack"][:1] == [event["fn"]]
                event["stack"] = entry["stack"][1:] if own else entry["stack"]
            gone.add(id(entry))
    return [event for event in events if id(event) not in gone]


def merge_chunks(events: list[dict[str, Any]], page_size: int) -> list[dict[str, Any]]:
    """Make one event of successive calls that each pinned all of the next part of one range.

    A driver pins a long range in parts; `calls` says in how many. `page_size` in bytes.
    """
    merged: list[dict[str, Any]] = []
    follows = -1  # the address at which the next part of the last event's range would begin
    for event in events:
        args = event.get("args", {})
        whole = "start" in args and event.get("ret") == args.get("nr_pages")
        before = merged[-1] if merged else {}
        if whole and args["start"] == follows and _same_call(before, event):
            before["args"]["nr_pages"] += args["nr_pages"]
            before["ret"] += event["ret"]
            before["calls"] = before.get("calls", 1) + 1
        else:
            merged.append(event)
        follows = args["start"] // page_size * page_size + args["nr_pages"] * page_size if whole else -1
    return merged


def _same_call(before: dict[str, Any], event: dict[str, Any]) -> bool:
    return all(before.get(key) == event.get(key) for key in ("fn", "tid", "caller")) and before["args"].get(
        "gup_flags"
    ) == event["args"].get("gup_flags")
