"""One memory block turned movable for a run: unpinnable memory on any node, without a reboot and without
pressure.

A block is taken offline and onlined to ZONE_MOVABLE (Documentation/admin-guide/mm/memory-hotplug.rst);
movable allocations then take it first. The journal knows of it before anything is changed, so that the next
start gives it back when this run is killed.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrepro.errors import Unmet, errno_name
from regrepro.kernel.journal import Entry, Journal, ReclaimFailed
from regrepro.kernel.zones import PAGE_SIZE, read_meminfo

if TYPE_CHECKING:
    from regrepro.kernel.memorymap import MemoryMap

MEMORY_BLOCKS = Path("/sys/devices/system/memory")

_NETLINK_KOBJECT_UEVENT = 15  # include/uapi/linux/netlink.h

NEED = "online-movable"
_PUT_BACK_SECONDS = 20.0  # a block that is not taken gets these to come back, however short the try was
_HOW_ROOT = "run as root on the node itself, not in a container with a read-only /sys"


def block_size() -> int:
    """Return the size of a memory block in bytes. Raises OSError on a kernel without
    CONFIG_MEMORY_HOTPLUG.
    """
    return int((MEMORY_BLOCKS / "block_size_bytes").read_text(), 16)


def write_limited(path: Path, text: str, limit: float) -> int:
    """Write to a sysfs file from a process that is killed after `limit` seconds. Returns 0 or an errno.

    The kernel tries to empty a block until a signal comes; ETIMEDOUT says that ours came.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, text.encode())
        except OSError as error:
            code = error.errno or errno.EIO
        except BaseException:
            code = errno.EIO
        finally:
            try:
                os.write(write_end, bytes([code & 0xFF]))
            finally:
                os._exit(0)
    os.close(write_end)
    try:
        ready, _, _ = select.select([read_end], [], [], limit)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        answer = os.read(read_end, 1)  # empty when it was killed in the middle
        return answer[0] if answer else errno.ETIMEDOUT
    finally:
        os.close(read_end)
        os.waitpid(pid, 0)


