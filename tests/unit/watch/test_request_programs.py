"""The BPF programs that follow requests, run by a machine of our own, and taken by this kernel's verifier."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from bpf_machine import Machine, Map, Refused
from hypothesis import given, settings
from hypothesis import strategies as st

from regrepro.core import bpf
from regrepro.core.bpf_code import Code
from regrepro.core.uprobes import REGISTERS, registers_in_context
from regrepro.kernel.btf import Btf, BtfError
from regrepro.kernel_functions import Returns
from regrepro.watch import request_programs as programs
from regrepro.watch.program import REQUESTS, STUCK_PAGES, Layout, PageOffsets, RequestOffsets, TaskOffsets
from regrepro.watch.registrations import KEY, NO_SIZE, SIZE_KEY
from regrepro.watch.request_programs import ALL, NOTHING, REQUEST_WORDS, STACK_FRAMES, Context, Maps

MAPS = Maps(ring=3, lost=4, requests=5, calls=6, pins=9, counts=7, sizes=8, uncounted=10)
GARBAGE = 0xABCD << 48
NUMBER = 11
HANDLER, OLD_HANDLER = "ib_uverbs_handler_UVERBS_METHOD_REG_MR", "ib_uverbs_reg_mr"
DMABUF_HANDLER = "ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR"
TASK = TaskOffsets(leader=16, start=24, signal=32, memlock=40, mm=48, pinned=56)
REQUEST = RequestOffsets(command=32, present=96, attributes=104, size=24)
PAGE = PageOffsets(lru=8, flags=0, refcount=52, mapcount=48, pincount=88)
BUNDLE, USER, TASK_AT = 0xFFFF888000100000, 0x7F0000001000, 0xFFFF888000200000
# Where a kprobe's or uprobe's context has the parameters and what was returned.
PROBE = Context([80, 72, 56, 40, 32, 24], 48)
HEAD = 0xFFFFC90000555000
BEGIN = struct.pack("=Q", BUNDLE)  # what a trampoline gives before its function has run


def machine() -> Machine:
    """One whose maps are as the engine opens them."""
    return Machine(
        {
            MAPS.lost: Map(4, 8, 1, array=True),
            MAPS.requests: Map(4, programs.STATE_BYTES),
            MAPS.calls: Map(4, programs.CALL_BYTES),
            MAPS.pins: Map(4, programs.PIN_BYTES),
            MAPS.counts: Map(KEY.size, 16),
            MAPS.sizes: Map(SIZE_KEY.size, 8),
            MAPS.uncounted: Map(4, 8, 1, array=True),
        },
        MAPS.ring,
    )


def in_request(*state: int) -> Machine:
    """One whose thread is in a request: since, calls, pages, list, reason, depth, length."""
    made = machine()
    words = struct.pack("=7Q", *[*(state or (900,)), 0, 0, 0, 0, 0, 0][:7])
    made.maps[MAPS.requests].entries[made.thread] = bytearray(words)
    return made


def state(made: Machine) -> tuple[int, ...]:
    return made.maps[MAPS.requests].words(made.thread)


def lost(made: Machine) -> int:
    return made.maps[MAPS.lost].words(bytes(4))[0]


def uncounted(made: Machine) -> int:
    return made.maps[MAPS.uncounted].words(bytes(4))[0]


def context(*parameters: int, ret: int) -> bytes:
    """What a trampoline gives."""
    return struct.pack(f"={len(parameters) + 1}Q", *(word & NOTHING for word in (*parameters, ret)))


def by_probe(parameters: Sequence[int] = (), ret: int = 0) -> bytes:
    """What a kprobe or a uprobe gives: registers, of which others have garbage."""
    made = bytearray(struct.pack("=Q", GARBAGE) * 21)
    assert PROBE.parameters is not None and PROBE.returned is not None
    for offset, value in zip(PROBE.parameters, parameters, strict=False):
        struct.pack_into("=Q", made, offset, value & NOTHING)
    struct.pack_into("=Q", made, PROBE.returned, ret & NOTHING)
    return bytes(made)


def word(number: int, *, high: int = GARBAGE >> 32) -> int:
    """Return an int as it lies in a register whose high half nobody has cleared."""
    return high << 32 | number & 0xFFFFFFFF


def told(made: Machine) -> list[int]:
    """Return the only record's words behind the header, which is checked."""
    (record,) = made.records
    number, task, ns, *words = struct.unpack(f"={len(record) // 8}Q", record)
    assert (number, task, ns) == (NUMBER, made.pid << 32 | made.tid, made.ns)
    return words


# The machine


def written(*write: Callable[[Code], None]) -> bytes:
    code = Code()
    for one in write:
        one(code)
    code.end()
    return code.bytes()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda c: c.copy(6, 7),
        lambda c: c.load(6, 10, -8),
        lambda c: c.store_number(10, -520, 0),
        lambda c: c.store_number(10, 0, 0),
        lambda c: c.store_number(10, -12, 0),
        lambda c: c.store(1, 0, 10),
        lambda c: c.load(6, 1, 16),
        lambda c: c.do(10, "+", 8),
        lambda c: c.call(9),
        lambda c: c.set_map(1, 99),
        lambda c: [c.label("back"), c.jump("back")],
        lambda c: [c.do(6, "=", 0), c.load(7, 6, 0)],
        lambda c: [c.call(bpf.KTIME_GET_BOOT_NS), c.copy(6, 1)],
        lambda c: [c.set_map(1, MAPS.requests), c.stack(2, -8), c.call(bpf.MAP_LOOKUP)],
    ],
)
def test_the_machine_refuses_what_the_verifier_does(wrong: Callable[[Code], None]) -> None:
    with pytest.raises(Refused):
        machine().run(written(wrong), bytes(16))


