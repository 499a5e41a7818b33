"""Which of all that a pass did is its verdict: each registration is judged, the worst proven one counts."""

from __future__ import annotations

from typing import Any

import pytest
import record_builder as build
from record_builder import CMA, OUT, PAGE, Builder, state

from regrepro.judge import judge_record
from regrepro.judge.controls import best_success
from regrepro.judge.facts import collect
from regrepro.judge.rules import Case

SECOND = build.ADDRESS + (1 << 20)
CMA2, OUT2 = list(range(300, 308)), list(range(5300, 5308))


def only(made: build.Record) -> dict[str, Any]:
    [item] = judge_record(made)["verdicts"]
    return dict(item)


def sound_round(builder: Builder, number: int = 1, pin: int | None = 1) -> None:
    """A round that succeeds: a long-term pin moves the pages out first."""
    builder.buffer(state(CMA), number)
    if pin is not None:
        builder.pin(
            state(CMA),
            state(OUT, 1025),
            pin,
            buffer=number,
            kind="longterm",
            owner="io-uring",
            api="io_uring",
        )
        builder.register(state(OUT, 1025), state(OUT, 2049), 1, pins=[pin], buffer=number)
        builder.release(state(OUT), pin)
    else:
        builder.register(state(CMA), state(OUT, 1025), 1, buffer=number)


def failing_round(
    builder: Builder, registration: int, *, number: int = 2, pin: int = 2, again: bool = True, **keys: Any
) -> None:
    """A round with the whole proof, in a buffer of its own."""
    own: dict[str, Any] = {"buffer": number, "address": SECOND, "iova": SECOND}
    builder.buffer(state(CMA2), number, address=SECOND)
    builder.pin(state(CMA2), state(CMA2, 1025), pin, buffer=number)
    builder.register(
        state(CMA2, 1025), state(CMA2, 1025), registration, errno="ENOMEM", pins=[pin], **(own | keys)
    )
    builder.release(state(CMA2), pin)
    if again:
        builder.register(state(CMA2), state(OUT2, 1025), registration + 1, **own)


def control(builder: Builder, rounds: int = 2) -> None:
    """The control pin=none of both rounds."""
    builder.begin(control="no-pin", contract="none", controls={"no-pin": "pin=none"})
    for number in range(1, rounds + 1):
        where = build.ADDRESS if number == 1 else SECOND
        pages, out = [pfn + 400 for pfn in CMA], [pfn + 4000 for pfn in OUT]
        builder.buffer(state(pages), number, address=where)
        builder.register(state(pages), state(out, 1025), number, buffer=number, address=where, iova=where)
    builder.end()


def begun() -> Builder:
    builder = Builder()
    builder.memory_map()
    builder.begin(controls={"no-pin": "pin=none"})
    return builder


def test_a_success_in_the_first_round_does_not_hide_the_failure_of_the_second() -> None:
    builder = begun()
    sound_round(builder)
    failing_round(builder, 2)
    builder.end()
    control(builder)
    found = only(builder.done())
    assert (found["verdict"], found["registration"], found["pin_owner"]) == ("reproduced", 2, "process-vm")
    assert "(registration 2 of 3)" in found["reason"]
    assert [item["held"] for item in found["controls"]] == [True]


def test_a_soak_loop_without_pins_is_judged_round_by_round() -> None:
    builder = begun()
    sound_round(builder, pin=None)
    builder.event("deregister", registration=1, errno=None)
    failing_round(builder, 2)
    builder.end()
    control(builder)
    assert only(builder.done())["verdict"] == "reproduced"


def test_another_errno_before_it_does_not_hide_the_bug() -> None:
    builder = begun()
    builder.buffer(state(CMA))
    builder.register(state(CMA), state(CMA), 1, errno="EINVAL", access=["REMOTE_WRITE"])
    failing_round(builder, 2)
    builder.end()
    control(builder)
    found = only(builder.done())
    assert (found["verdict"], found["registration"]) == ("reproduced", 2)


