"""The engine without a kernel: what it attaches and how, what records become, what it lets go of."""

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

from regrepro.core import bpf
from regrepro.kernel import kallsyms
from regrepro.kernel_functions import Returns
from regrepro.watch.bpf import engine as bpf_engine
from regrepro.watch.bpf.engine import _ALL as ALL
from regrepro.watch.bpf.engine import _NOTHING as NOTHING
from regrepro.watch.bpf.engine import _SHARED as SHARED
from regrepro.watch.bpf.engine import _STACK_FRAMES as STACK_FRAMES
from regrepro.watch.bpf.engine import REQUEST_WORDS, BpfEngine
from regrepro.watch.bpf.loader import Attached
from regrepro.watch.correlate import Correlator
from regrepro.watch.failed_registration import FailedRegistration, ShortTermPin, StuckPage
from regrepro.watch.functions import Function, Functions
from regrepro.watch.libraries import Copy
from regrepro.watch.registrations import KEY, NO_SIZE, SIZE_KEY, Account

MR, DMABUF = "ib_uverbs_reg_mr", "ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR"
FUNCTIONS = Functions(
    entries=[Function(name, "ib_uverbs") for name in (MR, DMABUF)],
    drivers=[Function("rxe_reg_user_mr", "rdma_rxe", Returns.POINTER)],
    pins=[Function("pin_user_pages_fast", "", Returns.LONG)],
    plain_pins=[
        Function("pin_user_pages", "", Returns.LONG),
        Function("pin_user_pages_remote", "", Returns.LONG),
    ],
    unpins=[Function("unpin_user_page", ""), Function("unpin_user_pages", "")],
    inner=[
        Function("__ib_umem_get_va", "ib_core", Returns.POINTER),
        Function("check_and_migrate_movable_pages", "", Returns.LONG),
    ],
    open=Function("ib_uverbs_open", "ib_uverbs"),
    migrate=Function("migrate_pages", ""),
    reasons={9: "longterm_pin"},
)
# What only adds to what is known of a failure.
OTHERS = ["__ib_umem_get_va", "check_and_migrate_movable_pages", "rxe_reg_user_mr", "migrate_pages"]
LATER = 1 << 62  # ns


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def open_one() -> int:
    return os.open(os.devnull, os.O_RDONLY)


