"""The kernel's account of a failed registration, as the tracer of `run` would have it (docs/record.md)."""

from __future__ import annotations

from typing import Any

from regrepro.kernel import trace_tree
from regrepro.kernel.trace_flags import FlagNames
from regrepro.watch.failed_registration import FailedRegistration, Inner
from regrepro.watch.functions import Functions

_NO_HANDLER = "no handler of the kernel saw the request: libibverbs or the kernel's entry refused it"


def trace_of(
    failure: FailedRegistration, functions: Functions, flags: FlagNames, lost: int, missed: int | None = None
) -> dict[str, Any]:
    """Return the trace of a failure.

    `lost`: events lost near it; `missed`: hits of probes that the kernel missed near it, None: not told.
    """
    spoiled = []
    if lost:
        spoiled.append(f"{lost} events were lost near this failure: what is absent may have happened")
    if failure.doubt:
        spoiled.append(failure.doubt)
    if missed:
        spoiled.append(f"{missed} hits of probes were missed near this failure")
    why = "; ".join(spoiled)
    followed = [*functions.entries, *functions.drivers, *functions.inner]
    followed += [functions.migrate] if functions.migrate is not None else []
    trace: dict[str, Any] = {
        "status": "spoiled" if why else "complete",
        "why": why,
        "events": [],
        "tree": [],
        "missing": [{"fn": name, "why": reason} for name, reason in functions.missing.items()],
        "probed": [item.name for item in functions.pins] if functions.entries else [],
        "probed_failures": [item.name for item in followed],
        "misses": missed,
        "overrun": lost,
    }
    if not failure.function and not failure.inner:
        trace["why"] = why or _NO_HANDLER
        return trace
    events = _events(failure, functions, flags)
    return {**trace, "events": events, "tree": _tree(events, failure), "flags_source": flags.source}


def _events(failure: FailedRegistration, functions: Functions, flags: FlagNames) -> list[dict[str, Any]]:
    inner = [item for item in failure.inner if not _of_something_else(item)]
    begin = inner[0].ns if inner else failure.ns
    whole = Inner(failure.ns, failure.function, failure.ret)
    events = [_event(item, begin, failure.tid, flags) for item in [*inner, whole]]
    succeeded = failure.pin_calls - sum(1 for item in inner if "nr_pages" in item.args)
    if succeeded > 0 and functions.pins:
        done = _event(Inner(begin, functions.pins[0].name, failure.pinned), begin, failure.tid, flags)
        events.insert(0, {**done, "t": 0.0, "args": {}, "calls": succeeded})
    return events


def _event(item: Inner, begin: int, tid: int, flags: FlagNames) -> dict[str, Any]:
    args = dict(item.args)
    if "gup_flags" in args and flags.values:
        args["flags"] = flags.decode(args["gup_flags"])
    return {
        "t": round((item.ns - begin) / 1e9, 6),
        "tid": tid,
        "fn": item.function,
        "ret": item.ret,
        "caller": None,
        **({"args": args} if args else {}),
    }


def _of_something_else(item: Inner) -> bool:
    """Whether this is a migration that compaction made in this thread, on its search for free memory."""
    return item.function == "migrate_pages" and item.args.get("reason") not in (
        "longterm_pin",
        "contig_range",
    )


def _tree(events: list[dict[str, Any]], failure: FailedRegistration) -> list[dict[str, Any]]:
    tree = trace_tree.build(events, failure.tid)
    if any(item["fn"] == failure.function for item in tree):
        return tree
    name = trace_tree.errno_name(failure.ret)
    root = {
        "depth": 0,
        "fn": failure.function,
        "ret": failure.ret,
        "errno": name,
        "failing": True,
        "text": f"{failure.function} = -{name}" if name else f"{failure.function} = {failure.ret}",
    }
    if not tree:
        root["deepest"] = True
    return [root, *({**item, "depth": item["depth"] + 1} for item in tree)]
