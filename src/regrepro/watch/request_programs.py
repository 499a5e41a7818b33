"""BPF programs that follow registrations in the kernel: silent on success, made of instructions here.

What costs on the path that succeeds: at a request's begin one number is written where one stood before, at a
pin that succeeds two are added; each other program compares what its function returned, and ends. Written by
hand because of that: bpftrace has no way to write into a map's entry, only to put a new one in its place,
which costs a multiple (kernel/bpf/hashtab.c), and has no trampoline for more than six parameters.

A program tells what failed by a record in a ring that all CPUs share: words of 8 bytes, the program's number,
thread and process, ns of boottime, and then

    opened          nothing
    end_request     `REQUEST_WORDS`
    failed          ret
    pin             ret, start, pages, flags
    migration       ret, reason; of STUCK_PAGES pages: address, refcount, mapcount, pincount, flags
    plain_pin       start, pages, flags, first page, length of the stack in bytes, its addresses
    unpin           the first page
    library_return  the six parameters

So one record comes after another if what it tells of did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from regrepro.core import bpf
from regrepro.core.bpf_code import CONTEXT, RESULT, STACK_END, Code
from regrepro.kernel_functions import Returns
from regrepro.watch.program import (
    REQUESTS,
    STUCK_PAGES,
    Layout,
    PageOffsets,
    RequestOffsets,
    TaskOffsets,
    attribute_index,
)
from regrepro.watch.registrations import NO_SIZE

STACK_FRAMES = 16  # that are told of a plain pin
_POINTER_ERRORS = 0xFFFFFFFFFFFFF000  # above are errors: IS_ERR(), include/linux/err.h
_HEADER = 3  # words: number, thread and process, time

# Registers that stay over calls, as they are used here.
_CTX, _STATE, _VALUE, _AT = 6, 7, 8, 9
_KEY = -8  # offset of a map's key on the stack; a record lies below
# A thread's entry in the map of requests, offsets of its words: since when it is in one (0: none was seen),
# pins that were made in it, pages of those that succeeded; of migrate_pages by kprobes its list and reason,
# and how deep it is: compaction calls it within itself, when the target is to be allocated; of a driver's
# registration by kprobes its length.
_SINCE, _CALLS, _PAGES, _LIST, _REASON, _DEPTH, _LENGTH, STATE_BYTES = 0, 8, 16, 24, 32, 40, 48, 56
# Of a call of libibverbs that is followed at entry and return: its parameters.
CALL_BYTES = 48
# Of a pin that is followed by kprobes: start, pages, flags.
PIN_BYTES = 32


REQUEST_WORDS = (
    *("ret", "since", "calls", "pages", "uid", "start", "memlock", "pinned", "comm", "comm_end"),
    *("asked_start", "asked_length", "asked_iova", "asked_access", "asked_fd", "present"),
)
MIGRATION_WORDS = 2 + 5 * STUCK_PAGES
PLAIN_PIN_WORDS = 5 + STACK_FRAMES
NOTHING = 0xFFFFFFFFFFFFFFFF
"""`present` where what was asked for is not known."""
ALL = NOTHING - 1
"""`present` of a request that has every parameter."""


@dataclass(frozen=True)
class Context:
    """Where a program finds what it is about: offsets in its context of parameters and returned value.

    Of a trampoline words, of a kprobe registers; `None`: not there in that moment.
    """

    parameters: Sequence[int] | None
    returned: int | None


@dataclass(frozen=True)
class Maps:
    """Descriptors: of the ring, of the counter of lost records, of requests, of library calls and of pins
    by kprobes; of what `registered` counts; of processes that made a plain pin, where unpins are followed.
    """

    ring: int
    lost: int
    requests: int
    calls: int
    pins: int
    counts: int = -1
    sizes: int = -1
    uncounted: int = -1
    pinners: int = -1


def by_trampoline(parameters: int) -> Context:
    """Return the context at the exit of a function (Documentation/bpf/, BPF_PROG_TYPE_TRACING)."""
    return Context([8 * index for index in range(parameters)], 8 * parameters)


class _Program:
    """Code with what all of these programs do."""

    def __init__(self, maps: Maps, context: Context) -> None:
        self.code = Code()
        self.maps = maps
        self.context = context
        self.code.copy(_CTX, CONTEXT)

    def returned_int(self) -> None:
        """`_VALUE` becomes the int that the function returned."""
        assert self.context.returned is not None
        self.code.load_signed(_VALUE, _CTX, self.context.returned)

    def thread(self) -> None:
        """Put the thread's number where a map's key is taken from; `_VALUE` and `_CTX` stay."""
        self.code.call(bpf.GET_CURRENT_PID_TGID)
        self.code.store(STACK_END, _KEY, RESULT, 4)

    def look_up(self, map_fd: int) -> None:
        """The result is a pointer to the thread's entry, or 0."""
        self.code.set_map(1, map_fd)
        self.code.stack(2, _KEY)
        self.code.call(bpf.MAP_LOOKUP)

    def end_unless_in_request(self) -> None:
        """`_STATE` becomes the thread's entry; of a thread that never made a request nothing is told."""
        self.thread()
        self.look_up(self.maps.requests)
        self.end_unless(RESULT, "!=", 0)
        self.code.copy(_STATE, RESULT)

    def end_unless(self, left: int, condition: str, number: int) -> None:
        """End the program unless a register compares so."""
        on = self.code.new_label()
        self.code.jump_if(left, condition, number, on)
        self.code.end()
        self.code.label(on)

    def bytes(self) -> bytes:
        """Return what the kernel takes."""
        return self.code.bytes()


