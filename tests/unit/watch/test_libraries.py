"""How copies of libibverbs are followed where they fail: their ELF files, probes, and what a hit says."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from kernel_fakes import BtfWriter

from regrepro.core.uprobes import Hit, Zero
from regrepro.kernel.btf import Btf
from regrepro.watch import copies, elf, library_probes, marker, watch
from regrepro.watch.branches import Branch, Place, Undecided
from regrepro.watch.events import Correlator, Ended, Failure, LibraryWord
from regrepro.watch.library_probes import LibraryProbes
from regrepro.watch.watch import Options, Watch


class Probes:
    """Stands for the kernel's uprobes."""

    refused = -1  # an offset where none can be put

    def __init__(self, *, stack_bytes: int, ring_pages: int) -> None:
        assert stack_bytes % 8 == 0 and ring_pages & (ring_pages - 1) == 0
        self.added: list[tuple[str, int, Zero | None]] = []
        self.removed: list[int] = []
        self.hits: list[Hit] = []
        self.lost = 0
        self.closed = False

    @staticmethod
    def supported() -> str:
        return ""

    def add(self, path: str, offset: int, *, zero: Zero | None) -> int:
        if offset == self.refused:
            raise PermissionError(13, "Permission denied")
        self.added.append((path, offset, zero))
        return len(self.added)

    def remove(self, probe: int) -> None:
        self.removed.append(probe)

    def read(self) -> list[Hit]:
        return self.hits

    def fds(self) -> list[int]:
        return []

    def close(self) -> None:
        self.closed = True


def image(machine: int = 62) -> bytes:
    """An ELF file of one loaded segment: addresses from 0x1000, at offset 0x100 of the file, 0x40 bytes."""
    order = 1 if struct.pack("=H", 1) == b"\x01\x00" else 2
    head = bytearray(0x100 + 0x40)
    head[:6] = b"\x7fELF\x02" + bytes([order])
    struct.pack_into("=H", head, 0x12, machine)
    struct.pack_into("=Q", head, 0x20, 0x40)
    struct.pack_into("=HH", head, 0x36, 56, 1)
    struct.pack_into("=IIQQQQQQ", head, 0x40, 1, 5, 0x100, 0x1000, 0x1000, 0x40, 0x40, 0x1000)
    head[0x100:] = bytes(range(0x40))
    return bytes(head)


def copy(**functions: int) -> copies.Copy:
    given = {"ibv_reg_mr_iova2": 0x1000, "ibv_reg_dmabuf_mr": 0x1020, "ibv_reg_mr": 0x1030}
    sizes = {"ibv_reg_mr_iova2:size": 32, "ibv_reg_dmabuf_mr:size": 16, "ibv_reg_mr:size": 11}
    return copies.Copy((1, 2), "/x/libibverbs.so.1", 9, given | sizes | functions)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> LibraryProbes:
    where = {
        "pd": Place("rbx"),
        "address": Place("rbp"),
        "length": Place(offset=8),
        "access": Place("r8", 0, 4),
    }

    def branches(read: Any, start: int, size: int, parameters: Any, machine: str) -> tuple[Branch, ...]:
        assert machine == "x86_64" and read(start, 4) == bytes(range(start - 0x1000, start - 0x1000 + 4))
        if "fd" in parameters:
            raise Undecided("it has no place of its own where it fails")
        return Branch(start + 8, where), Branch(start + 16, {}, Place("rax"))

    monkeypatch.setattr(library_probes, "UserProbes", Probes)
    monkeypatch.setattr(library_probes, "failing_branches", branches)
    return LibraryProbes()


def test_a_verb_is_followed_where_it_fails_or_else_left_to_bpftrace(probes: LibraryProbes) -> None:
    made = copy()
    probes.follow(made, image())
    assert made.at_failure == {"ibv_reg_mr_iova2"} and probes.some
    kernel: Any = probes._probes
    assert kernel.added == [(made.library.path, 0x108, None), (made.library.path, 0x110, Zero("rax"))]
    assert "ibv_reg_mr_iova2" not in made.library.functions and "ibv_reg_dmabuf_mr" in made.library.functions
    assert made.verbs() == ["ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr"]  # ibv_reg_mr only jumps
    path = "/x/libibverbs.so.1"
    why = "it has no place of its own where it fails"
    assert list(probes.how(made)) == [
        {"copy": path, "verb": "ibv_reg_mr_iova2", "at": "failure"},
        {"copy": path, "verb": "ibv_reg_dmabuf_mr", "at": "return", "why": why},
    ]
    assert [row["at"] for row in probes.how(made, at_return=False)] == ["failure", "nowhere"]
    assert list(probes.how(made, at_return=False))[1]["why"] == why
    probes.forget([(7, 7)])
    assert probes.some
    probes.forget([made.key])
    assert not probes.some and kernel.removed == [1, 2]
    probes.close()
    assert kernel.closed


