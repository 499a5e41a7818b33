"""The engine of BPF programs without a kernel: what it attaches, what records become, what it lets go of."""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bpf_machine import Machine, Map

from regrepro.core import bpf
from regrepro.core.uprobes import REGISTERS, registers_in_context
from regrepro.kernel import kallsyms
from regrepro.kernel_functions import Returns
from regrepro.watch import bpf_engine
from regrepro.watch import request_programs as programs
from regrepro.watch.bpf_engine import BpfEngine
from regrepro.watch.correlate import Correlator
from regrepro.watch.failed_registration import FailedRegistration, ShortTermPin, StuckPage
from regrepro.watch.functions import Function, Functions
from regrepro.watch.libraries import Copy
from regrepro.watch.program import Layout, PageOffsets, RequestOffsets, TaskOffsets
from regrepro.watch.registrations import KEY, NO_SIZE, SIZE_KEY, Account
from regrepro.watch.request_programs import ALL, NOTHING, REQUEST_WORDS

pytestmark = pytest.mark.skipif(not REGISTERS, reason="the registers of this architecture are not known")

REG = ("ibpd", "start", "length", "iova", "access", "udata")
PIN = ("start", "nr_pages", "gup_flags", "pages")
MR, DMABUF = "ib_uverbs_reg_mr", "ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR"
FUNCTIONS = Functions(
    entries=[Function(name, "ib_uverbs", ("attrs",), type_id=1 + n) for n, name in enumerate((MR, DMABUF))],
    drivers=[Function("rxe_reg_user_mr", "rdma_rxe", REG, Returns.POINTER, 3)],
    pins=[Function("pin_user_pages_fast", "", PIN, Returns.LONG, 4)],
    plain_pins=[
        Function("pin_user_pages", "", PIN, Returns.LONG, 5),
        Function("pin_user_pages_remote", "", ("mm", *PIN), Returns.LONG, 6),
    ],
    inner=[
        Function("__ib_umem_get_va", "ib_core", ("device",), Returns.POINTER, 7),
        Function("check_and_migrate_movable_pages", "", ("a", "b"), Returns.LONG, 8),
    ],
    open=Function("ib_uverbs_open", "ib_uverbs", ("inode", "filp"), type_id=9),
    migrate=Function("migrate_pages", "", ("from", "a", "b", "c", "mode", "reason", "ok"), type_id=10),
    reasons={9: "longterm_pin"},
)
TASK = TaskOffsets(leader=16, start=24, signal=32, memlock=40, mm=48, pinned=56)
REQUEST = RequestOffsets(command=32, present=96, attributes=104, size=24)
LATER = 1 << 62  # ns
PAGES = PageOffsets(lru=8, flags=0, refcount=52, mapcount=48, pincount=88)
LAYOUT = Layout(PAGES, TASK, REQUEST)


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def open_one() -> int:
    return os.open(os.devnull, os.O_RDONLY)


@dataclass
class Loaded:
    """A program that the engine gave to the kernel, and where it is attached."""

    name: str
    insns: bytes
    how: str  # fentry, fexit, kprobe
    module: bool
    on: str = ""


@dataclass
class KernelRing:
    """The ring of a kernel. Three records are taken at once."""

    kernel: Kernel

    @property
    def fd(self) -> int:
        return self.kernel.machine.ring

    @property
    def empty(self) -> bool:
        return not self.kernel.machine.records and not self.kernel.writes

    def take(self) -> Iterator[bytes]:
        machine = self.kernel.machine
        records, machine.records = machine.records[:3], machine.records[3:]
        yield from records

    def close(self) -> None:
        os.close(self.fd)
        self.kernel.closed += 1


