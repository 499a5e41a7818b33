"""The real machine behind the stage's ports: the C core, the kernel's view, and what the options chose."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy

from regrepro.core import cuda, pins, placement
from regrepro.core.memory import Range as Memory
from regrepro.core.memory import gather, vma_lines
from regrepro.errors import RegreproError, Unmet
from regrepro.kernel import procfs
from regrepro.kernel.pagestate import PageReader
from regrepro.kernel.pressure.pressure import Pressure
from regrepro.kernel.zones import Zone, read_meminfo, read_zones
from regrepro.options import RunOptions
from regrepro.stage import disk, hugepages
from regrepro.stage.cuda_memory import CudaPin
from regrepro.stage.ports import PAGE_SIZE, PIN_OWNERS, Device, HeldPin, MemoryMap, PageState, Range
from regrepro.stage.rdma import open_device


def parse_cpu_list(text: str) -> set[int]:
    """Return the CPUs of a list as the kernel prints it: `0-3,8`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


class System:
    """The real backend. Made in the parent; what a pass opens, it opens itself, in its own process."""

    def __init__(self, options: RunOptions, memory_map: MemoryMap | None, *, in_lab: bool = False) -> None:
        self.options = options
        self.memory_map = memory_map
        self.in_lab = in_lab
        self._reader: Any = None
        self._device: Device | None = None
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
        if backing == "hugetlb":
            size = hugepages.default_size()
            if self.in_lab:
                self._grow_pool(length // size)
            return Memory.hugetlb(length, size)
        if backing == "file":
            return self._file(length)
        if backing in ("memfd", "shm"):
            return Memory.memfd(length) if backing == "memfd" else Memory.shm(length)
        # Ballast is only held: huge pages are had faster, where they make the kernel move no others.
        huge = placement.quiet_huge_pages() if backing == "ballast" else backing == "thp"
        return Memory.anonymous(length, huge=huge)

    def _grow_pool(self, pages: int) -> None:
        """Have so many free huge pages in the pool, in a guest of the lab; `close` undoes it."""
        lacking = pages - hugepages.Pool.free()
        if lacking > 0:
            have = int(hugepages.COUNT.read_text())
            if self._pool_before is None:
                self._pool_before = have
            hugepages.COUNT.write_text(str(have + lacking))

    def _file(self, length: int) -> Range:
        """Map a file that the kernel writes back to a disk; it has no name any more, so that none stays."""
        if self._disk is None:
            self._disk = disk.written_back(self.in_lab)
        with tempfile.NamedTemporaryFile(prefix="regrepro-", dir=self._disk) as file:
            return Memory.file(file.name, length)

    def reserve(self, length: int) -> Range:
        """Reserve addresses for pages that are moved in; huge pages stay out of them."""
        return Memory.anonymous(length, huge=False, reserve_only=True)

    gather = staticmethod(gather)

    def move(self, source: int, target: int, length: int) -> None:
        """Move the pages of a range to other addresses, whatever is mapped there; the physical pages stay."""
        pages = numpy.arange(length // PAGE_SIZE, dtype=numpy.uint64) * numpy.uint64(PAGE_SIZE)
        self.gather(pages + numpy.uint64(source), target)

    def view(self, address: int, length: int) -> memoryview:
        """Return the bytes of a range, writable."""
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
            self._reader = PageReader(cast("Any", self.memory_map))
        return self._reader

    mappings = staticmethod(vma_lines)

    def default_pin(self) -> tuple[str, str]:
        """Return kind and owner of the pin of this run: CUDA's where `--cuda` gives one."""
        kind = default_contract(self.options)
        cuda = self.cuda()
        return (kind, cuda.owner) if cuda is not None else (kind, PIN_OWNERS[kind])

    def hold_default(self, address: int, length: int) -> HeldPin:
        """Take the pin of this run over a range. Raises OSError."""
        cuda = self.cuda()
        if cuda is not None:
            return CudaPin(cuda, address, length)
        return self.hold(default_contract(self.options), address, length)

    def why_no_cuda(self) -> str:
        """Return why there is no CUDA in this run; empty where there is."""
        return "" if self.cuda() is not None else self._no_cuda

    def cuda(self) -> Any:
        """Return the CUDA of this run (`core.cuda.Cuda`), or None. Raises `Unmet` where it was asked for.

        It is opened once a process: it does not survive a fork.
        """
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
        take = {"pin": pins.pin_process_vm, "get": pins.pin_vmsplice, "longterm": pins.pin_io_uring}
        return take[kind](address, length)

    def device(self) -> Device:
        """Open what this run registers with, once for each process. Raises `Unmet`."""
        if self._device is None:
            self._device = open_device(self.options)
        return self._device

    registrar = device  # its name in users' files

    def movements(self) -> tuple[bytes, ...] | None:
        """Return counts that grow when a page may have got another frame; None where the kernel keeps none.

        Migrations, swap and collapses are the whole system's (/proc/vmstat, `vmstat_text` in mm/vmstat.c),
        faults are this process' own, those that GUP takes for it included (`mm_account_fault`, mm/memory.c).
        """
        if self._vmstat < 0:
            try:
                self._vmstat = os.open(procfs.VMSTAT, os.O_RDONLY | os.O_CLOEXEC)
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
        memory = read_meminfo()
        return memory.get("MemAvailable", memory.get("MemFree", 0) // 2)

    def zones(self) -> list[Zone]:
        """Return the zones as /proc/zoneinfo shows them now; empty where it is closed."""
        try:
            return read_zones()
        except OSError:
            return []

    def node_cpus(self, node: int) -> set[int]:
        """Return the CPUs of a NUMA node; empty where it has none or the kernel knows no nodes."""
        try:
            return parse_cpu_list(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
        except (OSError, ValueError):
            return set()

    allocate_on_node = staticmethod(placement.allocate_on_node)
    give_back = staticmethod(placement.drop_pages)

    def cma_cap(self) -> int | None:
        """Return how many more bytes of CMA this pass may take: half of what was free at first stays free.
        None where the kernel has no CMA.
        """
        free = sum(zone.free_cma or 0 for zone in self.zones()) * PAGE_SIZE
        if self._cma_at_start is None:
            self._cma_at_start = free
        return max(0, free - self._cma_at_start // 2) if self._cma_at_start else None

    def start_pressure(self) -> None:
        """Start the process that `--place pressure` holds memory in, before this one pins anything.

        Raises `Unmet`.
        """
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
                hugepages.COUNT.write_text(str(self._pool_before))
            self._pool_before = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._vmstat >= 0:
            os.close(self._vmstat)
            self._vmstat = -1
        if self._device is not None:
            with suppress(OSError, RegreproError):
                self._device.close()
            self._device = None
        if self._cuda is not None:
            self._cuda.close()
            self._cuda = None


_MOVING = (
    b"\npgmigrate_success ",
    b"\nthp_migration_success ",
    b"\nthp_collapse_alloc ",
    b"\npswpout ",
)

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def default_contract(options: RunOptions) -> str:
    """Return the kind of the pin of a run. What a real driver asks for is measured, not known beforehand."""
    return "longterm" if options.cuda == "standin:longterm" else "pin"
