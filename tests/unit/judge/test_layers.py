"""Layers: each cause that says the same errno, told apart by trace, page state and what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import record_builder as build
from record_builder import CMA, OUT, PAGE, Builder, Record, find, returns, state

from regrepro.judge import judge_record
from unit.judge.layer_cases import (
    CASES,
    COUNTED,
    FILE,
    FILES,
    OLD,
    PIN_FAILED,
    UMEM_EARLY,
    UMEM_REFUSED,
    failed,
    limited,
    vma,
)


def layer(record: Record) -> tuple[str, str]:
    """Layer and how it is known."""
    verdict = judge_record(record)["verdicts"][0]
    # What names no cause, and what could be this bug, is left open; every other layer is another failure.
    open_cause = verdict["layer"] in ("unknown", "page-migration")
    assert verdict["verdict"] == "other-failure" or (open_cause and verdict["verdict"] == "unmet"), verdict
    return verdict["layer"], verdict["evidence"]["layer"]["how"]


@pytest.mark.parametrize("name", FILES)
def test_the_layer_where_the_call_stopped(name: str) -> None:
    """`check_vma_flags` (mm/gup.c) refuses at a mapping's first page; a fault comes at any."""
    record, due = FILES[name]
    assert layer(record) == due


@pytest.mark.parametrize("name", COUNTED)
def test_what_counts_against_the_limit(name: str) -> None:
    """mm->pinned_vm (VmPin) does, mm->locked_vm (VmLck) does not: `__ib_umem_get_va`, core/umem.c."""
    record, due = COUNTED[name]
    assert layer(record) == due


@pytest.mark.parametrize("errno", ["EOPNOTSUPP", "EINVAL"])
def test_implicit_on_demand_paging_is_no_overflow(errno: str) -> None:
    record = failed(errno, address=0, length=2**64 - 1, iova=0, access=["LOCAL_WRITE", "ON_DEMAND"])
    assert layer(record) == ("arguments", "observed")
    assert "implicit on-demand paging" in judge_record(record)["verdicts"][0]["reason"]


def test_a_refusal_of_the_rdma_core_is_not_blamed_on_access_flags() -> None:
    """A guest whose DMA is bounced: `__ib_umem_get_va` says EOPNOTSUPP, whatever the flags."""
    traced = returns(("__ib_umem_get_va", -95), ("rxe_reg_user_mr", -95))
    assert layer(failed("EOPNOTSUPP", traced))[0] == "unknown"


def test_no_layer_is_observed_by_a_function_that_no_trace_holds() -> None:
    """What is seen of a page that would not move is the return value of migrate_pages."""
    from regrepro.judge.layers import MOVE_REFUSED

    assert MOVE_REFUSED.startswith("migrate_pages, mm/migrate.c")
    verdict = judge_record(build.reproduced_record())["verdicts"][0]
    assert verdict["evidence"]["layer"]["source"] == MOVE_REFUSED


@pytest.mark.parametrize("name", CASES)
def test_the_layer_of(name: str) -> None:
    record, due = CASES[name]
    assert layer(record) == due


@pytest.mark.parametrize("name", [name for name, (_, due) in CASES.items() if due[0] == "unknown"])
def test_unknown_says_what_is_missing(name: str) -> None:
    evidence = judge_record(CASES[name][0])["verdicts"][0]["evidence"]["layer"]
    assert len(evidence["value"]["why"]) > 20


def test_no_errno_alone_names_a_layer() -> None:
    """Whatever the errno: with no trace, no page state and an ordinary request, nothing is named."""
    for errno in ("ENOMEM", "EFAULT", "EINVAL", "EPERM", "EOPNOTSUPP", "EBUSY", "EAGAIN"):
        record = failed(errno, {"status": "off", "why": "off"}, before=None, after=None)
        assert layer(record)[0] == "unknown", errno


