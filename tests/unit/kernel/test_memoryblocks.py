"""Memory blocks, over a /sys on paper that answers as the kernel does."""

from __future__ import annotations

import errno
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from regrepro.errors import Unmet
from regrepro.kernel import memoryblocks, reclaim
from regrepro.kernel.journal import Journal, ReclaimFailed
from regrepro.kernel.memoryblocks import MemoryBlock, OnlinedBlock, online_movable, write_limited

SIZE = 128 << 20


@dataclass
class Sysfs:
    """Memory blocks; `busy` ones refuse to go offline that many times (-1: always)."""

    folder: Path
    busy: dict[int, int] = field(default_factory=dict)
    writes: list[tuple[int, str]] = field(default_factory=list)
    refuse_movable: bool = False

    def make(self, zones: dict[int, str], nodes: dict[int, int] | None = None) -> None:
        (self.folder / "block_size_bytes").write_text(f"{SIZE:x}\n")
        for number, zone in zones.items():
            path = self.folder / f"memory{number}"
            path.mkdir()
            (path / f"node{(nodes or {}).get(number, 0)}").mkdir()
            self.set(number, "online", zone)

    def set(self, number: int, state: str, zone: str) -> None:
        path = self.folder / f"memory{number}"
        (path / "state").write_text(f"{state}\n")
        (path / "valid_zones").write_text(f"{zone}\n")

    def write(self, path: Path, text: str, limit: float) -> int:
        number = int(path.parent.name[6:])
        state = path.read_text().strip()
        self.writes.append((number, text))
        if text == "offline":
            if self.busy.get(number, 0):
                self.busy[number] -= 1
                return errno.EBUSY
            self.set(number, "offline", "Normal Movable")
            return 0
        if state == "online":
            return 0
        if text == "online_movable" and self.refuse_movable:
            return errno.EINVAL
        self.set(number, "online", "Movable" if text == "online_movable" else "Normal")
        return 0

    def shown(self) -> dict[int, tuple[str, str]]:
        return {
            int(path.name[6:]): ((path / "state").read_text(), (path / "valid_zones").read_text())
            for path in self.folder.glob("memory*")
        }


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sysfs:
    folder = tmp_path / "memory"
    folder.mkdir()
    made = Sysfs(folder)
    monkeypatch.setattr(memoryblocks, "MEMORY_BLOCKS", folder)
    monkeypatch.setattr(memoryblocks, "write_limited", made.write)
    monkeypatch.setattr(memoryblocks, "read_meminfo", lambda: {"MemAvailable": 8 << 30})
    return made


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    folder = tmp_path / "journal"
    folder.mkdir()
    return Journal(folder)


EIGHT = {0: "none", 1: "DMA32", 2: "DMA32", 3: "Normal", 4: "Normal", 5: "Normal", 6: "Movable", 7: "Normal"}


def test_the_highest_block_is_taken_and_given_back(sysfs: Sysfs, journal: Journal) -> None:
    sysfs.make(EIGHT)
    before = sysfs.shown()
    steps: list[dict[str, object]] = []
    with online_movable(journal, report=steps.append) as onlined:
        assert onlined.block.number == 7
        pages = SIZE // os.sysconf("SC_PAGE_SIZE")
        assert onlined.range == (7 * pages, 8 * pages)
        assert onlined.block.zone == "Movable"
        assert [entry.kind for entry in journal.entries] == ["memory-block"]
    assert sysfs.shown() == before and not journal.entries
    assert [(step["step"], step["errno"]) for step in steps] == [
        ("offline", None),
        ("online_movable", None),
        ("given-back", None),
    ]
    assert onlined.give_back()  # again is no harm
    json.dumps(steps)