@dataclass
class Kernel:
    """In the place of the loader and of bpf(2). `refuse`: what is to be attached → an errno, or 0."""

    attached: list[str] = field(default_factory=list)
    cookies: dict[str, int] = field(default_factory=dict)
    targets: list[str] = field(default_factory=list)  # of each loader
    shared: list[str] = field(default_factory=list)
    refuse: Callable[[str], int] = lambda _on: 0
    records: list[bytes] = field(default_factory=list)
    maps: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    missed: dict[int, tuple[int, int]] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)
    counters: list[int] = field(default_factory=lambda: [17, 0])
    closed: int = 0
    writes: bool = False  # there is a record that is not whole yet
    fds: dict[str, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.records and not self.writes

    def take(self) -> Iterator[bytes]:
        """Three records are taken at once."""
        some, self.records = self.records[:3], self.records[3:]
        yield from some

    def check(self, what: str) -> None:
        code = self.refuse(what)
        if code:
            raise OSError(code, os.strerror(code), what)

    def loader(self, _program: Path, _object: Path) -> FakeLoader:
        self.check("loader")
        return FakeLoader(self)

    def ring(self, fd: int, size: int) -> SimpleNamespace:
        assert fd == self.fds["ring"] and size % os.sysconf("SC_PAGE_SIZE") == 0 and size & (size - 1) == 0
        kernel = self

        class Ring(SimpleNamespace):
            empty = property(lambda _self: kernel.empty)

            def take(self) -> Iterator[bytes]:
                return kernel.take()

            def close(self) -> None:
                kernel.closed += 1

        return Ring(fd=fd)

    def read_map(self, fd: int, _key_size: int, _value_size: int) -> dict[bytes, bytes]:
        return dict(self.maps.setdefault(fd, {}))

    def remove_from_map(self, fd: int, key: bytes) -> None:
        self.removed.append(key)
        del self.maps[fd][key]


class FakeLoader:
    """What the engine asks of a loader."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.shares: list[str] = []

    def __enter__(self) -> FakeLoader:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def configure(self, config: bytes) -> None:
        assert len(config) == bpf_engine._CONFIG.size

    def share(self, name: str, fd: int) -> None:
        assert fd == self.kernel.fds[name]
        self.kernel.shared.append(name)

    def load(self, target: str) -> None:
        self.kernel.check(f"load {target}".strip())
        self.kernel.targets.append(target)

    def map(self, name: str) -> int:
        self.kernel.check(f"map {name}")
        fd = open_one()
        self.kernel.fds[name] = fd
        return fd

    def _attach(self, program: str, on: str, cookie: int) -> Attached:
        self.kernel.check(f"{program} {on}")
        self.kernel.attached.append(f"{program} {on}")
        self.kernel.cookies[f"{program} {on}"] = cookie
        return Attached(open_one(), open_one())

    def trampoline(self, program: str, function: str, module: str, cookie: int) -> Attached:
        assert program.startswith(("fentry", "fexit"))
        return self._attach(program, function, cookie)

    def kprobe(self, program: str, function: str, cookie: int, *, at_return: bool) -> Attached:
        assert program.startswith("kretprobe" if at_return else "kprobe")
        return self._attach(program, function, cookie)

    def uprobe(self, program: str, path: str, offset: int, cookie: int, *, at_return: bool) -> Attached:
        assert program == ("library_return" if at_return else "library_entry")
        return self._attach(program, f"{path}:{offset}", cookie)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    made = Kernel()
    counters = SimpleNamespace(value=lambda index: made.counters[index], close=lambda: None)
    for name, value in (
        ("Ring", made.ring),
        ("Counters", lambda fd: counters),
        ("read_map", made.read_map),
        ("remove_from_map", made.remove_from_map),
        ("missed_runs", made.missed.get),
    ):
        monkeypatch.setattr(bpf, name, value)
    monkeypatch.setattr(bpf_engine, "Loader", made.loader)
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


def engine(told: Told, functions: Functions | None = None, **options: Any) -> BpfEngine:
    files = Path("follow"), Path("an.o")
    return BpfEngine(functions or deepcopy(FUNCTIONS), told.correlator, None, files=files, **options)


def feed(kernel: Kernel, number: int, *words: int, tid: int = 7, pid: int = 6, ns: int = 1000) -> None:
    """Let a record come."""
    data = (number, pid << 32 | tid, ns, *(word & NOTHING for word in words))
    kernel.records.append(struct.pack(f"={len(data)}Q", *data))


# Attaching


def test_all_is_followed_by_fexit_and_the_beginning_of_requests_last(kernel: Kernel, told: Told) -> None:
    made = engine(told, short_term_pins=["pin_user_pages"], longterm=256)
    assert kernel.attached == [
        "fexit_failed __ib_umem_get_va",
        "fexit_failed check_and_migrate_movable_pages",
        "fexit_failed rxe_reg_user_mr",
        "fexit_migration migrate_pages",
        "fexit_pin pin_user_pages_fast",
        "fexit_short_term_pin pin_user_pages",
        "fexit_opened ib_uverbs_open",
        *(f"fexit_end_request {name}" for name in (MR, DMABUF)),
        *(f"fentry_begin_request {name}" for name in (MR, DMABUF)),
    ]
    assert made.probes == 11 and made.by_kprobe == [] and not made.ended and made.lost == 17
    assert made.fds() == [kernel.fds["ring"]] and not made.follows_libraries
    made.stop()
    assert kernel.closed == 1 and made.probes == 0 and made.ended and made.fds() == []
    assert made.lost == 17
    made.stop()
    assert made.take(LATER)


def test_cookies_say_what_is_special_of_a_function(kernel: Kernel, told: Told) -> None:
    both = ["pin_user_pages", "pin_user_pages_remote"]
    made = engine(told, short_term_pins=both, longterm=256, unpins=True, account=Account())
    numbers = [cookie & 0xFFFFFFFF for on, cookie in kernel.cookies.items() if "begin_request" not in on]
    assert sorted(numbers) == list(range(len(made._told)))
    special = {on: cookie >> 32 for on, cookie in kernel.cookies.items()}
    pointer, not_eagain, dmabuf, behind_mm, array, command, always = (1 << bit for bit in range(7))
    assert special["fexit_failed __ib_umem_get_va"] == pointer
    assert special["fexit_failed check_and_migrate_movable_pages"] == not_eagain
    assert special["fexit_short_term_pin pin_user_pages"] == always
    assert special["fexit_short_term_pin pin_user_pages_remote"] == always | behind_mm
    assert (special["fentry_unpin unpin_user_page"], special["fentry_unpin unpin_user_pages"]) == (0, array)
    assert (special[f"fexit_end_request {MR}"], special[f"fexit_end_request {DMABUF}"]) == (command, dmabuf)
    found = deepcopy(FUNCTIONS)
    found.drivers.append(Function("mlx5_ib_reg_user_mr_dmabuf", "mlx5_ib", Returns.POINTER))
    made.follow_new(deepcopy(FUNCTIONS), found)
    later = kernel.cookies["fexit_registered mlx5_ib_reg_user_mr_dmabuf"]
    assert kernel.cookies["fexit_registered rxe_reg_user_mr"] >> 40 == 0 and later >> 40 == 1
    assert later >> 32 & dmabuf
    made.stop()


def test_pins_without_longterm_are_followed_where_the_flag_is_known(kernel: Kernel, told: Told) -> None:
    made = engine(told, short_term_pins=["pin_user_pages"], longterm=0)
    assert not any("short_term_pin" in on or "unpin" in on for on in kernel.attached)
    made.stop()


def test_a_function_without_a_trampoline_is_followed_by_kprobes(kernel: Kernel, told: Told) -> None:
    without = {"migrate_pages", "pin_user_pages", "__ib_umem_get_va", MR}
    kernel.refuse = lambda on: errno.EOPNOTSUPP if on.startswith("f") and on.split()[1] in without else 0
    made = engine(told, short_term_pins=["pin_user_pages"], longterm=256)
    for function, programs in (
        ("migrate_pages", ["kprobe_keep", "kretprobe_migration"]),
        ("pin_user_pages", ["kprobe_keep", "kretprobe_short_term_pin"]),
        ("__ib_umem_get_va", ["kretprobe_failed"]),
        (MR, ["kretprobe_end_request", "kprobe_begin_request"]),
        (DMABUF, ["fexit_end_request", "fentry_begin_request"]),
    ):
        assert [on.split()[0] for on in kernel.attached if on.split()[1] == function] == programs
    assert set(made.by_kprobe) == without and kernel.targets == ["pin_user_pages"]
    made.stop()


def test_a_kernel_that_takes_no_program_for_trampolines_gets_kprobes_alone(
    kernel: Kernel, told: Told
) -> None:
    kernel.refuse = lambda on: errno.EINVAL if on == "load pin_user_pages" else 0
    made = engine(told)
    assert kernel.targets == [""] and all("probe" in on for on in kernel.attached)
    assert {on.split()[0] for on in kernel.attached} >= {"kprobe_begin_request", "kretprobe_end_request"}
    assert made.follow([copy()]) == []
    assert kernel.targets == ["", ""]  # it is not tried again
    made.stop()


@pytest.mark.parametrize("name", ["pin_user_pages_fast", "ib_uverbs_open", MR, DMABUF])
def test_what_must_be_followed_and_cannot_leaves_nothing_behind(
    kernel: Kernel, told: Told, name: str
) -> None:
    kernel.refuse = lambda on: errno.EBUSY if on.endswith(f" {name}") else 0
    before = descriptors()
    with pytest.raises(OSError, match=name):
        engine(told)
    assert descriptors() == before and kernel.closed == 1


@pytest.mark.parametrize("what", ["loader", "load", *(f"map {name}" for name in SHARED)])
def test_what_cannot_be_loaded_leaves_nothing_behind(kernel: Kernel, told: Told, what: str) -> None:
    kernel.refuse = lambda on: errno.EPERM if on == what or (what == "load" and on.startswith("load")) else 0
    before = descriptors()
    with pytest.raises(OSError, match="not permitted"):
        engine(told, account=Account())
    assert descriptors() == before


def test_what_only_adds_to_a_failure_and_that_nobody_can_follow_is_missing(
    kernel: Kernel, told: Told
) -> None:
    for refused, left in ((["migrate_pages"], 9), (OTHERS[:1], 9), (OTHERS[2:3], 9), (OTHERS, 6)):
        kernel.refuse = lambda on, r=refused: errno.ENOENT if on.split()[-1] in r else 0  # type: ignore[misc]
        functions = deepcopy(FUNCTIONS)
        made = engine(told, functions)
        assert sorted(functions.missing) == sorted(refused) and made.probes == left
        assert "No such file" in functions.missing[refused[0]]
        rest = [item.name for item in functions.all() if item.name in OTHERS]
        assert sorted(rest) == sorted(set(OTHERS) - set(refused)) and made.by_kprobe == []
        made.stop()


# A request from its beginning to its end


PAGE_AT = 0xFFFFEA0000001000


def test_a_request_that_fails_is_one_failure_with_all_that_failed_in_it(kernel: Kernel, told: Told) -> None:
    made = engine(told)

    def tell(method: str, name: str, *words: int) -> None:
        feed(kernel, number_of(made, method, name), *words, ns=1000 + len(kernel.records))

    enomem = -errno.ENOMEM
    tell("_migration_failed", "", 1, 9, PAGE_AT, 4, 1, 0, 0x17, *[0] * 15)
    tell("_failed_inside", "check_and_migrate_movable_pages", enomem)
    tell("_pin_failed", "pin_user_pages_fast", enomem, 0x7F0000101000, 256, 0x101)
    tell("_failed_inside", "__ib_umem_get_va", enomem)
    tell("_failed_inside", "rxe_reg_user_mr", enomem)
    asked = {"asked_start": 0x7F0000001000, "asked_length": 1 << 21, "asked_iova": 0x7F0000001000}
    process = {"calls": 2, "pages": 256, "uid": 1000, "start": 5555, "memlock": 65536, "pinned": 3}
    tell("_request_failed", MR, *request(**asked, **process, asked_access=7, asked_fd=NOTHING, present=ALL))
    assert not told.complete
    assert made.take(LATER) is True
    (failure,) = told.complete
    assert [(item.function, item.ret) for item in failure.inner] == [
        ("migrate_pages", 1),
        ("check_and_migrate_movable_pages", enomem),
        ("pin_user_pages_fast", enomem),
        ("__ib_umem_get_va", enomem),
        ("rxe_reg_user_mr", enomem),
    ]
    assert failure.inner[0].args == {"reason": "longterm_pin"}
    assert failure.inner[2].args == {"start": 0x7F0000101000, "nr_pages": 256, "gup_flags": 0x101}
    assert failure.stuck == [StuckPage(PAGE_AT, 4, 1, 0, 0x17)]
    assert (failure.tid, failure.pid, failure.comm, failure.uid) == (7, 6, "app", 1000)
    assert (failure.function, failure.ret, failure.doubt, failure.dmabuf) == (MR, enomem, "", False)
    assert (failure.pin_calls, failure.pinned, failure.process_start) == (2, 256, 5555)
    assert failure.limits == {"memlock_soft": 65536, "vmpin": 3 * os.sysconf("SC_PAGE_SIZE")}
    assert (failure.address, failure.length, failure.iova) == (0x7F0000001000, 1 << 21, 0x7F0000001000)
    assert (failure.access, failure.fd) == (7, None)
    assert made.correlator.counts.malformed == 0
    made.stop()


def test_a_request_that_nobody_saw_begin_is_doubted(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    feed(kernel, number_of(made, "_request_failed", MR), *request(since=0))
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


def test_openings_are_handed_on_but_our_own(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    for pid in (42, os.getpid(), 43):
        feed(kernel, number_of(made, "_opened"), pid=pid)
    made.take(LATER)
    assert told.opened == [42, 43]
    made.stop()


def test_short_term_pins_have_the_names_of_their_stack(
    kernel: Kernel, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def names_of(addresses: Sequence[int]) -> dict[int, str]:
        asked.append(list(addresses))
        return {address: f"f{address}+1" for address in addresses if address < 10}

    monkeypatch.setattr(kallsyms, "names_of", names_of)
    made = engine(told, short_term_pins=["pin_user_pages"], longterm=256)
    number = number_of(made, "_pinned_short_term", "pin_user_pages")
    for stack in ((1, 2, 0xFF), (2, 1), (3,)):
        words = [*stack, *[0] * (STACK_FRAMES - len(stack))]
        feed(kernel, number, 0x1000, 512, 0x41, 0xFFFF, 8 * len(stack), *words)
    feed(kernel, number, 0x1000, 512, 0x41, 0, -14, *[0] * STACK_FRAMES)
    made.take(LATER)
    stack_told = ["f1+1", "f2+1", "0xff"]
    first = ShortTermPin(1000, 7, 6, "pin_user_pages", 0x1000, 512, 0x41, stack_told, page=0xFFFF)
    assert told.pins[0] == first
    # Symbols are read at most once in some seconds: what came since is an address.
    assert [pin.stack for pin in told.pins[1:]] == [["f2+1", "f1+1"], ["0x3"], []]
    assert asked == [[1, 2, 0xFF]]
    made._symbols_read = float("-inf")
    feed(kernel, number, 0x1000, 512, 0x41, 0, 8, 3, *[0] * (STACK_FRAMES - 1))
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
    kernel.records += [b"", b"12345678", bytes(25), bytes(16)]
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


def test_runs_that_the_kernel_passed_over_are_counted_once_a_program(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    assert made.missed() is None
    programs = [item.program for items in made._attached.values() for item in items]
    kernel.missed.update({fd: (n, 10 + n) for n, fd in enumerate(programs[:3])})
    kernel.missed[programs[3]] = (2, 12)  # one program, attached twice
    assert made.missed() == 10 + 11 + 12
    one = copy()
    made.follow([one])
    kernel.missed.update({item.program: (100, 5) for item in made._copies[one.key]})
    made.forget([one.key])
    kernel.missed.clear()
    assert made.missed() == 33 + 5
    made.stop()


def test_a_ring_that_cannot_be_read_ends_it(kernel: Kernel, told: Told) -> None:
    def refuse() -> Iterator[bytes]:
        raise OSError(errno.EBADMSG, "reading a ring of bpf(2)")

    made = engine(told)
    assert made.why() == "it ended"
    kernel.take = refuse  # type: ignore[method-assign]
    kernel.writes = True
    assert made.take(LATER) is False
    assert made.ended and "reading a ring" in made.why()
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
    before, probes = descriptors(), made.probes
    assert not made.follows(one)
    for _ in range(2):
        assert made.follow([one]) == []
        assert kernel.attached == [f"library_return {one.path}:256", f"library_entry {one.path}:256"]
    assert made.follows(one) and made.follows_libraries and made.probes == probes + 2
    assert kernel.shared == list(SHARED)
    numbers = len(made._told)
    third = copy((5, 6))
    assert made.follow([one, other, third]) == []  # one loader for both that are new
    assert len(kernel.attached) == 14 and made.probes == probes + 14 and len(kernel.targets) == 3
    assert len(made._told) == numbers + 2  # a verb has one number, in however many copies it is
    made.forget([third.key])
    made.forget([(9, 9), other.key])
    assert made.follows_libraries and made.probes == probes + 2
    made.forget([one.key])
    assert not made.follows_libraries and made.probes == probes and descriptors() == before
    made.stop()


def test_a_copy_that_cannot_be_followed_whole_is_not_followed(kernel: Kernel, told: Told) -> None:
    made = engine(told)
    before = descriptors()
    for refused in ("library_return", "library_entry"):
        kernel.refuse = lambda on, r=refused: (  # type: ignore[misc]
            errno.EACCES if on.startswith(r) and on.endswith(":256") else 0
        )
        one, other = copy(), copy((3, 4))
        del other.offsets["ibv_reg_dmabuf_mr"]
        ((left, error),) = made.follow([one, other])
        assert left is one and error.errno == errno.EACCES and "denied" in str(error)
        assert made.follows(other) and not made.follows(one)
        made.forget([other.key])
        assert descriptors() == before and not made.follows_libraries
    kernel.refuse = lambda on: errno.EMFILE if on == "loader" else 0
    assert [error.errno for _, error in made.follow([copy(), copy((3, 4))])] == [errno.EMFILE] * 2
    kernel.refuse = lambda _on: 0
    assert made.follow([copy()]) == []
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
def test_a_verb_that_gave_null_is_the_librarys_word(
    kernel: Kernel, told: Told, verb: str, parameters: tuple[int, ...], given: tuple[int, ...]
) -> None:
    made = engine(told)
    made.follow([copy()])
    feed(kernel, number_of(made, "_library_failed", verb), *parameters)
    made.take(LATER)
    (failure,) = told.complete
    known = (failure.address, failure.length, failure.iova, failure.access, failure.fd)
    assert known[: len(given)] == given
    assert (failure.verb, failure.tid, failure.pid, failure.ns) == (verb, 7, 6, 1000)
    made.stop()


# Modules that come later


def test_functions_of_modules_that_were_loaded_later_are_followed(kernel: Kernel, told: Told) -> None:
    functions = deepcopy(FUNCTIONS)
    made = engine(told, functions)
    found = deepcopy(FUNCTIONS)
    found.drivers.append(Function("mlx5_ib_reg_user_mr", "mlx5_ib", Returns.POINTER))
    found.inner.append(Function("mlx5_core_create_mkey", "mlx5_core"))
    before = len(kernel.attached)
    assert made.follow_new(functions, found) == ["mlx5_core_create_mkey", "mlx5_ib_reg_user_mr"]
    names = ["fexit_failed mlx5_core_create_mkey", "fexit_failed mlx5_ib_reg_user_mr"]
    assert kernel.attached[before:] == names and kernel.shared == list(SHARED)
    assert [item.name for item in functions.drivers] == ["rxe_reg_user_mr", "mlx5_ib_reg_user_mr"]
    assert made.follow_new(functions, found) == [] and len(kernel.targets) == 2
    found.drivers.append(Function("efa_reg_mr", "efa", Returns.POINTER))
    kernel.refuse = lambda on: errno.ENOENT if " efa" in on else 0
    assert made.follow_new(functions, found) == [] and "efa_reg_mr" in functions.missing
    made.stop()


def test_functions_of_a_module_that_is_loaded_again_are_followed_again(kernel: Kernel, told: Told) -> None:
    names = ["rxe_reg_user_mr", "mlx5_core_create_mkey"]
    found = deepcopy(FUNCTIONS)
    found.inner.append(Function("mlx5_core_create_mkey", "mlx5_core"))
    functions = deepcopy(found)
    kernel.refuse = lambda on: errno.EINVAL if on.startswith("fexit") and on.split()[1] in names else 0
    made = engine(told, functions)
    assert set(made.by_kprobe) == set(names) and made.follow_new(functions, found) == []
    made.forget_modules(functions, {"ib_ipoib"})
    assert set(made.by_kprobe) == set(names) and made.follow_new(functions, found) == []
    probes, before = made.probes, descriptors()
    made.forget_modules(functions, {"rdma_rxe", "mlx5_core"})
    assert made.probes == probes - 2 and len(descriptors()) == len(before) - 4
    assert not made.by_kprobe and not functions.drivers and len(functions.inner) == 2
    kernel.attached.clear()
    assert set(made.follow_new(functions, found)) == set(names) == set(made.by_kprobe)
    assert set(kernel.attached) == {f"kretprobe_failed {name}" for name in names} and made.probes == probes
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


@pytest.mark.parametrize("account", [None, Account()])
def test_what_could_not_be_followed_of_a_module_is_tried_again_when_it_is_loaded_again(
    kernel: Kernel, told: Told, account: Account | None
) -> None:
    functions = replace(deepcopy(FUNCTIONS), drivers=[])
    made = engine(told, functions, account=account)
    kernel.refuse = lambda _on: errno.ENOENT
    assert made.follow_new(functions, FUNCTIONS) == [] and "rxe_reg_user_mr" in functions.missing
    kernel.refuse = lambda _on: 0
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
    kernel.maps.setdefault(made._maps["counts"], {})[key] = struct.pack("=QQ", number, size)


def test_what_was_counted_since_the_last_time_is_handed_on(kernel: Kernel, told: Told) -> None:
    account = Account()
    made = engine(told, account=account)
    assert "fexit_registered rxe_reg_user_mr" in kernel.attached
    sizes = kernel.maps.setdefault(made._maps["sizes"], {})
    account_now(made)
    assert not account.rows and not account.changed
    count(kernel, made, os.getpid(), 3, 3 << 12)
    kernel.counters[1] = 3
    sizes[SIZE_KEY.pack(0, 1, 12)] = struct.pack("=Q", 3)
    account_now(made)
    assert account.totals() == {("host", "rxe"): (3, 3 << 12)} and account.changed
    assert account.uncounted == account.as_record()["uncounted"] == 3
    account.changed = False
    account_now(made)
    assert not account.changed
    count(kernel, made, os.getpid(), 5, 9 << 12)
    sizes[SIZE_KEY.pack(0, 1, 12)] = struct.pack("=Q", 4)
    sizes[SIZE_KEY.pack(0, 1, NO_SIZE)] = struct.pack("=Q", 1)
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


def test_that_there_was_no_room_to_count_is_told_by_itself(kernel: Kernel, told: Told) -> None:
    account = Account()
    made = engine(told, account=account)
    kernel.counters[1] = 3
    account_now(made)
    made.stop()
    assert account.changed and account.as_record()["uncounted"] == 3