def test_earlier_registrations_count_against_the_limit() -> None:
    node = limited(12 * PAGE)
    for given_back, due in ((False, "observed"), (True, "inferred")):
        builder = Builder(**node)
        builder.begin("fault", contract="none", controls={}, needs=())
        builder.buffer(state(OUT), place="any")
        builder.register(state(OUT), state(OUT), 1)
        if given_back:
            builder.event("deregister", registration=1, errno=None)
        builder.register(state(OUT), state(OUT), 2, errno="ENOMEM", trace=UMEM_EARLY)
        builder.end()
        assert layer(builder.done()) == ("memlock-accounting", due)


def test_a_step_tells_the_limit() -> None:
    builder = Builder()
    builder.begin("fault", contract="none", controls={}, needs=())
    builder.buffer(state(OUT), place="any")
    builder.event("step", name="limits", memlock_soft=0, capabilities=[])
    builder.register(state(OUT), state(OUT), errno="EPERM", trace=UMEM_REFUSED)
    builder.end()
    assert layer(builder.done())[0] == "memlock-accounting"


def test_io_uring_counts_after_it_has_pinned() -> None:
    node = limited(4 * PAGE)
    traced = returns(("pin_user_pages_fast", 8), ("io_sqe_buffers_register", -12))
    record = failed("ENOMEM", traced, node=node, verb="io_uring_register_buffers", device="io_uring")
    assert layer(record)[0] == "memlock-accounting"


def test_a_reference_that_went_by_itself_is_page_migration() -> None:
    """Held by nobody we know, gone at the retry: the layer is right, and it is not this bug."""
    builder = Builder()
    builder.memory_map()
    builder.begin("transient", contract="none", expects={"none": "other-failure"}, controls={})
    builder.buffer(state(CMA))
    held = state(CMA, 1025)
    builder.register(held, held, errno="ENOMEM")
    builder.register(state(CMA), state(OUT, 1025), 2)
    builder.end()
    record = builder.done()
    assert layer(record) == ("page-migration", "observed")
    find(record, "register")["trace"] = None
    assert layer(record)[0] == "unknown"
    record = builder.done()
    find(record, "register")["before"] = find(record, "register")["after"] = state(CMA)
    assert layer(record)[0] == "unknown"
    record = builder.done()
    find(record, "register", 1)["errno"] = "ENOMEM"
    assert layer(record)[0] == "unknown"


def test_a_pin_that_fails_by_itself() -> None:
    for owner, due in (("cuda", "cuda-pin"), ("standin:longterm", "cuda-pin"), ("io-uring", "unknown")):
        builder = Builder()
        builder.begin()
        builder.buffer(state(CMA))
        builder.pin(
            state(CMA), state(CMA), kind="longterm", owner=owner, errno="ENOMEM", api="io_uring_register"
        )
        builder.end()
        assert layer(builder.done())[0] == due


def test_the_memory_cgroup_kills() -> None:
    builder = Builder()
    builder.begin("cgroup", contract="none", controls={}, needs=("lab",))
    builder.end("killed", signal="SIGKILL", memory_events={"oom": 1, "oom_kill": 1})
    assert layer(builder.done()) == ("memory-cgroup", "observed")
    builder = Builder()
    builder.begin("cgroup", contract="none", controls={}, needs=("lab",))
    builder.end("killed", signal="SIGKILL", memory_events={"oom": 0, "oom_kill": 0})
    assert judge_record(builder.done())["verdicts"][0]["verdict"] == "error"


def test_a_wait_that_nothing_ends() -> None:
    for stack, due in (
        (["ib_uverbs_remove_one+0x1f2/0x2a0", "remove_client_context"], "other-failure"),
        (["do_nanosleep"], "error"),
        (None, "error"),
    ):
        builder = Builder()
        builder.begin("vanishing", contract="none", controls={}, needs=("lab",))
        builder.end("blocked", **({"where": stack} if stack else {}))
        verdict = judge_record(builder.done())["verdicts"][0]
        assert verdict["verdict"] == due
        assert verdict["layer"] == ("device" if due == "other-failure" else None)


def test_bytes_that_do_not_arrive_are_a_failure() -> None:
    for errno, intact, due in (("EIO", False, "device"), (None, False, "unknown")):
        builder = Builder()
        builder.begin("transfer", contract="none", controls={}, needs=())
        builder.buffer(state(OUT), place="any")
        builder.register(state(OUT), state(OUT, 1025))
        builder.event("transfer", registration=1, opcode="RDMA_WRITE", bytes=PAGE, errno=errno, intact=intact)
        builder.end()
        assert layer(builder.done())[0] == due


