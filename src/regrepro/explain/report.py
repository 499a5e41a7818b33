"""The explanation for people."""

from __future__ import annotations

import io
import sys
from typing import Any

from regrepro.explain.causes import IMPOSSIBLE, NOTHING_AGAINST
from regrepro.views.lines import PLAIN_WIDTH, Line, emit, width_of, wrap

STYLES = {"decided": "bold green", "supported": "bold yellow", "possible": "", "impossible": "dim"}
MARKS = {"decided": "it is", "supported": "hints", "possible": "can be", "impossible": "cannot be"}

_NEXT = (
    "What to do: collect the call and its errno (NCCL_DEBUG=INFO, UCX_LOG_LEVEL=info, the kernel's log, or "
    "`regrepro watch` on the node while it fails), and explain that."
)


def ranges(numbers: list[int]) -> str:
    """Write numbers as ranges: 0-3, 7."""
    parts: list[str] = []
    start = previous = None
    for number in [*numbers, None]:
        if start is None or previous is None:
            start = previous = number
            continue
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ", ".join(parts[:40]) + (", …" if len(parts) > 40 else "")


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def layout(result: dict[str, Any], width: int) -> list[Line]:
    """Lay it out: each group with its causes, then what else the text says."""
    lines: list[Line] = []
    names = _some(result["files"])
    if result["closest"]:
        lines += wrap(f"Nothing that I know failed in {names}; the closest lines are these:", width)
        for one in result["closest"]:
            lines += wrap("{file}:{line}: {text}".format(**one), width, "      ", first="  - ")
        lines += wrap(_NEXT, width)
    elif not result["groups"]:
        lines += wrap(f"No failed memory registration in {names}.", width)
    for number, group in enumerate(result["groups"], 1):
        lines += _group(number, group, width)
        lines.append([])
    if result["remarks"]:
        if not result["groups"]:
            lines.append([])
        lines.append([("Also in the text, and no failed registration", "bold")])
        for one in result["remarks"]:
            text = f"{one['count']} x {one['kind']}: {one['why']}"
            lines += wrap(text, width, "      ", first="  - ")
            sample = "{file}:{line}: {text}".format(**one["sample"])
            lines += wrap(sample, width, "        ", first="      ", style="dim")
    if result["more_groups"]:
        lines.append([(f"{result['more_groups']} further failures of other kinds are not shown", "")])
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _group(number: int, group: dict[str, Any], width: int) -> list[Line]:
    errno = group["errno"] or "an errno that is not told"
    buffer = {"host": "host memory", "gpu": "GPU memory", None: "not told"}[group["buffer"]]
    times = "once" if group["count"] == 1 else f"{group['count']} times"
    lines: list[Line] = [[(f"{number}. {group['call']} failed with {errno}, {times}", "bold")]]
    details = [f"told by {', '.join(group['tools'])}", f"buffer: {buffer}"]
    details += [f"ranks {ranges(group['ranks'])}"] if group["ranks"] else []
    details += [f"{name} {_some(group[name])}" for name in ("hosts", "devices") if group[name]]
    lengths = _some([str(one) for one in group["lengths"]], 4)
    details += [f"lengths {lengths} bytes"] if lengths else []
    lines += wrap("; ".join(details), width, "   ")
    first = group["first"]
    if first:
        sample = f"{first['file']}:{first['line']}: {group['samples'][0]['text']}"
        lines += wrap(sample, width, "     ", first="   ", style="dim")
    for note in group["notes"]:
        lines += wrap(f"note: {note}", width, "     ", first="   ")
    closed = []
    for cause in group["causes"]:
        if cause["status"] == IMPOSSIBLE:
            closed.append(f"{cause['cause']} ({cause['why']})")
            continue
        mark = f"   {MARKS[cause['status']]:<7} "
        body = wrap(f"{cause['cause']}: {cause['title']}", width, " " * 11, first=mark)
        lines += [[(text, STYLES[cause["status"]]) for text, _ in line] for line in body]
        if cause["why"] != NOTHING_AGAINST:
            lines += wrap(cause["why"], width, " " * 13, first=" " * 11 + "- ")
        lines += wrap(f"next: {cause['command']}", width, " " * 17, first=" " * 11)
    if closed:
        lines += wrap("cannot be: " + "; ".join(closed), width, "     ", first="   ", style="dim")
    return lines


def plain(result: dict[str, Any]) -> str:
    """Write it as text that reads anywhere."""
    out = io.StringIO()
    emit(layout(result, PLAIN_WIDTH), out)
    return out.getvalue()


def show(result: dict[str, Any]) -> None:
    """Print it: in colour on a terminal that has it, else plainly."""
    emit(layout(result, width_of(sys.stdout)))
