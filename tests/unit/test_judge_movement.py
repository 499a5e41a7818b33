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
    builder.pin(build.state([*INSIDE, before]), moved, length=8 * build.PAGE, trace=trace)
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
    assert verdict(record((5000, 5000))) == ("not-reproduced", "pin")
    assert verdict(record((5000, 5000), asked("FOLL_WRITE", "FOLL_LONGTERM"))) == ("not-reproduced", "pin")


def test_a_neighbour_that_moved_as_well_proves_nothing() -> None:
    assert verdict(record((5000, 6000))) == ("unmet", None)


def test_a_pin_that_the_kernel_saw_ask_for_no_long_term_proves_nothing() -> None:
    assert verdict(record((5000, 5000), asked("FOLL_WRITE"))) == ("unmet", None)
