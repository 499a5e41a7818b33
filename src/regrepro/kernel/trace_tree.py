"""The failing path of a call as a person reads it: an indented tree, outermost function first.

Pure: works on the events of a trace (docs/record.md), here or on any other machine. A function's place comes
from its depth (`kernel_functions.CallDepth`) and its caller, since a return is recorded after those of the
functions that it called.
"""

from __future__ import annotations

import errno as errnos
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regrepro.errors import errno_name as name_of
from regrepro.kernel.trace_probes import GUP_FUNCTIONS
from regrepro.kernel_functions import BY_NAME, CallDepth, Returns

MARK = "   <== deepest failure"

_MAX_ERRNO = 4095


@dataclass
class _Node:
    event: dict[str, Any]
    depth: int
    children: list[_Node] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return failed(self.event)


def errno_name(value: Any) -> str | None:
    """Return the name of the errno that a kernel function returned as a negative number, else None."""
    if not isinstance(value, int) or not -_MAX_ERRNO <= value < 0:
        return None
    return name_of(-value)


def failed(event: Mapping[str, Any]) -> bool:
    """Return whether an event says that its function failed.

    `migrate_pages` fails with a positive count too, `alloc_migration_target` with NULL; EAGAIN from the
    function that moves pages out of unpinnable memory says that they moved and the pin is tried again.
    """
    if "tracepoint" in event:
        count = event["fields"].get("nr_failed")
        return isinstance(count, int) and count > 0
    ret, row = event.get("ret"), BY_NAME.get(event.get("fn", ""))
    if not isinstance(ret, int):
        return False
    depth, returns = (row.depth, row.returns) if row is not None else (None, None)
    if returns is Returns.POINTER_OR_NULL:
        return ret == 0
    if returns is Returns.NV_STATUS or depth is CallDepth.MIGRATE:
        return ret != 0
    if depth is CallDepth.UNPINNABLE and ret == -errnos.EAGAIN:
        return False
    return -_MAX_ERRNO <= ret < 0


def build(events: Iterable[Mapping[str, Any]], tid: int | None = None) -> list[dict[str, Any]]:
    """Return the failing path (docs/record.md, `tree`), empty where no function failed.

    `tid`: the thread that made the call; its path is preferred to another thread's. The item of the deepest
    failure has `deepest` true.
    """
    by_thread: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        by_thread.setdefault(event.get("tid", 0), []).append(event)
    order = sorted(by_thread, key=lambda thread: thread != tid)
    for thread in order:
        tree = _tree(by_thread[thread])
        if tree:
            return tree
    return []


def _nest(events: Sequence[Mapping[str, Any]]) -> list[_Node]:
    """Return the outermost calls. A return takes in what deeper layers returned since the last one."""
    stack: list[_Node] = []
    for event in events:
        if "tracepoint" in event:
            depth: CallDepth | None = CallDepth.TARGET
        else:
            row = BY_NAME.get(event["fn"]) if "ret" in event else None
            depth = row.depth if row is not None else None
        if depth is None:
            continue
        node = _Node(dict(event), depth)
        while stack and stack[-1].depth > depth:
            node.children.insert(0, stack.pop())
        stack.append(node)
    return stack