def test_a_pin_that_was_refused_does_not_hide_the_bug() -> None:
    builder = begun()
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(CMA), 1, errno="EFAULT")
    failing_round(builder, 1)
    builder.end()
    control(builder)
    assert only(builder.done())["verdict"] == "reproduced"


def test_a_failure_that_is_undecided_comes_before_another_failure() -> None:
    builder = begun()
    builder.buffer(state(CMA))
    builder.register(state(CMA), state(CMA), 1, errno="EINVAL", access=["REMOTE_WRITE"])
    failing_round(builder, 2, again=False)
    builder.end()
    control(builder)
    found = only(builder.done())
    assert (found["verdict"], found["registration"]) == ("unmet", 2)
    assert "not tried again" in found["reason"]


def test_another_failure_comes_before_a_success() -> None:
    builder = begun()
    sound_round(builder)
    builder.register(state(OUT), state(OUT), 2, errno="EINVAL", access=["REMOTE_WRITE"])
    builder.end()
    control(builder)
    found = only(builder.done())
    assert (found["verdict"], found["layer"], found["registration"]) == ("other-failure", "arguments", 2)


def test_a_retry_after_the_release_that_fails_is_a_finding_of_its_own() -> None:
    builder = begun()
    failing_round(builder, 1, again=False)
    builder.register(
        state(CMA2), state(CMA2), 2, errno="EINVAL", buffer=2, address=SECOND, iova=SECOND + 1, trace=None
    )
    builder.end()
    control(builder)
    run = collect(builder.record()).passes[0]
    assert [item.errno for item in run.registrations] == ["ENOMEM", "EINVAL"]
    found = only(builder.done())
    assert found["verdict"] == "unmet"
    builder = begun()
    sound_round(builder)
    builder.register(state(OUT), state(OUT), 2, errno="EINVAL", access=["REMOTE_WRITE"])  # after the release
    builder.end()
    assert only(builder.done())["verdict"] == "other-failure"


def test_of_two_that_are_undecided_the_one_that_lacks_least_is_named() -> None:
    builder = begun()
    builder.buffer(state(CMA))
    builder.register(state(CMA), state(CMA), 1, errno="ENOMEM", trace=None)
    failing_round(builder, 2, again=False)
    builder.end()
    control(builder)
    assert only(builder.done())["registration"] == 2


def test_the_control_is_held_against_the_same_call_and_not_its_first() -> None:
    """The first call of the control fails for the scenario's own mistake, as it does in the scenario."""
    builder = begun()
    builder.buffer(state(CMA))
    builder.register(state(CMA), state(CMA), 1, errno="EINVAL", access=["REMOTE_WRITE"])
    failing_round(builder, 2)
    builder.end()
    control(builder)
    record = builder.done()
    first = build.find(record, "register", 0, "no-pin")
    first |= {"errno": "EINVAL", "access": ["REMOTE_WRITE"], "after": first["before"]}
    assert only(record)["verdict"] == "reproduced"
    first["errno"] = "ENOMEM"  # without the pin it failed in the same way
    found = only(record)
    assert (found["verdict"], found["controls"][0]["got"]) == ("unmet", "failure")


# Series