class _Record:
    """A record on a program's stack. Words are counted from 0 behind the header."""

    def __init__(self, program: _Program, number: int, words: int) -> None:
        self._program, self._code = program, program.code
        self._words = _HEADER + words
        self._begin = _KEY - 8 * self._words
        code = self._code
        code.store_number(STACK_END, self._begin, number)
        code.call(bpf.GET_CURRENT_PID_TGID)
        code.store(STACK_END, self._begin + 8, RESULT)
        code.call(bpf.KTIME_GET_BOOT_NS)
        code.store(STACK_END, self._begin + 16, RESULT)

    def at(self, word: int) -> int:
        """Return a word's offset on the stack."""
        return self._begin + 8 * (_HEADER + word)

    def put(self, word: int, register: int) -> None:
        """Write a register."""
        self._code.store(STACK_END, self.at(word), register)

    def put_number(self, word: int, number: int) -> None:
        """Write a number."""
        self._code.store_number(STACK_END, self.at(word), number)

    def copy_context(self, word: int, offset: int) -> None:
        """Write what lies in the context: a number, whatever type the verifier takes it for."""
        code = self._code
        code.stack(1, self.at(word))
        code.do(2, "=", 8)
        code.copy(3, _CTX)
        code.do(3, "+", offset)
        code.call(bpf.PROBE_READ_KERNEL)

    def read(self, word: int, base: int, offset: int, *, size: int = 8, user: bool = False) -> None:
        """Write what lies at a register + `offset`; 0 where it cannot be read."""
        code = self._code
        if size < 8:
            self.put_number(word, 0)
        code.stack(1, self.at(word))
        code.do(2, "=", size)
        code.copy(3, base)
        if offset:
            code.do(3, "+", offset)
        code.call(bpf.PROBE_READ_USER if user else bpf.PROBE_READ_KERNEL)

    def low_half(self, word: int) -> None:
        """Leave of a word what is an unsigned int."""
        self._code.load(1, STACK_END, self.at(word))
        self._code.do(1, "<<", 32)
        self._code.do(1, ">>", 32)
        self.put(word, 1)

    def get(self, register: int, word: int) -> None:
        """A register becomes a word that was written."""
        self._code.load(register, STACK_END, self.at(word))

    def send(self) -> None:
        """Give the record to the ring, or count it as lost. `_CTX` stays."""
        code = self._code
        code.set_map(1, self._program.maps.ring)
        code.stack(2, self._begin)
        code.do(3, "=", 8 * self._words)
        code.do(4, "=", 0)
        code.call(bpf.RINGBUF_OUTPUT)
        sent = code.new_label()
        code.jump_if(RESULT, "==", 0, sent)
        _count_one(self._program, self._program.maps.lost)
        code.label(sent)