@pytest.mark.parametrize("program", [b"", bytes(4), bytes(8), struct.pack("=BBhi", 5, 0, 3, 0)])
def test_the_machine_stays_inside_of_the_program(program: bytes) -> None:
    with pytest.raises(Refused):
        machine().run(program, b"")


def test_the_machine_counts_as_the_kernel_does() -> None:
    made = machine()

    def arithmetic(code: Code) -> None:
        code.set(6, 1 << 63 | 0xF0)
        code.do(6, "s>>", 4)
        code.do(6, "&", -16)
        code.do(6, "|", 3)
        code.store(10, -8, 6)
        code.load(7, 10, -8, 1)
        code.add(7, 6)
        code.store(10, -16, 7)

    code = Code()
    arithmetic(code)
    code.load(0, 10, -16)
    code.jump_if(0, "s<", 0, "out")
    code.do(0, "=", 0)
    code.label("out")
    program = code.bytes() + struct.pack("=BBhi", 0x95, 0, 0, 0)
    assert made.run(program, b"") == 0xF800000000000003 + 0x03
    assert made.ran == 11


# Requests


def test_a_request_begins_with_an_entry_and_later_ones_begin_anew_in_it() -> None:
    made = machine()
    program = programs.begin_request(MAPS, programs.by_trampoline(1))
    assert made.run(program, BEGIN) == 0
    assert state(made) == (1000, 0, 0, 0, 0, 0, 0)
    made.maps[MAPS.requests].entries[made.thread][:] = struct.pack("=7Q", 1, 5, 9, 77, 88, 2, 0)
    made.ns = 2000
    made.run(program, BEGIN)
    assert state(made) == (2000, 0, 0, 77, 88, 0, 0)
    assert made.ran <= 18
    made.tid = 8
    made.run(program, BEGIN)
    assert len(made.maps[MAPS.requests].entries) == 2 and state(made) == (2000, 0, 0, 0, 0, 0, 0)
    assert not made.records


def bundle(made: Machine, handler: str, asked: Sequence[int]) -> None:
    """Let the request be there that start, length, iova, access and fd were asked for with."""
    made.kernel.put_word(BUNDLE + REQUEST.present, 0x15)
    if handler == OLD_HANDLER:
        made.kernel.put_word(BUNDLE + REQUEST.command, USER)
        start, length, iova, access, _ = asked
        made.user.put(USER, struct.pack("=QQQQII", 1, start, length, iova, 2, access))
        return
    # Places of the core's attributes: enum uverbs_attrs_reg_mr_cmd_attr_ids and _reg_dmabuf_mr_.
    identifiers = (4, 5, 3, 6, 7) if handler == HANDLER else (2, 3, 4, 6, 5)
    for identifier, value in zip(identifiers, asked, strict=True):
        made.kernel.put_word(BUNDLE + REQUEST.attributes + REQUEST.size * 2 * identifier, value)


def task(made: Machine) -> None:
    made.task = TASK_AT
    for index, (pointer, offset) in enumerate(
        ((TASK.leader, TASK.start), (TASK.signal, TASK.memlock), (TASK.mm, TASK.pinned)), 1
    ):
        made.kernel.put_word(TASK_AT + pointer, TASK_AT + 0x1000 * index)
        made.kernel.put_word(TASK_AT + 0x1000 * index + offset, 111 * index)


def end(
    handler: str = OLD_HANDLER, task: TaskOffsets | None = TASK, request: RequestOffsets | None = REQUEST
) -> bytes:
    layout = Layout(task=task, request=request)
    return programs.end_request(MAPS, programs.by_trampoline(1), NUMBER, handler, layout)


ASKED = (0x7F1234567000, 1 << 33, 0x55AA55AA5000, 0x80000007, 33)
EXPECTED = dict(
    zip(
        [name for name in REQUEST_WORDS if not name.startswith("comm")],
        (-12 & NOTHING, 900, 4, 2048, 1000, 111, 222, 333, *ASKED, 0x15),
        strict=True,
    )
)


@pytest.mark.parametrize("handler", [OLD_HANDLER, *REQUESTS])
def test_a_request_that_fails_is_told_with_every_word(handler: str) -> None:
    made = in_request(900, 4, 2048)
    task(made)
    bundle(made, handler, ASKED)
    made.comm = b"a long name of it"
    assert made.run(end(handler), context(BUNDLE, ret=word(-12))) == 0
    words = dict(zip(REQUEST_WORDS, told(made), strict=True))
    comm = struct.pack("=2Q", words.pop("comm"), words.pop("comm_end"))
    assert comm == b"a long name of \0"
    rest = {"asked_fd": NOTHING, "present": ALL} if handler == OLD_HANDLER else {}
    assert words == EXPECTED | rest
    assert state(made) == (900, 4, 2048, 0, 0, 0, 0)


@pytest.mark.parametrize("handler", [OLD_HANDLER, HANDLER, DMABUF_HANDLER])
def test_a_request_that_succeeds_costs_seven_instructions(handler: str) -> None:
    made = in_request(900, 4, 2048)
    made.run(end(handler), context(BUNDLE, ret=word(0)))
    assert not made.records and made.ran <= 7