def test_rings_are_powers_of_two_and_stay_within_their_bounds() -> None:
    cpus = (1, 2, 16, 32, 64, 192, 512, 4096)
    assert [library_probes.ring_pages(count, 4096) for count in cpus] == [256, 256, 256, 128, 64, 16, 8, 8]
    assert [library_probes.ring_pages(count, 65536) for count in cpus] == [16, 16, 16, 8, 4, 1, 1, 1]


def test_what_a_hit_says(probes: LibraryProbes) -> None:
    probes.follow(copy(), image())
    kernel: Any = probes._probes
    stack = struct.pack("=QQ", 1, 32768)
    kernel.hits = [
        Hit(1, os.getpid(), os.getpid(), 150, {"rbp": 0x7F0000000000, "r8": 0xFFFFFFFF00000007}, stack),
        Hit(1, 1 << 30, 1 << 30, 160, {}, b""),
        Hit(99, 5, 5, 170, {}, b""),  # of a probe that has been taken away
    ]
    words: list[LibraryWord] = []
    probes.take(words.append)
    assert [(word.ns, word.verb) for word in words] == [(150, 2), (160, 2)]
    assert words[0].given == {"address": 0x7F0000000000, "length": 32768, "access": 7}
    assert words[1].given == {}
    # Whose they were is looked up only of those that the kernel says nothing of.
    complete: list[Failure] = []
    correlator = Correlator([], lambda _: None, complete.append)
    for word in words:
        correlator.library_failed(word)
    correlator.settle(1000)
    assert [failure.comm for failure in complete] == [Path("/proc/self/comm").read_text().strip(), "?"]


def test_a_late_word_of_the_last_failure_leaves_nothing_to_forget() -> None:
    complete: list[Failure] = []
    clock = 10.0
    correlator = Correlator([], lambda _: None, complete.append, now=lambda: clock)
    correlator.library_speaks = True
    for ns in (100, 200):
        correlator.request_failed(Ended(7, 6, "app", ns, ns - 1, "ib_uverbs_reg_mr", -12, 0))
        correlator.overdue(20.0)
    correlator.request_failed(Ended(8, 6, "app", 1 << 40, 1, "ib_uverbs_reg_mr", -12, 0))
    correlator.overdue(20.0)
    correlator.library_failed(LibraryWord(7, 6, 150, 2, {}))
    correlator.library_failed(LibraryWord(7, 6, 250, 2, {}))
    assert len(complete) == 3 and not correlator.alone
    correlator.forget_stale(1 << 40)
    assert set(correlator._silent) == {8}
    correlator.forget_stale(1 << 50)
    assert not correlator._silent


