"""From the text of a trace to its events."""

from __future__ import annotations

from typing import Any

import pytest

from regrepro.kernel import trace_flags, trace_parse, trace_tree

PAGE = 4096


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__ib_umem_get_va+0x217/0x400 [ib_core]", "__ib_umem_get_va [ib_core]"),
        ("do_syscall_64+0x55/0xb0", "do_syscall_64"),
        ("io_pin_pages", "io_pin_pages"),
        ("[unknown/kretprobe'd]", None),
        ("arch_rethook_trampoline+0x0/0x60", None),
        ("kretprobe_trampoline+0x0/0x50", None),
        ("0xffffffffc0a01234", None),
    ],
)
def test_symbols(text: str, expected: str | None) -> None:
    assert trace_parse.symbol(text) == expected


def line(event: str, rest: str, seconds: str = "12.000100", cpu: int = 3, tid: int = 1234) -> str:
    return f"     some app (x)-{tid}  [{cpu:03}] .....    {seconds}: {event}: {rest}\n"


MAPPED = {
    "pin_user_pages_fast_9": ("pin_user_pages_fast", "return"),
    "pin_user_pages_fast_in_9": ("pin_user_pages_fast", "entry"),
    "rxe_reg_user_mr_9": ("rxe_reg_user_mr", "return"),
    "migrate_pages_9": ("migrate_pages", "return"),
    "mm_migrate_pages": ("mm_migrate_pages", "tracepoint"),
}
FLAGS = trace_flags.from_version("7.3")
PIN = (
    "(__ib_umem_get_va+0x217/0x400 [ib_core] <- pin_user_pages_fast) "
    "start=0x{start:x} nr_pages={n} gup_flags=0x101 ret={ret}"
)


def test_a_return_with_arguments() -> None:
    text = line("pin_user_pages_fast_9", PIN.format(start=0x7F0000000000, n=8, ret=-12))
    (event,) = trace_parse.parse(text, MAPPED, FLAGS).events
    assert event == {
        "fn": "pin_user_pages_fast",
        "ret": -12,
        "caller": "__ib_umem_get_va [ib_core]",
        "args": {
            "start": 0x7F0000000000,
            "nr_pages": 8,
            "gup_flags": 0x101,
            "flags": ["FOLL_WRITE", "FOLL_LONGTERM"],
        },
        "us": 12000100,
        "tid": 1234,
    }


def test_a_thread_group_id_in_the_line_does_no_harm() -> None:
    text = (
        "   app-77    (     70) [001] d..2.     1.000002: migrate_pages_9: "
        "(__gup_longterm_locked+0x1/0x2 <- migrate_pages) ret=3\n"
    )
    (event,) = trace_parse.parse(text, MAPPED, FLAGS).events
    assert (event["tid"], event["ret"], event["us"]) == (77, 3, 1000002)


def test_kernel_addresses_are_not_kept() -> None:
    text = line(
        "rxe_reg_user_mr_9",
        "(ib_uverbs_reg_mr+0x1/0x2 [ib_uverbs] <- rxe_reg_user_mr) ret=-65696752740168896",
    )
    (event,) = trace_parse.parse(text, MAPPED, FLAGS).events
    assert event["ret"] == 1
    text = line("rxe_reg_user_mr_9", "(ib_uverbs_reg_mr+0x1/0x2 [ib_uverbs] <- rxe_reg_user_mr) ret=-22")
    (event,) = trace_parse.parse(text, MAPPED, FLAGS).events
    assert event["ret"] == -22


def test_events_of_others_and_from_before_are_passed_over() -> None:
    text = (
        line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=1", "11.999999")
        + line("migrate_pages_10", "(a+0x1/0x2 <- migrate_pages) ret=2")
        + line("sched_switch", "prev_comm=a prev_pid=1")
        + "not a line of a trace\n"
        + line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=4")
    )
    parsed = trace_parse.parse(text, MAPPED, FLAGS, since_us=12_000_000)
    assert [event["ret"] for event in parsed.events] == [4]
    assert parsed.lost == {}