def test_what_this_kernels_types_do_not_say_is_not_told() -> None:
    made = in_request()
    made.run(end(task=None, request=None), context(BUNDLE, ret=-22))
    words = dict(zip(REQUEST_WORDS, told(made), strict=True))
    names = ("start", "memlock", "pinned", "asked_start", "asked_length", "asked_iova", "asked_access")
    assert {words[name] for name in (*names, "asked_fd")} == {0}
    assert words["present"] == NOTHING and words["ret"] == -22 & NOTHING


def test_a_request_that_nobody_saw_begin_has_no_beginning() -> None:
    made = machine()
    made.run(end(), context(BUNDLE, ret=-22))
    words = dict(zip(REQUEST_WORDS, told(made), strict=True))
    assert (words["since"], words["calls"], words["pages"]) == (0, 0, 0)
    assert not made.maps[MAPS.requests].entries


@pytest.mark.parametrize("handler", [OLD_HANDLER, HANDLER])
def test_memory_that_cannot_be_read_is_0_and_a_request_of_it_is_not_known(handler: str) -> None:
    made = in_request()
    made.kernel.put_word(BUNDLE + REQUEST.command, USER)
    made.run(end(handler), context(BUNDLE, ret=-22))
    words = dict(zip(REQUEST_WORDS, told(made), strict=True))
    assert words["start"] == words["memlock"] == words["pinned"] == 0
    assert words["asked_start"] == words["asked_length"] == words["asked_access"] == 0
    assert words["present"] == (NOTHING if handler == OLD_HANDLER else 0)


def test_of_the_old_request_each_part_is_read_by_itself() -> None:
    made = in_request()
    made.kernel.put_word(BUNDLE + REQUEST.command, USER)
    made.user.put(USER, struct.pack("=QQQ", 1, 2, 3))  # the page ends here
    made.run(end(), context(BUNDLE, ret=-22))
    words = dict(zip(REQUEST_WORDS, told(made), strict=True))
    assert (words["asked_start"], words["asked_length"], words["asked_iova"]) == (2, 3, 0)
    assert words["present"] == NOTHING and words["asked_fd"] == NOTHING


def test_an_old_request_of_which_the_kernel_has_no_address_is_not_known() -> None:
    made = in_request()
    made.run(end(), context(BUNDLE, ret=-22))
    words = dict(zip(REQUEST_WORDS, told(made), strict=True))
    assert words["present"] == NOTHING and words["asked_start"] == words["asked_length"] == 0


# What happens inside of a request


def pin() -> bytes:
    return programs.pin(MAPS, programs.by_trampoline(4), NUMBER)


def test_pins_that_succeed_are_counted_and_not_told() -> None:
    made = in_request(900, 2, 100)
    for ret in (512, 0, 1):
        made.run(pin(), context(0x1000, 512, 1, 0, ret=word(ret, high=0)))
        assert made.ran <= 22
    assert state(made) == (900, 5, 613, 0, 0, 0, 0)
    assert not made.records


def test_a_pin_that_fails_is_told_and_counted_too() -> None:
    made = in_request(900, 2, 100)
    made.run(pin(), context(0x7F0000001000, word(512), word(0x100), 0, ret=word(-14)))
    assert told(made) == [-14 & NOTHING, 0x7F0000001000, 512, 0x100]
    assert state(made) == (900, 3, 100, 0, 0, 0, 0)


def test_pins_of_others_are_none_of_ours() -> None:
    made = machine()
    made.run(pin(), context(0x1000, 512, 1, 0, ret=-14))
    made.run(pin(), context(0x1000, 512, 1, 0, ret=512))
    assert not made.records and not made.maps[MAPS.requests].entries


def failed(returns: Returns, never: int = 0) -> bytes:
    return programs.failed(MAPS, programs.by_trampoline(2), NUMBER, returns, never=never)


@pytest.mark.parametrize("returns", [Returns.INT, Returns.LONG])
def test_of_ints_those_below_0_are_failures(returns: Returns) -> None:
    made = in_request()
    for ret in (word(0), word(1), word(0x7FFFFFFF)):
        made.run(failed(returns), context(1, 2, ret=ret))
        assert made.ran <= 7
    assert not made.records
    made.run(failed(returns), context(1, 2, ret=word(-5)))
    assert [programs.signed_int(item) for item in told(made)] == [-5]


def test_an_errno_that_only_asks_to_try_again_is_left_out() -> None:
    made = in_request()
    for ret in (-errno.EAGAIN, 0, 3):
        made.run(failed(Returns.INT, errno.EAGAIN), context(1, 2, ret=word(ret)))
    assert not made.records
    made.run(failed(Returns.INT, errno.EAGAIN), context(1, 2, ret=word(-errno.ENOMEM)))
    made.run(failed(Returns.INT), context(1, 2, ret=word(-errno.EAGAIN)))
    assert len(made.records) == 2


def test_of_pointers_the_last_page_is_failures() -> None:
    made = in_request()
    for ret in (0, 0xFFFF888000000000, 0xFFFFFFFFFFFFF000, 0xFFFFFFF4):
        made.run(failed(Returns.POINTER), context(1, 2, ret=ret))
        assert made.ran <= 7
    assert not made.records
    made.run(failed(Returns.POINTER), context(1, 2, ret=-4095))
    assert told(made) == [-4095 & NOTHING]
    made.run(failed(Returns.POINTER), context(1, 2, ret=-1))
    assert len(made.records) == 2


