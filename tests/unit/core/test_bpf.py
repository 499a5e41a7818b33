"""bpf(2): rings made by hand, as the kernel would write them, and what is read of maps and programs."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from regrepro._core import ffi, lib

from regrepro.core import bpf

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


# Maps and programs


def test_numbers_that_programs_count_are_read(tmp_path: Path) -> None:
    file = tmp_path / "bss"
    file.write_bytes(struct.pack("=QQ", 17, 1 << 40).ljust(PAGE, b"\0"))
    with file.open("r+b") as opened:
        counters = bpf.Counters(opened.fileno())
        assert (counters.value(0), counters.value(1)) == (17, 1 << 40)
        opened.write(struct.pack("=Q", 18))
        opened.flush()
        assert counters.value(0) == 18
        counters.close()


def test_what_is_no_map_or_ring_is_said() -> None:
    with Path(os.devnull).open("rb") as file:
        with pytest.raises(OSError, match="reading a map"):
            bpf.read_map(file.fileno(), 4, 8)
        with pytest.raises(OSError, match="mapping a ring"):
            bpf.Ring(file.fileno(), PAGE)
        with pytest.raises(OSError):
            bpf.Counters(file.fileno())


def test_runs_that_were_passed_over_are_read_with_the_programs_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "fdinfo"
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: real(file if str(path).endswith("/77") else path))
    for text, expected in (
        ("pos:\t0\nprog_type:\t26\nprog_id:\t5\nrecursion_misses:\t17\n", (5, 17)),
        ("prog_id:\t5\nrecursion_misses:\t0\n", (5, 0)),
        ("pos:\t0\nprog_id:\t5\n", None),
        ("", None),
    ):
        file.write_text(text)
        assert bpf.missed_runs(77) == expected
    file.unlink()
    assert bpf.missed_runs(77) is None and bpf.missed_runs(-1) is None
