"""A machine made of numbers, for tests of stage and runner: pages are entries of a table, pins are counts.

It obeys the rules that matter here: a registration moves unpinnable pages out, unless a pin holds them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from regrepro.core.memory import Range
from regrepro.kernel.zones import Zone
from regrepro.options import RunOptions
from regrepro.record import FILE_NAME, RecordWriter, read_record
from regrepro.scenario import Change
from regrepro.stage import Stage
from regrepro.stage.ports import PAGE_SIZE, PIN_OWNERS

CMA, UNKNOWN, ABSENT = 1, 254, 255
_BASE = 1 << 40


@dataclass
class FakeMap:
    """`has_unpinnable`, `complete`: as the test wants them."""

    has_unpinnable: bool | None = True
    complete: bool = True
    problems: list[str] = field(default_factory=list)

    def as_record(self) -> dict[str, Any]:
        return {
            "page_size": PAGE_SIZE,
            "complete": self.complete,
            "has_unpinnable": self.has_unpinnable,
            "zones": [],
            "unpinnable_ranges": [[1000, 2000, "cma"]] if self.has_unpinnable else [],
            "problems": self.problems,
        }

    def check(self) -> dict[str, Any]:
        kept = {"complete": self.complete, "has_unpinnable": self.has_unpinnable, "problems": self.problems}
        return kept | {"changed": False, "sources": []}


@dataclass
class FakeState:
    pfn: Any
    place: Any
    refcount: Any = None
    mapcount: Any = None
    problems: list[str] = field(default_factory=list)

    def as_record(self) -> dict[str, Any]:
        refcount = None if self.refcount is None else [[i, 1, int(n)] for i, n in enumerate(self.refcount)]
        return {
            "pages": len(self.pfn),
            "pfn": [[i, int(n), 1] for i, n in enumerate(self.pfn) if n],
            "place": [
                [i, 1, {0: "ordinary", 1: "cma", 255: "absent"}[int(n)]] for i, n in enumerate(self.place)
            ],
            "refcount": refcount,
            "how": "observed",
            "source": "fake",
        }


class FakeRange:
    def __init__(self, machine: FakeBackend, address: int, length: int) -> None:
        self.machine, self.address, self.length = machine, address, length
        self.bytes = bytearray(length)
        self.closed = False

    def populate(self, threads: int = 1) -> None:
        for address in range(self.address, self.address + self.length, PAGE_SIZE):
            self.machine.fault(address)

    def fill(self, seed: int) -> None:
        self.bytes[:] = bytes([seed % 256]) * self.length

    def checksum(self) -> int:
        return hash(bytes(self.bytes))

    def vma(self) -> str:
        return f"{self.address:x}-{self.address + self.length:x} rw-p 00000000 00:00 0"

    def close(self) -> None:
        self.closed = True
        for address in range(self.address, self.address + self.length, PAGE_SIZE):
            self.machine.pages.pop(address, None)
        self.machine.ranges.remove(self)


class FakePin:
    def __init__(self, machine: FakeBackend, kind: str, address: int, length: int) -> None:
        self.owner = PIN_OWNERS[kind]
        self.api = "fake"
        self.machine = machine
        self.addresses = list(range(address, address + length, PAGE_SIZE))
        self.held = True
        for one in self.addresses:
            machine.pins[one] = machine.pins.get(one, 0) + 1

    def alive(self) -> bool:
        return self.held

    def release(self) -> None:
        self.held = False
        for one in self.addresses:
            self.machine.pins[one] -= 1


class FakeDevice:
    name, verb, verbs, stand_in, default_access = (
        "fake0",
        "ibv_reg_mr_iova2",
        ("ibv_reg_mr_iova2",),
        "fake",
        ("A",),
    )

    def __init__(self, machine: FakeBackend) -> None:
        self.machine = machine
        self.open = 0

    def register(self, verb: str, address: int, length: int, **_: Any) -> Any:
        self.machine.move_out(address, length)
        self.open += 1
        device = self

        class Region:
            lkey, rkey = 1, 2

            def deregister(self) -> None:
                device.open -= 1

        return Region()

    def transfer(self, source: Any, target: Any, length: int, opcode: str) -> None:
        raise OSError(errno.ETIMEDOUT, "no queue pair here")

    def close(self) -> None: ...


class FakeBackend:
    """`pattern(n)` gives the place of the n-th page that is ever handed out."""

    def __init__(
        self,
        pattern: Callable[[int], int] = lambda n: CMA,
        *,
        options: RunOptions | None = None,
        **map_keys: Any,
    ) -> None:
        self.options = options or RunOptions()
        self.memory_map: FakeMap | None = FakeMap(**map_keys)
        self.in_lab = False
        self.pattern = pattern
        self.handed_out = 0
        self.pages: dict[int, tuple[int, int]] = {}
        self.pins: dict[int, int] = {}
        self.ranges: list[FakeRange] = []
        self.available = 1 << 34
        self.hidden = False
        self.refuse: dict[str, int] = {}
        self._device = FakeDevice(self)
        self._next = _BASE
        self.snapshots = 0
        self.node: int | None = None
        self.cap: int | None = None
        self.pressed: list[tuple[int, int | None]] = []

    def fault(self, address: int) -> None:
        if address not in self.pages:
            self.handed_out += 1
            self.pages[address] = (1000 + self.handed_out, self.pattern(self.handed_out - 1))

    def allocate(self, length: int, backing: str) -> FakeRange:
        made = FakeRange(self, self._next, length)
        self._next += length + PAGE_SIZE
        self.ranges.append(made)
        return made

    def reserve(self, length: int) -> FakeRange:
        return self.allocate(length, "anonymous")

    def gather(self, sources: Any, target: int) -> None:
        for index, source in enumerate(sources):
            self.pages[target + index * PAGE_SIZE] = self.pages.pop(int(source))

    def move(self, source: int, target: int, length: int) -> None:
        for offset in range(0, length, PAGE_SIZE):
            self.pages[target + offset] = self.pages.pop(source + offset)

    def view(self, address: int, length: int) -> memoryview:
        for one in self.ranges:
            if one.address <= address < one.address + one.length:
                return memoryview(one.bytes)[address - one.address : address - one.address + length]
        raise AssertionError("no such memory")

    def movements(self) -> tuple[bytes, ...] | None:
        return (b"%d" % self.handed_out,)

    def snapshot(self, address: int, length: int, *, counts: bool) -> FakeState | None:
        self.snapshots += 1
        if self.memory_map is None:
            return None
        found = [self.pages.get(one, (0, ABSENT)) for one in range(address, address + length, PAGE_SIZE)]
        pins = [self.pins.get(one, 0) for one in range(address, address + length, PAGE_SIZE)]
        if self.hidden:
            found = [(0, UNKNOWN)] * len(found)
        return FakeState(
            numpy.array([pfn for pfn, _ in found], dtype=numpy.uint64),
            numpy.array([place for _, place in found], dtype=numpy.uint8),
            numpy.array([1 + 1024 * n for n in pins]) if counts else None,
            problems=["PFNs are hidden"] if self.hidden else [],
        )

    def same_places(self, state: FakeState) -> bool:
        places = dict(self.pages.values())
        return all(
            places.get(int(pfn), ABSENT) == place for pfn, place in zip(state.pfn, state.place, strict=True)
        )

    def mappings(self, address: int, length: int) -> list[str]:
        return [
            f"{one.address:x}-{one.address + one.length:x} rw-p 00000000 00:00 0"
            for one in self.ranges
            if one.address < address + length and address < one.address + one.length
        ]

    def move_out(self, address: int, length: int) -> None:
        pages = range(address, address + length, PAGE_SIZE)
        stuck = [one for one in pages if self.pages[one][1] == CMA and self.pins.get(one)]
        for one in pages:
            if self.pages[one][1] == CMA and one not in stuck:
                self.handed_out += 1
                self.pages[one] = (5000 + self.handed_out, 0)
        if stuck:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def hold(self, kind: str, address: int, length: int) -> FakePin:
        if kind in self.refuse:
            raise OSError(self.refuse[kind], os.strerror(self.refuse[kind]))
        if kind == "longterm":
            self.move_out(address, length)
        return FakePin(self, kind, address, length)

    def default_pin(self) -> tuple[str, str]:
        return "pin", "process-vm"

    def hold_default(self, address: int, length: int) -> FakePin:
        return self.hold("pin", address, length)

    def why_no_cuda(self) -> str:
        return "there is none"

    def device(self) -> FakeDevice:
        return self._device

    def available_memory(self) -> int:
        return self.available - len(self.pages) * PAGE_SIZE

    def zones(self) -> list[Zone]:
        return []

    def node_cpus(self, node: int) -> set[int]:
        return set()

    def allocate_on_node(self, node: int | None) -> None:
        if node is not None and node > 1:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self.node = node

    def give_back(self, address: int, marks: Any) -> None:
        for index in numpy.flatnonzero(marks):
            self.pages.pop(address + int(index) * PAGE_SIZE, None)

    def cma_cap(self) -> int | None:
        return self.cap

    def start_pressure(self) -> None: ...

    def press(self, wanted: int, node: int | None) -> None:
        self.pressed.append((wanted, node))

    def release_pressure(self) -> None:
        self.pressed.append((0, None))

    def close(self) -> None: ...


class Bench:
    """A stage, and the record that it writes."""

    def __init__(
        self, path: Path, backend: FakeBackend, change: Change | None = None, tracer: Any = None
    ) -> None:
        self.backend = backend
        self.writer = RecordWriter(path / FILE_NAME, {})
        self.stage = Stage(backend, self.writer, scenario="s", change=change, tracer=tracer)

    def events(self, *types: str) -> list[dict[str, Any]]:
        return [
            event for event in read_record(self.writer.path).events if not types or event["event"] in types
        ]


def places(event: dict[str, Any], key: str = "pages") -> list[str]:
    return [place for _, count, place in event[key]["place"] for _ in range(count)]


class RealMemory(FakeBackend):
    """A fake machine whose memory is this process' own."""

    def __init__(self) -> None:
        super().__init__()
        self.memory_map = None

    def allocate(self, length: int, backing: str) -> Any:
        return Range.memfd(length) if backing == "memfd" else Range.anonymous(length, huge=False)

    def view(self, address: int, length: int) -> memoryview:
        import ctypes

        return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def steps(stage: Stage) -> list[dict[str, Any]]:
    return [event for event in read_record(stage._writer.path).events if event["event"] == "step"]
