"""Sources that were not held against each other: the memory map and the frames, a pin's trace and its pages,
a control and the device, transfers and their MR. Each edit contradicts what stands elsewhere in the record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from record_builder import Record

from regrepro.judge import judge_record
from unit.judge import turned

Edit = Callable[[Record], object]


def frames(**keys: Any) -> Edit:
    """Set keys of every page state that lies in CMA."""

    def edit(record: Record) -> None:
        for event in record.events:
            for name in ("pages", "before", "after"):
                state = event.get(name)
                if isinstance(state, dict) and state["place"] == [[0, 8, "cma"]]:
                    state.update(keys)

    return edit


def memory_map(**keys: Any) -> Edit:
    """Set keys of the memory map."""
    return lambda record: turned.find(record, "memory-map").update(keys)


def gup(event: str, nth: int = 0, **keys: Any) -> Edit:
    """Set keys of the call that took references, in the trace of an event."""

    def edit(record: Record) -> None:
        for item in turned.find(record, event, nth)["trace"]["events"]:
            if "user_pages" in item.get("fn", ""):
                item["args"].update(keys)

    return edit


def unpaired(record: Record) -> None:
    """The second try's migration has its tracepoint, and no return."""
    trace = turned.find(record, "register", 1)["trace"]
    trace["events"] = [item for item in trace["events"] if item.get("fn") != "migrate_pages"]


def twice_migrated(record: Record) -> None:
    """A migration that left nothing comes before the one that did, without a tracepoint."""
    events = turned.find(record, "register")["trace"]["events"]
    events.insert(0, {"t": 0.0, "fn": "migrate_pages", "ret": 0, "caller": "__gup_longterm_locked"})


def driver_in_stack(record: Record) -> None:
    """NVIDIA's function stands in the stack of a pin that the harness is said to have taken."""
    for item in turned.find(record, "pin")["trace"]["events"]:
        item["stack"] = ["os_lock_user_pages [nvidia]"]


def same_flags_of_another_name(record: Record) -> None:
    """The pin's trace and the registration's decode the same number differently."""
    gup("pin", gup_flags=257)(record)
    gup("register", gup_flags=257)(record)


def first_failed(record: Record) -> None:
    """The harness' own long-term pin was refused by io_uring, says its trace."""
    events = turned.find(record, "pin")["trace"]["events"]
    events.append({"t": 0.4, "fn": "io_sqe_buffers_register", "ret": -12, "caller": ""})


def transfer(**keys: Any) -> Edit:
    """Put a transfer that went well behind the last registration."""

    def edit(record: Record) -> None:
        mr = turned.find(record, "register", 0)
        went = {"event": "transfer", "opcode": "RDMA_WRITE", "errno": None, "intact": True, "bytes": 1}
        went |= {key: mr[key] for key in ("scenario", "variant", "control", "t")} | {
            "registration": mr["registration"]
        }
        record.events.insert(record.events.index(mr) + 1, went | keys)
        turned.renumber(record)

    return edit


def other_device(record: Record) -> None:
    """The control was made on another device."""
    for event in record.events:
        if event["event"] == "register" and event["control"]:
            event["device"] = "another0"


def in_movable_zone(record: Record) -> None:
    """The pages are said to lie in a zone of which the map, which held, knows nothing."""
    insert_check(record, has_unpinnable=True, changed=False, block_events=0)
    frames(place=[[0, 8, "movable-zone"]])(record)


TURNED: dict[str, tuple[Callable[[], Record], Edit]] = {
    "frames outside of the map's CMA": (
        turned.reproduced,
        memory_map(unpinnable_ranges=[[70000, 80000, "cma"]]),
    ),
    "ordinary frames within the map's CMA": (
        turned.reproduced,
        memory_map(unpinnable_ranges=[[1, 80000, "cma"]]),
    ),
    "one frame for all pages, mapped once": (
        turned.reproduced,
        frames(pfn=[[n, 100, 1] for n in range(8)]),
    ),
    "the pin's trace is of other addresses": (turned.reproduced, gup("pin", start=turned.ADDRESS + 4096)),
    "the pin's trace is of pages far away": (turned.reproduced, gup("pin", start=turned.ADDRESS - (1 << 30))),
    "in ZONE_MOVABLE of a node that has none": (turned.reproduced, in_movable_zone),
    "one value of flags, two meanings": (turned.reproduced, same_flags_of_another_name),
    "a driver in the stack of the harness' pin": (turned.reproduced, driver_in_stack),
    "another owner than takes such pins": (turned.reproduced, turned.event("pin", owner="io-uring")),
    "a pin whose trace ends in a refusal": (turned.by_pin, first_failed),
    "a tracepoint without its function": (turned.reproduced, unpaired),
    "a function without its tracepoint": (turned.reproduced, twice_migrated),
    "the second try was not traced": (
        turned.reproduced,
        lambda r: turned.find(r, "register", 1).update(trace={"status": "off", "why": "", "events": []}),
    ),
    "the second try's complete trace lost hits": (
        turned.reproduced,
        lambda r: turned.find(r, "register", 1)["trace"].update(misses=3),
    ),
    "a control's pass as the scenario": (turned.moved_out, turned.event("scenario-begin", change="pin=none")),
    "a control on another device": (turned.reproduced, other_device),
    "pages that bore a pin, and moved": (turned.moved_out, turned.counts("register", "before", 1025)),
    "a transfer larger than its MR": (turned.by_kernel, transfer(bytes=1 << 30)),
    "a transfer through no MR": (turned.by_kernel, transfer(registration=7)),
    "unpinnable memory that is gone and unchanged": (
        turned.by_kernel,
        lambda r: insert_check(r, has_unpinnable=False, changed=False),
    ),
}


def insert_check(record: Record, **keys: Any) -> None:
    """Put a second look at the memory map before the end of the pass."""
    end = turned.find(record, "scenario-end")
    look = {"event": "memory-map-check", "complete": True, "block_events": 0, "problems": []} | keys
    look |= {key: end[key] for key in ("scenario", "variant", "control", "t")}
    record.events.insert(record.events.index(end), look)
    turned.renumber(record)


@pytest.mark.parametrize("name", TURNED)
def test_what_stands_elsewhere_in_the_record_decides(name: str) -> None:
    make, edit = TURNED[name]
    record = make()
    assert judge_record(record)["verdicts"][0]["verdict"] in ("reproduced", "not-reproduced")
    edit(record)
    assert judge_record(record)["verdicts"][0]["verdict"] == "unmet"