def test_without_the_kernels_help_or_with_a_strange_file_all_is_left_to_bpftrace(
    probes: LibraryProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copy()
    probes.follow(made, b"no library")
    assert not made.at_failure and all("ELF" in row["why"] for row in probes.how(made))

    monkeypatch.setattr(Probes, "refused", 0x110)
    probes.follow(made, image())
    assert not made.at_failure and "Permission denied" in next(probes.how(made))["why"]
    kernel: Any = probes._probes
    assert len(kernel.added) == 1 and kernel.removed == [1] and not probes.some  # all of a verb or nothing
    monkeypatch.setattr(Probes, "supported", staticmethod(lambda: "this kernel has no uprobes"))
    none = LibraryProbes()
    none.follow(made, image())
    assert none.why and not made.at_failure and none.lost == 0 and none.fds() == []
    none.close()


def test_addresses_of_a_library_lie_in_its_file() -> None:
    blob = image()
    assert elf.machine_of(blob) == "x86_64" and elf.machine_of(image(183)) == "aarch64"
    assert elf.machine_of(image(3)) == ""
    assert elf.file_offset(blob, 0x1008) == 0x108
    read = elf.text_reader(blob)
    assert (
        read(0x1000, 4) == b"\x00\x01\x02\x03" and read(0x103E, 8) == b"\x3e\x3f" and read(0x2000, 4) == b""
    )
    with pytest.raises(elf.NotElf):
        elf.file_offset(blob, 0x1040)
    for cut in range(0, 0x68, 5):
        with pytest.raises(elf.NotElf):
            elf.text_reader(blob[:cut])


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two devices, of which the first cannot be opened, and this machine's CPUs."""
    (tmp_path / "uverbs0").mkdir(mode=0)
    (tmp_path / "uverbs0").rmdir()
    (tmp_path / "uverbs0").symlink_to("nothing")
    (tmp_path / "uverbs1").write_text("")
    monkeypatch.setattr(marker, "online_cpus", lambda: sorted(os.sched_getaffinity(0)))
    return tmp_path


def test_bpftrace_has_told_all_when_it_has_told_of_an_opening_on_each_cpu(openings: Path) -> None:
    told: list[tuple[int, str]] = []
    cpus = sorted(os.sched_getaffinity(0))
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    made = marker.Marker(lambda ns, doubt: told.append((ns, doubt)), openings)
    made.ask(10.0)
    after = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert sorted(os.sched_getaffinity(0)) == cpus
    for cpu in cpus:
        made.told(before - 1, cpu)  # of an earlier round
    made.told(after, 1 << 20)
    assert not told
    for cpu in cpus:
        assert not told
        made.told(after, cpu)
    ((ns, doubt),) = told
    assert before <= ns <= after and not doubt
    made.ask(10.1)  # too soon
    made.wait_no_longer(100.0, 0.0)
    assert len(told) == 1
    made.ask(11.0)
    made.wait_no_longer(11.0 + marker.LATE_SECONDS, 0.0)
    made.wait_no_longer(60.0, 58.0)  # it has much to tell
    assert len(told) == 1
    made.wait_no_longer(11.1 + marker.LATE_SECONDS, 0.0)
    assert len(told) == 2 and "in time" in told[1][1]


def test_what_it_may_have_to_tell_of_other_cpus_is_a_doubt(
    openings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(marker, "online_cpus", lambda: [*cpus, 1 << 15])
    told: list[tuple[int, str]] = []
    made = marker.Marker(lambda ns, doubt: told.append((ns, doubt)), openings)
    made.ask(10.0)
    for cpu in cpus:
        made.told(1 << 62, cpu)
    assert len(told) == 1 and "every CPU" in told[0][1]
    (openings / "uverbs1").unlink()
    made.ask(20.0)
    for cpu in cpus:
        made.told(1 << 62, cpu)
    assert len(told) == 1
    made.wait_no_longer(30.0, 0.0)
    assert len(told) == 2


def test_bpftrace_is_asked_only_of_words_that_stay_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    complete: list[Failure] = []
    clock = 10.0
    correlator = Correlator([], lambda _: None, complete.append, now=lambda: clock)
    asked: list[float] = []
    made = Watch(Options(tmp_path), lambda _text: None)

    class Running:
        pass

    engine: Any = Running()
    engine.correlator, engine.last_line = correlator, 0.0
    made._engine = engine
    monkeypatch.setattr(made._marker, "ask", asked.append)
    made._ask_for_the_kernels_word(10.0)
    correlator.library_failed(LibraryWord(7, 6, 150, 2, {}))
    made._ask_for_the_kernels_word(10.01)
    assert not asked
    made._ask_for_the_kernels_word(10.1)
    assert asked == [10.1]
    made._sure(151, "why not")
    assert [failure.doubt for failure in complete] == ["why not"]


def test_copies_of_containers_that_are_gone_are_let_go_of_when_a_new_one_comes(
    probes: LibraryProbes, tmp_path: Path
) -> None:
    made = Watch(Options(tmp_path), lambda _text: None)
    made._library_probes = probes
    made._tell = lambda *_args, **_keys: None  # type: ignore[method-assign]
    made._observer = type("Observer", (), {"meet": lambda _self, _pid: None})()
    gone, new = copy(), copies.Copy((3, 4), "/new/libibverbs.so.1", -1, {}, users={os.getpid()})
    gone.fd, gone.users = os.open(os.devnull, os.O_RDONLY), {1 << 30}
    probes.follow(gone, image())
    made._copies.known[gone.key] = gone

    def look_at(_pid: int) -> bool:
        made._copies.known[new.key] = new
        return True

    made._copies.look_at = look_at  # type: ignore[method-assign]
    made._opened(os.getpid())
    kernel: Any = probes._probes
    assert list(made._copies.known) == [new.key] and kernel.removed == [1, 2] and not made._copies_due


def test_where_a_request_lies_is_read_of_a_kernel_that_has_it_as_it_is_read() -> None:
    def bundle(data_at: int, *names: str) -> Btf:
        writer = BtfWriter()
        long = writer.integer("unsigned long", 8)
        udata = writer.record("ib_udata", 32, [("inbuf", long, 0), ("outbuf", long, 8)])
        pointer = writer.record("uverbs_ptr_attr", 24, [("data", long, data_at)])
        attribute = writer.record("uverbs_attr", 24, [("ptr_attr", pointer, 0)])
        members = {
            "ucore": (udata, 32),
            "attr_present": (long, 96),
            "attrs": (writer.array(attribute, 0), 104),
        }
        writer.record("uverbs_attr_bundle", 104, [(name, *members[name]) for name in names])
        return Btf(writer.blob())

    found = watch.request_offsets(bundle(0, "ucore", "attr_present", "attrs"))
    assert found is not None and (found.command, found.present, found.attributes, found.size) == (
        32,
        96,
        104,
        24,
    )
    assert watch.request_offsets(bundle(0, "attr_present", "attrs")) is None
    assert watch.request_offsets(bundle(8, "ucore", "attr_present", "attrs")) is None
