"""What the stage needs of the world. `system.System` is the real thing; tests have their own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from regrepro.errors import Unmet
from regrepro.options import RunOptions

if TYPE_CHECKING:
    from regrepro.kernel.zones import Zone

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")

# Codes of kernel/memorymap.py, repeated: a user's list of scenarios need not load numpy.
ORDINARY = 0
UNPINNABLE = (1, 2, 3)  # CMA, isolate, movable zone
UNKNOWN = 254


class Range(Protocol):
    """A mapped range of memory (`core.memory.Range`)."""

    address: int
    length: int

    def populate(self, threads: int = 1) -> Any: ...
    def fill(self, seed: int) -> Any: ...
    def checksum(self) -> int: ...
    def vma(self) -> str: ...
    def close(self) -> Any: ...


class HeldPin(Protocol):
    """A pin that is held until released (`core.pins.HeldPin`, or CUDA's)."""

    owner: str
    api: str

    def alive(self) -> bool | None: ...
    def release(self) -> Any: ...


class MemoryRegion(Protocol):
    """A registration that succeeded."""

    lkey: int | None
    rkey: int | None

    def deregister(self) -> None: ...


class Device(Protocol):
    """An RDMA device, or io_uring in its place. A refusal to register is an `OSError` with the errno."""

    name: str
    verb: str
    verbs: tuple[str, ...]
    stand_in: str | None
    default_access: tuple[str, ...]

    def register(
        self, verb: str, address: int, length: int, *, iova: int, access: tuple[str, ...], fd: int | None
    ) -> MemoryRegion: ...
    def transfer(self, source: MemoryRegion, target: MemoryRegion, length: int, opcode: str) -> None: ...
    def close(self) -> None: ...


class PageState(Protocol):
    """The pages of a range at one moment (`kernel.pagestate.PageState`); arrays, one item a page."""

    pfn: Any
    place: Any
    problems: list[str]

    def as_record(self) -> dict[str, Any]: ...


class MemoryMap(Protocol):
    """The node's memory (`kernel.memorymap.MemoryMap`)."""

    complete: bool
    has_unpinnable: bool | None
    problems: list[str]

    def as_record(self) -> dict[str, Any]: ...
    def check(self) -> dict[str, Any]: ...


class Tracer(Protocol):
    """The kernel's own trace (`kernel.trace.Tracer`)."""

    def status(self) -> tuple[bool, str]: ...
    def arm(self) -> bool: ...
    def follow(self, pid: int) -> None: ...
    def begin(self, *, stack: bool = False) -> Any: ...
    def end(self, token: Any, *, succeeded: bool = False) -> dict[str, Any]: ...
    def disarm(self) -> None: ...


class Backend(Protocol):
    """All that the stage asks of the machine."""

    options: RunOptions
    memory_map: MemoryMap | None
    in_lab: bool

    def allocate(self, length: int, backing: str) -> Range: ...
    def reserve(self, length: int) -> Range: ...
    def gather(self, sources: Any, target: int) -> None: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def view(self, address: int, length: int) -> memoryview: ...
    def snapshot(self, address: int, length: int, *, counts: bool) -> PageState | None: ...
    def same_places(self, state: PageState) -> bool: ...
    def mappings(self, address: int, length: int) -> list[str] | None: ...
    def hold(self, kind: str, address: int, length: int) -> HeldPin: ...
    def default_pin(self) -> tuple[str, str]: ...
    def hold_default(self, address: int, length: int) -> HeldPin: ...
    def cuda(self) -> Any: ...
    def why_no_cuda(self) -> str: ...
    def device(self) -> Device: ...
    def movements(self) -> tuple[bytes, ...] | None: ...
    def available_memory(self) -> int: ...
    def zones(self) -> list[Zone]: ...
    def node_cpus(self, node: int) -> set[int]: ...
    def allocate_on_node(self, node: int | None) -> None: ...
    def give_back(self, address: int, marks: Any) -> Any: ...
    def cma_cap(self) -> int | None: ...
    def start_pressure(self) -> None: ...
    def press(self, wanted: int, node: int | None) -> Any: ...
    def release_pressure(self) -> None: ...
    def close(self) -> None: ...


PIN_OWNERS = {"pin": "process-vm", "get": "vmsplice", "longterm": "io-uring"}
"""Who holds a pin of each kind where CUDA does not; all three stand in for a driver."""


def register_whole(device: Device, address: int, length: int) -> MemoryRegion:
    """Register a range as the device does by default. Raises OSError."""
    return device.register(device.verb, address, length, iova=address, access=device.default_access, fd=None)


def readable(state: PageState | None) -> bool:
    """Return whether a page state tells where the pages are: PFNs are hidden from an ordinary user."""
    if state is None:
        return False
    hidden = (state.pfn == 0) & (state.place == UNKNOWN)
    return not bool(hidden.any())


def told(state: PageState | None) -> PageState:
    """Return a page state that tells where the pages are. Raises `Unmet`."""
    if state is None or not readable(state):
        why = join(state.problems) if state is not None else ""
        raise Unmet("page-state", why or "where pages lie cannot be read here", "run as root")
    return state


def has_unpinnable(memory_map: MemoryMap | None) -> bool:
    """Return whether the node has unpinnable memory, or may have some. Raises `Unmet` where nothing tells."""
    if memory_map is None or memory_map.has_unpinnable is None:
        raise Unmet(
            "page-state",
            (join(memory_map.problems) if memory_map is not None else "")
            or "where pages lie cannot be read here",
            "run as root on a kernel with /proc/kcore and BTF",
        )
    return memory_map.has_unpinnable or not memory_map.complete


def join(problems: Iterable[str]) -> str:
    """Return sentences as one line."""
    return "; ".join(dict.fromkeys(" ".join(problem.split()) for problem in problems))