@dataclass
class Kernel:
    """In the place of bpf(2). `refuse`: how a program is loaded, and for which function → an errno, or 0."""

    machine: Machine = field(default_factory=lambda: Machine({}, -1))
    loaded: dict[int, Loaded] = field(default_factory=dict)
    attached: list[str] = field(default_factory=list)
    refuse: Callable[[str, str], int] = lambda _how, _name: 0
    refuse_attaching: Callable[[str], int] = lambda _on: 0
    missed: dict[int, int] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    closed: int = 0
    writes: bool = False  # there is a record that is not whole yet

    def ring(self, size: int) -> KernelRing:
        assert size % os.sysconf("SC_PAGE_SIZE") == 0 and size & (size - 1) == 0
        self.machine.ring = open_one()
        return KernelRing(self)

    def counter(self, name: str) -> SimpleNamespace:
        fd = open_one()
        self.machine.maps[fd] = Map(4, 8, 1, array=True)
        made = SimpleNamespace(fd=fd, value=17 if name == "regrepro_lost" else 0)
        self.counters[name] = made
        made.close = lambda: os.close(fd)
        return made

    def open_map(
        self, kind: int, name: str, *, key_size: int = 4, value_size: int = 8, entries: int = 1
    ) -> int:
        self._check("map", name)
        assert kind in (bpf.MAP_LRU_HASH, bpf.MAP_HASH) and len(name) < 16
        fd = open_one()
        self.machine.maps[fd] = Map(key_size, value_size, entries)
        return fd

    def read_map(self, fd: int, key_size: int, value_size: int) -> dict[bytes, bytes]:
        found = self.machine.maps[fd]
        assert (found.key_size, found.value_size) == (key_size, value_size)
        return {key: bytes(value) for key, value in found.entries.items()}

    def remove_from_map(self, fd: int, key: bytes) -> None:
        self.removed.append(key)
        del self.machine.maps[fd].entries[key]

    def load(
        self, insns: bytes, kind: int, name: str, *, attach: int = 0, btf_id: int = 0, btf_fd: int = 0
    ) -> int:
        names = {0: "kprobe", bpf.TRACE_FENTRY: "fentry", bpf.TRACE_FEXIT: "fexit"}
        how = names[attach]
        assert (kind == bpf.PROG_KPROBE) == (how == "kprobe") == (btf_id == 0) and len(name) < 16
        self._check(how, name)
        fd = open_one()
        self.loaded[fd] = Loaded(name, insns, how, btf_fd > 0)
        return fd

    def _check(self, how: str, name: str) -> None:
        code = self.refuse(how, name)
        if code:
            raise OSError(code, os.strerror(code), name)

    def attach(self, program: int, on: str) -> int:
        return self._attach(program, on, self.loaded[program].how)

    def to_function(self, on: str, program: int, *, at_return: bool) -> int:
        return self._attach(program, on, "kretprobe" if at_return else "kprobe")

    def to_code(self, path: str, offset: int, program: int, *, at_return: bool) -> int:
        return self._attach(program, f"{path}:{offset}", "uretprobe" if at_return else "uprobe")

    def _attach(self, program: int, on: str, how: str) -> int:
        code = self.refuse_attaching(f"{how} {on}")
        if code:
            raise OSError(code, os.strerror(code), on)
        self.loaded[program].on = f"{how} {on}"
        self.attached.append(f"{how} {on}")
        return open_one()

    def run(self, on: str, *parameters: int, ret: int = 0) -> None:
        """Let a function begin or end: run what is attached so."""
        if on.startswith(("f", "F")):
            context = struct.pack(
                f"={len(parameters) + 1}Q", *(word & NOTHING for word in (*parameters, ret))
            )
        else:
            registers = registers_in_context()
            names, returned = bpf_engine._CALLS[os.uname().machine]
            made = bytearray(max(registers.values()) + 8)
            for name, value in zip(names, parameters, strict=False):
                struct.pack_into("=Q", made, registers[name], value & NOTHING)
            if "ret" in on:
                struct.pack_into("=Q", made, registers[returned], ret & NOTHING)
            context = bytes(made)
        found = [item for item in self.loaded.values() if item.on == on]
        assert found, on
        for item in found:
            self.machine.ns += 1
            self.machine.run(item.insns, context)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    made = Kernel()
    for name, value in (
        ("Ring", made.ring),
        ("Counter", made.counter),
        ("open_map", made.open_map),
        ("read_map", made.read_map),
        ("remove_from_map", made.remove_from_map),
        ("load_program", made.load),
        ("attach_program", made.attach),
        ("open_btf", lambda _module: open_one()),
        ("missed_runs", made.missed.get),
    ):
        monkeypatch.setattr(bpf, name, value)
    monkeypatch.setattr(bpf_engine, "attach_to_function", made.to_function)
    monkeypatch.setattr(bpf_engine, "attach_to_code", made.to_code)
    monkeypatch.setattr(bpf_engine, "_TURNS", 8)  # of three records each
    before = descriptors()
    yield made
    assert descriptors() == before


@dataclass
class Told:
    """A correlator, and what it hands out."""

    complete: list[FailedRegistration] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    pins: list[ShortTermPin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.correlator = Correlator(lambda _failure: None, self.complete.append, reasons=FUNCTIONS.reasons)
        self.correlator.on_open = self.opened.append
        self.correlator.on_pin = self.pins.append


@pytest.fixture
def told() -> Told:
    return Told()


def engine(
    told: Told, functions: Functions | None = None, layout: Layout = LAYOUT, **options: Any
) -> BpfEngine:
    return BpfEngine(functions or deepcopy(FUNCTIONS), told.correlator, layout, **options)


def feed(kernel: Kernel, number: int, *words: int, tid: int = 7, pid: int = 6, ns: int = 1000) -> None:
    """Let a record come."""
    data = (number, pid << 32 | tid, ns, *(word & NOTHING for word in words))
    kernel.machine.records.append(struct.pack(f"={len(data)}Q", *data))


# Attaching


def test_all_is_followed_by_trampolines_and_the_beginning_of_requests_last(
    kernel: Kernel, told: Told
) -> None:
    made = engine(told, plain_pins=["pin_user_pages"], longterm=256)
    assert kernel.attached == [
        "fexit __ib_umem_get_va",
        "fexit check_and_migrate_movable_pages",
        "fexit rxe_reg_user_mr",
        "fexit migrate_pages",
        "fexit pin_user_pages_fast",
        "fexit pin_user_pages",
        "fexit ib_uverbs_open",
        *(f"fexit {name}" for name in (MR, DMABUF)),
        *(f"fentry {name}" for name in (MR, DMABUF)),
    ]
    of_modules = {item.on.split()[1] for item in kernel.loaded.values() if item.module}
    assert of_modules == {"__ib_umem_get_va", "rxe_reg_user_mr", "ib_uverbs_open", MR, DMABUF}
    assert made.probes == 11 and made.by_kprobe == [] and made.attached and made.lost == 17
    assert made.fds() == [kernel.machine.ring] and not made.follows_libraries
    made.stop()
    assert kernel.closed == 1 and made.probes == 0 and not made.attached and made.fds() == []
    assert made.lost == 17
    made.stop()
    assert made.take(LATER)


def test_both_pins_can_be_followed_without_longterm(kernel: Kernel, told: Told) -> None:
    names = ["pin_user_pages", "pin_user_pages_remote"]
    made = engine(told, plain_pins=names, longterm=0)
    assert not any(f"fexit {name}" in kernel.attached for name in names)
    made.stop()
    made = engine(told, plain_pins=names, longterm=256)
    assert all(f"fexit {name}" in kernel.attached for name in names)
    made.stop()


NEEDED = [MR, DMABUF, "pin_user_pages_fast", "ib_uverbs_open"]


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("how", ["loading", "attaching"])
def test_what_must_be_followed_by_a_trampoline_and_cannot_leaves_nothing_behind(
    kernel: Kernel, told: Told, name: str, how: str
) -> None:
    if how == "loading":
        kernel.refuse = lambda how, on: errno.EINVAL if how != "kprobe" and name.startswith(on) else 0
    else:
        kernel.refuse_attaching = lambda on: errno.EBUSY if on == f"fexit {name}" else 0
    before = descriptors()
    with pytest.raises(OSError, match=name[:15]):
        engine(told)
    assert descriptors() == before and kernel.closed == 1


@pytest.mark.parametrize("name", [f"regrepro_{name}" for name in ("req", "call", "pin", "count", "sizes")])
def test_a_map_that_there_is_no_room_for_leaves_nothing_behind(kernel: Kernel, told: Told, name: str) -> None:
    kernel.refuse = lambda _how, on: errno.ENOMEM if on == name else 0
    before = descriptors()
    with pytest.raises(OSError, match=name):
        engine(told, account=Account())
    assert descriptors() == before and kernel.closed == 1


def test_a_request_that_btf_does_not_know_is_not_followed(kernel: Kernel, told: Told) -> None:
    entries = [Function(MR, "ib_uverbs")]
    with pytest.raises(OSError, match="not in BTF") as caught:
        engine(told, replace(FUNCTIONS, entries=entries))
    assert caught.value.errno == errno.ENOENT


OTHERS = ["__ib_umem_get_va", "check_and_migrate_movable_pages", "rxe_reg_user_mr", "migrate_pages"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBUSY, bpf.ENOTSUPP])
def test_others_are_followed_by_kprobes_where_no_trampoline_is_to_be_had(
    kernel: Kernel, told: Told, code: int
) -> None:
    short = [name[:15] for name in OTHERS]
    kernel.refuse = lambda how, name: code if how == "fexit" and name in short else 0
    made = engine(told)
    assert made.by_kprobe == OTHERS
    assert [on for on in kernel.attached if on.split()[1] in OTHERS] == [
        *(f"kretprobe {name}" for name in OTHERS[:-1]),
        "kprobe migrate_pages",
        "kretprobe migrate_pages",
    ]
    assert made.probes == 4 + 1 + 6
    made.stop()