def _count_one(program: _Program, counter: int) -> None:
    """Count a counter up. The map's key that lies on the stack is gone then."""
    code = program.code
    none = code.new_label()
    code.store_number(STACK_END, _KEY, 0, 4)
    code.set_map(1, counter)
    code.stack(2, _KEY)
    code.call(bpf.MAP_LOOKUP)
    code.jump_if(RESULT, "==", 0, none)
    code.do(1, "=", 1)
    code.add_atomically(RESULT, 0, 1)
    code.label(none)


def begin_request(maps: Maps, context: Context) -> bytes:
    """Where the kernel begins a request: the thread is in one since now."""
    program = _Program(maps, context)
    code = program.code
    program.thread()
    code.call(bpf.KTIME_GET_BOOT_NS)
    code.copy(_VALUE, RESULT)
    program.look_up(maps.requests)
    code.jump_if(RESULT, "==", 0, "first")
    code.store(RESULT, _SINCE, _VALUE)
    for offset in (_CALLS, _PAGES, _DEPTH):
        code.store_number(RESULT, offset, 0)
    code.end()
    code.label("first")
    begin = _KEY - STATE_BYTES
    code.store(STACK_END, begin + _SINCE, _VALUE)
    for offset in range(8, STATE_BYTES, 8):
        code.store_number(STACK_END, begin + offset, 0)
    _put_entry(program, maps.requests, begin)
    code.end()
    return program.bytes()


def _put_entry(program: _Program, map_fd: int, value: int) -> None:
    """Make the thread's entry what lies on the stack."""
    code = program.code
    code.set_map(1, map_fd)
    code.stack(2, _KEY)
    code.stack(3, value)
    code.do(4, "=", 0)  # BPF_ANY
    code.call(bpf.MAP_UPDATE)


def end_request(maps: Maps, context: Context, number: int, handler: str, layout: Layout) -> bytes:
    """Where a request ends: tell if it failed."""
    program = _Program(maps, context)
    code = program.code
    program.returned_int()
    program.end_unless(_VALUE, "!=", 0)
    words = {name: index for index, name in enumerate(REQUEST_WORDS)}
    record = _Record(program, number, len(REQUEST_WORDS))
    record.put(words["ret"], _VALUE)
    program.thread()
    program.look_up(maps.requests)
    code.jump_if(RESULT, "==", 0, "unseen")
    for name, offset in (("since", _SINCE), ("calls", _CALLS), ("pages", _PAGES)):
        code.load(1, RESULT, offset)
        record.put(words[name], 1)
    code.jump("state")
    code.label("unseen")
    for name in ("since", "calls", "pages"):
        record.put_number(words[name], 0)
    code.label("state")
    code.call(bpf.GET_CURRENT_UID_GID)
    record.put(words["uid"], RESULT)
    record.low_half(words["uid"])
    code.stack(1, record.at(words["comm"]))
    code.do(2, "=", 16)
    code.call(bpf.GET_CURRENT_COMM)
    _tell_task(program, record, words, layout.task)
    _tell_asked(program, record, words, handler, layout.request)
    record.send()
    code.end()
    return program.bytes()


def _tell_task(program: _Program, record: _Record, words: dict[str, int], task: TaskOffsets | None) -> None:
    if task is None:
        for name in ("start", "memlock", "pinned"):
            record.put_number(words[name], 0)
        return
    code = program.code
    for name, pointer, offset in (
        ("start", task.leader, task.start),
        ("memlock", task.signal, task.memlock),
        ("pinned", task.mm, task.pinned),
    ):
        code.call(bpf.GET_CURRENT_TASK)
        record.read(words[name], RESULT, pointer)
        record.get(_AT, words[name])
        record.read(words[name], _AT, offset)


