"""Good records, traced as a kernel of today traces, and the edits that tests make of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import record_builder as build
from record_builder import ADDRESS, CMA, PAGE, Record, find, state

from regrepro.judge import judge_record

Edit = Callable[[Record], object]

PINS = ("pin_user_pages_fast", "pin_user_pages", "pin_user_pages_remote", "pin_user_pages_unlocked")
GETS = ("get_user_pages_fast", "get_user_pages", "get_user_pages_remote", "get_user_pages_unlocked")
PROBED = [
    *PINS,
    *GETS,
    "rxe_reg_user_mr",
    "__ib_umem_get_va",
    "migrate_pages",
    "io_sqe_buffers_register",
    "ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR",
]
ON_FAILURE = ["__gup_longterm_locked", "dma_map_sgtable"]
TAKEN_BY = {
    "pin": ("pin_user_pages_remote", ["FOLL_WRITE"]),
    "get": ("get_user_pages_fast", []),
    "longterm": ("pin_user_pages_fast", ["FOLL_WRITE", "FOLL_LONGTERM"]),
}


def traced(record: Record) -> Record:
    """Put into a record what the tracer of today says of each call."""
    for event in record.events:
        if event["event"] == "pin" and event["kind"] in TAKEN_BY:
            fn, flags = TAKEN_BY[event["kind"]]
            pages = event["after"]["pages"]
            moved = build.migration(pages, 0, 0) if event["kind"] == "longterm" else []
            args = {"start": ADDRESS, "nr_pages": pages, "flags": list(flags)}
            event["trace"] = build.trace(
                events=[*moved, {"t": 0.3, "fn": fn, "ret": pages, "caller": "", "args": args}]
            )
        if event["event"] in ("pin", "register") and event["trace"]:
            event["trace"] |= {"probed": list(PROBED), "probed_failures": list(ON_FAILURE)}
        if event["event"] == "register":
            args = {"start": event["address"], "nr_pages": event["length"] // PAGE}
            for item in event["trace"]["events"]:
                if item.get("fn") == "pin_user_pages_fast":
                    item["args"] = args | {"flags": ["FOLL_WRITE", "FOLL_LONGTERM"]}
    return record


def reproduced() -> Record:
    return traced(build.reproduced_record())


def by_get() -> Record:
    return traced(build.get_record())


def one_of_eight() -> Record:
    return traced(build.partly_pinned_record())


def by_pin() -> Record:
    return traced(build.longterm_record())


def by_kernel() -> Record:
    return traced(build.kernel_record())


def by_placement() -> Record:
    return traced(build.placement_record())


def moved_out() -> Record:
    return traced(build.no_pin_record())


def own_code() -> Record:
    """A pin that code of one's own took, which cannot be asked whether it is alive."""
    record = reproduced()
    for event in record.events:
        if event["event"] == "pin" and event["kind"] == "pin":
            event["owner"] = "own-code"
    find(record, "register")["pins"][0] |= {"alive_before": None, "alive_after": None}
    return record


GOOD = {
    reproduced: ("reproduced", None),
    by_get: ("reproduced", None),
    one_of_eight: ("reproduced", None),
    own_code: ("reproduced", None),
    by_pin: ("not-reproduced", "pin"),
    by_kernel: ("not-reproduced", "kernel"),
    by_placement: ("not-reproduced", "placement"),
    moved_out: ("not-reproduced", "kernel"),
}


def verdict(record: Record) -> dict[str, Any]:
    return dict(judge_record(record)["verdicts"][0])


# What is edited


def event(kind: str, number: int = 0, /, *, control: str | None = None, **keys: Any) -> Edit:
    """Set keys of an event."""
    return lambda record: find(record, kind, number, control).update(copy.deepcopy(keys))


def pages(kind: str, when: str, number: int = 0, control: str | None = None, **keys: Any) -> Edit:
    """Set keys of a page state."""
    return lambda record: find(record, kind, number, control)[when].update(copy.deepcopy(keys))


def counts(kind: str, when: str, count: Any, number: int = 0, control: str | None = None) -> Edit:
    """Set the reference counts of a page state."""
    refs = count if isinstance(count, list) else None if count is None else [[0, 8, count]]
    return pages(kind, when, number, control, refcount=refs)


def both(*edits: Edit) -> Edit:
    return lambda record: [edit(record) for edit in edits]


def renumber(record: Record) -> None:
    """Close the gaps."""
    for seq, item in enumerate(record.events, 1):
        item["seq"] = seq


