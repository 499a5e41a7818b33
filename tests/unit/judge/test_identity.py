"""Identity: pages are the same if their frames are, and a pin is whose call raised the references."""

from __future__ import annotations

from typing import Any

import pytest
import record_builder as build
from record_builder import CMA, OUT, PAGE, Builder, state

from regrepro.judge import judge_record
from regrepro.judge.consistency import flaws
from regrepro.judge.facts import collect
from regrepro.judge.frames import pins_on

SECOND = build.ADDRESS + (1 << 20)
SHARED: dict[str, Any] = {"backing": "memfd"}


def vma(address: int, pages: int = 8) -> str:
    return f"{address:x}-{address + pages * PAGE:x} rw-s 00000000 00:01 7 /memfd:regrepro (deleted)"


def mapped_twice(
    *,
    pinned: list[int] | None = None,
    second: list[int] | None = None,
    kind: str = "pin",
    owner: str = "process-vm",
    held_by: int = 1024,
) -> build.Record:
    """A memfd of eight pages in two mappings: pinned by the first, registered by the second.

    `pinned`: page numbers of the first mapping (all); `second`: the frames of the second mapping.
    """
    builder = Builder()
    builder.memory_map()
    pinned = list(range(8)) if pinned is None else pinned
    frames = CMA if second is None else second
    held = {CMA[page] for page in pinned}
    longterm = kind == "longterm"
    now = [OUT[CMA.index(pfn)] if longterm and pfn in held else pfn for pfn in frames]
    own = [OUT[page] if longterm and page in pinned else CMA[page] for page in range(8)]

    def refs(before: list[int], more: int = 0) -> list[int]:
        return [3 + more + (held_by if pfn in held else 0) for pfn in before]

    where: dict[str, Any] = {"buffer": 2, "address": SECOND, "iova": SECOND}
    builder.begin(controls={"no-pin": "pin=none"}, contract="longterm" if longterm else "pin")
    builder.buffer(state(CMA, 2), vma=vma(build.ADDRESS), **SHARED)
    builder.buffer(state(frames, 3, 2), 2, address=SECOND, vma=vma(SECOND), **SHARED)
    builder.pin(
        state(CMA, 3, 2), state(own, refs(CMA), 2), kind=kind, owner=owner,
        ranges=[[page * PAGE, PAGE] for page in pinned],
    )  # fmt: skip
    if longterm:
        builder.register(state(now, refs(frames), 2), state(now, refs(frames, 1024), 2), 1, pins=[1], **where)
        builder.release(state(own, 3, 2))
    else:
        stay = [pfn if pfn in held else pfn + 5000 for pfn in frames]
        builder.register(
            state(frames, refs(frames), 2), state(stay, refs(frames), 2), 1, errno="ENOMEM", pins=[1],
            trace=build.failing_trace(len([pfn for pfn in frames if pfn in held])), **where,
        )  # fmt: skip
        builder.release(state(CMA, 3, 2))
        out = [pfn if pfn > 1000 else pfn + 6000 for pfn in stay]
        builder.register(state(stay, 3, 2), state(out, 1027, 2), 2, **where)
    builder.end()
    builder.begin(control="no-pin", contract="none", controls={"no-pin": "pin=none"})
    own = [pfn + 500 for pfn in CMA]
    builder.buffer(state(own, 2), vma=vma(build.ADDRESS), **SHARED)
    builder.buffer(state(own, 3, 2), 2, address=SECOND, vma=vma(SECOND), **SHARED)
    builder.register(state(own, 3, 2), state([pfn + 6000 for pfn in own], 1027, 2), 1, **where)
    builder.end()
    return builder.done()


def first(made: build.Record) -> dict[str, Any]:
    return dict(judge_record(made)["verdicts"][0])


@pytest.mark.parametrize(
    ("pinned", "second"),
    [
        (None, None),  # the same eight pages
        ([3], None),  # one of them is pinned
        ([0, 1, 7], None),
        (None, [*CMA[4:], *CMA[:4]]),  # mapped in another order
        ([2], CMA[::-1]),  # the other way round
        ([5], CMA[4:] + [pfn + 200 for pfn in CMA[:4]]),  # the second mapping has other pages, too
    ],
)
def test_a_pin_by_one_mapping_holds_the_frames_of_the_other(
    pinned: list[int] | None, second: list[int] | None
) -> None:
    found = first(mapped_twice(pinned=pinned, second=second))
    assert (found["verdict"], found["pin_owner"]) == ("reproduced", "process-vm"), found["reason"]
    assert found["evidence"]["pages_pinned"]["value"] == (8 if pinned is None else len(pinned))