def test_the_journal_knows_before_anything_is_changed(
    sysfs: Sysfs, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysfs.make(EIGHT)

    def change(block: MemoryBlock, state: str, limit: float) -> int:
        assert [entry.data["block"] for entry in journal.entries] == [block.number]
        return sysfs.write(block.path / "state", state, limit)

    monkeypatch.setattr(MemoryBlock, "change", change)
    online_movable(journal).give_back()


def test_busy_blocks_are_passed_over(sysfs: Sysfs, journal: Journal) -> None:
    sysfs.make(EIGHT)
    sysfs.busy = {7: -1, 5: -1}
    steps: list[dict[str, object]] = []
    onlined = online_movable(journal, report=steps.append)
    assert onlined.block.number == 4
    assert [(s["block"], s["step"], s["errno"]) for s in steps][:2] == [
        (7, "failed", "EBUSY"),
        (5, "failed", "EBUSY"),
    ]
    assert len(journal.entries) == 1


def test_none_can_be_taken(sysfs: Sysfs, journal: Journal) -> None:
    sysfs.make(EIGHT)
    sysfs.busy = dict.fromkeys(EIGHT, -1)
    before = sysfs.shown()
    with pytest.raises(Unmet, match=r"none of 3 memory blocks of 128 MiB.*block 7"):
        online_movable(journal, attempts=3)
    assert sysfs.shown() == before and not journal.entries


def test_a_block_that_will_not_go_movable_is_put_back(sysfs: Sysfs, journal: Journal) -> None:
    sysfs.make(EIGHT)
    sysfs.refuse_movable = True
    before = sysfs.shown()
    with pytest.raises(Unmet):
        online_movable(journal, attempts=2)
    assert sysfs.shown() == before and not journal.entries


def test_a_block_that_goes_offline_when_its_time_is_over_is_put_back(
    sysfs: Sysfs, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal that ends the try comes too late: the block is offline, and there is no time left."""
    sysfs.make(EIGHT)
    before = sysfs.shown()

    def write(path: Path, text: str, limit: float) -> int:
        return sysfs.write(path, text, limit) or (errno.ETIMEDOUT if limit <= 0 else 0)

    monkeypatch.setattr(memoryblocks, "write_limited", write)
    with pytest.raises(Unmet, match="not free in time"):
        online_movable(journal, attempts=2, limit=0.0)
    assert (7, "offline") in sysfs.writes
    assert sysfs.shown() == before and not journal.entries


def test_a_node_keeps_its_last_block(sysfs: Sysfs, journal: Journal) -> None:
    sysfs.make({0: "Normal", 1: "Normal", 2: "Normal"}, nodes={2: 1})
    with pytest.raises(Unmet, match="of node 1"):
        online_movable(journal, node=1)
    assert online_movable(journal, node=0).block.number == 1


def test_a_block_that_would_come_back_to_another_zone_is_left_alone(sysfs: Sysfs, journal: Journal) -> None:
    """Offline, the last block of ZONE_DMA32 lies in no low zone any more, and would come back Normal."""
    sysfs.make({0: "none", 1: "DMA32", 2: "DMA32", 3: "DMA32", 4: "Movable"})
    assert [block.number for block in memoryblocks.candidates()] == [2]
    sysfs.set(3, "online", "Normal")
    assert [block.number for block in memoryblocks.candidates()] == [3]


def test_too_little_memory(sysfs: Sysfs, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs.make(EIGHT)
    monkeypatch.setattr(memoryblocks, "read_meminfo", lambda: {"MemAvailable": 200 << 20})
    with pytest.raises(Unmet, match="128 MiB and only 200 MiB"):
        online_movable(journal)
    assert not sysfs.writes


def test_no_memory_hotplug(tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memoryblocks, "MEMORY_BLOCKS", tmp_path / "nothing")
    with pytest.raises(Unmet, match="CONFIG_MEMORY_HOTREMOVE"):
        online_movable(journal)


def test_giving_back_tries_again_while_busy(sysfs: Sysfs, journal: Journal) -> None:
    sysfs.make(EIGHT)
    onlined = online_movable(journal)
    sysfs.busy = {onlined.block.number: 3}
    assert onlined.give_back(limit=5)
    assert sysfs.writes.count((onlined.block.number, "offline")) == 5


def test_what_stays_busy_stays_in_the_journal(sysfs: Sysfs, journal: Journal) -> None:
    sysfs.make(EIGHT)
    steps: list[dict[str, object]] = []
    onlined: OnlinedBlock = online_movable(journal, report=steps.append)
    sysfs.busy = {onlined.block.number: -1}
    assert not onlined.give_back(limit=0.2)
    assert steps[-1]["step"] == "failed" and len(journal.entries) == 1
    sysfs.busy = {}
    assert onlined.give_back() and not journal.entries


@pytest.mark.parametrize("state", ["online Movable", "offline Normal Movable", "online Normal"])
def test_reclaim_gives_back_from_every_state(sysfs: Sysfs, state: str) -> None:
    sysfs.make(EIGHT)
    before = sysfs.shown()
    sysfs.set(5, *state.split(" ", 1))
    said = reclaim._HANDLERS["memory-block"]({"block": 5, "restore": "online_kernel"})
    assert sysfs.shown() == before
    assert (said is None) == (state == "online Normal")


def test_reclaim_of_a_busy_block_fails_and_says_why(sysfs: Sysfs) -> None:
    sysfs.make(EIGHT)
    sysfs.set(5, "online", "Movable")
    sysfs.busy = {5: -1}
    with pytest.raises(ReclaimFailed, match="busy"):
        reclaim._HANDLERS["memory-block"]({"block": 5, "restore": "online_kernel", "limit": 0.2})


def test_a_write_that_hangs_is_given_up(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # opening it for writing waits for a reader, as the kernel waits for pages
    began = time.monotonic()
    assert write_limited(fifo, "offline", 0.3) == errno.ETIMEDOUT
    assert time.monotonic() - began < 5
    assert write_limited(tmp_path / "nowhere" / "state", "x", 5) == errno.ENOENT
    (tmp_path / "file").touch()
    assert write_limited(tmp_path / "file", "online", 5) == 0
    assert (tmp_path / "file").read_text() == "online"


class Announced:
    """A netlink socket that hands these messages out."""

    def __init__(self, *messages: bytes | OSError) -> None:
        self.messages = list(messages)

    def recv(self, size: int) -> bytes:
        if not self.messages:
            raise BlockingIOError
        message = self.messages.pop(0)
        if isinstance(message, OSError):
            raise message
        return message


ONLINE = b"online@/devices/system/memory/memory35\0ACTION=online\0SUBSYSTEM=memory\0"
OFFLINE = b"offline@/devices/system/memory/memory35\0ACTION=offline\0SUBSYSTEM=memory\0"
CPU = b"offline@/devices/system/cpu/cpu1\0ACTION=offline\0SUBSYSTEM=cpu\0"
ADDED = b"add@/devices/system/memory/memory36\0ACTION=add\0SUBSYSTEM=memory\0"


@pytest.mark.parametrize(
    ("messages", "count"),
    [
        ((), 0),
        ((OFFLINE, CPU, ADDED, ONLINE), 2),
        ((OFFLINE, OSError(errno.ENOBUFS, "lost"), ONLINE), None),
        ((OSError(errno.EBADF, "closed"),), None),
    ],
)
def test_changes_of_blocks_are_counted(messages: tuple[bytes | OSError, ...], count: int | None) -> None:
    events = memoryblocks.BlockEvents()
    events.close()
    assert events.count() is None  # nobody listens
    events._socket = Announced(*messages)  # type: ignore[assignment]
    assert events.count() == count