def _tell_asked(
    program: _Program, record: _Record, words: dict[str, int], handler: str, request: RequestOffsets | None
) -> None:
    """Tell what the failed request had asked for: of its only parameter, the bundle."""
    asked = [
        words[name] for name in ("asked_start", "asked_length", "asked_iova", "asked_access", "asked_fd")
    ]
    present = words["present"]
    if request is None or program.context.parameters is None:
        for word in asked:
            record.put_number(word, 0)
        record.put_number(present, -1)
        return
    record.copy_context(present, program.context.parameters[0])
    record.get(_AT, present)
    if handler in REQUESTS:
        for word, identifier in zip(asked, REQUESTS[handler], strict=True):
            record.read(word, _AT, request.attributes + request.size * attribute_index(identifier))
        record.read(present, _AT, request.present)
        return
    # struct ib_uverbs_reg_mr, include/uapi/rdma/ib_user_verbs.h: response, start, length, hca_va, pd_handle,
    # access_flags.
    record.read(present, _AT, request.command)
    record.get(_AT, present)
    record.put_number(present, -1)
    record.put_number(asked[3], 0)
    record.put_number(asked[4], -1)
    code = program.code
    for word, offset in zip((*asked[1:3], asked[0]), (16, 24, 8), strict=True):
        record.read(word, _AT, offset, user=True)
    # All of it lies in 40 bytes, so in two pages at most: what lies between its ends can be read if they can.
    code.jump_if(RESULT, "!=", 0, "unread")
    record.read(asked[3], _AT, 36, size=4, user=True)
    code.jump_if(RESULT, "!=", 0, "unread")
    record.put_number(present, -2)
    code.label("unread")


def opened(maps: Maps, context: Context, number: int) -> bytes:
    """Tell that a process opened an RDMA device."""
    program = _Program(maps, context)
    program.returned_int()
    program.end_unless(_VALUE, "==", 0)
    _Record(program, number, 0).send()
    program.code.end()
    return program.bytes()


def pin(maps: Maps, context: Context, number: int) -> bytes:
    """Where a pin ends: count it for the thread's request, and tell if it failed."""
    program = _Program(maps, context)
    code = program.code
    program.returned_int()
    program.end_unless_in_request()
    code.load(1, _STATE, _CALLS)
    code.do(1, "+", 1)
    code.store(_STATE, _CALLS, 1)
    code.jump_if(_VALUE, "s<", 0, "failed")
    code.load(1, _STATE, _PAGES)
    code.add(1, _VALUE)
    code.store(_STATE, _PAGES, 1)
    code.end()
    code.label("failed")
    assert context.parameters is not None
    record = _Record(program, number, 4)
    record.put(0, _VALUE)
    for word in range(3):
        record.copy_context(1 + word, context.parameters[word])
    for word in (2, 3):  # int nr_pages, unsigned int gup_flags
        record.low_half(word)
    record.send()
    code.end()
    return program.bytes()


def failed(maps: Maps, context: Context, number: int, returns: Returns, *, never: int = 0) -> bytes:
    """Where another function ends: tell if it failed in a request, unless with the errno `never`."""
    program = _Program(maps, context)
    code = program.code
    assert context.returned is not None
    if returns is Returns.POINTER:
        code.load(_VALUE, _CTX, context.returned)
        code.set(1, _POINTER_ERRORS)
        code.jump_if_register(_VALUE, ">", 1, "failed")
        code.end()
        code.label("failed")
    else:
        program.returned_int()
        program.end_unless(_VALUE, "s<", 0)
        if never:
            program.end_unless(_VALUE, "!=", -never)
    program.end_unless_in_request()
    record = _Record(program, number, 1)
    record.copy_context(0, context.returned)
    record.send()
    code.end()
    return program.bytes()


def keep_length(maps: Maps, context: Context) -> bytes:
    """Where a driver's registration begins, by a kprobe: keep its length."""
    program = _Program(maps, context)
    assert context.parameters is not None
    program.end_unless_in_request()
    program.code.load(1, _CTX, context.parameters[2])
    program.code.store(_STATE, _LENGTH, 1)
    program.code.end()
    return program.bytes()


