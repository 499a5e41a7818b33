"""Pages that moved for another reason than the pin never pass for a pin with FOLL_LONGTERM.

NUMA balancing moved a whole buffer to the other node when its pin was taken (seen in a guest of two nodes).
"""

from __future__ import annotations

from typing import Any

import record_builder as build

from regrepro import judge

INSIDE, OUTSIDE = list(range(100, 108)), list(range(2000, 2008))


def record(neighbour: tuple[int, int], trace: dict[str, Any] | None = None) -> build.Record:
    """A pin of the first eight pages, which move out, and one ordinary page: its PFN before and after."""
    before, after = neighbour
    builder = build.Builder()
    builder.memory_map()
    builder.begin(controls={"pin-without-longterm": "pin=pin"})
    builder.buffer(build.state([*INSIDE, before]))
    moved = build.state([*OUTSIDE, after], [1025] * 8 + [1])
    builder.pin(build.state([*INSIDE, before]), moved, length=8 * build.PAGE, trace=trace, owner="own-code")
    registered = build.state([*OUTSIDE, after], [2049] * 8 + [1025])
    builder.register(moved, registered, pins=[1])
    builder.release(build.state([*OUTSIDE, after], 1025))
    builder.end()
    builder.begin(control="pin-without-longterm", controls={"pin-without-longterm": "pin=pin"})
    builder.buffer(build.state(INSIDE))
    builder.pin(build.state(INSIDE), build.state(INSIDE, 1025))
    builder.register(build.state(INSIDE, 1025), build.state(INSIDE, 1025), errno="ENOMEM", pins=[1])
    builder.release(build.state(INSIDE))
    builder.end()
    return builder.done()


def verdict(made: build.Record) -> tuple[str, str | None]:
    [item] = judge.judge_record(made)["verdicts"]
    return item["verdict"], item["basis"]


def asked(*flags: str) -> dict[str, Any]:
    """The trace of a pin that asked for these flags."""
    call = {"t": 0.1, "fn": "pin_user_pages_remote", "ret": 8, "caller": "", "args": {"flags": list(flags)}}
    return build.trace(events=[call])


def test_a_neighbour_that_stayed_makes_it_a_long_term_pin() -> None:
    assert verdict(record((5000, 5000))) == ("unmet", None)  # it may have pinned twice: a trace must tell
    assert verdict(record((5000, 5000), asked("FOLL_WRITE", "FOLL_LONGTERM"))) == ("not-reproduced", "pin")


def test_a_neighbour_that_moved_as_well_proves_nothing() -> None:
    assert verdict(record((5000, 6000))) == ("unmet", None)


def test_a_pin_that_the_kernel_saw_ask_for_no_long_term_proves_nothing() -> None:
    assert verdict(record((5000, 5000), asked("FOLL_WRITE"))) == ("unmet", None)


# What is said of a pin that stayed


def stayed(*, references: int, compared: tuple[list[int], list[int]] | None) -> str:
    """The contract of a pin whose pages stayed, beside an io_uring pin: its PFNs before and after."""
    builder = build.Builder()
    builder.memory_map()
    builder.begin(controls={"longterm-pin": "pin=longterm"})
    pinned = build.state(INSIDE, references)
    builder.buffer(build.state(INSIDE))
    builder.pin(build.state(INSIDE), pinned)
    builder.register(pinned, pinned, errno="ENOMEM", pins=[1])
    builder.release(build.state(INSIDE))
    builder.end()
    if compared is not None:
        before, after = compared
        builder.begin(control="longterm-pin", controls={"longterm-pin": "pin=longterm"})
        builder.buffer(build.state(before))
        state = build.state(after, 1025)
        builder.pin(build.state(before), state, kind="longterm", owner="io-uring")
        builder.register(state, state, pins=[1])
        builder.release(build.state(after))
        builder.end()
    [item] = judge.judge_record(builder.done())["verdicts"]
    return str(item["evidence"]["pin_contract"]["value"]["1"]["contract"])


def test_a_pin_is_plain_where_a_long_term_pin_would_have_moved_its_pages() -> None:
    assert stayed(references=1025, compared=(INSIDE, OUTSIDE)) == "plain"


def test_where_no_pin_moves_a_page_nothing_is_said() -> None:
    assert stayed(references=1025, compared=(INSIDE, INSIDE)) == "unknown"


def test_without_a_long_term_pin_beside_it_nothing_is_said() -> None:
    assert stayed(references=1025, compared=None) == "unknown"


def test_a_page_that_bears_no_pin_was_perhaps_never_pinned() -> None:
    assert stayed(references=1, compared=(INSIDE, OUTSIDE)) == "unknown"