def test_a_pin_on_other_frames_is_not_held_on_these() -> None:
    found = first(mapped_twice(second=[pfn + 200 for pfn in CMA]))
    assert found["verdict"] == "unmet"
    assert "no pin without FOLL_LONGTERM was held" in found["reason"]


def test_a_long_term_pin_moves_the_frames_of_both_mappings() -> None:
    found = first(mapped_twice(kind="longterm", owner="io-uring"))
    assert (found["verdict"], found["basis"]) == ("not-reproduced", "pin"), found["reason"]


def test_a_private_page_that_is_mapped_twice_may_have_been_copied() -> None:
    record = mapped_twice(kind="longterm", owner="io-uring")
    for number in (0, 1):
        made = build.find(record, "buffer", number)
        made["vma"] = made["vma"].replace("rw-s", "rw-p")
    assert first(record)["verdict"] == "unmet"


def test_an_earlier_success_by_the_other_mapping_speaks_against_the_bug() -> None:
    record = mapped_twice()
    failed = build.find(record, "register")
    earlier = failed | {
        "registration": 9, "buffer": 1, "address": build.ADDRESS, "iova": build.ADDRESS, "errno": None,
        "trace": None, "after": failed["before"],
    }  # fmt: skip
    record.events.insert(record.events.index(failed), earlier)
    for seq, event in enumerate(record.events, 1):
        event["seq"] = seq
    found = first(record)
    assert found["verdict"] == "unmet"
    assert {check["name"]: check["state"] for check in found["checks"]}["order"] == "contradicted"


def test_a_pin_held_by_the_other_mapping_spoils_the_retry() -> None:
    record = mapped_twice()
    pin, release = build.find(record, "pin"), build.find(record, "release")
    at = record.events.index(release)
    record.events.insert(at, pin | {"pin": 2})
    for seq, event in enumerate(record.events, 1):
        event["seq"] = seq
    assert first(record)["verdict"] == "unmet"


def test_an_address_that_got_another_frame_is_not_held_any_more() -> None:
    """After a fork and a write, or mremap, the pin still holds the old frame."""
    record = build.reproduced_record()
    other = state([pfn + 300 for pfn in CMA], 1025)
    failed = build.find(record, "register")
    failed["before"] = failed["after"] = other
    run = collect(record).passes[0]
    assert pins_on(run.registrations[0]) == []
    found = first(record)
    assert (found["verdict"], "no pin without FOLL_LONGTERM" in found["reason"]) == ("unmet", True)


def test_a_pinned_frame_that_moved_within_the_buffer_is_held_where_it_is_now() -> None:
    record = build.partly_pinned_record()
    swapped = [*CMA[:3], CMA[5], CMA[4], CMA[3], *CMA[6:]]
    build.find(record, "register")["before"] = state(swapped, [1] * 5 + [1025] + [1] * 2)
    [pin] = pins_on(collect(record).passes[0].registrations[0])
    assert pin.spans.pairs == ((5, 6),)
    assert pin.after is not None and pin.after.bounds("refcount", pin.spans) == (1025, 1025)


# Whose pin


def gup(caller: str, *stack: str, flags: tuple[str, ...] = ("FOLL_WRITE",)) -> dict[str, Any]:
    event = {
        "t": 0.1, "fn": "pin_user_pages", "ret": 8, "caller": caller, "stack": list(stack),
        "args": {"start": build.ADDRESS, "nr_pages": 8, "flags": list(flags)},
    }  # fmt: skip
    return build.trace(events=[event])


NVIDIA = ("os_lock_user_pages [nvidia]", "rm_alloc_os_descriptor [nvidia]")