def with_unpins() -> Functions:
    functions = deepcopy(FUNCTIONS)
    names = ["unpin_user_page", "unpin_user_pages"]
    functions.unpins = [Function(name, "", ("page", "npages"), type_id=20) for name in names]
    return functions


def test_unpins_are_not_followed_where_nobody_asks(kernel: Kernel, told: Told) -> None:
    made = engine(told, with_unpins(), plain_pins=["pin_user_pages"], longterm=0x100)
    assert not any("unpin" in on for on in kernel.attached)
    made.stop()


@pytest.mark.parametrize("trampolines", [True, False])
def test_unpins_are_followed_where_they_are_asked_for(kernel: Kernel, told: Told, trampolines: bool) -> None:
    functions = with_unpins()
    if not trampolines:
        kernel.refuse_attaching = lambda on: errno.EINVAL if on.startswith("fentry unpin") else 0
    unpinned: list[tuple[int, int]] = []
    told.correlator.on_unpin = lambda pid, _ns, page: unpinned.append((pid, page))
    made = engine(told, functions, plain_pins=["pin_user_pages"], longterm=0x100, unpins=True)
    how = "fentry" if trampolines else "kprobe"
    kernel.machine.kernel.put_word(HEAD, PAGE_AT)
    kernel.run(f"{how} unpin_user_page", PAGE_AT, 1)
    kernel.run("fexit pin_user_pages", 0x1000, 8, 0x41, 0, ret=8)
    kernel.run(f"{how} unpin_user_page", PAGE_AT, 1)
    kernel.run(f"{how} unpin_user_pages", HEAD, 8)
    made.take(LATER)
    assert unpinned == [(kernel.machine.pid, PAGE_AT)] * 2 and len(told.pins) == 1
    made.stop()


def test_pins_of_others_are_followed_by_kprobes_too(kernel: Kernel, told: Told) -> None:
    names = ["pin_user_pages", "pin_user_pages_remote"]
    refused = [f"fexit {name}" for name in names]
    kernel.refuse_attaching = lambda on: errno.EINVAL if on in refused else 0
    made = engine(told, plain_pins=names, longterm=0x100)
    assert made.by_kprobe == names
    kernel.machine.stack = struct.pack("=Q", 0xFF)
    for name, given in zip(names, ((0x1000, 512, 0x41), (9, 0x2000, 8, 0x41)), strict=True):
        kernel.run(f"kprobe {name}", *given)
        kernel.run(f"kretprobe {name}", ret=given[-2])
        kernel.run(f"kretprobe {name}", ret=given[-2])  # the entry of this one was passed over
    made.take(LATER)
    assert [(pin.function, pin.start, pin.pages, pin.flags) for pin in told.pins] == [
        (names[0], 0x1000, 512, 0x41),
        (names[1], 0x2000, 8, 0x41),
    ]
    made.stop()


def test_what_only_adds_to_a_failure_and_that_nobody_can_follow_is_missing(
    kernel: Kernel, told: Told
) -> None:
    for refused, left in ((["migrate_pages"], 9), (OTHERS[:1], 9), (OTHERS[2:3], 9), (OTHERS, 6)):
        kernel.refuse_attaching = lambda on, r=refused: errno.ENOENT if on.split()[1] in r else 0  # type: ignore[misc]
        functions = deepcopy(FUNCTIONS)
        made = engine(told, functions)
        assert sorted(functions.missing) == sorted(refused) and made.probes == left
        assert "No such file" in functions.missing[refused[0]]
        rest = [item.name for item in functions.all() if item.name in OTHERS]
        assert sorted(rest) == sorted(set(OTHERS) - set(refused)) and made.by_kprobe == []
        made.stop()


# A request from its beginning to its end


HEAD, PAGE_AT, BUNDLE, USER = 0xFFFFC90000555000, 0xFFFFEA0000001000, 0xFFFF888000100000, 0x7F0000200000