@pytest.mark.parametrize("returns", list(Returns))
def test_failures_outside_of_requests_are_none_of_ours(returns: Returns) -> None:
    made = machine()
    made.run(failed(returns), context(1, 2, ret=-5))
    assert not made.records


def test_by_kprobes_it_is_the_same() -> None:
    made = in_request()
    program = programs.failed(MAPS, Context(None, PROBE.returned), NUMBER, Returns.POINTER)
    made.run(program, by_probe(ret=0))
    assert not made.records
    made.run(program, by_probe(ret=-12))
    assert told(made) == [-12 & NOTHING]


# Migrations


def pages(made: Machine, count: int, *, broken: int = -1) -> list[int]:
    """Let pages be on the list; return their addresses. The list of page `broken` cannot be read further."""
    found = [0xFFFFEA0000000000 + 64 * index for index in range(count)]
    places = [HEAD, *(page + PAGE.lru for page in found), HEAD]
    for index, (place, following) in enumerate(pairwise(places)):
        if index != broken + 1 or broken < 0:
            made.kernel.put_word(place, following)
    for index, page in enumerate(found):
        made.kernel.put_word(page + PAGE.flags, 0x17FFFF00000000 + index)
        made.kernel.put(page + PAGE.mapcount, struct.pack("=iI", -index, 2 + index))
        if index % 2 == 0:
            made.kernel.put(page + PAGE.pincount, struct.pack("=I", 1024))
    return found