def drop(kind: str, number: int = 0, control: str | None = None) -> Edit:
    """Take an event out and number the others anew."""

    def edit(record: Record) -> None:
        record.events.remove(find(record, kind, number, control))
        renumber(record)

    return edit


def repeat(kind: str, number: int = 0, **keys: Any) -> Edit:
    """Write an event twice, and number the others anew."""

    def edit(record: Record) -> None:
        original = find(record, kind, number)
        at = record.events.index(original)
        record.events.insert(at + 1, copy.deepcopy(original) | keys)
        renumber(record)

    return edit


def trace(number: int = 0, kind: str = "register", control: str | None = None, **keys: Any) -> Edit:
    """Set keys of a trace."""
    return lambda record: find(record, kind, number, control)["trace"].update(copy.deepcopy(keys))


def returned(fn: str, ret: int, number: int = 0, tree: bool = True) -> Edit:
    """Have a function return something else, in the trace's tree as well."""

    def edit(record: Record) -> None:
        told = find(record, "register", number)["trace"]
        found = [item for item in told["events"] if item.get("fn") == fn]
        assert found
        for item in (*found, *(told["tree"] if tree else [])):
            if item.get("fn") == fn:
                item["ret"] = ret

    return edit


def tracepoint(number: int = 0, **fields: int) -> Edit:
    """Set fields of the migration's tracepoint."""

    def edit(record: Record) -> None:
        events = find(record, "register", number)["trace"]["events"]
        found = [item for item in events if "tracepoint" in item]
        assert found
        for item in found:
            item["fields"] |= fields

    return edit


def without_events(*names: str, number: int = 0, kind: str = "register") -> Edit:
    """Take events out of a trace, and its tree with them."""

    def edit(record: Record) -> None:
        told = find(record, kind, number)["trace"]
        told["events"] = [
            item for item in told["events"] if item.get("fn", item.get("tracepoint")) not in names
        ]
        told["tree"] = []

    return edit


def asked(*flags: str, fn: str | None = None, ret: int | None = None) -> Edit:
    """Have the pin's own trace show other flags, another function, another result."""

    def edit(record: Record) -> None:
        call = find(record, "pin")["trace"]["events"][-1]
        call["args"]["flags"] = list(flags)
        call["fn"] = fn or call["fn"]
        call["ret"] = call["ret"] if ret is None else ret

    return edit


def swapped(record: Record) -> None:
    """The registration bears the trace of the one after it, and the reverse."""
    one, two = find(record, "register"), find(record, "register", 1)
    one["trace"], two["trace"] = two["trace"], one["trace"]


def backwards(record: Record) -> None:
    find(record, "release")["t"] = 0.0


def shuffled(record: Record) -> None:
    """Two lines of the record have changed places."""
    at = record.events.index(find(record, "release"))
    record.events[at], record.events[at - 1] = record.events[at - 1], record.events[at]


def misplaced(record: Record) -> None:
    """The buffer is freed before it is registered again; numbers and clock are as they should be."""
    events, freed = record.events, find(record, "free")
    events.remove(freed)
    events.insert(events.index(find(record, "register", 1)), freed)
    for seq, item in enumerate(events, 1):
        item |= {"seq": seq, "t": seq / 100}


def without_pass(control: str) -> Edit:
    """Take a control out."""

    def edit(record: Record) -> None:
        record.events = [item for item in record.events if item.get("control") != control]
        renumber(record)

    return edit


def succeeded_first(record: Record) -> None:
    """Under the same pin the same pages were registered before, in place, and deregistered."""
    failed = find(record, "register")
    at = record.events.index(failed)
    made = copy.deepcopy(failed) | {"errno": None, "lkey": 3, "rkey": 3, "registration": 9}
    made["after"] = state(CMA, OTHERS_PIN)
    made["trace"] = build.succeeding_trace(made["before"], made["after"])
    made["trace"] |= {"probed": list(PROBED), "probed_failures": list(ON_FAILURE)}
    ended = {key: failed[key] for key in ("scenario", "variant", "control", "t")}
    record.events[at:at] = [made, ended | {"event": "deregister", "registration": 9, "errno": None}]
    renumber(record)


OTHERS_PIN = 2049  # a stranger's and ours
HALF = [[0, 4, 1025], [4, 4, 1]]
CONTRADICTED = "consistency"
ODP = both(
    event("register", after=state(CMA, 1025), access=["LOCAL_WRITE", "REMOTE_WRITE", "ON_DEMAND"]),
    without_events("pin_user_pages_fast", "__ib_umem_get_va"),
)