def series(builder: Builder, *, refused: int | None, again: str | None, kept: int = 4) -> None:
    """Four ranges of two pages, of which `refused` was refused; `again` is what the full try of it said."""
    pinned = [1, 1, 1, 1, 1025, 1025, 1, 1]
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(CMA, pinned), ranges=[[4 * PAGE, 2 * PAGE]])
    moved = [*OUT[:4], *CMA[4:]]
    builder.register(state(CMA, pinned), state([*OUT[:2], *CMA[2:]], pinned), 1, pins=[1], length=2 * PAGE)
    for number in range(1, kept):
        failed = number == refused
        builder.event(
            "registered",
            series=1,
            number=number,
            address=build.ADDRESS + number * 2 * PAGE,
            length=2 * PAGE,
            errno="ENOMEM" if failed else None,
            seconds=0.1,
        )
        if failed:
            break
    place = build.ADDRESS + 4 * PAGE
    own: dict[str, Any] = {"address": place, "iova": place, "length": 2 * PAGE}
    if refused is not None:
        stuck = state(moved, pinned)
        trace = build.failing_trace(2) if again else build.trace()
        builder.register(stuck, stuck, 2, errno=again, pins=[1], trace=trace, **own)
    builder.event(
        "register-many",
        series=1,
        buffer=1,
        verb="ibv_reg_mr_iova2",
        access=list(build.ACCESS),
        count=4,
        length=2 * PAGE,
        keep=False,
        succeeded=refused if refused is not None else 4,
        errno="ENOMEM" if refused is not None else None,
        seconds=0.1,
        before=state(CMA, pinned),
        after=state(moved, pinned),
    )
    builder.release(state(moved))
    after = state([*moved[:4], *OUT[4:6], *CMA[6:]], [1] * 4 + [1025] * 2 + [1] * 2)
    builder.register(state(moved), after, 3, **own, trace=of_two_pages(place))
    builder.end()


def series_control(builder: Builder) -> None:
    builder.begin(control="no-pin", contract="none", controls={"no-pin": "pin=none"})
    pages = [pfn + 400 for pfn in CMA]
    builder.buffer(state(pages))
    after = state([*OUT[:2], *pages[2:]], [1025] * 2 + [1] * 6)
    builder.register(state(pages), after, 1, length=2 * PAGE, trace=of_two_pages(build.ADDRESS))
    builder.end()


def of_two_pages(start: int) -> dict[str, Any]:
    """The trace of a registration of two pages that moved."""
    made = build.returns(("pin_user_pages_fast", 2), ("__ib_umem_get_va", 1), ("rxe_reg_user_mr", 1))
    made["events"][0]["args"] = {"start": start, "nr_pages": 2, "flags": ["FOLL_WRITE", "FOLL_LONGTERM"]}
    made["events"][:0] = build.migration(2, 0, 0)
    return made


def test_what_a_series_could_not_register_is_the_proof() -> None:
    builder = begun()
    series(builder, refused=2, again="ENOMEM")
    series_control(builder)
    found = only(builder.done())
    assert (found["verdict"], found["registration"]) == ("reproduced", 2)


def test_a_refusal_within_a_series_that_passed_is_not_proven_and_not_lost() -> None:
    builder = begun()
    series(builder, refused=2, again=None)
    series_control(builder)
    found = only(builder.done())
    assert (found["verdict"], found["registration"]) == ("unmet", None)
    assert "number 2 of series 1" in found["reason"]


def test_a_success_within_a_series_under_the_same_pin_speaks_against_a_later_failure() -> None:
    builder = begun()
    series(builder, refused=2, again="ENOMEM")
    series_control(builder)
    record = builder.done()
    lines = [event for event in record.events if event["event"] == "registered"]
    lines[0]["address"] = build.ADDRESS + 4 * PAGE  # the very pages that fail later
    found = only(record)
    assert found["verdict"] == "unmet"
    assert {"name": "order", "state": "contradicted"}.items() <= found["checks"][3].items()


# What a finding rests on


def test_a_finding_knows_the_events_that_it_rests_on() -> None:
    record = build.reproduced_record()
    facts = collect(record)
    run = facts.passes[0]
    case = Case(facts, run, run.registrations[0], run.buffers[1])
    due = {
        build.find(record, "buffer")["seq"],
        build.find(record, "pin")["seq"],
        build.find(record, "register")["seq"],
        build.find(record, "release")["seq"],
        build.find(record, "register", 1)["seq"],
    }
    assert case.seqs == due


@pytest.mark.parametrize("record", [build.kernel_record, build.longterm_record, build.no_pin_record])
def test_a_success_is_judged_by_the_registration_that_says_most(record: Any) -> None:
    made = record()
    run = collect(made).passes[0]
    chosen = best_success(run)
    assert chosen is not None
    found = judge_record(made)["verdicts"][0]
    assert (found["registration"], found["verdict"]) == (chosen.id, "not-reproduced")
