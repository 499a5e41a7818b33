"""What is odd and honest contradicts nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import record_builder as build
from record_builder import CMA, OUT, PAGE, Builder, Record, find, state

from regrepro.judge.consistency import flaws
from regrepro.judge.facts import collect
from unit.judge.turned import (
    PROBED,
    Edit,
    both,
    by_get,
    by_kernel,
    by_pin,
    counts,
    event,
    one_of_eight,
    own_code,
    pages,
    reproduced,
    trace,
    traced,
)


def passed(make: Callable[[Builder], object], **node: Any) -> Record:
    """One pass, traced as today."""
    builder = Builder(**node)
    builder.memory_map()
    builder.begin(controls={})
    make(builder)
    builder.end()
    return traced(builder.done())


def edited(make: Callable[[], Record], *edits: Edit) -> Record:
    record = make()
    both(*edits)(record)
    return record


def forked(builder: Builder) -> None:
    """After fork() the process writes, and gets copies; the FOLL_GET stays on the pages that it had."""
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(CMA, 2), kind="get", owner="vmsplice")
    builder.register(state(OUT, 1), state(OUT, 1025), pins=[1])
    builder.release(state(OUT, 1025))


def huge(builder: Builder) -> None:
    """Of a large folio `_pincount` counts each page, and migration counts the folio."""

    def large(pins: int) -> dict[str, Any]:
        return state(CMA, 8 + pins, 8, pincount=[[0, 8, pins]])

    builder.buffer(large(0), backing="thp")
    builder.pin(large(0), large(8))
    builder.register(large(8), large(8), errno="ENOMEM", pins=[1], trace=build.failing_trace(1))
    builder.release(large(0))


def kept_series(builder: Builder) -> None:
    """Many registrations were kept of which no page state was read."""
    builder.buffer(state(OUT))
    builder.pin(state(OUT), state(OUT, 1025))
    builder.register(state(OUT, 1025), state(OUT, 2049), pins=[1])
    length = len(OUT) * build.PAGE
    each = {"series": 1, "length": length, "errno": None, "seconds": 0.001}
    for number in (2, 3, 4):
        builder.event("registered", number=number, address=build.ADDRESS, **each)
    of_all = {"verb": "ibv_reg_mr_iova2", "access": build.ACCESS, "buffer": 1}
    builder.event("register-many", **each, **of_all, count=4, keep=True, succeeded=4)
    builder.release(state(OUT, 1 + 4 * 1024))


def peer(builder: Builder) -> None:
    """A GPU's memory: the pin of host pages fails, a peer-memory client then has it."""
    builder.buffer(None, backing="cuda-device", owner="cuda")
    seen = build.returns(("pin_user_pages_fast", -14), ("__ib_umem_get_va", -14), ("rxe_reg_user_mr", 1))
    builder.register(None, None, trace=seen)


def no_dmabuf(builder: Builder) -> None:
    """Libibverbs has its own word for a provider without dma-buf."""
    builder.buffer(state(OUT))
    seen = build.returns(("ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR", -93))
    builder.register(state(OUT), state(OUT), errno="EOPNOTSUPP", verb="ibv_reg_dmabuf_mr", trace=seen)


def beyond(builder: Builder) -> None:
    """A range longer than the buffer: pages that nobody read migrated as well."""
    builder.buffer(state(CMA))
    seen = build.returns(("pin_user_pages_fast", -14), ("__ib_umem_get_va", -14), ("rxe_reg_user_mr", -14))
    seen["events"][:0] = build.migration(120, 0, 0)
    builder.register(state(CMA), state(OUT), errno="EFAULT", length=PAGE << 20, trace=seen)


def by_io_uring(builder: Builder) -> None:
    """Without a device io_uring registers, and gives no keys."""
    builder.buffer(state(CMA))
    keys = {"verb": "io_uring_register_buffers", "device": "io_uring", "lkey": None, "rkey": None}
    seen = build.returns(("pin_user_pages_fast", 8), ("io_sqe_buffers_register", 0))
    seen["events"][:0] = build.migration(8, 0, 0)
    builder.register(state(CMA), state(OUT, 1025), trace=seen, **keys)


def fresh(builder: Builder) -> None:
    """Absent pages come to be in CMA during the call, and are moved out."""
    builder.buffer(state([0] * 8, 0))
    seen = build.succeeding_trace(state(CMA), state(OUT))
    builder.register(state([0] * 8, 0), state(OUT, 1025), trace=seen)


HONEST: dict[str, Record] = {
    "a page of an LRU batch": edited(
        reproduced, counts("register", "after", 1026), counts("register", "before", 1026, 1)
    ),
    "a FOLL_GET on a page that left its LRU batch": edited(by_get, counts("pin", "before", 2)),
    "a FOLL_GET whose release left the page in an LRU batch": edited(by_get, counts("release", "after", 2)),
    "counts that were not read": edited(
        reproduced, *(counts("register", when, None, n) for when in ("before", "after") for n in (0, 1))
    ),
    "isolated meanwhile": edited(by_kernel, pages("register", "after", place=[[0, 8, "isolate"]])),
    "a kernel that hides migrate_pages": edited(
        by_kernel,
        lambda r: [
            item["trace"].update(
                missing=[{"fn": "migrate_pages", "why": "inlined"}],
                probed=[name for name in PROBED if name != "migrate_pages"],
            )
            for item in r.events
            if item.get("trace")
        ],
    ),
    "a trace that lost events": edited(
        reproduced, trace(status="spoiled", why="overrun", events=[], tree=[]), event("register", errno="EIO")
    ),
    "a driver's pin that cannot be asked": own_code(),
    "a driver that pins with FOLL_GET": edited(
        own_code, counts("pin", "after", 2), *(counts("register", when, 2) for when in ("before", "after"))
    ),
    "own code that asks for more than is expected of it": edited(
        by_pin,
        lambda r: find(r, "pin").update(owner="own-code", kind="pin"),
    ),
    "one page of eight": one_of_eight(),
    "fork": passed(forked),
    "a huge page": passed(huge),
    "a series": passed(kept_series),
    "a GPU's memory": passed(peer),
    "no dma-buf": passed(no_dmabuf),
    "a range beyond the buffer": passed(beyond),
    "io_uring": passed(by_io_uring),
    "pages that come to be in the call": passed(fresh),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_is_odd_and_honest_contradicts_nothing(name: str) -> None:
    facts = collect(HONEST[name])
    assert [flaw.text for run in facts.passes for flaw in flaws(facts, run)] == []
    assert not [text for run in facts.passes for text in run.problems]
