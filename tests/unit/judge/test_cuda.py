"""Verdicts where CUDA made the memory: nobody saw its pages before the pin, or it has none of the host."""

from __future__ import annotations

from typing import Any

import pytest
import record_builder as build
from record_builder import CMA, OUT, state

from regrepro import judge

MOVED = {"nr_succeeded": 8, "nr_failed": 0, "mode": "MIGRATE_SYNC", "reason": "longterm_pin"}


def moving_trace(*flags: str, moved: int = 8, status: str = "complete") -> dict[str, Any]:
    """The trace of a pin for which the kernel moved pages out."""
    fields = MOVED | {"nr_succeeded": moved}
    call = {"t": 0.3, "fn": "pin_user_pages_fast", "ret": 8, "caller": "", "args": {"flags": list(flags)}}
    events: list[dict[str, Any]] = [
        {"t": 0.1, "tracepoint": "mm_migrate_pages", "fields": fields},
        {"t": 0.2, "fn": "migrate_pages", "ret": 0, "caller": "", "args": {}},
        call,
    ]
    return build.trace(events=events if moved else events[2:], status=status)


def host_alloc(
    pages: list[int], trace: dict[str, Any] | None, *, errno: str | None = None, owner: str = "standin:pin"
) -> build.Record:
    """CudaHostAlloc, register, cudaFreeHost with the pages kept, register again; controls as shipped."""
    builder = build.Builder()
    builder.memory_map()
    builder.begin("cuda_host_alloc_then_register", contract="pin")
    held = state(pages, 1025)
    builder.buffer(held, backing="cuda-host", owner="cuda", stand_in=owner)
    builder.pin(None, held, owner=owner, api="cudaHostAlloc", trace=trace, pages_unknown="made by this call")
    if errno:
        builder.register(held, held, errno=errno, pins=[1])
    else:
        builder.register(held, state(pages, 2049), pins=[1])
    builder.release(state(pages))
    builder.register(state(pages), state(OUT, 1025), 2)
    builder.end()
    build.no_pin_control(builder, "cuda_host_alloc_then_register")
    build.ordinary_control(builder, "cuda_host_alloc_then_register")
    return builder.done()


def only(made: build.Record) -> dict[str, Any]:
    [item] = judge.judge_record(made)["verdicts"]
    return item


def test_memory_of_cuda_itself_can_be_the_proof() -> None:
    found = only(host_alloc(CMA, build.trace(), errno="ENOMEM"))
    assert (found["verdict"], found["pin_owner"], found["layer"]) == (
        "reproduced",
        "standin:pin",
        "page-migration",
    )


def test_a_driver_that_moved_its_pages_out_first_is_told_by_the_trace() -> None:
    found = only(host_alloc(OUT, moving_trace("FOLL_WRITE", "FOLL_LONGTERM"), owner="cuda"))
    assert (found["verdict"], found["basis"]) == ("not-reproduced", "pin")
    assert "moved 8 of its pages" in found["reason"]


@pytest.mark.parametrize(
    "trace",
    [
        None,
        build.trace(),
        moving_trace("FOLL_WRITE", "FOLL_LONGTERM", moved=0),
        moving_trace("FOLL_WRITE", "FOLL_LONGTERM", status="spoiled"),
        moving_trace("FOLL_WRITE"),
    ],
    ids=["no trace", "nothing seen", "nothing moved", "events lost", "no FOLL_LONGTERM"],
)
def test_without_that_trace_ordinary_pages_prove_nothing_of_the_driver(trace: dict[str, Any] | None) -> None:
    assert only(host_alloc(OUT, trace))["verdict"] == "unmet"


def test_a_refusal_of_cuda_is_a_verdict_of_its_own_with_cuda_s_words() -> None:
    builder = build.Builder(nvidia_driver="560.35.03")
    builder.memory_map()
    builder.begin("cuda_host_alloc_then_register")
    builder.buffer(None, address=0, backing="cuda-host", owner="cuda")
    builder.pin(
        None,
        None,
        owner="cuda",
        api="cudaHostAlloc",
        errno="ENOMEM",
        cuda_error="cudaErrorMemoryAllocation",
        message="cudaHostAlloc: cudaErrorMemoryAllocation, out of memory",
    )
    builder.end()
    found = only(builder.done())
    assert (found["verdict"], found["layer"], found["errno"]) == ("other-failure", "cuda-pin", "ENOMEM")
    assert "cudaErrorMemoryAllocation" in found["reason"]


def gpu_buffer(errno: str | None, verb: str) -> build.Record:
    builder = build.Builder()
    builder.memory_map(has_unpinnable=False)
    builder.begin(
        "gpu_buffer",
        contract="none",
        expects={"none": "not-reproduced"},
        controls={"host-memory": "instead no_pin"},
        needs=("root", "cuda"),
    )
    builder.buffer(None, backing="cuda-device", owner="cuda", place="any", placed="as-allocated", vma="")
    builder.register(None, None, errno=errno, verb=verb, trace=build.trace())
    builder.end()
    return builder.done()


def test_memory_of_the_gpu_has_no_page_that_could_be_held() -> None:
    found = only(gpu_buffer(None, "ibv_reg_dmabuf_mr"))
    assert (found["verdict"], found["basis"]) == ("not-reproduced", "kernel")
    assert "memory of the GPU" in found["reason"]


@pytest.mark.parametrize(
    ("errno", "verb", "layer"),
    [
        ("EOPNOTSUPP", "ibv_reg_dmabuf_mr", "dma-buf"),
        ("EBADF", "ibv_reg_dmabuf_mr", "dma-buf"),
        ("EFAULT", "ibv_reg_mr_iova2", "peer-memory"),
    ],
)
def test_its_refusals_have_their_own_layers(errno: str, verb: str, layer: str) -> None:
    found = only(gpu_buffer(errno, verb))
    assert (found["verdict"], found["layer"]) == ("other-failure", layer)


def test_what_was_asked_to_be_unpinnable_is_what_a_success_is_judged_by() -> None:
    """A connection registers structures of its own first: they say nothing of the pinned bank."""
    builder = build.Builder()
    builder.memory_map()
    builder.begin("nccl")
    own = state(list(range(8000, 8004)))
    builder.buffer(own, place="any")
    builder.register(own, own, 1, length=100)
    builder.buffer(state(CMA), 2, address=build.ADDRESS + (1 << 20))
    builder.pin(state(CMA), state(OUT, 1025), buffer=2, owner="standin:longterm")
    builder.register(
        state(OUT, 1025), state(OUT, 2049), 2, pins=[1], buffer=2, address=build.ADDRESS + (1 << 20)
    )
    builder.end()
    build.no_pin_control(builder, "nccl")
    found = only(builder.done())
    assert (found["pin_owner"], found["evidence"]["pages"]["value"]) == ("standin:longterm", 8)