def _tree(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for root in reversed(_nest(events)):
        # Below a call that succeeded in the end nothing failed for good.
        if root.failed:
            items: list[dict[str, Any]] = []
            _describe(root, 0, None, items)
            if items:
                deepest = max((item for item in items if item["failing"]), key=lambda item: item["depth"])
                deepest["deepest"] = True
            return items
    return []


def _describe(node: _Node, depth: int, parent: str | None, items: list[dict[str, Any]]) -> None:
    event = node.event
    if "tracepoint" in event:
        text = f"{event['tracepoint']}: " + " ".join(
            f"{key}={value}" for key, value in event["fields"].items() if value != 0 or key == "nr_succeeded"
        )
        items.append(
            {
                "depth": depth,
                "fn": event["tracepoint"],
                "ret": None,
                "errno": None,
                "failing": False,
                "text": text,
            }
        )
        return
    caller = event.get("caller")
    if caller and caller.split()[0] != parent:
        # A function without a probe stands between, or above all.
        items.append(
            {"depth": depth, "fn": caller, "ret": None, "errno": None, "failing": False, "text": caller}
        )
        depth += 1
    item = {
        "depth": depth,
        "fn": event["fn"],
        "ret": event["ret"],
        "errno": errno_name(event["ret"]),
        "failing": True,
        "text": _text(event, node.children),
    }
    items.append(item)
    calls = [child for child in node.children if child.failed and "fn" in child.event]
    if calls:
        # Only the last failure is the one that was passed on.
        _describe(calls[-1], depth + 1, event["fn"], items)
    for child in node.children:
        if child.failed and "tracepoint" in child.event:
            _describe(child, depth + 1, event["fn"], items)


def _text(event: Mapping[str, Any], children: Sequence[_Node]) -> str:
    function, ret = event["fn"], event["ret"]
    row = BY_NAME.get(function)
    depth = row.depth if row is not None else None
    arguments = _arguments(event.get("args"))
    name = errno_name(ret)
    if name is not None:
        text = f"{function}{arguments} = -{name}"
        if depth is CallDepth.UMEM:
            text += _after_pinning(children)
        return text
    if depth is CallDepth.MIGRATE and ret > 0:
        return f"{function}: {ret} {'page' if ret == 1 else 'pages'} not migrated"
    if ret == 0 and row is not None and row.returns in (Returns.POINTER, Returns.POINTER_OR_NULL):
        return f"{function} = NULL" + (": no page to move to" if depth is CallDepth.TARGET else "")
    return f"{function}{arguments} = {ret}"


def _after_pinning(children: Sequence[_Node]) -> str:
    """Say whether a umem that failed had pinned its pages: that tells an accounting check from a mapping."""
    pins = [child for child in children if child.event.get("fn") in GUP_FUNCTIONS]
    if any(pin.failed for pin in pins):
        return ""
    if not pins:
        return ", before any page was pinned"
    pages = sum(pin.event["ret"] for pin in pins if isinstance(pin.event["ret"], int))
    return f", after {pages} {'page was' if pages == 1 else 'pages were'} pinned"


def _arguments(args: Mapping[str, Any] | None) -> str:
    if not args:
        return ""
    parts = []
    if "start" in args:
        parts.append(f"{args['start']:#x}")
    if "nr_pages" in args:
        parts.append(f"{args['nr_pages']} {'page' if args['nr_pages'] == 1 else 'pages'}")
    if "flags" in args:
        parts.append("|".join(args["flags"]) or "0")
    elif "gup_flags" in args:
        parts.append(f"gup_flags={args['gup_flags']:#x}")
    return f"({', '.join(parts)})"


def render(trace: Mapping[str, Any]) -> list[str]:
    """Return the trace as lines of text: the tree with its deepest failure marked, and what was not seen."""
    lines: list[str] = []
    for item in trace.get("tree") or []:
        lines.append("  " * item["depth"] + item["text"] + (MARK if item.get("deepest") else ""))
    status = trace.get("status")
    if status == "complete":
        if not lines:
            lines.append("no probed kernel function failed")
    else:
        lines.append(f"trace {status}: {trace.get('why') or 'no reason recorded'}")
    return lines


def gup_calls(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the calls that took references to user pages: who asked, for what, with which flags.

    Each has `fn`, `start`, `nr_pages`, `flags` (names; None where the kernel's are not known), `longterm`
    (bool or None), `caller`, `modules` (that stand in its stack, innermost first), `ret`.
    """
    calls = []
    for event in trace.get("events") or []:
        args = event.get("args") or {}
        if event.get("fn") not in GUP_FUNCTIONS or "gup_flags" not in args:
            continue
        flags = args.get("flags")
        frames = [event.get("caller") or "", *(event.get("stack") or [])]
        modules = [frame.split("[", 1)[1].rstrip("]") for frame in frames if "[" in frame]
        calls.append(
            {
                "fn": event["fn"],
                "start": args.get("start"),
                "nr_pages": args.get("nr_pages"),
                "flags": flags,
                "longterm": None if flags is None else "FOLL_LONGTERM" in flags,
                "caller": event.get("caller"),
                "modules": list(dict.fromkeys(modules)),
                "ret": event.get("ret"),
            }
        )
    return calls
