"""What the stage stands on: the C core and the kernel's view, behind one seam that tests replace."""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

from regrepro.errors import RegreproError, Unmet
from regrepro.options import RunOptions

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


class Registrar(Protocol):
    """Registers memory: an RDMA device's verbs, or io_uring. A refusal is an `OSError` with the errno."""

    device: str
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
    def registrar(self) -> Registrar: ...
    def movements(self) -> tuple[bytes, ...] | None: ...
    def available_memory(self) -> int: ...
    def zones(self) -> list[Zone]: ...
    def node_cpus(self, node: int) -> set[int]: ...
    def allocate_on_node(self, node: int | None) -> None: ...
    def give_back(self, address: int, marks: Any) -> None: ...
    def cma_cap(self) -> int | None: ...
    def start_pressure(self) -> None: ...
    def press(self, wanted: int, node: int | None) -> Any: ...
    def release_pressure(self) -> None: ...
    def close(self) -> None: ...


class Zone:
    """One zone of /proc/zoneinfo; all counts are in pages."""

    __slots__ = ("free", "free_cma", "low", "managed", "name", "node", "present")

    def __init__(self, node: int, name: str) -> None:
        self.node = node
        self.name = name
        self.free = self.free_cma = self.low = self.managed = self.present = 0


def parse_zoneinfo(text: str) -> list[Zone]:
    """Return the zones of /proc/zoneinfo. `free_cma` is 0 where the kernel prints none (no CONFIG_CMA)."""
    zones: list[Zone] = []
    names = {"low": "low", "present": "present", "managed": "managed", "nr_free_cma": "free_cma"}
    for line in text.splitlines():
        head = re.match(r"Node (\d+), zone +(\S+)", line)
        if head:
            zones.append(Zone(int(head[1]), head[2]))
            continue
        words = line.split()
        if not zones or len(words) < 2:
            continue
        if words[:2] == ["pages", "free"]:
            zones[-1].free = int(words[2])
        elif words[0] in names and words[1].isdigit():
            setattr(zones[-1], names[words[0]], int(words[1]))
    return zones