def expected_pages(found: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    return [
        (page, 2 + index, -index, 0 if index % 2 else 1024, 0x17FFFF00000000 + index)
        for index, page in enumerate(found)
    ]


def migration(
    *, offsets: PageOffsets | None = PAGE, reasons: Sequence[int] = (8, 9), kprobe: bool = False
) -> bytes:
    where = Context(None, PROBE.returned) if kprobe else programs.by_trampoline(7)
    return programs.migration(MAPS, where, NUMBER, offsets, reasons)


def migrated(ret: int, reason: int = 9) -> bytes:
    return context(HEAD, 1, 2, 3, 4, word(reason), 6, ret=ret)


@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_pages_that_stayed_are_told_up_to_so_many(count: int) -> None:
    made = in_request()
    found = pages(made, count)
    made.run(migration(), migrated(word(count or 1)))
    words = told(made)
    assert words[:2] == [count or 1, 9] and len(words) == 2 + 5 * STUCK_PAGES
    assert list(programs.migration_pages(words)) == expected_pages(found[:STUCK_PAGES])


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_list_is_told_as_far_as_it_can_be_read(broken: int) -> None:
    made = in_request()
    found = pages(made, 4, broken=broken)
    made.run(migration(), migrated(4))
    assert list(programs.migration_pages(told(made))) == expected_pages(found[: broken + 1])


def test_a_list_that_cannot_be_read_at_all_has_no_pages() -> None:
    made = in_request()
    made.run(migration(), migrated(4))
    assert told(made) == [4, 9, *[0] * (5 * STUCK_PAGES)]


def test_migrations_of_others_reasons_and_those_that_move_all_are_not_told() -> None:
    made = in_request()
    pages(made, 2)
    made.run(migration(), migrated(2, reason=0))
    made.run(migration(reasons=(8,)), migrated(2, reason=9))
    made.run(migration(), migrated(word(0)))
    assert made.ran <= 7
    assert not made.records
    made.run(migration(), migrated(2, reason=8))
    made.run(migration(reasons=()), migrated(2, reason=0))
    assert len(made.records) == 2
    outside = machine()
    outside.run(migration(), migrated(2))
    assert not outside.records


def test_of_a_migration_that_failed_altogether_the_list_is_not_walked() -> None:
    made = in_request()
    pages(made, 2)
    made.run(migration(), migrated(word(-12)))
    words = told(made)
    assert words == [-12 & NOTHING, 9, *[0] * (5 * STUCK_PAGES)]


def test_without_offsets_of_pages_none_are_told() -> None:
    made = in_request()
    pages(made, 2)
    made.run(migration(offsets=None), migrated(2))
    assert list(programs.migration_pages(told(made))) == []


KEEP = programs.keep_migration(MAPS, Context(PROBE.parameters, None))


def test_by_kprobes_the_list_is_kept_from_the_beginning_and_used_once() -> None:
    made = in_request(900, 3, 40)
    found = pages(made, 2)
    made.run(KEEP, by_probe([HEAD, 1, 2, 3, 4, word(9)]))
    assert state(made)[:4] == (900, 3, 40, HEAD) and state(made)[4] & 0xFFFFFFFF == 9 and state(made)[5] == 1
    made.run(migration(kprobe=True), by_probe(ret=word(2)))
    words = told(made)
    assert words[:2] == [2, 9] and list(programs.migration_pages(words)) == expected_pages(found)
    assert state(made)[:3] == (900, 3, 40) and state(made)[5] == 0
    made.run(KEEP, by_probe([HEAD, 1, 2, 3, 4, word(9)]))
    made.run(migration(kprobe=True), by_probe(ret=word(0)))
    assert state(made)[5] == 0 and len(made.records) == 1
    others = machine()
    others.run(KEEP, by_probe([HEAD, 1, 2, 3, 4, 9]))
    others.run(migration(kprobe=True), by_probe(ret=word(2)))
    assert not others.maps[MAPS.requests].entries and not others.records


@pytest.mark.parametrize("inner", [3, 0, -12])
@pytest.mark.parametrize("reason", [0, 9])
def test_by_kprobes_a_migration_within_another_neither_hides_it_nor_is_told_in_its_place(
    inner: int, reason: int
) -> None:
    made = in_request()
    found = pages(made, 2)
    made.run(KEEP, by_probe([HEAD, 1, 2, 3, 4, word(9)]))
    for _ in range(2):  # compaction, for the pages that the first moves to
        made.run(KEEP, by_probe([HEAD + 0x1000, 1, 2, 3, 4, word(reason)]))
        made.run(migration(kprobe=True), by_probe(ret=word(inner)))
    assert not made.records
    made.run(migration(kprobe=True), by_probe(ret=word(2)))
    words = told(made)
    assert words[:2] == [2, 9] and list(programs.migration_pages(words)) == expected_pages(found)


def test_by_kprobes_a_migration_that_moves_all_is_not_told_for_one_within_it() -> None:
    made = in_request()
    for place in (HEAD, HEAD + 0x1000):
        made.run(KEEP, by_probe([place, 1, 2, 3, 4, word(9)]))
    for ret in (3, 0):
        made.run(migration(kprobe=True), by_probe(ret=word(ret)))
    assert not made.records and state(made)[5] == 0


def test_by_kprobes_a_return_that_was_missed_is_made_up_for_by_the_next_request() -> None:
    made = in_request()
    found = pages(made, 2)
    begin = programs.begin_request(MAPS, programs.by_trampoline(1))
    made.run(KEEP, by_probe([HEAD + 0x1000, 1, 2, 3, 4, word(9)]))
    made.run(begin, BEGIN)
    made.run(KEEP, by_probe([HEAD, 1, 2, 3, 4, word(9)]))
    made.run(migration(kprobe=True), by_probe(ret=word(2)))
    assert list(programs.migration_pages(told(made))) == expected_pages(found)


def test_by_kprobes_a_return_without_its_entry_tells_nothing() -> None:
    made = in_request()
    pages(made, 2)
    made.run(migration(kprobe=True), by_probe(ret=word(2)))
    assert not made.records and state(made)[5] == 0
    made.run(KEEP, by_probe([HEAD, 1, 2, 3, 4, word(9)]))
    for _ in range(3):
        made.run(migration(kprobe=True), by_probe(ret=word(2)))
    assert len(made.records) == 1 and state(made)[5] == 0


# Pins of others, and openings


@pytest.mark.parametrize("first", [0, 1])
def test_a_pin_without_longterm_is_told_with_its_stack(first: int) -> None:
    made = machine()
    program = programs.plain_pin(MAPS, programs.by_trampoline(4 + first), NUMBER, first, 0x100)
    made.stack = struct.pack("=3Q", 1, 2, 3)
    made.kernel.put_word(HEAD, BUNDLE)
    given = (*[9] * first, 0x7F0000001000, 512, word(0x41), HEAD)
    made.run(program, context(*given, ret=512))
    assert told(made) == [0x7F0000001000, 512, 0x41, BUNDLE, 24, 1, 2, 3, *[0] * (STACK_FRAMES - 3)]
    made.records.clear()
    made.stack = struct.pack("=40Q", *range(40))
    made.run(program, context(*given, ret=1))
    assert told(made)[4:] == [8 * STACK_FRAMES, *range(STACK_FRAMES)]
    made.records.clear()
    made.stack = -errno.EFAULT
    made.run(program, context(*given, ret=1))
    assert told(made)[4:] == [-errno.EFAULT & NOTHING, *[0] * STACK_FRAMES]


def test_pins_with_longterm_and_those_that_fail_are_not_told() -> None:
    made = machine()
    program = programs.plain_pin(MAPS, programs.by_trampoline(4), NUMBER, 0, 0x100)
    made.run(program, context(0x1000, 512, word(0x141), 0, ret=512))
    made.run(program, context(0x1000, 512, word(0x41), 0, ret=-14))
    made.run(program, context(0x1000, 512, word(0x41), 0, ret=0))
    assert not made.records and made.ran <= 5


@pytest.mark.parametrize("first", [0, 1])
def test_by_kprobes_a_pin_is_told_with_what_it_began_with(first: int) -> None:
    made = machine()
    keep = programs.keep_pin(MAPS, Context(PROBE.parameters, None), first)
    back = programs.plain_pin(MAPS, Context(None, PROBE.returned), NUMBER, first, 0x100)
    made.stack = struct.pack("=Q", 5)
    made.kernel.put_word(HEAD, BUNDLE)
    made.run(back, by_probe(ret=512))
    assert not made.records  # nobody saw it begin
    for flags in (0x141, 0x41):
        made.run(keep, by_probe([*[9] * first, 0x7F0000001000, 512, word(flags), HEAD]))
        made.run(back, by_probe(ret=-14))
        made.run(back, by_probe(ret=512))
    assert told(made) == [0x7F0000001000, 512, 0x41, BUNDLE, 8, 5, *[0] * (STACK_FRAMES - 1)]


def test_openings_that_succeed_are_told() -> None:
    made = machine()
    program = programs.opened(MAPS, programs.by_trampoline(2), NUMBER)
    made.run(program, context(1, 2, ret=word(-13)))
    assert not made.records
    made.run(program, context(1, 2, ret=word(0)))
    assert told(made) == []


# Libraries


def test_a_verb_that_gives_null_is_told_with_what_it_was_called_with() -> None:
    made = machine()
    call = programs.library_call(MAPS, PROBE)
    back = programs.library_return(MAPS, PROBE, NUMBER)
    parameters = [0x5555, 0x7F0000001000, 1 << 33, word(7), word(-1), 6]
    made.run(call, by_probe([1, 2, 3, 4, 5, 6]))
    made.run(call, by_probe(parameters))
    assert made.maps[MAPS.calls].words(made.thread) == tuple(parameters)
    made.run(back, by_probe(ret=0))
    assert told(made) == parameters


def test_of_verbs_that_call_one_another_the_inner_is_told_and_only_it() -> None:
    made = machine()
    call = programs.library_call(MAPS, PROBE)
    back = programs.library_return(MAPS, PROBE, NUMBER)
    outer = programs.library_return(MAPS, PROBE, NUMBER + 1)
    made.run(call, by_probe([1, 2, 3, 4, 5, 6]))
    made.run(call, by_probe([1, 2, 3, 9, 5, 6]))
    made.run(back, by_probe(ret=0))
    made.run(outer, by_probe(ret=0))
    assert told(made) == [1, 2, 3, 9, 5, 6]


def test_a_return_whose_entry_was_missed_is_not_told_with_an_earlier_calls_parameters() -> None:
    made = machine()
    call = programs.library_call(MAPS, PROBE)
    back = programs.library_return(MAPS, PROBE, NUMBER)
    for ret in (0x7F00, 0):
        made.run(call, by_probe([1, 2, 3, 4, 5, 6]))
        made.run(back, by_probe(ret=ret))
        assert len(made.records) == (ret == 0)
        made.run(back, by_probe(ret=0))
        assert len(made.records) == (ret == 0)


def test_a_return_whose_call_nobody_saw_is_not_told() -> None:
    made = machine()
    made.run(programs.library_return(MAPS, PROBE, NUMBER), by_probe(ret=0))
    assert not made.records


# Registrations that are counted


def registered(*, dmabuf: bool = False) -> bytes:
    return programs.registered(MAPS, programs.by_trampoline(6), NUMBER, 2, dmabuf=dmabuf)


def registration(length: int, ret: int = 0xFFFF888000000000) -> bytes:
    return context(1, 0x7F0000001000, length, 4, 5, 6, ret=ret)


def counted(made: Machine) -> dict[tuple[int, int, int, int, bytes], tuple[int, ...]]:
    entries = made.maps[MAPS.counts]
    return {KEY.unpack(key): entries.words(key) for key in entries.entries}


def sizes(made: Machine) -> dict[tuple[int, int, int], int]:
    entries = made.maps[MAPS.sizes]
    return {SIZE_KEY.unpack(key): entries.words(key)[0] for key in entries.entries}


APP = b"app".ljust(16, b"\0")


def test_registrations_are_counted_by_their_path() -> None:
    host, without_pins = in_request(900, 1), in_request(900, 0)
    for made, dmabuf, path in (
        (host, False, 1),
        (host, True, 2),
        (without_pins, False, 3),
        (without_pins, True, 2),
        (machine(), False, 3),
        (machine(), True, 2),
    ):
        before = counted(made).get((2, path, 6, 0, APP), (0, 0))
        made.run(registered(dmabuf=dmabuf), registration(4096))
        made.run(registered(dmabuf=dmabuf), registration(100))
        assert counted(made)[2, path, 6, 0, APP] == (before[0] + 2, before[1] + 4196)
        assert not made.records
    assert set(sizes(host)) == {(2, 1, 12), (2, 1, 6), (2, 2, 12), (2, 2, 6)}


def test_processes_have_rows_of_their_own() -> None:
    made = in_request(900, 1)
    made.run(registered(), registration(4096))
    made.pid, made.comm = 60, b"other"
    made.run(registered(), registration(4096))
    assert set(counted(made)) == {(2, 1, 6, 0, APP), (2, 1, 60, 0, b"other".ljust(16, b"\0"))}
    assert sizes(made) == {(2, 1, 12): 2}


@pytest.mark.parametrize(
    ("length", "power"),
    [(0, NO_SIZE), (1, 0), (2, 1), (3, 1), (4095, 11), (4096, 12), (1 << 33, 33), (NOTHING, 63)],
)
def test_sizes_are_counted_by_their_highest_bit(length: int, power: int) -> None:
    made = in_request(900, 1)
    made.run(registered(), registration(length))
    assert sizes(made) == {(2, 1, power): 1}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64).flatmap(lambda bits: st.integers(1 << bits - 1, (1 << bits) - 1)))