def registered(maps: Maps, context: Context, number: int, driver: int, *, dmabuf: bool) -> bytes:
    """Where a driver's registration ends: count it if it succeeded, tell if it failed. `driver`: its number
    in what is counted (registrations.py).
    """
    program = _Program(maps, context)
    code = program.code
    assert context.returned is not None
    key, size_key, begin = -40, -48, -64  # on the stack: keys, and a new entry of 0
    code.load(_VALUE, _CTX, context.returned)
    code.set(1, _POINTER_ERRORS)
    code.jump_if_register(_VALUE, ">", 1, "failed")
    program.thread()
    program.look_up(maps.requests)
    if context.parameters is None:
        program.end_unless(RESULT, "!=", 0)
        code.load(_AT, RESULT, _LENGTH)
    else:
        code.load(_AT, _CTX, context.parameters[2])
    code.do(_STATE, "=", 2)
    if not dmabuf:
        code.do(_STATE, "=", 3)
        code.jump_if(RESULT, "==", 0, "path")
        code.load(1, RESULT, _CALLS)
        code.jump_if(1, "==", 0, "path")
        code.do(_STATE, "=", 1)
    code.label("path")
    for offset in range(begin, 0, 8):
        code.store_number(STACK_END, offset, 0)
    code.store_number(STACK_END, key, driver, 4)
    code.store(STACK_END, key + 4, _STATE, 4)
    code.call(bpf.GET_CURRENT_PID_TGID)
    code.do(RESULT, ">>", 32)
    code.store(STACK_END, key + 8, RESULT, 4)
    code.stack(1, key + 16)
    code.do(2, "=", 16)
    code.call(bpf.GET_CURRENT_COMM)
    _count(program, maps.counts, key, nothing=begin, name="counts", values=[1, _AT])
    # The length's highest bit.
    code.do(_VALUE, "=", 0)
    code.jump_if(_AT, "==", 0, "nothing")
    for shift in (32, 16, 8, 4, 2, 1):
        lower = code.new_label()
        code.copy(1, _AT)
        code.do(1, ">>", shift)
        code.jump_if(1, "==", 0, lower)
        code.copy(_AT, 1)
        code.do(_VALUE, "+", shift)
        code.label(lower)
    code.jump("sized")
    code.label("nothing")
    code.do(_VALUE, "=", NO_SIZE)
    code.label("sized")
    code.store_number(STACK_END, size_key, driver, 4)
    code.store(STACK_END, size_key + 4, _STATE, 2)
    code.store(STACK_END, size_key + 6, _VALUE, 2)
    _count(program, maps.sizes, size_key, nothing=begin, name="sizes", values=[1])
    code.end()
    code.label("failed")
    record = _Record(program, number, 1)
    record.copy_context(0, context.returned)
    record.send()
    code.end()
    return program.bytes()


def _count(
    program: _Program, map_fd: int, key: int, *, nothing: int, name: str, values: Sequence[int]
) -> None:
    """Add to a map's entry, a new one if there is none: 1, then what registers have."""
    code = program.code
    for again in (False, True):
        code.set_map(1, map_fd)
        code.stack(2, key)
        code.call(bpf.MAP_LOOKUP)
        code.jump_if(RESULT, "!=", 0, name)
        if not again:
            code.set_map(1, map_fd)
            code.stack(2, key)
            code.stack(3, nothing)
            code.do(4, "=", bpf.BPF_NOEXIST)
            code.call(bpf.MAP_UPDATE)
    _count_one(program, program.maps.uncounted)
    code.jump(f"{name} full")
    code.label(name)
    for index, value in enumerate(values):
        if value == 1:
            code.do(1, "=", 1)
        code.add_atomically(RESULT, 8 * index, value)
    code.label(f"{name} full")


