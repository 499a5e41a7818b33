"""The machine as the runner needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from regrepro import reservations
from regrepro.kernel import memoryblocks, reclaim
from regrepro.kernel.journal import Journal
from regrepro.kernel.memorymap import read_memory_map
from regrepro.kernel.node import node_facts
from regrepro.kernel.trace import Tracer as KernelTracer
from regrepro.lab.token import in_lab_guest
from regrepro.options import RunOptions
from regrepro.stage.ports import Backend, MemoryMap, Tracer
from regrepro.stage.rdma import find_device, software_driver
from regrepro.stage.system import System


class Environment:
    """The machine as the runner needs it. Tests put their own in its place."""

    def __init__(self) -> None:
        self.in_lab = in_lab_guest()

    def node_facts(self) -> dict[str, Any]:
        return node_facts()

    def reclaim(self) -> list[str]:
        """Give back what killed runs left; return a sentence for each thing."""
        return reclaim.reclaim()

    def journal(self) -> Any:
        """Return the journal of this run: what it must give back, also after a kill, at the next start."""
        return Journal()

    def memory_map(self) -> MemoryMap:
        return read_memory_map()

    def block_events(self) -> Any:
        """Count changes of memory blocks from now on."""
        return memoryblocks.BlockEvents()

    def online_movable(
        self, journal: Any, memory_map: Any, report: Callable[[dict[str, Any]], object]
    ) -> Any:
        """Make a block of unpinnable memory; `report` gets each step. Raises `Unmet`."""
        return memoryblocks.online_movable(journal, memory_map=memory_map, report=report)

    def tracer(self, journal: Any) -> Tracer:
        return KernelTracer(journal)

    def reservations(self, given: Iterable[str]) -> list[dict[str, Any]]:
        """Return what this boot made of its arguments; `given`: those of `--boot`."""
        return [item.as_record() for item in reservations.read(given)]

    def stand_ins(self, options: RunOptions) -> list[dict[str, str]]:
        """Return what stands in for CUDA and for an RDMA card, for the header."""
        made = []
        if options.cuda.startswith("standin:"):
            asks = "with" if options.cuda == "standin:longterm" else "without"
            what = f"pins host memory {asks} FOLL_LONGTERM; its device memory is a memfd"
            made.append((options.cuda, "CUDA and NVIDIA's driver", what))
        device, _ = find_device(options)
        driver = software_driver(device) if device is not None else None
        if device is None:
            what = "registers by io_uring fixed buffers: the same FOLL_LONGTERM pin as for an MR"
            made.append(("io-uring", "an RDMA device", what))
        elif driver is not None:
            what = f"{device} is RDMA in software; it registers by the kernel's common ib_umem_get"
            made.append((driver, "an RDMA card, such as a ConnectX", what))
        return [{"name": name, "replaces": replaced, "what": what} for name, replaced, what in made]

    def backend(self, options: RunOptions, memory_map: MemoryMap | None) -> Backend:
        return System(options, memory_map, in_lab=self.in_lab)