def test_any_size_has_the_power_of_two_that_it_reaches(length: int) -> None:
    made = in_request(900, 1)
    made.run(registered(), registration(length))
    assert sizes(made) == {(2, 1, length.bit_length() - 1): 1}


def test_a_registration_that_fails_is_told_and_not_counted() -> None:
    made = machine()
    made.run(registered(), registration(4096, ret=-12))
    assert told(made) == [-12 & NOTHING]
    assert not counted(made) and not sizes(made)
    made.run(registered(), registration(4096, ret=0xFFFFFFFFFFFFF000))
    assert counted(made) and len(made.records) == 1


def test_what_finds_no_room_in_the_maps_is_left_out() -> None:
    made = in_request(900, 1)
    made.run(registered(), registration(4096))
    made.maps[MAPS.counts].limit = made.maps[MAPS.sizes].limit = 1
    made.pid = 60
    made.run(registered(), registration(1 << 20))
    assert counted(made) == {(2, 1, 6, 0, APP): (1, 4096)} and sizes(made) == {(2, 1, 12): 1}
    assert uncounted(made) > 0
    before = uncounted(made)
    made.pid = 6
    made.run(registered(), registration(4096))
    assert counted(made) == {(2, 1, 6, 0, APP): (2, 8192)} and sizes(made) == {(2, 1, 12): 2}
    assert uncounted(made) == before