def keep_migration(maps: Maps, context: Context) -> bytes:
    """Where migrate_pages begins, by a kprobe: keep what its end is to be told with."""
    program = _Program(maps, context)
    assert context.parameters is not None
    program.end_unless_in_request()
    code = program.code
    code.load(2, _STATE, _DEPTH)
    code.copy(1, 2)
    code.do(1, "+", 1)
    code.store(_STATE, _DEPTH, 1)
    code.jump_if(2, "!=", 0, "within")
    for place, position in ((_LIST, 0), (_REASON, 5)):
        code.load(1, _CTX, context.parameters[position])
        code.store(_STATE, place, 1)
    code.label("within")
    code.end()
    return program.bytes()


def migration(
    maps: Maps, context: Context, number: int, offsets: PageOffsets | None, reasons: Sequence[int]
) -> bytes:
    """Where migrate_pages ends: tell if pages stayed, and of some of them what they are.

    After a failure they are on the list that was given (mm/migrate.c). `reasons`: those of pins (enum
    migrate_reason), as compaction fails to move pages all day long; empty: not known.
    """
    program = _Program(maps, context)
    code = program.code
    program.returned_int()
    if context.parameters is None:
        program.end_unless_in_request()
        code.load(1, _STATE, _DEPTH)
        program.end_unless(1, "!=", 0)  # its beginning was before the request's
        code.do(1, "+", -1)
        code.store(_STATE, _DEPTH, 1)
        program.end_unless(1, "==", 0)
        program.end_unless(_VALUE, "!=", 0)
    else:
        program.end_unless(_VALUE, "!=", 0)
        program.end_unless_in_request()
    record = _Record(program, number, MIGRATION_WORDS)
    record.put(0, _VALUE)
    head = 2  # the first page's word, until the list is walked
    if context.parameters is None:
        for word, place in ((head, _LIST), (1, _REASON)):
            code.load(1, _STATE, place)
            record.put(word, 1)
    else:
        record.copy_context(head, context.parameters[0])
        record.copy_context(1, context.parameters[5])
    record.low_half(1)
    if reasons:
        record.get(1, 1)
        for reason in reasons:
            code.jump_if(1, "==", reason, "told")
        code.end()
        code.label("told")
    record.get(_STATE, head)  # from here on the list's head
    for word in range(2, MIGRATION_WORDS):
        record.put_number(word, 0)
    code.jump_if(_STATE, "==", 0, "send")
    if offsets is not None:
        code.jump_if(_VALUE, "s<", 0, "send")
        code.copy(_AT, _STATE)
        for index in range(STUCK_PAGES):
            word = 2 + 5 * index
            record.read(word, _AT, 0)  # the list's next
            record.get(_AT, word)
            record.put_number(word, 0)
            code.jump_if(_AT, "==", 0, "send")
            code.jump_if_register(_AT, "==", _STATE, "send")
            for place, (offset, size) in enumerate(
                ((offsets.refcount, 4), (offsets.mapcount, 4), (offsets.pincount, 4), (offsets.flags, 8)), 1
            ):
                record.read(word + place, _AT, offset - offsets.lru, size=size)
            code.copy(1, _AT)
            code.do(1, "+", -offsets.lru)
            record.put(word, 1)
    code.label("send")
    record.send()
    code.end()
    return program.bytes()


def keep_pin(maps: Maps, context: Context, first: int) -> bytes:
    """Where a pin begins, by a kprobe: keep what its end is to be told with. `first`: position of start."""
    program = _Program(maps, context)
    assert context.parameters is not None
    begin = _KEY - PIN_BYTES
    for word in range(4):
        program.code.load(1, _CTX, context.parameters[first + word])
        program.code.store(STACK_END, begin + 8 * word, 1)
    program.thread()
    _put_entry(program, maps.pins, begin)
    program.code.end()
    return program.bytes()