@pytest.mark.parametrize("trampolines", [True, False])
def test_a_request_that_fails_is_one_failure_with_all_that_failed_in_it(
    kernel: Kernel, told: Told, trampolines: bool
) -> None:
    short = [name[:15] for name in OTHERS]
    kernel.refuse = lambda how, name: (
        0 if trampolines or how != "fexit" or name not in short else errno.EINVAL
    )
    made = engine(told)
    returned = "fexit" if trampolines else "kretprobe"
    machine = kernel.machine
    machine.uid, machine.comm, machine.task = 1000, b"app", 0xFFFF888000200000
    for pointer, offset, value in ((16, 24, 5555), (32, 40, 65536), (48, 56, 3)):
        machine.kernel.put_word(machine.task + pointer, machine.task + 0x1000 * pointer)
        machine.kernel.put_word(machine.task + 0x1000 * pointer + offset, value)
    machine.kernel.put_word(BUNDLE + REQUEST.command, USER)
    machine.user.put(USER, struct.pack("=QQQQII", 0, 0x7F0000001000, 1 << 21, 0x7F0000001000, 1, 7))
    machine.kernel.put_word(HEAD, PAGE_AT + PAGES.lru)
    machine.kernel.put_word(PAGE_AT + PAGES.lru, HEAD)
    machine.kernel.put_word(PAGE_AT, 0x17)
    machine.kernel.put(PAGE_AT + PAGES.mapcount, struct.pack("=iI", 1, 4))
    machine.kernel.put(PAGE_AT + PAGES.pincount, struct.pack("=I", 0))

    kernel.run(f"fentry {MR}", BUNDLE)
    kernel.run("fexit pin_user_pages_fast", 0x7F0000001000, 256, 0x100, 0, ret=256)
    if not trampolines:
        kernel.run("kprobe migrate_pages", HEAD, 0, 0, 0, 2, 9)
    migration = (HEAD, 0, 0, 0, 2, 9, 0) if trampolines else ()
    kernel.run(f"{returned} migrate_pages", *migration, ret=1)
    moved = (1, 2) if trampolines else ()
    kernel.run(f"{returned} check_and_migrate_movable_pages", *moved, ret=-errno.EAGAIN)
    kernel.run(f"{returned} check_and_migrate_movable_pages", *moved, ret=-errno.ENOMEM)
    kernel.run("fexit pin_user_pages_fast", 0x7F0000101000, 256, 0x101, 0, ret=-errno.ENOMEM)
    kernel.run(f"{returned} __ib_umem_get_va", *moved[:1], ret=-errno.ENOMEM)
    kernel.run(f"{returned} rxe_reg_user_mr", *((1, 2, 3, 4, 5, 6) if trampolines else ()), ret=-errno.ENOMEM)
    kernel.run(f"fexit {MR}", BUNDLE, ret=-errno.ENOMEM)
    assert not told.complete
    assert made.take(LATER) is True
    (failure,) = told.complete
    assert [(item.function, item.ret) for item in failure.inner] == [
        ("migrate_pages", 1),
        ("check_and_migrate_movable_pages", -errno.ENOMEM),
        ("pin_user_pages_fast", -errno.ENOMEM),
        ("__ib_umem_get_va", -errno.ENOMEM),
        ("rxe_reg_user_mr", -errno.ENOMEM),
    ]
    assert failure.inner[0].args == {"reason": "longterm_pin"}
    assert failure.inner[2].args == {"start": 0x7F0000101000, "nr_pages": 256, "gup_flags": 0x101}
    assert failure.stuck == [StuckPage(PAGE_AT, 4, 1, 0, 0x17)]
    assert (failure.tid, failure.pid, failure.comm, failure.uid) == (7, 6, "app", 1000)
    assert (failure.function, failure.ret, failure.doubt, failure.dmabuf) == (MR, -errno.ENOMEM, "", False)
    assert (failure.pin_calls, failure.pinned, failure.process_start) == (2, 256, 5555)
    assert failure.limits == {"memlock_soft": 65536, "vmpin": 3 * os.sysconf("SC_PAGE_SIZE")}
    assert (failure.address, failure.length, failure.iova) == (0x7F0000001000, 1 << 21, 0x7F0000001000)
    assert (failure.access, failure.fd) == (7, None)
    assert made.correlator.counts.malformed == 0
    # The next request of the thread has nothing of it.
    kernel.run(f"fentry {MR}", BUNDLE)
    kernel.run(f"fexit {MR}", BUNDLE, ret=-errno.EINVAL)
    made.take(LATER)
    assert len(told.complete) == 2 and not told.complete[1].inner and told.complete[1].pin_calls == 0
    made.stop()


