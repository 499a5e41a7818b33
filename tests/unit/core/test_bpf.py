"""bpf(2): rings made by hand, as the kernel would write them; maps and programs where this machine may."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from regrepro._core import ffi, lib

from regrepro.core import bpf
from regrepro.core.bpf_code import Code

PAGE = os.sysconf("SC_PAGE_SIZE")
BUSY, DISCARD = 1 << 31, 1 << 30  # BPF_RINGBUF_BUSY_BIT, BPF_RINGBUF_DISCARD_BIT
LAST = (1 << 64) - 1


class Ring:
    """A ring as the kernel maps it: a page with the producer's position, then the data twice in a row."""

    def __init__(self, size: int = 256, at: int = 0) -> None:
        self.size = size
        self.memory = ffi.new("uint64_t[]", (PAGE + 2 * size) // 8)
        self.bytes = ffi.buffer(self.memory)
        self.consumer = ffi.new("unsigned long *", at)
        self.mapped = ffi.new("struct rr_bpf_ring *")
        self.mapped.consumer = int(ffi.cast("uintptr_t", self.consumer))
        self.mapped.producer = int(ffi.cast("uintptr_t", self.memory))
        self.mapped.bytes = size
        self.end = at

    @property
    def end(self) -> int:
        """The producer's position."""
        return int(self.memory[0])

    @end.setter
    def end(self, at: int) -> None:
        self.memory[0] = at & LAST

    @property
    def free(self) -> int:
        return self.size - (self.end - int(self.consumer[0]) & LAST)

    def put(self, data: bytes, flags: int = 0) -> bool:
        """Write a record behind the others, where there is room for it."""
        whole = struct.pack("=II", len(data) | flags, 99) + data.ljust(-(-len(data) // 8) * 8, b"\xee")
        if len(whole) > self.free:
            return False
        for index, byte in enumerate(whole):
            at = PAGE + (self.end + index) % self.size
            for place in (at, at + self.size):
                self.bytes[place : place + 1] = bytes([byte])
        self.end += len(whole)
        return True

    def head(self, at: int, word: int) -> None:
        """Write the lower half of a record's first word."""
        for place in (PAGE + at % self.size, PAGE + at % self.size + self.size):
            self.bytes[place : place + 4] = struct.pack("=I", word)

    def take(self, room: int = 1 << 16) -> list[bytes]:
        """Return what is taken, of which lengths and fillings are checked."""
        out = ffi.new("uint8_t[]", room + 8)
        ffi.buffer(out)[room : room + 8] = b"untaken!"
        used = int(lib.rr_bpf_ring_take(self.mapped, out, room))
        assert used <= room and bytes(ffi.buffer(out)[room : room + 8]) == b"untaken!"
        if used < 0:
            raise OSError(-used, os.strerror(-used))
        data, records = bytes(ffi.buffer(out, used)), []
        while data:
            (length,) = struct.unpack_from("=Q", data)
            records.append(data[8 : 8 + length])
            assert len(records[-1]) == length
            data = data[8 + -(-length // 8) * 8 :]
        return records

    @property
    def emptied(self) -> bool:
        """Whether all was taken, as the core says it."""
        said = lib.rr_bpf_ring_empty(self.mapped)
        assert said == (int(self.consumer[0]) == self.end)
        return bool(said)


def test_an_empty_ring_gives_nothing() -> None:
    for at in (0, 8, LAST - 7):
        assert Ring(at=at).take() == []


def test_records_come_in_their_order() -> None:
    ring = Ring()
    records = [b"12345678", b"", b"1", bytes(range(24)), b"123456789"]
    assert all(ring.put(record) for record in records)
    assert ring.take() == records
    assert ring.emptied and ring.take() == []
    assert ring.put(b"later") and ring.take() == [b"later"]


@pytest.mark.parametrize("lap", [0, 1, 1 << 40, (LAST + 1) // 256 - 1])
def test_a_record_may_lie_across_the_end_at_any_word(lap: int) -> None:
    for before in range(0, 48, 8):
        ring = Ring(at=256 * (lap + 1) - before & LAST)
        records = [bytes(range(30)), b"behind"]
        assert all(ring.put(record) for record in records)
        assert ring.take() == records
        assert ring.emptied


def test_a_ring_full_to_the_last_byte_is_read() -> None:
    ring = Ring(at=80)
    while ring.put(b"12345678"):
        pass
    assert ring.free == 0
    assert ring.take() == [b"12345678"] * 16
    ring = Ring(at=80)
    assert ring.put(bytes(range(248))) and ring.free == 0
    assert ring.take() == [bytes(range(248))]


def test_what_is_being_written_is_waited_for_and_what_is_behind_it_too() -> None:
    ring = Ring()
    ring.put(b"first")
    at = ring.end
    ring.put(b"second", BUSY)
    ring.put(b"third")
    assert ring.take() == [b"first"]
    assert ring.take() == [] and not ring.emptied
    ring.head(at, 6)
    assert ring.take() == [b"second", b"third"]


def test_what_was_given_up_is_passed_over() -> None:
    ring = Ring()
    for data, flags in ((b"given up", DISCARD), (b"first", 0), (b"given up", DISCARD), (b"", DISCARD)):
        ring.put(data, flags)
    ring.put(b"last")
    ring.put(b"given up", DISCARD)
    assert ring.take() == [b"first", b"last"]
    assert ring.emptied
    ring.put(b"given up", DISCARD | BUSY)
    assert ring.take() == [] and not ring.emptied


@pytest.mark.parametrize(
    ("at", "end"),
    [(8, 0), (0, 256 + 8), (0, 1 << 40), (1 << 40, 0), (4, 204), (1, 201), (0, 4), (LAST - 7, LAST - 15)],
)
def test_positions_that_cannot_be_are_no_ring(at: int, end: int) -> None:
    ring = Ring(at=at)
    ring.end = end
    with pytest.raises(OSError) as caught:
        ring.take()
    assert caught.value.errno == errno.EBADMSG


@pytest.mark.parametrize("length", [9, 16, 248, 256, 1 << 20, (1 << 30) - 1])
def test_a_record_longer_than_what_is_there_is_no_record(length: int) -> None:
    ring = Ring()
    ring.put(b"first")
    at = ring.end
    ring.put(b"12345678")
    for flags in (0, DISCARD):
        ring.head(at, length | flags)
        ring.consumer[0] = at
        with pytest.raises(OSError) as caught:
            ring.take()
        assert caught.value.errno == errno.EBADMSG
        assert ring.consumer[0] == at


def test_what_does_not_fit_the_caller_stays_for_the_next_time() -> None:
    ring = Ring()
    for data, flags in ((b"12345678", 0), (b"given up", DISCARD), (b"1234567", 0), (b"123456789", 0)):
        ring.put(data, flags)
    assert ring.take(15) == []
    assert ring.take(16) == [b"12345678"]
    assert ring.take(39) == [b"1234567"]
    assert ring.take(24) == [b"123456789"]
    assert ring.emptied


WRITES = st.lists(
    st.one_of(st.tuples(st.binary(max_size=70), st.sampled_from([0, 0, 0, DISCARD])), st.integers(0, 200)),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(size=st.sampled_from([128, 256, 1024]), at=st.integers(0, LAST // 8), steps=WRITES)
def test_what_was_written_comes_out_in_order(
    size: int, at: int, steps: Sequence[tuple[bytes, int] | int]
) -> None:
    """Records are written, and at times taken into so much room."""
    ring = Ring(size, at * 8)
    written: list[bytes] = []
    taken: list[bytes] = []
    for step in steps:
        if isinstance(step, int):
            taken += ring.take(step)
        elif ring.put(*step) and not step[1]:
            written.append(step[0])
        assert taken == written[: len(taken)]
    assert taken + ring.take() == written
    assert ring.emptied


def read_by_class(ring: Ring) -> bpf.Ring:
    """Return an object of the class that reads a ring made by hand."""
    made = bpf.Ring.__new__(bpf.Ring)
    made._mapped, made._out = ring.mapped, ffi.new("uint8_t[]", bpf._TAKE_BYTES)
    made.fd = 0
    return made


def test_records_are_given_out_without_what_fills_them_up() -> None:
    ring = Ring()
    records = [b"", b"1", b"12345678", b"123456789"]
    for record in records:
        ring.put(record)
    made = read_by_class(ring)
    assert not made.empty
    assert list(made.take()) == records
    assert made.empty and list(made.take()) == []
    ring.put(b"late", BUSY)
    assert list(made.take()) == [] and not made.empty
    made.fd = -1
    assert list(made.take()) == [] and made.empty


def test_some_64_kib_are_taken_at_once() -> None:
    ring = Ring(1 << 18)
    for number in range(6):
        assert ring.put(bytes([number]) * 20000)
    made = read_by_class(ring)
    assert [record[0] for record in made.take()] == [0, 1, 2]
    assert [record[0] for record in made.take()] == [3, 4, 5]


def test_a_ring_that_is_none_is_said() -> None:
    ring = Ring()
    ring.end = 4
    with pytest.raises(OSError, match="reading a ring") as caught:
        list(read_by_class(ring).take())
    assert caught.value.errno == errno.EBADMSG


# Words


def test_the_verifier_is_quoted_from_its_end() -> None:
    assert bpf.verifier_says(b"") == "" and bpf.verifier_says(b" \n") == ""
    assert bpf.verifier_says(b"0: (95) exit\nR0 !read_ok\n").endswith("says '0: (95) exit R0 !read_ok'")
    said = bpf.verifier_says(b"x\n" * 2000 + b"the end \xff")
    assert said.endswith("the end \N{REPLACEMENT CHARACTER}'") and len(said) < 600


def test_errors_say_what_failed_on_what_and_what_would_help() -> None:
    error = bpf.failure(errno.EPERM, "a map of bpf(2)", "name", bpf.HINTS)
    assert isinstance(error, PermissionError) and error.filename == "name"
    assert str(error).startswith("[Errno 1] a map of bpf(2): Operation not permitted (bpf(2) takes CAP_BPF")
    assert "RLIMIT_NOFILE" in str(bpf.failure(errno.EMFILE, "a map", "x", bpf.HINTS))
    assert str(bpf.failure(errno.EMFILE, "a map", "x", {})) == "[Errno 24] a map: Too many open files: 'x'"
    assert "a probe: Operation not supported" in str(bpf.failure(bpf.ENOTSUPP, "a probe", "x", {}))


class Runs:
    """In the place of a program's /proc/self/fdinfo: a file of any text, open at a descriptor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self._file = file
        real = os.open
        monkeypatch.setattr(
            os, "open", lambda path, flags: real(file if path == "/proc/self/fdinfo/77" else path, flags)
        )

    def say(self, text: str) -> int | None:
        self._file.write_text(text)
        return bpf.missed_runs(77)


def test_runs_that_were_passed_over_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = Runs(monkeypatch, tmp_path / "fdinfo")
    assert runs.say("pos:\t0\nprog_type:\t26\nrecursion_misses:\t17\nverified_insns:\t3\n") == 17
    assert runs.say("prog_type:\t26\nrecursion_misses:\t0\n") == 0
    assert runs.say("pos:\t0\nprog_type:\t26\n") is None
    assert runs.say("") is None
    (tmp_path / "fdinfo").unlink()
    assert bpf.missed_runs(77) is None


def test_a_descriptor_that_is_no_program_has_no_runs() -> None:
    with Path(os.devnull).open("rb") as file:
        assert bpf.missed_runs(file.fileno()) is None
    assert bpf.missed_runs(-1) is None


def test_a_call_is_tried_once_more_with_a_higher_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []

    def raise_limit(limit: int, hard: int) -> bool:
        raised.append((limit, hard))
        return len(raised) < 3

    def answers(*results: int) -> Callable[[], int]:
        left = list(results)
        return lambda: left.pop(0)

    monkeypatch.setattr(bpf, "_raise_limit", raise_limit)
    assert bpf.descriptor(answers(-errno.EPERM)) == -errno.EPERM and not raised
    assert bpf.bpf_descriptor(answers(-errno.EPERM, 5)) == 5
    assert bpf.bpf_descriptor(answers(-errno.EMFILE, 6)) == 6
    assert [limit for limit, _ in raised] == [resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE]
    assert raised[0][1] == resource.RLIM_INFINITY
    assert bpf.bpf_descriptor(answers(-errno.EMFILE)) == -errno.EMFILE  # it is no more than before
    assert bpf.bpf_descriptor(answers(-errno.EINVAL)) == -errno.EINVAL


# This machine's kernel


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@pytest.fixture
def live() -> Iterator[None]:
    """A kernel that has bpf(2) for this process; nothing stays open."""
    before = descriptors()
    try:
        fd = bpf.open_map(bpf.MAP_ARRAY, "test")
    except OSError as error:
        assert error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS)
        assert descriptors() == before
        pytest.skip(str(error))
    os.close(fd)
    yield
    assert descriptors() == before


def put(map_fd: int, key: bytes, value: bytes) -> int:
    return int(lib.rr_bpf_map_set(map_fd, ffi.from_buffer(key), ffi.from_buffer(value)))


def test_a_map_gives_what_was_put_in(live: None) -> None:
    fd = bpf.open_map(bpf.MAP_HASH, "test", key_size=12, value_size=16, entries=64)
    assert bpf.read_map(fd, 12, 16) == {}
    expected = {bytes([number]) * 12: bytes([number, 1]) * 8 for number in range(50)}
    for key, value in expected.items():
        assert put(fd, key, value) == 0
    assert bpf.read_map(fd, 12, 16) == expected
    for number in range(0, 50, 2):
        bpf.remove_from_map(fd, bytes([number]) * 12)
        del expected[bytes([number]) * 12]
    bpf.remove_from_map(fd, bytes([0]) * 12)
    assert bpf.read_map(fd, 12, 16) == expected
    os.close(fd)


def test_what_is_no_map_is_said(live: None) -> None:
    with pytest.raises(OSError, match="a map") as caught:
        bpf.open_map(bpf.MAP_HASH, "of_no_entries", entries=0)
    assert caught.value.errno == errno.EINVAL and caught.value.filename == "of_no_entries"
    with pytest.raises(OSError, match="reading a map"):
        bpf.read_map(-1, 4, 8)


def test_a_counter_shows_what_is_in_its_map_and_the_last_number_when_it_is_closed(live: None) -> None:
    counter = bpf.Counter("test")
    assert counter.value == 0
    put(counter.fd, bytes(4), struct.pack("=Q", 1 << 40))
    assert counter.value == 1 << 40
    counter.close()
    counter.close()
    assert counter.value == 1 << 40 and counter.fd == -1


@pytest.mark.parametrize("size", [0, 8, PAGE + 8, 3 * PAGE])
def test_a_ring_of_another_size_is_refused(live: None, size: int) -> None:
    with pytest.raises(OSError, match=f"{size} bytes") as caught:
        bpf.Ring(size)
    assert caught.value.errno == errno.EINVAL


def test_a_new_ring_is_empty_and_has_nothing_to_poll(live: None) -> None:
    with bpf.Ring(2 * PAGE) as ring:
        assert list(ring.take()) == [] and ring.empty
        poll = select.poll()
        poll.register(ring.fd, select.POLLIN)
        assert poll.poll(0) == []
        ring.close()
        assert ring.fd == -1 and list(ring.take()) == []


def test_a_program_is_loaded(live: None) -> None:
    code = Code()
    code.end()
    program = bpf.load_program(code.bytes(), bpf.PROG_KPROBE, "test")
    assert bpf.missed_runs(program) in (None, 0)
    with pytest.raises(OSError, match="attaching a BPF program"):
        bpf.attach_program(program, "nothing")
    os.close(program)


def test_a_signal_does_not_keep_a_program_from_being_loaded(live: None) -> None:
    """The verifier gives up where one is pending, and looks at each instruction whether one is."""
    code = Code()
    for _ in range(200_000):
        code.do(0, "=", 0)
    code.end()
    came: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _frame: came.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        fd = bpf.load_program(code.bytes(), bpf.PROG_KPROBE, "test")
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    os.close(fd)
    assert came


def test_a_program_that_the_verifier_refuses_is_quoted(live: None) -> None:
    code = Code()
    code.copy(0, 7)  # of which nothing is known
    code.end()
    with pytest.raises(OSError, match=r"the verifier says .*R7 !read_ok") as caught:
        bpf.load_program(code.bytes(), bpf.PROG_KPROBE, "reads_unset")
    assert caught.value.errno in (errno.EACCES, errno.EINVAL)
    assert caught.value.filename == "reads_unset"


def test_a_module_that_is_not_there_has_no_types(live: None) -> None:
    with pytest.raises(OSError, match=r"types .BTF. of a module") as caught:
        bpf.open_btf("no_such_module")
    assert caught.value.errno in (errno.ENOENT, errno.EPERM)


def test_the_kernels_own_types_are_found_by_their_name(live: None) -> None:
    if not Path("/sys/kernel/btf/vmlinux").exists():
        pytest.skip("this kernel has no BTF (CONFIG_DEBUG_INFO_BTF)")
    try:
        fd = bpf.open_btf("vmlinux")
    except OSError as error:
        assert error.errno in (errno.EPERM, errno.ENOENT)  # before 5.11 they have no names
        pytest.skip(str(error))
    os.close(fd)