def test_compaction_beside_is_no_migration_of_ours() -> None:
    """A migration for another reason between tracepoint and return of ours changes nothing."""
    record = build.reproduced_record()
    events = find(record, "register")["trace"]["events"]
    fields = {"nr_succeeded": 3, "nr_failed": 0, "mode": "MIGRATE_ASYNC", "reason": "compaction"}
    events.append({"t": 0.9, "tracepoint": "mm_migrate_pages", "fields": fields})
    events.insert(0, {"t": 0.0, "tracepoint": "mm_migrate_pages", "fields": fields})
    assert judge_record(record)["verdicts"][0]["verdict"] == "reproduced"


def test_an_earlier_batch_that_moved_is_not_the_failing_one() -> None:
    """A tracer that records failures only gives the tracepoint of the batch that moved, and no return."""
    record = build.reproduced_record()
    events = find(record, "register")["trace"]["events"]
    fields = {"nr_succeeded": 0, "nr_failed": 0, "mode": "MIGRATE_SYNC", "reason": "longterm_pin"}
    events.insert(0, {"t": 0.0, "tracepoint": "mm_migrate_pages", "fields": fields})
    assert judge_record(record)["verdicts"][0]["verdict"] == "reproduced"
    events.append({"t": 0.9, "tracepoint": "mm_migrate_pages", "fields": fields})
    assert judge_record(record)["verdicts"][0]["verdict"] == "unmet"


@pytest.mark.parametrize(
    "lost", [{"misses": 1}, {"overrun": 5}, {"status": "spoiled", "why": "events were lost"}]
)
def test_lost_events_never_count_as_did_not_happen(lost: dict[str, Any]) -> None:
    """Each of these is named because a function was not called: with events lost, nobody knows."""
    for errno, ret in (("EINVAL", -22), ("EOPNOTSUPP", -95), ("ENOMEM", -12)):
        whole = failed(errno, returns(("rxe_reg_user_mr", ret)))
        gap = failed(errno, returns(("rxe_reg_user_mr", ret)) | lost)
        assert layer(whole)[0] in ("mkey", "arguments"), errno
        name, how = layer(gap)
        assert (name == "unknown" or how == "inferred") and how != "observed", (errno, name, how)
    limits = limited(0)
    assert layer(failed("EPERM", UMEM_REFUSED, node=limits))[1] == "observed"
    assert layer(failed("EPERM", UMEM_REFUSED | lost, node=limits))[1] == "inferred"


def test_a_step_tells_the_mapping_as_it_is_at_the_call() -> None:
    builder = Builder()
    builder.memory_map()
    builder.begin("fault", contract="none", expects={"none": "other-failure"}, controls={}, needs=())
    builder.buffer(state(OUT), place="any", placed="as-allocated", **vma("rw-p"))
    builder.event("step", name="read-only", buffer=1, **vma("r--p"))
    builder.register(state(OUT), state(OUT), errno="EFAULT", trace=PIN_FAILED)
    builder.event("step", name="writable", buffer=1, **vma("rw-p"))
    builder.end()
    verdict = judge_record(builder.done())["verdicts"][0]
    assert "read-only" in verdict["reason"]


def test_a_pin_of_a_file_that_io_uring_refused_itself() -> None:
    """Before 6.5 `io_pin_pages` (io_uring/rsrc.c) pins the pages of a file, and gives them back."""
    builder = Builder(**OLD)
    builder.begin("fault", contract="longterm", controls={}, needs=())
    builder.buffer(state(OUT), place="any", **FILE)
    refused = returns(("pin_user_pages", 8), ("io_pin_pages", -95), ("io_sqe_buffers_register", -95))
    pin = {"kind": "longterm", "owner": "io-uring", "api": None, "errno": "EOPNOTSUPP"}
    builder.pin(state(OUT), state(OUT), trace=refused, **pin)
    builder.end()
    assert layer(builder.done()) == ("longterm-refused", "inferred")