def plain_pin(maps: Maps, context: Context, number: int, first: int, longterm: int) -> bytes:
    """Where a pin ends: tell if it succeeded without `longterm` (FOLL_LONGTERM). `first`: see `keep_pin`."""
    program = _Program(maps, context)
    code = program.code
    assert context.returned is not None
    code.load(_VALUE, _CTX, context.returned)
    program.end_unless(_VALUE, "s>", 0)
    if context.parameters is None:
        program.thread()
        program.look_up(maps.pins)
        program.end_unless(RESULT, "!=", 0)
        code.copy(_STATE, RESULT)
        code.load(1, _STATE, 8)
        program.end_unless(1, "!=", 0)  # pages
    record = _Record(program, number, PLAIN_PIN_WORDS)
    for word in range(4):
        if context.parameters is None:
            code.load(1, _STATE, 8 * word)
            record.put(word, 1)
            code.store_number(_STATE, 8 * word, 0)  # once
        else:
            record.copy_context(word, context.parameters[first + word])
    record.get(_AT, 3)
    record.read(
        3, _AT, 0
    )  # of the array that the pin has filled: what was pinned, wherever it is mapped by now
    record.low_half(2)
    record.get(1, 2)
    code.jump_if(1, "&", longterm, "out")
    for word in range(STACK_FRAMES):
        record.put_number(5 + word, 0)
    code.copy(1, _CTX)
    code.stack(2, record.at(5))
    code.do(3, "=", 8 * STACK_FRAMES)
    code.do(4, "=", 0)
    code.call(bpf.GET_STACK)
    record.put(4, RESULT)
    record.send()
    if maps.pinners >= 0:
        _process(program)
        _put_entry(program, maps.pinners, record.at(0))
    code.label("out")
    code.end()
    return program.bytes()


def _process(program: _Program) -> None:
    """Put the process' number where a map's key is taken from."""
    program.code.call(bpf.GET_CURRENT_PID_TGID)
    program.code.do(RESULT, ">>", 32)
    program.code.store(STACK_END, _KEY, RESULT, 4)


def unpin(maps: Maps, context: Context, number: int, *, many: bool) -> bytes:
    """Where pages are unpinned: tell of the first, if this process made a plain pin. `many`: the parameter is
    an array of pages.
    """
    program = _Program(maps, context)
    assert context.parameters is not None
    _process(program)
    program.look_up(maps.pinners)
    program.end_unless(RESULT, "!=", 0)
    record = _Record(program, number, 1)
    record.copy_context(0, context.parameters[0])
    if many:
        record.get(_AT, 0)
        record.read(0, _AT, 0)
    record.send()
    program.code.end()
    return program.bytes()


def library_call(maps: Maps, context: Context) -> bytes:
    """Where a verb of libibverbs begins: keep its parameters."""
    program = _Program(maps, context)
    code = program.code
    assert context.parameters is not None
    begin = _KEY - CALL_BYTES
    for index in range(CALL_BYTES // 8):
        code.load(1, _CTX, context.parameters[index])
        code.store(STACK_END, begin + 8 * index, 1)
    program.thread()
    _put_entry(program, maps.calls, begin)
    code.end()
    return program.bytes()


def library_return(maps: Maps, context: Context, number: int) -> bytes:
    """Where a verb of libibverbs returns: tell if it gave NULL, of verbs that call one another the inner."""
    program = _Program(maps, context)
    code = program.code
    assert context.returned is not None
    code.load(_VALUE, _CTX, context.returned)
    program.thread()
    program.look_up(maps.calls)
    program.end_unless(RESULT, "!=", 0)
    code.copy(_STATE, RESULT)
    code.load(_AT, _STATE, 0)  # the protection domain
    code.store_number(_STATE, 0, 0)  # once
    program.end_unless(_AT, "!=", 0)
    program.end_unless(_VALUE, "==", 0)
    record = _Record(program, number, CALL_BYTES // 8)
    record.put(0, _AT)
    for index in range(1, CALL_BYTES // 8):
        code.load(1, _STATE, 8 * index)
        record.put(index, 1)
    record.send()
    code.end()
    return program.bytes()


def migration_pages(words: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield of a record of a migration: address, refcount, mapcount, pincount, flags."""
    for index in range(STUCK_PAGES):
        page, *counts, flags = words[2 + 5 * index : 7 + 5 * index]
        if page:
            refcount, mapcount, pincount = map(signed_int, counts)
            yield page, refcount, mapcount, pincount, flags


def signed_int(word: int) -> int:
    """Return a word's low half as an int."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