def test_a_request_that_nobody_saw_begin_is_doubted(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    kernel.run(f"fexit {MR}", BUNDLE, ret=-errno.EINVAL)
    made.take(LATER)
    assert "nobody saw" in told.complete[0].doubt
    made.stop()


# Records


def number_of(made: BpfEngine, function: str, name: str = "") -> int:
    """Return the number of the records that a method of the engine takes (`name`: of this function)."""
    for number, (_, told) in enumerate(made._told):
        method = getattr(told, "func", told)
        if method.__name__ == function and name in (*getattr(told, "args", ()), ""):
            return number
    raise AssertionError(function)


def request(**words: int) -> list[int]:
    comm = struct.unpack("=2Q", b"app\0garbage\0garb")
    given = {"ret": -12, "since": 900, "present": NOTHING, "comm": comm[0], "comm_end": comm[1]} | words
    return [given.get(name, 0) for name in REQUEST_WORDS]


def test_what_was_asked_for_is_what_the_request_had(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    number = number_of(made, "_request_failed", DMABUF)
    asked = {"asked_start": 1, "asked_length": 2, "asked_iova": 3, "asked_access": 7, "asked_fd": 33}
    wide = asked | {"asked_access": 7 | 9 << 32, "asked_fd": 33 | 9 << 32}
    places = {"address": 2, "length": 3, "iova": 4, "access": 6, "fd": 5}
    for words in (wide, asked):
        for present in ({"address", "fd"}, set(places), set()):
            bits = sum(1 << 2 * places[name] for name in present)
            feed(kernel, number, *request(present=bits, **words))
            made.take(LATER)
            failure = told.complete.pop()
            expected = dict(zip(places, (1, 2, 3, 7, 33), strict=True))
            for name, value in expected.items():
                assert getattr(failure, name) == (value if name in present else None)
    feed(kernel, number, *request(present=NOTHING, **asked))
    feed(kernel, number, *request(present=ALL, **asked))
    made.take(LATER)
    unknown, whole = told.complete
    assert (unknown.address, unknown.length, unknown.access) == (None, None, None)
    assert (whole.address, whole.length, whole.iova, whole.access, whole.fd) == (1, 2, 3, 7, None)
    made.stop()


def test_limits_are_told_where_this_kernels_types_say_where_they_lie(kernel: Kernel, told: Told) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    for task, memlock, expected in (
        (TASK, 65536, {"memlock_soft": 65536, "vmpin": 2 * page}),
        (TASK, NOTHING, {"memlock_soft": None, "vmpin": 2 * page}),
        (None, 0, {}),
    ):
        made = engine(told, layout=Layout(PAGES, task, REQUEST))
        feed(kernel, number_of(made, "_request_failed", MR), *request(memlock=memlock, pinned=2, start=5))
        made.take(LATER)
        failure = told.complete.pop()
        assert failure.limits == expected and failure.process_start == (5 if task else None)
        assert (failure.comm, failure.ret, failure.function) == ("app", -12, MR)
        made.stop()


def test_openings_are_handed_on_but_our_own(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    for pid in (42, os.getpid(), 43):
        feed(kernel, number_of(made, "_opened"), pid=pid)
    made.take(LATER)
    assert told.opened == [42, 43]
    made.stop()


def test_plain_pins_have_the_names_of_their_stack(
    kernel: Kernel, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def names_of(addresses: Sequence[int]) -> dict[int, str]:
        asked.append(list(addresses))
        return {address: f"f{address}+1" for address in addresses if address < 10}

    monkeypatch.setattr(kallsyms, "names_of", names_of)
    made = engine(told, plain_pins=["pin_user_pages"], longterm=256)
    number = number_of(made, "_plain_pin", "pin_user_pages")
    for stack in ((1, 2, 0xFF), (2, 1), (3,)):
        words = [*stack, *[0] * (programs.STACK_FRAMES - len(stack))]
        feed(kernel, number, 0x1000, 512, 0x41, 0xFFFF, 8 * len(stack), *words)
    feed(kernel, number, 0x1000, 512, 0x41, 0, -14, *[0] * programs.STACK_FRAMES)
    made.take(LATER)
    stack_told = ["f1+1", "f2+1", "0xff"]
    first = ShortTermPin(1000, 7, 6, "pin_user_pages", 0x1000, 512, 0x41, stack_told, page=0xFFFF)
    assert told.pins[0] == first
    # Symbols are read at most once in some seconds: what came since is an address.
    assert [pin.stack for pin in told.pins[1:]] == [["f2+1", "f1+1"], ["0x3"], []]
    assert asked == [[1, 2, 0xFF]]
    made._symbols_read = float("-inf")
    feed(kernel, number, 0x1000, 512, 0x41, 0, 8, 3, *[0] * (programs.STACK_FRAMES - 1))
    made.take(LATER)
    assert told.pins[-1].stack == ["f3+1"] and len(asked) == 2
    made.stop()


def test_symbols_that_cannot_be_read_are_addresses(
    kernel: Kernel, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_addresses: Sequence[int]) -> dict[int, str]:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(kallsyms, "names_of", refuse)
    made = engine(told)
    assert made._names([16]) == ["0x10"]
    made.stop()


def test_records_that_are_none_are_counted(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    kernel.machine.records += [b"", b"12345678", bytes(25), bytes(16)]
    feed(kernel, 999)
    feed(kernel, NOTHING)
    feed(kernel, number_of(made, "_request_failed", MR), 1, 2)
    feed(kernel, number_of(made, "_pin_failed"), 1)
    feed(kernel, number_of(made, "_failed_inside"))
    for method, words in (
        ("_opened", 1),
        ("_failed_inside", 2),
        ("_migration_failed", 2),
        ("_pin_failed", 5),
    ):
        feed(kernel, number_of(made, method), *range(words))
    feed(kernel, number_of(made, "_opened"), pid=42)
    while not made.take(LATER):
        pass
    assert made.correlator.counts.malformed == 13 and not told.complete and not told.correlator._inner
    assert told.opened == [42]
    assert made.lost == 17 + 13  # what they told is as lost as what found no room
    made.stop()
    assert made.lost == 17 + 13


def test_what_keeps_coming_is_left_for_later_and_taken_when_it_stops(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    for pid in range(100, 130):
        feed(kernel, number_of(made, "_opened"), pid=pid)
    assert made.take(LATER) is False and made.waits
    assert len(told.opened) < 30 and told.opened == list(range(100, 100 + len(told.opened)))
    made.stop()
    assert told.opened == list(range(100, 130))


def test_what_is_told_from_a_time_on_waits_until_then(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    number = number_of(made, "_opened")
    for pid, ns in ((100, 10), (101, 20), (102, 15), (103, 30)):
        feed(kernel, number, pid=pid, ns=ns)
    assert made.take(10) is True and made.waits and not told.opened
    assert made.take(20) is True and told.opened == [100]
    # What another CPU told of a little earlier comes in its turn.
    assert made.take(21) is True and told.opened == [100, 101, 102]
    assert made.take(31) is True and told.opened == [100, 101, 102, 103] and not made.waits
    kernel.writes = True
    assert made.take(40) is False
    kernel.writes = False
    assert made.take(40) is True
    made.stop()


def test_a_failed_request_is_announced_before_it_is_handed_on(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    announced: list[tuple[int, int]] = []
    for ns, pid in ((10, 1), (20, 2)):
        feed(kernel, number_of(made, "_failed_inside", "rxe_reg_user_mr"), -12, ns=ns - 1, pid=pid)
        feed(kernel, number_of(made, "_request_failed", DMABUF), *request(since=1), ns=ns, pid=pid)
    feed(kernel, number_of(made, "_opened"), ns=30)
    made.take(LATER, lambda ns: announced.append((ns, len(told.complete))))
    assert announced == [(10, 0), (20, 1)] and len(told.complete) == 2
    made.stop()


def test_what_went_on_well_is_forgotten_in_time(
    kernel: Kernel, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, minutes = 10**12, 60 * 10**9
    monkeypatch.setattr(bpf_engine, "kernel_boottime", lambda: now)
    made = engine(told)
    number = number_of(made, "_failed_inside", "rxe_reg_user_mr")
    feed(kernel, number, -12, ns=now - 2 * minutes - 1)
    feed(kernel, number, -12, ns=now - 2 * minutes + 1, tid=8)
    made.take(LATER)
    assert set(told.correlator._inner) == {7, 8}
    made._forget_at = 0.0
    made.take(LATER)
    assert set(told.correlator._inner) == {8} and made._forget_at > time.monotonic()
    made.stop()


def test_while_there_is_more_to_take_nothing_is_forgotten_that_it_may_be_of(
    kernel: Kernel, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpf_engine, "kernel_boottime", lambda: 10**15)
    made = engine(told)
    feed(kernel, number_of(made, "_failed_inside", "rxe_reg_user_mr"), -12, ns=950)
    kernel.writes = True
    made._forget_at = 0.0
    assert made.take(LATER) is False and 7 in told.correlator._inner
    feed(kernel, number_of(made, "_request_failed", DMABUF), *request(since=900), ns=1000)
    made._forget_at = 0.0
    made.take(LATER)
    assert [item.function for item in told.complete[0].inner] == ["rxe_reg_user_mr"]
    made.stop()


def test_runs_that_the_kernel_passed_over_are_added_up(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    assert made.missed() is None
    for count, program in enumerate(kernel.loaded):
        kernel.missed[program] = count
    expected = sum(range(len(kernel.loaded)))
    assert made.missed() == expected
    one = copy()
    made.follow(one)
    mine = [program for program, item in kernel.loaded.items() if "probe" in item.on]
    kernel.missed.update(dict.fromkeys(mine, 100))
    made.forget([one.key])
    assert made.missed() == expected + 100 * len(mine)
    made.stop()


def test_a_ring_that_cannot_be_read_ends_it(
    kernel: Kernel, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_ring: KernelRing) -> Iterator[bytes]:
        raise OSError(errno.EBADMSG, "reading a ring of bpf(2)")

    made = engine(told)
    assert made.why() == "it ended"
    monkeypatch.setattr(KernelRing, "take", refuse)
    kernel.writes = True
    assert made.take(LATER) is False
    assert made.ended and not made.attached and "reading a ring" in made.why()
    made.stop()
    assert kernel.closed == 1


# Copies of libibverbs


def copy(key: tuple[int, int] = (1, 2)) -> Copy:
    functions = {"ibv_reg_mr": 0x10, "ibv_reg_mr_iova2": 0x80, "ibv_reg_dmabuf_mr": 0x100}
    return Copy(key, "/x/libibverbs.so.1", 9, functions)


def test_verbs_are_followed_at_return_and_entry(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    one, other = copy(), copy((3, 4))
    del one.offsets["ibv_reg_mr_iova2"], one.offsets["ibv_reg_mr"]
    kernel.attached.clear()
    before = descriptors()
    assert not made.follows(one)
    made.follow(one)
    path = one.path
    assert kernel.attached == [f"uretprobe {path}:256", f"uprobe {path}:256"] and made.follows(one)
    assert made.follows_libraries and made.probes == 12
    made.follow(one)
    assert len(kernel.attached) == 2
    made.follow(other)
    assert len(kernel.attached) == 8 and made.probes == 18
    made.forget([(9, 9), other.key])
    assert made.follows_libraries and made.probes == 12
    made.forget([one.key])
    assert not made.follows_libraries and made.probes == 10 and descriptors() == before
    made.follow(one)
    made.stop()
    assert not made.follows_libraries


def test_a_copy_that_cannot_be_followed_whole_is_not_followed(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    before = descriptors()
    for refused in ("uretprobe", "uprobe"):
        kernel.refuse_attaching = lambda on, r=refused: (  # type: ignore[misc]
            errno.EACCES if on.startswith(r) and on.endswith(f":{0x100}") else 0
        )
        with pytest.raises(OSError):
            made.follow(copy())
        assert descriptors() == before and not made.follows_libraries and made.probes == 10
    kernel.refuse_attaching = lambda _on: 0
    made.follow(copy())
    assert made.follows_libraries
    made.stop()


@pytest.mark.parametrize(
    ("verb", "parameters", "given"),
    [
        ("ibv_reg_mr", (1, 0x7000, 4096, 7 | 9 << 32, 5, 6), (0x7000, 4096, 0x7000, 7)),
        ("ibv_reg_mr_iova2", (1, 0x7000, 4096, 0x9000, 7 | 9 << 32, 6), (0x7000, 4096, 0x9000, 7)),
        ("ibv_reg_dmabuf_mr", (1, 64, 4096, 0x9000, 33 | 9 << 32, 7 | 9 << 32), (64, 4096, 0x9000, 7, 33)),
    ],
)
def test_a_verb_that_gives_null_is_the_librarys_word(
    kernel: Kernel, told: Told, verb: str, parameters: tuple[int, ...], given: tuple[int, ...]
) -> None:
    made = engine(told)
    one = copy()
    made.follow(one)
    on = f"{one.path}:{one.offsets[verb]}"
    kernel.run(f"uprobe {on}", *parameters)
    kernel.run(f"uretprobe {on}", ret=0x5555)
    kernel.run(f"uretprobe {on}", ret=0)  # the entry of this one was passed over
    made.take(LATER)
    assert not told.complete
    kernel.run(f"uprobe {on}", *parameters)
    kernel.run(f"uretprobe {on}", ret=0)
    made.take(LATER)
    (failure,) = told.complete
    known = (failure.address, failure.length, failure.iova, failure.access, failure.fd)
    assert known[: len(given)] == given
    assert (failure.verb, failure.tid, failure.pid, failure.ns) == (verb, 7, 6, kernel.machine.ns)
    made.stop()


def test_a_verb_that_calls_another_is_told_once_as_the_other(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    one = copy()
    made.follow(one)
    outer, inner = (f"{one.path}:{one.offsets[verb]}" for verb in ("ibv_reg_mr", "ibv_reg_mr_iova2"))
    kernel.run(f"uprobe {outer}", 1, 0x7000, 4096, 7)
    kernel.run(f"uprobe {inner}", 1, 0x7000, 4096, 0x7000, 7)
    kernel.run(f"uretprobe {inner}", ret=0)
    kernel.run(f"uretprobe {outer}", ret=0)
    made.take(LATER)
    assert [failure.verb for failure in told.complete] == ["ibv_reg_mr_iova2"]
    made.stop()


def test_a_library_overtaken_by_nothing_completes_the_kernels_failure(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    told.correlator.library_speaks = True
    one = copy()
    made.follow(one)
    path = one.path
    kernel.run(f"uprobe {path}:16", 1, 0x7000, 4096, 7, 0, 0)
    kernel.run(f"fentry {MR}", BUNDLE)
    kernel.run(f"fexit {MR}", BUNDLE, ret=-errno.EINVAL)
    kernel.run(f"uretprobe {path}:16", ret=0)
    made.take(LATER)
    (failure,) = told.complete
    assert (failure.verb, failure.function, failure.address, failure.access) == ("ibv_reg_mr", MR, 0x7000, 7)
    made.stop()


# Modules that come later


def test_functions_of_modules_that_were_loaded_later_are_followed(kernel: Kernel, told: Told) -> None:
    functions = deepcopy(FUNCTIONS)
    made = engine(told, functions)
    found = deepcopy(FUNCTIONS)
    found.drivers.append(Function("mlx5_ib_reg_user_mr", "mlx5_ib", REG, Returns.POINTER, 20))
    found.inner.append(Function("mlx5_core_create_mkey", "mlx5_core", ("dev",), type_id=21))
    before = len(kernel.attached)
    assert made.follow_new(functions, found) == ["mlx5_core_create_mkey", "mlx5_ib_reg_user_mr"]
    assert kernel.attached[before:] == ["fexit mlx5_core_create_mkey", "fexit mlx5_ib_reg_user_mr"]
    assert [item.name for item in functions.drivers] == ["rxe_reg_user_mr", "mlx5_ib_reg_user_mr"]
    assert made.follow_new(functions, found) == []
    found.drivers.append(Function("efa_reg_mr", "efa", REG, Returns.POINTER, 22))
    kernel.refuse_attaching = lambda _on: errno.ENOENT
    assert made.follow_new(functions, found) == [] and "efa_reg_mr" in functions.missing
    made.stop()


def test_registrations_of_a_driver_that_was_loaded_later_are_counted(kernel: Kernel, told: Told) -> None:
    account = Account()
    functions, found = deepcopy(FUNCTIONS), deepcopy(FUNCTIONS)
    made = engine(told, functions, account=account)
    found.drivers.append(Function("efa_reg_mr", "efa", REG, Returns.POINTER, 22))
    assert made.follow_new(functions, found) == ["efa_reg_mr"]
    kernel.run("fexit efa_reg_mr", 1, 0x1000, 4096, 0x1000, 7, 0, ret=0xFFFF888000000000)
    account_now(made)
    assert account.totals() == {("peer-memory-or-on-demand", "efa"): (1, 4096)}
    made.stop()


@pytest.mark.parametrize("account", [None, Account()])
def test_what_is_missing_of_drivers_is_not_once_one_is_followed(
    kernel: Kernel, told: Told, account: Account | None
) -> None:
    functions = replace(deepcopy(FUNCTIONS), drivers=[], missing={"reg_user_mr": "none is loaded"})
    made = engine(told, functions, account=account)
    assert made.follow_new(functions, deepcopy(functions)) == [] and "reg_user_mr" in functions.missing
    assert made.follow_new(functions, deepcopy(FUNCTIONS)) == ["rxe_reg_user_mr"]
    assert not functions.missing
    made.stop()


def test_functions_of_a_module_that_is_loaded_again_are_followed_again(kernel: Kernel, told: Told) -> None:
    names = ["rxe_reg_user_mr", "mlx5_core_create_mkey"]
    found = deepcopy(FUNCTIONS)
    found.inner.append(Function("mlx5_core_create_mkey", "mlx5_core", ("dev",), type_id=21))
    functions = deepcopy(found)
    kernel.refuse = lambda how, name: (
        errno.EINVAL if how == "fexit" and name in [one[:15] for one in names] else 0
    )
    made = engine(told, functions)
    assert set(made.by_kprobe) == set(names) and made.follow_new(functions, found) == []
    made.forget_modules(functions, {"ib_ipoib"})
    assert set(made.by_kprobe) == set(names) and made.follow_new(functions, found) == []
    made.forget_modules(functions, {"rdma_rxe", "mlx5_core"})
    assert not made.by_kprobe and not functions.drivers and len(functions.inner) == 2
    kernel.attached.clear()
    assert set(made.follow_new(functions, found)) == set(names)
    assert set(kernel.attached) == {f"kretprobe {name}" for name in names} and set(made.by_kprobe) == set(
        names
    )
    made.stop()


@pytest.mark.parametrize("account", [None, Account()])
def test_what_could_not_be_followed_of_a_module_is_tried_again_when_it_is_loaded_again(
    kernel: Kernel, told: Told, account: Account | None
) -> None:
    functions = replace(deepcopy(FUNCTIONS), drivers=[])
    made = engine(told, functions, account=account)
    kernel.refuse_attaching = lambda _on: errno.ENOENT
    assert made.follow_new(functions, FUNCTIONS) == [] and "rxe_reg_user_mr" in functions.missing
    kernel.refuse_attaching = lambda _on: 0
    assert made.follow_new(functions, FUNCTIONS) == []
    made.forget_modules(functions, {"rdma_rxe"})
    assert not functions.missing and made.follow_new(functions, FUNCTIONS) == ["rxe_reg_user_mr"]
    made.stop()


def test_drivers_whose_registrations_are_counted_cannot_be_unloaded_and_are_kept(
    kernel: Kernel, told: Told
) -> None:
    functions = deepcopy(FUNCTIONS)
    made = engine(told, functions, account=Account())
    made.forget_modules(functions, {"rdma_rxe"})
    assert made.follow_new(functions, FUNCTIONS) == [] and len(functions.drivers) == 1
    made.stop()


# What is counted


def account_now(made: BpfEngine) -> None:
    made._account_at = 0.0
    made.take(LATER)


def count(kernel: Kernel, made: BpfEngine, pid: int, number: int, size: int) -> None:
    key = KEY.pack(0, 1, pid, 0, b"app\0")
    kernel.machine.maps[made._maps.counts].entries[key] = bytearray(struct.pack("=QQ", number, size))


def test_what_was_counted_since_the_last_time_is_handed_on(kernel: Kernel, told: Told) -> None:
    account = Account()
    made = engine(told, account=account)
    assert "fexit rxe_reg_user_mr" in kernel.attached
    sizes = kernel.machine.maps[made._maps.sizes].entries
    account_now(made)
    assert not account.rows and not account.changed
    count(kernel, made, os.getpid(), 3, 3 << 12)
    kernel.counters["regrepro_uncount"].value = 3
    sizes[SIZE_KEY.pack(0, 1, 12)] = bytearray(struct.pack("=Q", 3))
    account_now(made)
    assert account.totals() == {("host", "rxe"): (3, 3 << 12)} and account.changed
    assert account.uncounted == account.as_record()["uncounted"] == 3
    account.changed = False
    account_now(made)
    assert not account.changed
    count(kernel, made, os.getpid(), 5, 9 << 12)
    sizes[SIZE_KEY.pack(0, 1, 12)][:] = struct.pack("=Q", 4)
    sizes[SIZE_KEY.pack(0, 1, NO_SIZE)] = bytearray(struct.pack("=Q", 1))
    made.take(LATER)
    assert account.totals() == {("host", "rxe"): (3, 3 << 12)}  # it is not yet time
    made.stop()
    assert account.totals() == {("host", "rxe"): (5, 9 << 12)}
    ((row),) = account.as_record()["registrations"]
    assert (row["fn"], row["pid"], row["comm"]) == ("rxe_reg_user_mr", os.getpid(), "app")
    assert account.as_record()["sizes"][0]["buckets"] == [[0, 1], [4096, 4]]


def test_entries_of_processes_that_have_ended_are_taken_out_once_they_are_handed_on(
    kernel: Kernel, told: Told
) -> None:
    account = Account()
    made = engine(told, account=account)
    gone = 1 << 30
    count(kernel, made, gone, 2, 8192)
    count(kernel, made, os.getpid(), 1, 4096)
    for _ in range(2):  # the second time it is seen to have ended
        account_now(made)
        assert not kernel.removed
    account_now(made)
    assert [KEY.unpack(key)[2] for key in kernel.removed] == [gone]
    assert account.totals() == {("host", "rxe"): (3, 12288)}
    count(kernel, made, gone, 1, 4096)  # another of the same number
    account_now(made)
    assert account.totals() == {("host", "rxe"): (4, 16384)}
    made.stop()


def test_registrations_are_counted_by_the_program_of_the_driver(kernel: Kernel, told: Told) -> None:
    account = Account()
    made = engine(told, account=account)
    kernel.run(f"fentry {MR}", BUNDLE)
    kernel.run("fexit pin_user_pages_fast", 0x1000, 1, 1, 0, ret=1)
    kernel.run("fexit rxe_reg_user_mr", 1, 0x1000, 4096, 0x1000, 7, 0, ret=0xFFFF888000000000)
    kernel.run(f"fexit {MR}", BUNDLE, ret=0)
    account_now(made)
    assert account.totals() == {("host", "rxe"): (1, 4096)} and not told.complete
    kernel.run(f"fentry {MR}", BUNDLE)
    kernel.run("fexit rxe_reg_user_mr", 1, 0x1000, 4096, 0x1000, 7, 0, ret=-12)
    kernel.run(f"fexit {MR}", BUNDLE, ret=-12)
    made.take(LATER)
    assert [item.function for item in told.complete[0].inner] == ["rxe_reg_user_mr"]
    made.stop()


def test_registrations_are_counted_by_kprobes_where_no_trampoline_is_to_be_had(
    kernel: Kernel, told: Told
) -> None:
    kernel.refuse = lambda how, name: errno.EINVAL if (how, name) == ("fexit", "rxe_reg_user_mr") else 0
    account = Account()
    made = engine(told, account=account)
    assert made.by_kprobe == ["rxe_reg_user_mr"]
    kernel.run(f"fentry {MR}", BUNDLE)
    kernel.run("kprobe rxe_reg_user_mr", 1, 0x1000, 12288, 0x1000, 7, 0)
    kernel.run("fexit pin_user_pages_fast", 0x1000, 3, 1, 0, ret=3)
    kernel.run("kretprobe rxe_reg_user_mr", ret=0xFFFF888000000000)
    account_now(made)
    assert account.totals() == {("host", "rxe"): (1, 12288)}
    made.stop()


def test_that_there_was_no_room_to_count_is_told_by_itself(kernel: Kernel, told: Told) -> None:
    account = Account()
    made = engine(told, account=account)
    kernel.counters["regrepro_uncount"].value = 3
    account_now(made)
    made.stop()
    assert account.changed and account.as_record()["uncounted"] == 3