class MemoryBlock:
    """One /sys/devices/system/memory/memoryN."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.path = MEMORY_BLOCKS / f"memory{number}"

    def _read(self, name: str) -> str:
        return (self.path / name).read_text().strip()

    @property
    def state(self) -> str:
        """`online`, `offline` or `going-offline`. Raises OSError."""
        return self._read("state")

    @property
    def zone(self) -> str | None:
        """The zone of an online block; None for one that is offline or spans several zones."""
        if self.state != "online":
            return None
        name = self._read("valid_zones")
        return None if name == "none" else name.split()[0]

    @property
    def node(self) -> int:
        """The NUMA node of the block, 0 on a kernel without NUMA."""
        for link in self.path.glob("node[0-9]*"):
            return int(link.name[4:])
        return 0

    @property
    def range(self) -> tuple[int, int]:
        """First PFN and last PFN + 1."""
        pages = block_size() // PAGE_SIZE
        return self.number * pages, (self.number + 1) * pages

    def change(self, state: str, limit: float) -> int:
        """Write a state. Returns 0 or an errno."""
        return write_limited(self.path / "state", state, limit)

    def restore(self, how: str, *, limit: float) -> str | None:
        """Give the block back: online to a zone of the kernel. Tries again while pages are in use.

        `how` is the word that brings it back, `online_kernel` or `online`. Returns a sentence, None if there
        was nothing to do. Raises ReclaimFailed, OSError.
        """
        deadline = time.monotonic() + limit
        why = 0
        touched = False
        while True:
            state = self.state
            if state == "online" and self.zone != "Movable":
                return f"gave memory block {self.number} back" if touched else None
            left = deadline - time.monotonic()
            if left <= 0:
                raise ReclaimFailed(
                    f"memory block {self.number} is {state} in zone {self.zone or 'none'}: "
                    f"{_words(why) if why else 'still busy'}, for {limit:.0f} s"
                )
            if state == "online":
                why = self.change("offline", min(left, 5.0))
            elif state == "offline":
                why = self.change(how, min(left, 5.0))
                if why == errno.EINVAL and how != "online":
                    why = self.change("online", min(left, 5.0))
            touched = True
            if why:
                time.sleep(min(0.1, max(left, 0)))


class BlockEvents:
    """Counts memory blocks that go online or offline, as the kernel announces them to every listener.

    device_online() and device_offline() (drivers/base/core.c) send a uevent after each change that
    succeeded, so that a change that was undone between two looks is not lost.
    """

    def __init__(self) -> None:
        """Listen. Where that cannot be, `count` is None."""
        self._socket: socket.socket | None = None
        try:
            made = socket.socket(
                socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _NETLINK_KOBJECT_UEVENT
            )
        except OSError:
            return
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            made.bind((0, 1))
        except OSError:
            made.close()
            return
        self._socket = made

    def count(self) -> int | None:
        """Return how many there were since the last call; None where that is not known."""
        if self._socket is None:
            return None
        seen: int | None = 0
        while True:
            try:
                message = self._socket.recv(1 << 14)
            except BlockingIOError:
                return seen
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    return None
                seen = None  # some were lost
                continue
            action, _, path = message.split(b"\0", 1)[0].partition(b"@")
            if action in (b"online", b"offline") and path.startswith(b"/devices/system/memory/"):
                seen = None if seen is None else seen + 1

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass
class OnlinedBlock:
    """A memory block that lies in ZONE_MOVABLE until it is given back. Also a context manager."""

    block: MemoryBlock
    range: tuple[int, int]  # first PFN, last PFN + 1
    node: int  # a process gets its pages if it runs on this NUMA node
    _journal: Journal = field(repr=False)
    _entry: Entry = field(repr=False)
    _report: Callable[[dict[str, Any]], object] | None = field(default=None, repr=False)
    given_back: bool = False

    def __enter__(self) -> OnlinedBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self, *, limit: float = _PUT_BACK_SECONDS) -> bool:
        """Give the block back. False when its pages are in use for longer than `limit` seconds.

        The journal then keeps it, and the next start tries again.
        """
        if self.given_back:
            return True
        try:
            self.block.restore(str(self._entry.data["restore"]), limit=limit)
        except (ReclaimFailed, OSError) as error:
            _tell(
                self._report, self.block, self.range, "failed", getattr(error, "errno", None) or errno.EBUSY
            )
            return False
        self.given_back = True
        self._journal.remove(self._entry)
        _tell(self._report, self.block, self.range, "given-back", 0)
        return True


def _tell(
    report: Callable[[dict[str, Any]], object] | None,
    block: MemoryBlock,
    pfns: tuple[int, int],
    step: str,
    error: int,
) -> None:
    """Hand an event `online-movable` of docs/record.md over."""
    if report is not None:
        name = errno_name(error) if error else None
        report({"block": block.number, "range": list(pfns), "step": step, "errno": name})


def memory_blocks() -> list[MemoryBlock]:
    """Return every memory block; none on a kernel without CONFIG_MEMORY_HOTPLUG."""
    return [MemoryBlock(int(path.name[6:])) for path in MEMORY_BLOCKS.glob("memory[0-9]*")]


def candidates(memory_map: MemoryMap | None = None, node: int | None = None) -> list[MemoryBlock]:
    """Return the blocks that could be taken, the most promising first. Raises OSError.

    Not taken are blocks of several zones, of ZONE_DMA, a node's first block, and one that would come back
    to another zone. Where the pageblock bitmap is known, blocks without unmovable pageblocks come first; then
    the highest, which boot allocations spare.
    """
    by_node: dict[int, list[MemoryBlock]] = {}
    for block in memory_blocks():
        try:
            if block.zone in ("DMA32", "Normal", "HighMem"):
                by_node.setdefault(block.node, []).append(block)
        except OSError:
            continue
    usable = []
    for number, blocks in by_node.items():
        if len(blocks) > 1 and node in (None, number):
            # Most kernel memory of a node lies in its first blocks: those are never worth a try.
            first, wanders = min(block.number for block in blocks), _wanders(blocks)
            usable += [block for block in blocks if block.number not in (first, wanders)]
    return sorted(usable, key=lambda block: (_fixed_pageblocks(block, memory_map), -block.number))


def _wanders(blocks: list[MemoryBlock]) -> int | None:
    """Return the block of a node that would come back to another zone, None where there is none.

    A zone below ZONE_NORMAL shrinks when the block at its end goes offline, and `online_kernel` puts a block
    that lies in no such zone's span into ZONE_NORMAL (default_kernel_zone_for_pfn(), mm/memory_hotplug.c).
    """
    return max((block.number for block in blocks if block.zone == "DMA32"), default=None)


def _fixed_pageblocks(block: MemoryBlock, memory_map: MemoryMap | None) -> int:
    """Return how many pageblocks of a block are of a type that cannot be emptied; 0 where the map does not
    tell.
    """
    sections = None if memory_map is None else memory_map.sections
    if sections is None:
        return 0
    first, end = block.range
    shift = sections.layout.section_shift
    rows = (sections.numbers >= first >> shift) & (sections.numbers < end >> shift)
    movable = 1  # MIGRATE_MOVABLE, on every kernel (include/linux/mmzone.h)
    return int((sections.types[rows] != movable).sum())


def online_movable(
    journal: Journal,
    *,
    memory_map: MemoryMap | None = None,
    node: int | None = None,
    attempts: int = 8,
    limit: float = 5.0,
    report: Callable[[dict[str, Any]], object] | None = None,
) -> OnlinedBlock:
    """Turn one memory block movable.

    Tries up to `attempts` blocks for `limit` seconds each, on one `node` if given. `report` is called with
    the keys of event `online-movable` at each step. Raises Unmet when it cannot be; every block then is what
    it was before, but for one that the message names and the journal keeps.
    """
    try:
        size = block_size()
        blocks = candidates(memory_map, node)
    except OSError as error:
        raise Unmet(
            NEED,
            f"this kernel offers no memory blocks ({error.strerror})",
            "a kernel with CONFIG_MEMORY_HOTPLUG and CONFIG_MEMORY_HOTREMOVE, or boot with movablecore=",
        ) from None
    if not blocks:
        where = "" if node is None else f" of node {node}"
        raise Unmet(
            NEED,
            f"no memory block{where} can be spared or taken offline (a block has {size >> 20} MiB)",
            "a node with more memory, a kernel with CONFIG_MEMORY_HOTREMOVE, or boot with movablecore=",
        )
    if not os.access(blocks[0].path / "state", os.W_OK):
        raise Unmet(NEED, f"{blocks[0].path}/state cannot be written", _HOW_ROOT)
    available = read_meminfo().get("MemAvailable", 0)
    if available < 2 * size:
        raise Unmet(
            NEED,
            f"a memory block has {size >> 20} MiB and only {available >> 20} MiB of memory are available",
            f"free memory until {2 * size >> 20} MiB are available",
        )
    failures = []
    for block in blocks[:attempts]:
        onlined, why = _try(journal, block, limit, report)
        if onlined is not None:
            return onlined
        failures.append(f"block {block.number}: {why}")
        if why in (os.strerror(errno.EROFS), os.strerror(errno.EACCES), os.strerror(errno.EPERM)):
            raise Unmet(NEED, f"memory block {block.number} cannot be changed: {why}", _HOW_ROOT)
    raise Unmet(
        NEED,
        f"none of {len(failures)} memory blocks of {size >> 20} MiB could be taken offline "
        f"({'; '.join(failures[:3])})",
        "try again with fewer processes running, or boot with movablecore=",
    )


def _try(
    journal: Journal, block: MemoryBlock, limit: float, report: Callable[[dict[str, Any]], object] | None
) -> tuple[OnlinedBlock | None, str]:
    """Try one block: the onlined block, or why not."""
    pfns = block.range
    # Back to the kernel's choice of zone: of an online block only that can be known, not what was once
    # written.
    entry = journal.add("memory-block", block=block.number, restore="online_kernel", zone=block.zone)
    step = "offline"
    error = block.change("offline", limit)
    if not error:
        _tell(report, block, pfns, step, 0)
        step = "online_movable"
        error = block.change("online_movable", limit)
        if not error and block.zone != "Movable":
            error = errno.EINVAL
        if not error:
            _tell(report, block, pfns, step, 0)
            return OnlinedBlock(block, pfns, block.node, journal, entry, report), ""
    _tell(report, block, pfns, "failed", error)
    try:
        block.restore("online_kernel", limit=_PUT_BACK_SECONDS)
    except (ReclaimFailed, OSError):
        return None, f"{_words(error)}, and it could not be put back yet"  # the journal keeps it
    journal.remove(entry)
    return None, _words(error)


def _words(error: int) -> str:
    return "its pages were not free in time" if error == errno.ETIMEDOUT else os.strerror(error)