def test_a_stack_belongs_to_the_event_before_it_in_its_thread() -> None:
    text = (
        line("pin_user_pages_fast_9", PIN.format(start=PAGE, n=1, ret=1), tid=1)
        + line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=4", tid=2)
        + "     some app (x)-1  [003] ..... 12.000101: <stack trace>\n"
        + " => os_lock_user_pages+0x10/0x20 [nvidia]\n => nvidia_ioctl+0x1/0x2 [nvidia]\n"
        + " => __x64_sys_ioctl+0x1/0x2\n"
    )
    events = trace_parse.parse(text, MAPPED, FLAGS).events
    assert events[0]["stack"] == ["os_lock_user_pages [nvidia]", "nvidia_ioctl [nvidia]", "__x64_sys_ioctl"]
    assert "stack" not in events[1]


def test_an_old_events_stack_goes_with_it() -> None:
    text = (
        line("pin_user_pages_fast_9", PIN.format(start=PAGE, n=1, ret=1), "11.0000001"[:9])
        + "     some app (x)-1234  [003] ..... 11.000001: <stack trace>\n"
        + " => f+0x10/0x20\n"
        + line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=4")
    )
    (event,) = trace_parse.parse(text, MAPPED, FLAGS, since_us=12_000_000).events
    assert "stack" not in event


def test_lost_events_count_unless_older_ones_follow_on_that_cpu() -> None:
    old = line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=1", "11.000000", cpu=1)
    new = line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=1", cpu=2)
    text = "CPU:1 [LOST 7 EVENTS]\n" + old + "CPU:2 [LOST 5 EVENTS]\n" + new + "CPU:4 [LOST EVENTS]\n"
    assert trace_parse.parse(text, MAPPED, FLAGS, since_us=12_000_000).lost == {2: 5, 4: 1}
    assert trace_parse.parse(text, MAPPED, FLAGS).lost == {1: 7, 2: 5, 4: 1}


def test_entries_and_returns_become_one_event() -> None:
    text = (
        line(
            "pin_user_pages_fast_in_9",
            "(pin_user_pages_fast+0x0/0x60) start=0x1000 nr_pages=8 gup_flags=0x101",
        )
        + line("migrate_pages_9", "(a+0x1/0x2 <- migrate_pages) ret=8")
        + line("pin_user_pages_fast_9", "(ib_umem_get+0x1/0x2 [ib_uverbs] <- pin_user_pages_fast) ret=-12")
        + line(
            "pin_user_pages_fast_in_9", "(pin_user_pages_fast+0x0/0x60) start=0x9000 nr_pages=1 gup_flags=0x1"
        )
    )
    events = trace_parse.pair_entries(trace_parse.parse(text, MAPPED, FLAGS).events)
    assert [event["fn"] for event in events] == [
        "migrate_pages",
        "pin_user_pages_fast",
        "pin_user_pages_fast",
    ]
    assert events[1]["ret"] == -12
    assert events[1]["args"]["nr_pages"] == 8
    assert "ret" not in events[2]  # still under way
    assert trace_tree.gup_calls({"events": events})[1]["ret"] is None


def chunk(start: int, pages: int, ret: int, flags: int = 0x101) -> dict[str, Any]:
    args = {"start": start, "nr_pages": pages, "gup_flags": flags}
    return {"fn": "pin_user_pages_fast", "tid": 1, "caller": "f", "ret": ret, "args": args}


@pytest.mark.parametrize("page", [4096, 65536])
def test_parts_of_one_range_are_one_event(page: int) -> None:
    parts = [chunk(0x10000000 + at * 512 * page + 5 * (at == 0), 512, 512) for at in range(4)]
    (event,) = trace_parse.merge_chunks(parts, page)
    assert event["args"]["nr_pages"] == event["ret"] == 2048
    assert event["args"]["start"] == 0x10000005
    assert event["calls"] == 4


@pytest.mark.parametrize(
    "second",
    [
        chunk(512 * PAGE, 512, -12),  # failed
        chunk(512 * PAGE, 512, 100),  # short
        chunk(513 * PAGE, 512, 512),  # elsewhere
        chunk(512 * PAGE, 512, 512, 0x1),  # for another purpose
        {**chunk(512 * PAGE, 512, 512), "tid": 2},
        {**chunk(512 * PAGE, 512, 512), "caller": "g"},
    ],
)
def test_only_successful_parts_that_follow_each_other_are_merged(second: dict[str, Any]) -> None:
    assert len(trace_parse.merge_chunks([chunk(0, 512, 512), second], PAGE)) == 2
