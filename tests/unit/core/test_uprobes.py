"""Uprobes: rings made by hand, as the kernel would write them; and one live probe."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from regrepro._core import ffi, lib

from regrepro.core import bpf, uprobes
from regrepro.core.bpf_code import RESULT, STACK_END, Code
from regrepro.core.uprobes import REGISTERS, UserProbes, Zero, attach_to_code, attach_to_function

PAGE = os.sysconf("SC_PAGE_SIZE")
HEAD, TAIL = 1024, 1032  # struct perf_event_mmap_page
LOST, THROTTLE, UNTHROTTLE, SAMPLE, LOST_SAMPLES, UNKNOWN = 2, 5, 6, 9, 13, 77
ABI_32, ABI_64 = 1, 2
pytestmark = pytest.mark.skipif(not REGISTERS, reason="the registers of this architecture are not known")


def record(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHH", kind, 0, 8 + len(body)) + body


def sample(
    number: int, stack: bytes = b"", *, read: int | None = None, abi: int = ABI_64, raw: int = 4
) -> bytes:
    """What the kernel writes of a hit in task (number, number + 1), registers number × 100 and on."""
    body = struct.pack("=IIQIIQ", number, number + 1, 7000 + number, raw, number, abi)
    if abi:
        body += struct.pack(f"={len(REGISTERS)}Q", *(number * 100 + n for n in range(len(REGISTERS))))
    body += struct.pack("=Q", len(stack))
    if stack:
        body += stack + struct.pack("=Q", len(stack) if read is None else read)
    return record(SAMPLE, body)


@dataclass
class Ring:
    """Two pages of data behind the page of positions, and what draining it gave."""

    pages: int = 2

    def __post_init__(self) -> None:
        self.size = self.pages * PAGE
        self.memory = ffi.new("uint64_t[]", (self.size + PAGE) // 8)
        self.bytes = ffi.buffer(self.memory)
        self.tally = ffi.new("struct rr_uprobe_tally *")

    def put(self, tail: int, data: bytes, head: int | None = None) -> None:
        for index, byte in enumerate(data):
            at = PAGE + (tail + index) % self.size
            self.bytes[at : at + 1] = bytes([byte])
        self.bytes[HEAD : HEAD + 16] = struct.pack("=QQ", tail + len(data) if head is None else head, tail)

    def drain(self, room: int = 100) -> list[tuple[int, int, int, int, list[int], bytes]]:
        hits = ffi.new("struct rr_uprobe_hit[]", room)
        stacks = ffi.new("uint8_t[]", self.size)
        address = int(ffi.cast("uintptr_t", self.memory))
        count = lib.rr_uprobe_drain(address, self.pages, hits, room, stacks, self.tally)
        return [
            (
                *(hit.probe, hit.pid, hit.tid, hit.ns),
                ffi.unpack(hit.registers, len(REGISTERS)),
                bytes(ffi.buffer(stacks + hit.stack, hit.stack_length)),
            )
            for hit in hits[0:count]
        ]

    @property
    def emptied(self) -> bool:
        head, tail = struct.unpack("=QQ", self.bytes[HEAD : HEAD + 16])
        return bool(head == tail)

    def counted(self) -> tuple[int, int, int]:
        return self.tally.foreign, self.tally.throttled, self.tally.unreadable


def expected(number: int, stack: bytes = b"") -> tuple[int, int, int, int, list[int], bytes]:
    registers = [number * 100 + n for n in range(len(REGISTERS))]
    return number, number, number + 1, 7000 + number, registers, stack


def test_an_empty_ring_gives_nothing() -> None:
    ring = Ring()
    ring.put(40, b"")
    assert ring.drain() == []
    assert ring.counted() == (0, 0, 0)


def test_hits_have_what_the_kernel_wrote() -> None:
    ring = Ring()
    ring.put(0, sample(1, bytes(range(64))) + sample(2) + sample(3, bytes(range(64, 128)), read=10))
    assert ring.drain() == [
        expected(1, bytes(range(64))),
        expected(2),
        expected(3, bytes(range(64, 74))),
    ]
    assert ring.emptied
    assert ring.counted() == (0, 0, 0)
    assert ring.drain() == []


def test_a_record_has_the_size_that_rings_are_measured_by() -> None:
    assert lib.rr_uprobe_record_bytes(0) == len(sample(1))
    assert lib.rr_uprobe_record_bytes(256) == len(sample(1, bytes(256)))


@pytest.mark.parametrize("laps", [0, 1, 1 << 50])
def test_a_record_may_lie_across_the_end_at_any_word(laps: int) -> None:
    stack = bytes(range(200))
    both = sample(1, stack) + sample(2, stack[::-1])
    for before in range(8, len(both), 8):
        ring = Ring()
        ring.put((laps + 1) * ring.size - before, both)
        assert ring.drain() == [expected(1, stack), expected(2, stack[::-1])]
        assert ring.emptied


def test_positions_may_pass_the_end_of_64_bits() -> None:
    ring = Ring()
    data = sample(1, bytes(8)) + sample(2)
    tail = (1 << 64) - 64
    ring.put(tail, data, head=tail + len(data) - (1 << 64))
    assert ring.drain() == [expected(1, bytes(8)), expected(2)]
    assert ring.emptied


def test_what_does_not_fit_the_caller_stays_in_the_ring() -> None:
    ring = Ring()
    ring.put(0, sample(1) + record(LOST, struct.pack("=QQ", 1, 5)) + sample(2) + sample(3))
    assert ring.drain(room=1) == [expected(1)]
    assert ring.drain(room=1) == [expected(2)]
    assert ring.drain(room=2) == [expected(3)]
    assert ring.counted() == (0, 0, 0)


def test_a_ring_full_to_the_last_byte_is_read() -> None:
    ring = Ring()
    rest = ring.size % len(sample(0))
    numbers = range(ring.size // len(sample(0)))
    filler = record(UNTHROTTLE, bytes(rest - 8)) if rest else b""
    ring.put(8, b"".join(sample(n) for n in numbers) + filler)
    assert ring.drain() == [expected(n) for n in numbers]
    assert ring.emptied


def test_throttling_is_counted_and_losses_are_left_to_the_program() -> None:
    ring = Ring()
    ring.put(
        0,
        record(LOST, struct.pack("=QQ", 1, 3))
        + record(LOST_SAMPLES, struct.pack("=Q", 4))
        + record(THROTTLE, bytes(24))
        + record(UNTHROTTLE, bytes(24))
        + sample(1)
        + record(UNKNOWN, bytes(16)),
    )
    assert ring.drain() == [expected(1)]
    assert ring.counted() == (0, 1, 1)


def test_hits_of_32_bit_tasks_are_counted_apart() -> None:
    ring = Ring()
    ring.put(0, sample(1, bytes(16), abi=ABI_32) + sample(2) + sample(3, abi=0))
    assert ring.drain() == [expected(2)]
    assert ring.counted() == (2, 0, 0)


@pytest.mark.parametrize("size", [0, 1, 4, 7, 9, 12, 0xFFFF, 0xFFF8])
def test_a_record_of_no_sane_length_ends_the_reading_but_not_for_good(size: int) -> None:
    ring = Ring()
    bad = struct.pack("=IHH", SAMPLE, 0, size)
    ring.put(ring.size - 16, sample(1) + bad + sample(2))
    assert ring.drain() == [expected(1)]
    assert ring.emptied
    assert ring.counted() == (0, 0, 1)
    ring.put(64, sample(3))
    assert ring.drain() == [expected(3)]


def shortened(data: bytes, length: int) -> bytes:
    return struct.pack("=IHH", SAMPLE, 0, length) + data[8:length]


def test_a_record_that_ends_too_early_is_left_out_alone() -> None:
    whole = sample(1, bytes(32))
    for length in range(8, len(whole), 8):
        ring = Ring()
        ring.put(0, shortened(whole, length) + sample(2))
        assert ring.drain() == [expected(2)], length
        assert ring.counted() == (0, 0, 1)


@pytest.mark.parametrize("length", [0, 3, 5, 12, 1 << 31])
def test_a_program_that_sends_something_else_is_not_ours(length: int) -> None:
    ring = Ring()
    ring.put(0, sample(1, raw=length) + sample(2))
    assert ring.drain() == [expected(2)]
    assert ring.counted() == (0, 0, 1)


@pytest.mark.parametrize("length", [1, 7, 24, 40, 1 << 16, 1 << 32, (1 << 64) - 8, (1 << 64) - 1])
def test_a_stack_longer_than_its_record_is_not_read(length: int) -> None:
    data = bytearray(sample(1, bytes(16)))
    data[len(data) - 32 : len(data) - 24] = struct.pack("=Q", length)
    ring = Ring()
    ring.put(0, bytes(data) + sample(2))
    assert ring.drain() == [expected(2)]
    assert ring.counted() == (0, 0, 1)


def test_more_read_than_there_is_of_a_stack_is_not_believed() -> None:
    ring = Ring()
    ring.put(0, sample(1, bytes(16), read=17) + sample(2))
    assert ring.drain() == [expected(2)]


@pytest.mark.parametrize(("tail", "head"), [(8, 0), (0, 12), (4, 400), (0, 1 << 40), (1 << 40, 0)])
def test_positions_that_cannot_be_end_the_reading(tail: int, head: int) -> None:
    ring = Ring()
    ring.put(tail, b"", head=head)
    assert ring.drain() == []
    assert ring.emptied
    assert ring.counted() == (0, 0, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stack_bytes": 12},
        {"stack_bytes": -8},
        {"stack_bytes": 65536},
        {"ring_pages": 0},
        {"ring_pages": 3},
        {"ring_pages": -2},
        {"stack_bytes": PAGE, "ring_pages": 1},
    ],
    ids=str,
)
def test_values_that_cannot_be_are_said(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="="):
        UserProbes(**wrong)


def test_a_kernel_without_uprobes_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(uprobes, "_PMU_TYPE", tmp_path / "none")
    assert "CONFIG_UPROBE_EVENTS" in UserProbes.supported()
    with UserProbes() as probes, pytest.raises(OSError, match="CONFIG_UPROBE_EVENTS") as caught:
        probes.add("/bin/true", 0)
    assert caught.value.errno == errno.ENOSYS


def test_a_kernel_without_bpf_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pmu = tmp_path / "type"
    pmu.write_text("8\n")
    monkeypatch.setattr(uprobes, "_PMU_TYPE", pmu)
    monkeypatch.setattr(uprobes, "lib", SimpleNamespace(rr_bpf_answer=lambda: -errno.ENOSYS))
    assert "CONFIG_BPF_SYSCALL" in UserProbes.supported()


def test_the_kernels_lists_of_cpus_are_read(tmp_path: Path) -> None:
    online = tmp_path / "online"
    online.write_text("0-2,5,8-9\n")
    assert uprobes._cpus(online) == [0, 1, 2, 5, 8, 9]


def raised_limit(limit: int, soft: int, hard: int) -> tuple[bool, tuple[int, int]]:
    """Raise a limit that a child was given. Return whether it says so, and what it has then."""
    code = (
        "import resource; from regrepro.core.bpf import _raise_limit; "
        f"resource.setrlimit({limit}, ({soft}, {hard})); print(_raise_limit({limit}, {hard}), "
        f"*resource.getrlimit({limit}))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    raised, *now = done.stdout.split()
    return raised == "True", (int(now[0]), int(now[1]))


def test_a_soft_limit_is_raised_to_the_hard_one() -> None:
    limit = resource.RLIMIT_NOFILE
    assert raised_limit(limit, 40, 60) == (True, (60, 60))
    assert raised_limit(limit, 60, 60) == (False, (60, 60))


def test_the_verifiers_words_are_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_number: int, _rings: int, _lost: int, _zero: object, log: object, room: int) -> int:
        ffi.buffer(log, room)[0:22] = b"0: (95) exit\nR0 !read_"
        return -errno.EACCES

    monkeypatch.setattr(uprobes, "lib", SimpleNamespace(rr_uprobe_program=refuse))
    with pytest.raises(OSError, match=r"verifier says '0: .95. exit R0 !read_'") as caught:
        made = SimpleNamespace(_rings_map=3, _counter=SimpleNamespace(fd=4))
        UserProbes._load(made, 0, "/bin/true", None)  # type: ignore[arg-type]
    assert caught.value.errno == errno.EACCES


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


needs_kernel = pytest.mark.skipif(bool(UserProbes.supported()), reason=UserProbes.supported() or "-")


@needs_kernel
def test_what_is_no_place_for_a_probe_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    before = descriptors()
    with UserProbes() as probes:
        for path, offset, code in (
            (tmp_path / "none", 0, errno.ENOENT),
            (file, 100, errno.EINVAL),
            (file, -1, errno.EINVAL),
            (tmp_path, 0, errno.EINVAL),
        ):
            with pytest.raises(OSError, match=path.name) as caught:
                probes.add(path, offset)
            assert caught.value.errno == code
        assert probes.fds() == []
    assert descriptors() == before


@dataclass
class Library:
    """A copy of libm, in this process only: scalbln(double, long), and where it begins in the file."""

    path: Path
    offset: int
    call: Callable[[float, int], float]


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    ctypes.CDLL("libm.so.6")
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = next(line.split()[-1] for line in maps if line.endswith("/libm.so.6"))
    path = tmp_path / "libcopy.so"
    shutil.copyfile(found, path)
    loaded = ctypes.CDLL(str(path))
    loaded.scalbln.argtypes, loaded.scalbln.restype = [ctypes.c_double, ctypes.c_long], ctypes.c_double
    address = ctypes.cast(loaded.scalbln, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, start, _, _, *name = line.split()
        first, last = (int(part, 16) for part in span.split("-"))
        if name == [str(path)] and first <= address < last:
            yield Library(path, address - first + int(start, 16), loaded.scalbln)
            return
    pytest.skip("scalbln is not in libm's own file")


@needs_kernel
def test_a_live_probe_sees_this_process(library: Library) -> None:
    before = descriptors()
    with UserProbes(stack_bytes=64) as probes:
        try:
            number = probes.add(library.path, library.offset)
        except OSError as error:
            assert error.errno in (errno.EACCES, errno.EPERM)
            assert descriptors() == before
            pytest.skip(str(error))
        started = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        for exponent in (3, 4, 5):
            assert library.call(1.0, exponent) == 2.0**exponent
        ended = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        poll = select.poll()
        for fd in probes.fds():
            poll.register(fd, select.POLLIN)
        assert poll.poll(0)
        hits = probes.read()
        argument = "rdi" if "rdi" in REGISTERS else "x0"
        assert [hit.registers[argument] for hit in hits] == [3, 4, 5]
        assert {(hit.probe, hit.pid, hit.tid) for hit in hits} == {(number, os.getpid(), os.getpid())}
        assert {len(hit.stack) for hit in hits} == {64}
        assert all(started < hit.ns < ended for hit in hits)
        assert probes.read() == []
        library.call(1.0, 6)
        probes.remove(number)
        library.call(1.0, 7)
        assert [hit.registers[argument] for hit in probes.read()] == [6]
        with pytest.raises(KeyError):
            probes.remove(number)
        assert probes.add(library.path, library.offset) != number
        probes.follow_cpus()
        library.call(1.0, 8)
        assert [hit.registers[argument] for hit in probes.read()] == [8]
        assert (probes.lost, probes.foreign, probes.throttled, probes.unreadable) == (0, 0, 0, 0)
        probes.close()
        assert probes.read() == []
        assert probes.fds() == []
    assert descriptors() == before


def told(number: int, ring: bpf.Ring) -> bytes:
    """A program that writes its number and the thread into a ring."""
    code = Code()
    code.call(bpf.GET_CURRENT_PID_TGID)
    code.store(STACK_END, -8, RESULT)
    code.store_number(STACK_END, -16, number)
    code.set_map(1, ring.fd)
    code.stack(2, -16)
    code.do(3, "=", 16)
    code.do(4, "=", 0)
    code.call(bpf.RINGBUF_OUTPUT)
    code.end()
    return code.bytes()


@needs_kernel
def test_programs_of_our_own_run_at_the_beginning_and_the_return_of_a_function(library: Library) -> None:
    before = descriptors()
    fds: list[int] = []
    try:
        with bpf.Ring(PAGE) as ring:
            for number, at_return in enumerate((False, True)):
                fds.append(bpf.load_program(told(number, ring), bpf.PROG_KPROBE, "test"))
                fds.append(attach_to_code(str(library.path), library.offset, fds[-1], at_return=at_return))
            for _ in range(3):
                library.call(1.0, 3)
            poll = select.poll()
            poll.register(ring.fd, select.POLLIN)
            assert poll.poll(0)
            us = os.getpid() << 32 | os.getpid()
            assert list(ring.take()) == [struct.pack("=QQ", n, us) for n in (0, 1)] * 3
            assert ring.empty and list(ring.take()) == []
            os.close(fds.pop())  # the return's
            library.call(1.0, 3)
            assert list(ring.take()) == [struct.pack("=QQ", 0, us)]
    except OSError as error:
        # A ring is of Linux 5.8, and EINVAL before.
        assert error.errno in (errno.EACCES, errno.EPERM, errno.EINVAL) and "verifier" not in str(error)
        pytest.skip(str(error))
    finally:
        for fd in fds:
            os.close(fd)
    assert descriptors() == before


@needs_kernel
def test_functions_and_files_that_are_not_there_are_said(library: Library) -> None:
    code = Code()
    code.end()
    try:
        program = bpf.load_program(code.bytes(), bpf.PROG_KPROBE, "test")
    except OSError as error:
        assert error.errno in (errno.EACCES, errno.EPERM)
        pytest.skip(str(error))
    before = descriptors()
    with pytest.raises(OSError, match=r"no_such_function|kprobe/type") as caught:  # or the kernel has none
        attach_to_function("no_such_function", program)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(OSError, match="none"):
        attach_to_code(str(library.path.parent / "none"), 0, program)
    with pytest.raises(OSError, match="its BPF program"):
        attach_to_code(str(library.path), library.offset, -1)
    assert descriptors() == before
    os.close(program)


@needs_kernel
def test_hits_with_anything_but_0_in_a_place_do_not_count(library: Library) -> None:
    argument = "rdi" if "rdi" in REGISTERS else "x0"
    with UserProbes(stack_bytes=0) as probes:
        try:
            half = probes.add(library.path, library.offset, zero=Zero(argument, size=4))
        except OSError as error:
            assert error.errno in (errno.EACCES, errno.EPERM)
            pytest.skip(str(error))
        whole = probes.add(library.path, library.offset, zero=Zero(argument))
        for exponent in (0, 1, 1 << 32, 1 << 31, -1):
            library.call(1.0, exponent)
        hits = probes.read()
        assert sorted((hit.probe, hit.registers[argument]) for hit in hits) == [
            (half, 0),
            (half, 1 << 32),
            (whole, 0),
        ]
        with pytest.raises(OSError, match="BPF program") as caught:
            probes.add(library.path, library.offset, zero=Zero(argument, size=2))
        assert caught.value.errno == errno.EINVAL
        assert probes.lost == 0


@needs_kernel
def test_every_lost_hit_is_counted_at_once(library: Library) -> None:
    with UserProbes(ring_pages=1) as probes:
        try:
            number = probes.add(library.path, library.offset)
        except OSError as error:
            assert error.errno in (errno.EACCES, errno.EPERM)
            pytest.skip(str(error))
        held = len(os.sched_getaffinity(0)) * PAGE // lib.rr_uprobe_record_bytes(256)
        for _ in range(held + 100):
            library.call(1.0, 3)
        lost = probes.lost
        assert lost >= 100
        assert len(probes.read()) + lost == held + 100
        # A CPU whose ring is not there: all that run on it are lost, and counted too.
        for cpu in list(probes._rings):
            probes._leave_cpu(cpu)
        library.call(1.0, 4)
        assert probes.lost == lost + 1
        probes.remove(number)
        probes.close()
        assert probes.lost == lost + 1
        assert probes.unreadable == 0