def parse_cpu_list(text: str) -> set[int]:
    """Return the CPUs of a list as the kernel prints it: `0-3,8`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


PIN_OWNERS = {"pin": "process-vm", "get": "vmsplice", "longterm": "io-uring"}
"""Who holds a pin of each kind where CUDA does not; all three stand in for a driver."""


class System:
    """The real backend. Made in the parent; what a pass opens, it opens itself, in its own process."""

    def __init__(self, options: RunOptions, memory_map: MemoryMap | None, *, in_lab: bool = False) -> None:
        self.options = options
        self.memory_map = memory_map
        self.in_lab = in_lab
        self._reader: Any = None
        self._registrar: Registrar | None = None
        self._cuda: Any = None
        self._no_cuda = ""
        self._vmstat = -1
        self._pressure: Any = None
        self._cma_at_start: int | None = None
        self._pool_before: int | None = None
        self._disk: str | None = None
        # What the holder of `--place pressure` holds and wants to hold, for the runner to see: bytes.
        self.pressing = mmap.mmap(-1, mmap.PAGESIZE) if options.place == "pressure" else None

    def allocate(self, length: int, backing: str) -> Range:
        """Map memory of the given backing; nothing is touched. Raises OSError, `Unmet`."""
        from regrepro.core.memory import Range as Memory

        if backing == "anonymous":
            return Memory.anonymous(length, huge=False)
        if backing == "ballast":
            # Only held: huge pages are had faster, where they make the kernel move no others.
            from regrepro.core.placement import quiet_huge_pages

            return Memory.anonymous(length, huge=quiet_huge_pages())
        if backing == "thp":
            return Memory.anonymous(length, huge=True)
        if backing == "memfd":
            return Memory.memfd(length)
        if backing == "shm":
            return Memory.shm(length)
        if backing == "hugetlb":
            size = default_huge_page_size()
            if self.in_lab:
                self._grow_pool(length // size)
            return Memory.hugetlb(length, size)
        if backing == "file":
            return self._file(length)
        raise AssertionError(backing)

    def _grow_pool(self, pages: int) -> None:
        """Have so many free huge pages in the pool, in a guest of the lab; `close` undoes it."""
        free = re.search(r"^HugePages_Free: +(\d+)", Path("/proc/meminfo").read_text(), re.M)
        lacking = pages - int(free[1]) if free else 0
        if lacking > 0:
            have = int(HUGE_PAGES.read_text())
            if self._pool_before is None:
                self._pool_before = have
            HUGE_PAGES.write_text(str(have + lacking))

    def _file(self, length: int) -> Range:
        """Map a file that the kernel writes back to a disk; it has no name any more, so that none stays."""
        import tempfile

        from regrepro.core.memory import Range as Memory
        from regrepro.stage.faults import written_back

        if self._disk is None:
            self._disk = written_back(self.in_lab)
        with tempfile.NamedTemporaryFile(prefix="regrepro-", dir=self._disk) as file:
            return Memory.file(file.name, length)

    def reserve(self, length: int) -> Range:
        """Reserve addresses for pages that are moved in; huge pages stay out of them."""
        from regrepro.core.memory import Range as Memory

        return Memory.anonymous(length, huge=False, reserve_only=True)

    def gather(self, sources: Any, target: int) -> None:
        """Move pages, by their addresses, to consecutive pages from `target` on; the physical pages stay."""
        from regrepro.core.memory import gather

        gather(sources, target)

    def move(self, source: int, target: int, length: int) -> None:
        """Move the pages of a range to other addresses, whatever is mapped there; the physical pages stay."""
        import numpy

        pages = numpy.arange(length // PAGE_SIZE, dtype=numpy.uint64) * numpy.uint64(PAGE_SIZE)
        self.gather(pages + numpy.uint64(source), target)

    def view(self, address: int, length: int) -> memoryview:
        """Return the bytes of a range, writable."""
        import ctypes

        return memoryview((ctypes.c_char * length).from_address(address)).cast("B")

    def snapshot(self, address: int, length: int, *, counts: bool) -> PageState | None:
        """Read the state of a range's pages; None where there is no map to read them by."""
        if self.memory_map is None:
            return None
        state: PageState = self._open_reader().snapshot(address, length, counts=counts)
        return state

    def same_places(self, state: PageState) -> bool:
        """Return whether the frames of a state that was read before lie in the same places now."""
        return bool(self._open_reader().same_places(state))

    def _open_reader(self) -> Any:
        if self._reader is None:
            from regrepro.kernel.pagestate import PageReader

            self._reader = PageReader(cast("Any", self.memory_map))
        return self._reader

    def mappings(self, address: int, length: int) -> list[str] | None:
        """Return the lines of /proc/self/maps that a range touches now; None where they cannot be read."""
        from regrepro.core.memory import vma_lines

        return vma_lines(address, length)

    def default_pin(self) -> tuple[str, str]:
        """Return kind and owner of the pin of this run: CUDA's where `--cuda` gives one."""
        kind = default_contract(self.options)
        cuda = self._open_cuda()
        return (kind, cuda.owner) if cuda is not None else (kind, PIN_OWNERS[kind])

    def hold_default(self, address: int, length: int) -> HeldPin:
        """Take the pin of this run over a range. Raises OSError."""
        cuda = self._open_cuda()
        if cuda is not None:
            from regrepro.stage.cuda_memory import CudaPin

            return CudaPin(cuda, address, length)
        return self.hold(default_contract(self.options), address, length)

    def cuda(self) -> Any:
        """Return the CUDA of this run (`core.cuda.Cuda`), or None. Raises `Unmet` as asked."""
        return self._open_cuda()

    def why_no_cuda(self) -> str:
        """Return why there is no CUDA in this run; empty where there is."""
        return "" if self._open_cuda() is not None else self._no_cuda

    def _open_cuda(self) -> Any:
        """Open CUDA once a process: it does not survive a fork. Raises `Unmet` where it was asked for."""
        mode = self.options.cuda
        if self._cuda is None and not self._no_cuda:
            if mode == "none":
                self._no_cuda = "--cuda none"
            elif mode == "auto" and not NVIDIA_DRIVER.exists():
                self._no_cuda = f"no NVIDIA driver is loaded ({NVIDIA_DRIVER} is missing)"
            else:
                self._cuda = self._try_cuda(mode)
        return self._cuda

    def _try_cuda(self, mode: str) -> Any:
        from regrepro.core import cuda

        try:
            return cuda.open_cuda("real" if mode == "auto" else mode, self.options.gpu)
        except (RegreproError, cuda.CudaError) as error:
            self._no_cuda = str(error)
            if mode == "auto":
                return None
            raise Unmet(
                "cuda", self._no_cuda, "run on a GPU node, or use --cuda standin:pin or standin:longterm"
            ) from None

    def hold(self, kind: str, address: int, length: int) -> HeldPin:
        """Take a pin of a kind over a range. Raises OSError with the kernel's errno."""
        from regrepro.core import pins

        if kind == "pin":
            return pins.pin_process_vm(address, length)
        if kind == "get":
            return pins.pin_vmsplice(address, length)
        return pins.pin_io_uring(address, length)

    def registrar(self) -> Registrar:
        """Open the registrar of this run, once for each process. Raises `Unmet`."""
        if self._registrar is None:
            from regrepro.stage.registrars import open_registrar

            self._registrar = open_registrar(self.options)
        return self._registrar

    def movements(self) -> tuple[bytes, ...] | None:
        """Return counts that grow when a page may have got another frame; None where the kernel keeps none.

        Migrations, swap and collapses are the whole system's (/proc/vmstat, `vmstat_text` in mm/vmstat.c),
        faults are this process' own, those that GUP takes for it included (`mm_account_fault`, mm/memory.c).
        """
        if self._vmstat < 0:
            try:
                self._vmstat = os.open("/proc/vmstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
        text = os.pread(self._vmstat, 1 << 16, 0)
        if b"\npgmigrate_success " not in text:
            return None
        counts = []
        for name in _MOVING:
            start = text.find(name)
            if start >= 0:
                counts.append(text[start : text.find(b"\n", start + 1)])
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return (*counts, b"%d %d" % (usage.ru_minflt, usage.ru_majflt))

    def available_memory(self) -> int:
        """Return MemAvailable in bytes; half of what is free on kernels without it."""
        text = Path("/proc/meminfo").read_text()
        found = re.search(r"^MemAvailable: +(\d+) kB", text, re.M)
        if found:
            return int(found[1]) * 1024
        free = re.search(r"^MemFree: +(\d+) kB", text, re.M)
        return int(free[1]) * 512 if free else 0

    def zones(self) -> list[Zone]:
        """Return the zones as /proc/zoneinfo shows them now; empty where it is closed."""
        try:
            return parse_zoneinfo(Path("/proc/zoneinfo").read_text())
        except OSError:
            return []

    def node_cpus(self, node: int) -> set[int]:
        """Return the CPUs of a NUMA node; empty where it has none or the kernel knows no nodes."""
        try:
            return parse_cpu_list(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
        except (OSError, ValueError):
            return set()

    def allocate_on_node(self, node: int | None) -> None:
        """Have this process allocate on one NUMA node from now on; None: wherever it runs. Raises OSError."""
        from regrepro.core.placement import allocate_on_node

        allocate_on_node(node)

    def give_back(self, address: int, marks: Any) -> None:
        """Give back those pages from `address` on whose mark is not 0; the range stays mapped."""
        from regrepro.core.placement import drop_pages

        drop_pages(address, marks)

    def cma_cap(self) -> int | None:
        """Return how many more bytes of CMA this pass may take: half of what was free at first stays free.
        None where the kernel has no CMA.
        """
        free = sum(zone.free_cma for zone in self.zones()) * PAGE_SIZE
        if self._cma_at_start is None:
            self._cma_at_start = free
        return max(0, free - self._cma_at_start // 2) if self._cma_at_start else None

    def start_pressure(self) -> None:
        """Start the process that `--place pressure` holds memory in, before this one pins anything.

        Raises `Unmet`.
        """
        from regrepro.kernel.pressure import Pressure

        pressing = self.pressing

        def report(held: int, goal: int) -> None:
            if pressing is not None:
                pressing[:16] = held.to_bytes(8, "little") + goal.to_bytes(8, "little")

        self._pressure = Pressure(
            limit=self.options.pressure_limit or self.available_memory() // 2,
            memory_map=cast("Any", self.memory_map),
            beside_gpu_jobs=self.options.pressure_beside_gpu_jobs,
            report=report,
        )
        self._pressure.start()

    def press(self, wanted: int, node: int | None) -> Any:
        """Hold ordinary memory until the next `wanted` bytes come out of unpinnable memory. Raises `Unmet`.

        `release_pressure` ends it.
        """
        if self._pressure is None:
            self.start_pressure()
        return self._pressure.press(wanted, node=node)

    def release_pressure(self) -> None:
        """Give back what `press` holds."""
        if self._pressure is not None:
            self._pressure.release()
        if self.pressing is not None:
            self.pressing[:16] = bytes(16)

    def close(self) -> None:
        """Close what this process opened."""
        if self._pressure is not None:
            self._pressure.close()
            self._pressure = None
        if self._pool_before is not None:
            with suppress(OSError):
                HUGE_PAGES.write_text(str(self._pool_before))
            self._pool_before = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._vmstat >= 0:
            os.close(self._vmstat)
            self._vmstat = -1
        if self._registrar is not None:
            with suppress(OSError, RegreproError):
                self._registrar.close()
            self._registrar = None
        if self._cuda is not None:
            self._cuda.close()
            self._cuda = None


_MOVING = (
    b"\npgmigrate_success ",
    b"\nthp_migration_success ",
    b"\nthp_collapse_alloc ",
    b"\npswpout ",
)

HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def default_contract(options: RunOptions) -> str:
    """Return the kind of the pin of a run. What a real driver asks for is measured, not known beforehand."""
    return "longterm" if options.cuda == "standin:longterm" else "pin"


def default_huge_page_size() -> int:
    """Return the default hugetlb page size in bytes. Raises `Unmet` where the kernel has none."""
    found = re.search(r"^Hugepagesize: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    if not found:
        raise Unmet("hugetlb", "this kernel has no CONFIG_HUGETLBFS", "use a kernel that has it")
    return int(found[1]) * 1024


def readable(state: PageState | None) -> bool:
    """Return whether a page state tells where the pages are: PFNs are hidden from an ordinary user."""
    if state is None:
        return False
    hidden = (state.pfn == 0) & (state.place == UNKNOWN)
    return not bool(hidden.any())


def join(problems: Iterable[str]) -> str:
    """Return sentences as one line."""
    return "; ".join(dict.fromkeys(" ".join(problem.split()) for problem in problems))