@pytest.mark.parametrize(("full", "pid", "length"), [(MAPS.counts, 60, 4096), (MAPS.sizes, 6, 1 << 20)])
def test_what_finds_no_room_in_one_of_the_maps_is_counted_as_that(full: int, pid: int, length: int) -> None:
    made = in_request(900, 1)
    made.run(registered(), registration(4096))
    made.maps[full].limit = 1
    made.pid = pid
    for _ in range(3):
        made.run(registered(), registration(length))
    assert uncounted(made) == 3 and len(counted(made)) == len(sizes(made)) == 1
    assert sum(sizes(made).values()) == (4 if full == MAPS.counts else 1)
    assert sum(count for count, _ in counted(made).values()) == (1 if full == MAPS.counts else 4)


class Raced(Map):
    """A map into which another CPU puts the same entry just before."""

    def update(self, key: bytes, value: bytes, flags: int) -> int:
        super().update(key, struct.pack(f"={len(value) // 8}Q", *[5] * (len(value) // 8)), 0)
        return super().update(key, value, flags)


def test_what_another_cpu_counted_first_is_added_to() -> None:
    made = in_request(900, 1)
    made.maps[MAPS.counts], made.maps[MAPS.sizes] = Raced(KEY.size, 16), Raced(SIZE_KEY.size, 8)
    made.run(registered(), registration(4096))
    assert counted(made) == {(2, 1, 6, 0, APP): (6, 4101)} and sizes(made) == {(2, 1, 12): 6}
    assert uncounted(made) == 0


@pytest.mark.parametrize("many", [False, True])
def test_an_unpin_is_told_by_its_first_page_where_the_process_made_a_plain_pin(many: bool) -> None:
    made = machine()
    maps = replace(MAPS, pinners=12)
    made.maps[maps.pinners] = Map(4, 8)
    pinned = programs.plain_pin(maps, programs.by_trampoline(4), NUMBER, 0, 0x100)
    unpin = programs.unpin(maps, programs.by_trampoline(2), NUMBER, many=many)
    made.kernel.put_word(HEAD, BUNDLE)
    given = context(HEAD if many else BUNDLE, 8, ret=0)
    made.run(unpin, given)
    assert not made.records and made.ran <= 12  # O_DIRECT of everybody comes by here
    made.run(pinned, context(0x1000, 8, word(0x41), 0, ret=8))
    made.records.clear()
    made.run(unpin, given)
    assert told(made) == [BUNDLE]


# A ring that is full


@pytest.mark.parametrize(
    ("program", "given"),
    [
        (end(), context(BUNDLE, ret=-12)),
        (pin(), context(0x1000, 1, 1, 0, ret=-14)),
        (failed(Returns.INT), context(1, 2, ret=-5)),
        (migration(), migrated(2)),
        (programs.opened(MAPS, programs.by_trampoline(2), NUMBER), context(1, 2, ret=0)),
        (programs.plain_pin(MAPS, programs.by_trampoline(4), NUMBER, 0, 256), context(1, 1, 1, 0, ret=1)),
        (registered(), registration(1, ret=-12)),
    ],
)
def test_records_that_find_no_room_are_counted(program: bytes, given: bytes) -> None:
    made = in_request()
    made.room = 1
    for _ in range(3):
        assert made.run(program, given) == 0
    assert len(made.records) == 1 and lost(made) == 2


def test_a_call_that_finds_no_room_in_the_ring_is_counted() -> None:
    made = machine()
    made.room = 0
    made.run(programs.library_call(MAPS, PROBE), by_probe([1, 2, 3, 4, 5, 6]))
    made.run(programs.library_return(MAPS, PROBE, NUMBER), by_probe(ret=0))
    assert not made.records and lost(made) == 1


# This machine's kernel


@pytest.fixture
def kernel_maps() -> Iterator[Maps]:
    """The maps of the engine, of this kernel."""
    fds: list[int] = []
    try:
        with bpf.Ring(os.sysconf("SC_PAGE_SIZE")) as ring:
            counter, uncounted = bpf.Counter("test"), bpf.Counter("test")
            for kind, key, value in (
                (bpf.MAP_LRU_HASH, 4, programs.STATE_BYTES),
                (bpf.MAP_LRU_HASH, 4, programs.CALL_BYTES),
                (bpf.MAP_LRU_HASH, 4, programs.PIN_BYTES),
                (bpf.MAP_HASH, KEY.size, 16),
                (bpf.MAP_HASH, SIZE_KEY.size, 8),
            ):
                fds.append(bpf.open_map(kind, "test", key_size=key, value_size=value, entries=16))
            yield Maps(ring.fd, counter.fd, *fds, uncounted.fd, fds[0])
            counter.close()
            uncounted.close()
    except OSError as error:
        assert error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL), error
        pytest.skip(str(error))
    finally:
        for fd in fds:
            os.close(fd)


needs_registers = pytest.mark.skipif(not REGISTERS, reason="the registers of this architecture are not known")


@needs_registers
def test_the_verifier_takes_what_kprobes_and_uprobes_run(kernel_maps: Maps) -> None:
    registers = registers_in_context()
    names = ("rdi", "rsi", "rdx", "rcx", "r8", "r9") if "rdi" in registers else [f"x{n}" for n in range(6)]
    parameters = [registers[name] for name in names]
    returned = registers["rax" if "rax" in registers else "x0"]
    at_entry, at_return = Context(parameters, None), Context(None, returned)
    made = [
        programs.library_call(kernel_maps, at_entry),
        programs.library_return(kernel_maps, at_return, NUMBER),
        programs.keep_migration(kernel_maps, at_entry),
        programs.keep_pin(kernel_maps, at_entry, 1),
        programs.plain_pin(kernel_maps, at_return, NUMBER, 1, 256),
        programs.migration(kernel_maps, at_return, NUMBER, PAGE, (8, 9)),
        programs.migration(kernel_maps, at_return, NUMBER, None, ()),
        *(programs.failed(kernel_maps, at_return, NUMBER, returns, never=11) for returns in Returns),
    ]
    for insns in made:
        os.close(bpf.load_program(insns, bpf.PROG_KPROBE, "test"))


def trampolines(maps: Maps) -> Iterator[tuple[str, Callable[[Context], bytes]]]:
    """Yield every program of the exits of functions, and a function with such parameters and results that
    every kernel has.
    """
    for handler in (OLD_HANDLER, HANDLER, DMABUF_HANDLER):
        for layout in (Layout(task=TASK, request=REQUEST), Layout()):
            yield "commit_creds", partial(_end, maps, handler, layout)
    yield "vfs_open", lambda c: programs.opened(maps, c, NUMBER)
    yield "pin_user_pages_fast", lambda c: programs.pin(maps, c, NUMBER)
    yield "pin_user_pages_fast", lambda c: programs.plain_pin(maps, c, NUMBER, 0, 256)
    yield "pin_user_pages_remote", lambda c: programs.plain_pin(maps, c, NUMBER, 1, 256)
    yield "unpin_user_page", lambda c: programs.unpin(maps, c, NUMBER, many=False)
    yield "unpin_user_pages", lambda c: programs.unpin(maps, c, NUMBER, many=True)
    yield "migrate_pages", lambda c: programs.migration(maps, c, NUMBER, PAGE, (8, 9))
    yield "migrate_pages", lambda c: programs.migration(maps, c, NUMBER, replace(PAGE, lru=0), ())
    yield "migrate_pages", lambda c: programs.failed(maps, c, NUMBER, Returns.INT, never=11)
    yield "copy_process", lambda c: programs.failed(maps, c, NUMBER, Returns.POINTER)
    yield "copy_process", lambda c: programs.registered(maps, c, NUMBER, 2, dmabuf=False)
    yield "copy_process", lambda c: programs.registered(maps, c, NUMBER, 2, dmabuf=True)


def _end(maps: Maps, handler: str, layout: Layout, where: Context) -> bytes:
    return programs.end_request(maps, where, NUMBER, handler, layout)


@needs_registers
def test_the_verifier_takes_what_trampolines_run_as_kprobes_too(kernel_maps: Maps) -> None:
    """What it does not look at then are types of parameters."""
    for _, make in trampolines(kernel_maps):
        os.close(bpf.load_program(make(programs.by_trampoline(7)), bpf.PROG_KPROBE, "test"))
    begin = programs.begin_request(kernel_maps, programs.by_trampoline(1))
    os.close(bpf.load_program(begin, bpf.PROG_KPROBE, "test"))


def test_the_verifier_takes_what_trampolines_run(kernel_maps: Maps) -> None:
    try:
        types = Btf.of_running_kernel()
    except (OSError, BtfError) as error:
        pytest.skip(f"this kernel has no BTF: {error}")
    taken = 0
    try:
        for name, make in trampolines(kernel_maps):
            function = types.function(name)
            if function is not None:
                insns, to = make(programs.by_trampoline(len(function.parameters))), function.type_id
                kind, when = bpf.PROG_TRACING, bpf.TRACE_FEXIT
                os.close(bpf.load_program(insns, kind, "test", attach=when, btf_id=to))
                taken += 1
        function = types.function("commit_creds")
        if function is not None:
            insns = programs.begin_request(kernel_maps, programs.by_trampoline(1))
            kind, when, to = bpf.PROG_TRACING, bpf.TRACE_FENTRY, function.type_id
            os.close(bpf.load_program(insns, kind, "test", attach=when, btf_id=to))
    except OSError as error:
        assert error.errno == errno.EPERM or (error.errno == bpf.ENOTSUPP and not taken)
        pytest.skip(str(error))
    if not taken:
        pytest.skip("this kernel's BTF has none of these functions")


@pytest.mark.parametrize(
    ("at", "bytes_there"),
    [(0, struct.pack("=QQQQ", 1, 2, 3, 4)), (24, struct.pack("=QII", 4, 5, 6))],
    ids=["access", "start"],
)
def test_of_an_old_request_that_cannot_be_read_whole_nothing_is_known(at: int, bytes_there: bytes) -> None:
    made = in_request()
    made.kernel.put_word(BUNDLE + REQUEST.command, USER)
    made.user.put(USER + at, bytes_there)
    made.run(end(), context(BUNDLE, ret=-22))
    assert dict(zip(REQUEST_WORDS, told(made), strict=True))["present"] == NOTHING