@pytest.mark.parametrize(
    ("node", "trace", "owner"),
    [
        ({"nvidia_driver": "535.54.03"}, None, "cuda"),  # a record from before nvidia_module
        ({"nvidia_driver": "535.54.03", "nvidia_module": True}, None, "cuda"),
        ({"nvidia_driver": None, "nvidia_module": True}, None, "cuda"),
        ({"nvidia_driver": None}, None, "unknown"),
        ({"nvidia_driver": "535.54.03", "nvidia_module": False}, None, "unknown"),
        ({"nvidia_driver": "535.54.03"}, gup(NVIDIA[0], *NVIDIA), "cuda"),
        ({"nvidia_driver": "535.54.03"}, gup("process_vm_rw_core.constprop.0"), "process-vm"),
        ({"nvidia_driver": None}, gup("process_vm_rw_core.constprop.0"), "process-vm"),
        ({"nvidia_driver": "535.54.03"}, gup("io_pin_pages"), "io-uring"),
        ({"nvidia_driver": "535.54.03"}, gup("get_pages [amdgpu]"), "amdgpu"),
        ({"nvidia_driver": "535.54.03"}, gup("do_something"), "unknown"),
        ({"nvidia_driver": "535.54.03"}, build.trace(), "unknown"),  # nothing in it pinned
        ({"nvidia_driver": None}, gup(NVIDIA[0], *NVIDIA), "unknown"),
    ],
)
def test_only_the_driver_s_own_pin_is_the_driver_s(node: Any, trace: Any, owner: str) -> None:
    record = build.reproduced_record(**node)
    build.find(record, "pin").update(owner="cuda", trace=trace, api="cudaHostRegister")
    found = first(record)
    assert (found["verdict"], found["pin_owner"]) == ("reproduced", owner)
    assert ("NVIDIA" in found["reason"], "driver" in found) == (owner == "cuda", owner == "cuda")
    assert found["evidence"]["pins"]["value"][0]["owner"] == owner


@pytest.mark.parametrize(
    ("owner", "node", "due"),
    [
        ("cuda", {"nvidia_driver": "535.54.03"}, "cuda"),
        ("cuda", {"nvidia_driver": None}, "unknown"),
        ("own-code", {}, "own-code"),
        ("standin:longterm", {}, "standin:longterm"),
    ],
)
def test_a_refused_pin_is_of_the_call_that_was_refused(owner: str, node: Any, due: str) -> None:
    builder = Builder(**node)
    builder.memory_map()
    builder.begin()
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(CMA), errno="ENOMEM", owner=owner, trace=build.trace())
    builder.end()
    found = first(builder.done())
    assert (found["verdict"], found["pin_owner"], found["errno"]) == ("other-failure", due, "ENOMEM")


@pytest.mark.parametrize("kind", ["pin", "get"])
def test_a_function_that_pins_nothing_is_not_blamed_for_a_stranger_s_pin(kind: str) -> None:
    record = build.reproduced_record() if kind == "pin" else build.get_record()
    pin = build.find(record, "pin")
    pin.update(owner="own-code", api="mine.pin")
    assert first(record)["pin_owner"] == "own-code"
    assert first(record)["verdict"] == "reproduced"
    pin["before"]["refcount"] = pin["after"]["refcount"]  # it stood before mine.pin was called
    found = first(record)
    assert (found["verdict"], found["pin_owner"]) == ("unmet", "unknown")
    [flaw] = [need["why"] for need in found["unmet"] if need["need"] == "consistency"]
    assert "put no pin on page 0-7" in flaw
    assert found["evidence"]["pin_contract"]["value"]["1"]["contract"] == "unknown"


def test_nor_is_it_praised_where_the_kernel_allows_it() -> None:
    record = build.kernel_record()
    pin = build.find(record, "pin")
    pin.update(owner="own-code", api="mine.pin")
    assert first(record)["basis"] == "kernel"
    pin["before"]["refcount"] = pin["after"]["refcount"]
    assert first(record)["verdict"] == "unmet"


def test_a_page_that_left_an_lru_batch_when_it_was_pinned_was_pinned_all_the_same() -> None:
    record = build.reproduced_record()
    pin = build.find(record, "pin")
    pin.update(owner="own-code", api="mine.pin")
    pin["before"]["refcount"] = [[0, 8, 2]]
    assert first(record)["verdict"] == "reproduced"


def test_code_that_was_expected_to_ask_for_longterm_and_did_not_is_the_cause() -> None:
    record = build.reproduced_record()
    build.find(record, "pin").update(owner="own-code", api="mine.pin", kind="longterm")
    found = first(record)
    assert (found["verdict"], found["pin_owner"]) == ("reproduced", "own-code")


# Which pin stands


@pytest.mark.parametrize(
    ("owner", "trace", "verdict"),
    [
        ("io-uring", None, "not-reproduced"),
        ("standin:longterm", None, "not-reproduced"),
        ("own-code", None, "unmet"),
        ("cuda", None, "unmet"),
        ("driver-source", None, "unmet"),
        ("own-code", build.trace(), "unmet"),  # none of its calls was seen
        ("own-code", gup("f [mine]"), "unmet"),  # it asked for no FOLL_LONGTERM
        ("own-code", gup("f [mine]", flags=("FOLL_WRITE", "FOLL_LONGTERM")), "not-reproduced"),
        ("cuda", gup(*NVIDIA, flags=("FOLL_WRITE", "FOLL_LONGTERM")), "not-reproduced"),
        ("own-code", gup("f [mine]", flags=("FOLL_LONGTERM",)) | {"status": "spoiled"}, "unmet"),
    ],
)
def test_movement_says_longterm_only_of_the_pin_that_stands(owner: str, trace: Any, verdict: str) -> None:
    record = build.longterm_record()
    record.header["node"]["nvidia_driver"] = "560.35.03"
    build.find(record, "pin").update(owner=owner, trace=trace, api="mine.pin")
    found = first(record)
    assert (found["verdict"], found["basis"]) == (verdict, "pin" if verdict == "not-reproduced" else None)


@pytest.mark.parametrize("start", [build.ADDRESS, SECOND, 4096])
def test_a_short_pin_beside_the_long_one_may_be_the_one_that_stands(start: int) -> None:
    """By whatever address it was taken: the pages may be mapped there, too."""
    record = build.longterm_record()
    trace = gup("f [mine]", flags=("FOLL_WRITE", "FOLL_LONGTERM"))
    short = gup("f [mine]")["events"][0]
    short["args"]["start"] = start
    trace["events"].append(short)
    build.find(record, "pin").update(owner="own-code", trace=trace, api="mine.pin")
    assert first(record)["verdict"] == "unmet"


def test_a_call_that_asked_for_longterm_on_other_pages_proves_nothing() -> None:
    record = build.longterm_record()
    trace = gup("f [mine]", flags=("FOLL_WRITE", "FOLL_LONGTERM"))
    trace["events"][0]["args"]["start"] = SECOND
    build.find(record, "pin").update(owner="own-code", trace=trace, api="mine.pin")
    assert first(record)["verdict"] == "unmet"


@pytest.mark.parametrize(("kind", "other"), [("pin", "get"), ("get", "pin")])
def test_code_that_takes_another_kind_of_pin_than_it_says_is_told_what_to_write(
    kind: str, other: str
) -> None:
    record = build.reproduced_record() if kind == "pin" else build.get_record()
    build.find(record, "pin").update(owner="own-code", api="mine.pin", kind=other)
    found = first(record)
    assert found["verdict"] == "unmet"
    assert f"write kind='{kind}'" in str(found["unmet"])


def test_a_release_is_not_held_against_an_mr_that_another_mapping_took_meanwhile() -> None:
    builder = Builder()
    builder.memory_map()
    where: dict[str, Any] = {"buffer": 2, "address": SECOND, "iova": SECOND}
    builder.begin(controls={})
    builder.buffer(state(OUT, 3, 2), vma=vma(build.ADDRESS), **SHARED)
    builder.buffer(state(OUT, 3, 2), 2, address=SECOND, vma=vma(SECOND), **SHARED)
    builder.pin(state(OUT, 3, 2), state(OUT, 1027, 2))
    builder.register(state(OUT, 1027, 2), state(OUT, 2051, 2), 1, pins=[1], **where)
    builder.release(state(OUT, 1027, 2))  # as many references as after the pin: the MR has its own
    builder.end()
    facts = collect(builder.done())
    assert flaws(facts, facts.passes[0]) == []
