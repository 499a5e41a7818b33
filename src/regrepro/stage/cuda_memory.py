"""CUDA's memory on the stage: mapped host memory, device memory, dma-buf descriptors; each one recorded.

`cudaHostAlloc` maps and pins in one call, so nothing can look at its pages in between, and `cudaFreeHost`
gives pin and pages back in one. Here the pages are kept across the release (they are moved aside by `mremap`,
which keeps the physical page, and moved back to where they were): so the registration that failed can be
tried again on the same pages at the same address with nothing but the pin gone.
"""

from __future__ import annotations

import errno as errnos
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrepro.errors import Unmet, UsageError, errno_name
from regrepro.stage import buffers
from regrepro.stage.buffers import Buffer, Place
from regrepro.stage.pages import Look
from regrepro.stage.pins import Pin, refusal_facts
from regrepro.stage.ports import ORDINARY, PAGE_SIZE, UNPINNABLE, Backend, has_unpinnable, readable
from regrepro.stage.rdma import find_device
from regrepro.stage.search import Search, Wanted

if TYPE_CHECKING:
    from regrepro.stage.stage import Stage

PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")
_MODULES = Path("/sys/module")

_HOW_TO_CUDA = "run on a GPU node, or with --cuda standin:pin or standin:longterm"

# A driver's pages that are not in the page tables as ordinary pages: VmFlags of /proc/PID/smaps
# (show_smap_vma_flags, fs/proc/task_mmu.c): pf VM_PFNMAP, io VM_IO, mm VM_MIXEDMAP.
_DRIVER_FLAGS = frozenset({"pf", "io", "mm"})
# Draws of a search that nothing tells apart any more: enough to empty the per-CPU lists of free pages.
_DRAWS = 48
_FIRST_BALLAST = 4 << 20

# CUDA hides the errno behind its own error; the record needs one beside CUDA's own name (enum cudaError).
_ERRNO_OF = {
    1: errnos.EINVAL,  # cudaErrorInvalidValue
    2: errnos.ENOMEM,  # cudaErrorMemoryAllocation
    35: errnos.ENXIO,  # cudaErrorInsufficientDriver
    100: errnos.ENODEV,  # cudaErrorNoDevice
    101: errnos.ENODEV,  # cudaErrorInvalidDevice
    712: errnos.EEXIST,  # cudaErrorHostMemoryAlreadyRegistered
    713: errnos.ENOENT,  # cudaErrorHostMemoryNotRegistered
    801: errnos.EOPNOTSUPP,  # cudaErrorNotSupported
}


class CudaRefusal(OSError):
    """A call that CUDA refused. `cuda_error` is CUDA's own name of it; the errno is the system call's where a
    stand-in tells it, else the nearest to CUDA's error.
    """

    def __init__(self, number: int, text: str, cuda_error: str) -> None:
        super().__init__(number, text)
        self.cuda_error = cuda_error


def ask(call: Callable[[], Any]) -> Any:
    """Make a call of `core.cuda`; raise `CudaRefusal` (an OSError) for its CudaError."""
    from regrepro.core.cuda import CudaError

    try:
        return call()
    except CudaError as error:
        number = error.errno or _ERRNO_OF.get(error.code, errnos.EIO)
        raise CudaRefusal(number, str(error), error.name) from None


class CudaPin:
    """A pin that CUDA holds, by `cudaHostRegister`. Raises `CudaRefusal`."""

    api = "cudaHostRegister"

    def __init__(self, cuda: Any, address: int, length: int) -> None:
        self.owner: str = cuda.owner
        self._cuda = cuda
        self._address = address
        ask(lambda: cuda.host_register(address, length))

    def alive(self) -> bool | None:
        """Return whether it is held: the stand-in knows, NVIDIA's driver cannot be asked (None)."""
        answer: bool | None = self._cuda.pin_alive(self._address)
        return answer

    def release(self) -> None:
        ask(lambda: self._cuda.host_unregister(self._address))


class HostAllocation:
    """Memory of `cudaHostAlloc`: a range of memory and the pin that came with it, in one.

    As a range it has the methods of `core.memory.Range`, as a pin those of a held pin.
    """

    api = "cudaHostAlloc"

    def __init__(self, backend: Backend, cuda: Any, length: int, flags: tuple[str, ...]) -> None:
        self.owner: str = cuda.owner
        self.length = length
        self._backend = backend
        self._cuda = cuda
        self._held = True
        self._mapped = True
        from regrepro.core.memory import Range

        self.address: int = ask(lambda: cuda.host_alloc(length, flags))
        self._range = Range(self.address, length, "cuda-host")

    def alive(self) -> bool | None:
        """Return whether it is held: the stand-in knows, NVIDIA's driver cannot be asked (None)."""
        answer: bool | None = self._held and self._cuda.pin_alive(self.address)
        return answer

    def release(self) -> None:
        """`cudaFreeHost`, with the pages kept where they are. Raises OSError.

        Pages that are the driver's own cannot be kept and go. Where CUDA keeps the addresses to itself, the
        pages cannot come back: EEXIST.
        """
        if not self._held:
            return
        if vma_facts(self.address)["page_kind"] != "anonymous":
            self._free()
            self._mapped = False
            return
        aside = self._backend.reserve(self.length)
        try:
            self._backend.move(self.address, aside.address, self.length)
            self._mapped = False
            self._free()
            if vma_facts(self.address)["vma"]:
                raise OSError(
                    errnos.EEXIST, "CUDA keeps these addresses mapped, so that its pages cannot come back"
                )
            self._backend.move(aside.address, self.address, self.length)
            self._mapped = True
        finally:
            aside.close()

    def _free(self) -> None:
        self._held = False
        ask(lambda: self._cuda.free_host(self.address))

    @property
    def readable(self) -> bool:
        """Whether the bytes are still there."""
        return self._mapped

    def populate(self, threads: int = 1) -> None:
        """CUDA has done so."""

    def fill(self, seed: int) -> None:
        self._range.fill(seed)

    def checksum(self) -> int:
        return self._range.checksum() if self._mapped else 0

    def vma(self) -> str:
        return self._range.vma()

    def close(self) -> None:
        """Give all back: by `cudaFreeHost`, or by unmapping the pages that outlived it."""
        if self._held:
            self._free()
        elif self._mapped:
            self._range.close()
        self._mapped = False


class NoHostMemory:
    """A range without a page of this host: no byte of it is read or written. CUDA refused it, or it is a
    GPU's.
    """

    def __init__(self, length: int) -> None:
        self.address = 0
        self.length = length

    def populate(self, threads: int = 1) -> None: ...

    def fill(self, seed: int) -> None: ...

    def checksum(self) -> int:
        return 0

    def vma(self) -> str:
        return ""

    def close(self) -> None: ...


class DeviceAllocation(NoHostMemory):
    """Memory of the GPU; what a stand-in gives for it is never looked at."""

    def __init__(self, cuda: Any, length: int, gpu: int, *, vmm: bool) -> None:
        super().__init__(length)
        self._cuda = cuda
        self._vmm: Any = None
        self._mapped = True
        if vmm:
            self._vmm = ask(lambda: cuda.vmm_alloc(length, gpu))
            self.address, self.length = self._vmm.address, self._vmm.length
        else:
            self.address = ask(lambda: cuda.malloc(length))

    def close(self) -> None:
        if self._mapped:
            self._mapped = False
            ask(lambda: self._cuda.vmm_free(self._vmm) if self._vmm else self._cuda.free(self.address))


class CudaBuffer(Buffer):
    """A buffer that CUDA allocated. `readable` tells whether its bytes can be looked at."""

    owner = "cuda"

    @property
    def readable(self) -> bool:
        return bool(getattr(self._memory, "readable", False)) and not self.freed

    def checksum(self) -> int | None:  # type: ignore[override]
        """Return a checksum of the whole buffer, None where its bytes cannot be had (device memory)."""
        return int(self._memory.checksum()) if self.readable else None


class CudaMemory:
    """What a body does with CUDA beyond `stage.pin()`: `stage.cuda`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @property
    def _cuda(self) -> Any:
        """The CUDA of this run. Raises `Unmet`."""
        cuda = self._stage.backend.cuda()
        if cuda is None:
            raise Unmet("cuda", self._stage.backend.why_no_cuda(), _HOW_TO_CUDA)
        return cuda

    def host_alloc(
        self,
        *,
        pages: int | None = None,
        length: int | None = None,
        place: Place = "any",
        flags: tuple[str, ...] = ("mapped",),
    ) -> Pin:
        """`cudaHostAlloc`: return the pin that came with the memory; `pin.buffer` is the memory itself.

        False where CUDA refused. `place`: `any`, `ordinary` (every page), or `unpinnable` (at least one page:
        CUDA maps its own memory, which cannot be put together page by page). In a control that changes the
        pin it is memory of the same kind without CUDA: anonymous, mapped and touched, pinned as the control
        says. Raises `Unmet` where the pages cannot be placed.
        """
        stage = self._stage
        if stage._change is not None and stage._change.variable == "pin":
            return stage.pin(stage.buffer(pages=pages, length=length, place=place))
        size, asked = buffers.size_of(pages, length), stage._place(place)
        if not isinstance(asked, str):
            raise UsageError(f"place={asked!r} is not for cudaHostAlloc", hint="any, ordinary or unpinnable")
        cuda, backend = self._cuda, stage.backend
        kind, owner = backend.default_pin()
        drawn, placed, search = draw(stage, size, asked, lambda: HostAllocation(backend, cuda, size, flags))
        number, memory = stage._next("buffer"), drawn.memory
        buffer = CudaBuffer(stage, number, memory or NoHostMemory(size), "cuda-host", placed)
        buffer.stand_in = cuda.stand_in
        pin = Pin(stage, stage._next("pin"), buffer, kind, owner)
        if memory is not None:
            memory.fill(number)
            stage._pins.append(pin)
            pin._held = [memory]
        else:
            buffer.freed = True
            buffer.no_pages = "CUDA did not give the memory"
        stage._add(buffer, asked, search, flags=list(flags))
        if drawn.error is not None:
            pin.errno = errno_name(drawn.error.errno or 0)
        stage._record_pin(
            pin,
            Look(None),
            stage._pages.look(buffer),
            pages_unknown="this call itself was to make the memory and pin it",
            api=HostAllocation.api,
            **refusal_facts(drawn.error),
            seconds=drawn.seconds,
            checksum=buffer.checksum(),
            trace=drawn.trace,
            stand_in=cuda.stand_in,
            offset=0,
            length=size,
        )
        if memory is not None:
            self.describe(buffer, HostAllocation.api)
        return pin

    def device_alloc(self, length: int, *, vmm: bool = False) -> CudaBuffer:
        """`cudaMalloc`, or the virtual-memory-management calls (`vmm`), of `length` bytes. Raises `Unmet`."""
        stage, cuda = self._stage, self._cuda
        size = buffers.size_of(None, length)
        call = "cuMemCreate" if vmm else "cudaMalloc"
        try:
            memory = DeviceAllocation(cuda, size, stage.backend.options.gpu, vmm=vmm)
        except OSError as error:
            raise Unmet("device-memory", str(error.strerror), "free memory on the GPU") from None
        backing = "cuda-vmm" if vmm else "cuda-device"
        buffer = CudaBuffer(stage, stage._next("buffer"), memory, backing, "as-allocated")
        buffer.stand_in = cuda.stand_in
        buffer.no_pages = "device memory has no page of this host"
        if cuda.stand_in:
            buffer.no_pages += " (a stand-in's has, and says nothing of a GPU's)"
        stage._add(buffer, "any", {})
        self.describe(buffer, call)
        return buffer

    def describe(self, buffer: Buffer, call: str = "cudaHostRegister") -> None:
        """Record what the memory is: mapping, page kind, places, counts, and what CUDA says of the address.

        It answers section 9's question by observation: imported user pages, or the driver's own.
        """
        stage = self._stage
        cuda = stage.backend.cuda()
        facts: dict[str, Any] = {}
        if not buffer.no_pages:
            facts = vma_facts(buffer.address)
            facts |= page_facts(stage._pages.look(buffer).state)
        if cuda is not None:
            facts["pointer"] = self._pointer(cuda, buffer.address)
            told = cuda.properties(stage.backend.options.gpu)
            facts |= {"cuda_versions": told.versions, "gpu": told.device, "gpu_sources": told.sources}
            if told.cuda_python is not None:
                facts["cuda_python"] = told.cuda_python
        stage._event(
            "step",
            name="cuda-memory",
            call=call,
            buffer=buffer.id,
            address=buffer.address,
            length=buffer.length,
            **facts,
            stand_in=cuda.stand_in if cuda is not None else None,
        )

    @staticmethod
    def _pointer(cuda: Any, address: int) -> dict[str, Any]:
        try:
            attributes = ask(lambda: cuda.pointer_attributes(address))
            found = {
                "type": attributes.type,
                "device": attributes.device,
                "device_pointer": attributes.device_pointer,
                "host_pointer": attributes.host_pointer,
            }
            if attributes.type == "host":
                found["mapped_at"] = ask(lambda: cuda.host_device_pointer(address))
        except OSError as error:
            return {"error": error.strerror}
        return found

    def export_dmabuf(self, buffer: Buffer, offset: int = 0, length: int | None = None) -> int | None:
        """`cuMemGetHandleForAddressRange`: return a dma-buf descriptor, which the caller closes, or None."""
        cuda = self._cuda
        start = buffer.address + offset
        size = length if length is not None else buffer.length - offset
        error: OSError | None = None
        fd: int | None = None
        try:
            fd = ask(lambda: cuda.dmabuf_fd(start, size))
        except OSError as refusal:
            error = refusal
        self._stage._event(
            "step",
            name="dmabuf-export",
            buffer=buffer.id,
            address=start,
            length=size,
            errno=errno_name(error.errno or 0) if error is not None else None,
            **refusal_facts(error),
            stand_in=cuda.stand_in,
        )
        return fd


@dataclass
class _Drawn:
    """One call of `cudaHostAlloc`: the memory or the refusal, its trace and its seconds."""

    memory: HostAllocation | None
    error: OSError | None
    trace: Any
    seconds: float


class _Draws(Search):
    """A search for memory that only CUDA can map: drawn whole, again and again, until it lies as wanted.

    At least one page has to be unpinnable where that is wanted, and all of them ordinary where that is. A
    driver that pins for long moves its pages out of unpinnable memory before anybody can look: then the
    kernel's trace of the call shows that they had lain there.
    """

    def __init__(self, stage: Stage, length: int, wanted: Wanted) -> None:
        super().__init__(stage.backend, length, wanted)
        self._stage = stage
        self._draws = 0
        self._moved = 0

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"draws": self._draws, "moved_by_the_pin": self._moved}

    def draw_cuda(self, take: Callable[[], HostAllocation]) -> _Drawn:
        """Return the first draw that lies as wanted, or that CUDA refused. Raises `Unmet`."""
        ballast = _FIRST_BALLAST
        with self._on_best_node():
            while self._draws < _DRAWS and self._room() >= self._length:
                if self._wants_unpinnable:
                    self._press(self._length)
                drawn = call_traced(self._stage, take)
                self._draws += 1
                if drawn.memory is None or self._fits(drawn, drawn.memory):
                    return drawn
                self._held.append(drawn.memory)
                self._touched += self._length
                ballast = self._move_on(ballast)
        kind = self._wanted.kind if self._wants_unpinnable else "ordinary"
        raise Unmet(
            kind,
            f"CUDA's memory came to lie in no {kind} memory ({self._draws} draws of {self._length} bytes)",
            "use --place online-movable, or --place pressure with a --pressure-limit",
        )

    def _fits(self, drawn: _Drawn, memory: HostAllocation) -> bool:
        import numpy

        state = self._state(memory)
        self._found[True] += int(numpy.isin(state.place, UNPINNABLE).sum())
        self._found[False] += int((state.place == ORDINARY).sum())
        if not self._wants_unpinnable:
            return bool(self._wanted.right(state, False).all())
        self._moved += moved_out(drawn.trace)
        return bool(self._wanted.right(state, True).any()) or self._moved > 0


def call_traced(stage: Stage, take: Callable[[], HostAllocation]) -> _Drawn:
    """Make one call of `cudaHostAlloc`, traced. Raises `Unmet` where the memory shares its first page."""
    made: list[HostAllocation] = []
    error, trace, seconds = stage._call(lambda: made.append(take()), stack=True)
    if made and made[0].address % PAGE_SIZE:
        address = made[0].address
        made[0].close()
        raise Unmet(
            "host-memory",
            f"CUDA handed out {address:#x}, within a page: so small a request comes from a pool of its own",
            "ask for more, such as --option length=4M",
        )
    return _Drawn(made[0] if made else None, error, trace, seconds)


def draw(
    stage: Stage, length: int, place: Place, take: Callable[[], HostAllocation]
) -> tuple[_Drawn, str, dict[str, Any]]:
    """Allocate by CUDA, placed: the draw, how it was placed, facts of the search. Raises `Unmet`."""
    if place == "any":
        return call_traced(stage, take), "as-allocated", {}
    if not has_unpinnable(stage.backend.memory_map):
        placed = "as-allocated" if place == "ordinary" else "none-on-node"
        return call_traced(stage, take), placed, {}
    search = _Draws(stage, length, buffers.wanted(place, length // PAGE_SIZE))
    with search:
        drawn = search.draw_cuda(take)
    return drawn, stage.backend.options.place, search.facts()


def moved_out(trace: Any) -> int:
    """Return how many pages the kernel moved for a long-term pin during a traced call."""
    events = trace.get("events") if isinstance(trace, dict) else None
    moved = 0
    for event in events or []:
        fields = event.get("fields") or {}
        if event.get("tracepoint") == "mm_migrate_pages" and fields.get("reason") == "longterm_pin":
            moved += int(fields.get("nr_succeeded") or 0)
    return moved


def vma_facts(address: int, smaps: Path = Path("/proc/self/smaps")) -> dict[str, Any]:
    """Return of the mapping that holds an address: `vma` (its line, "" if none), `vm_flags`, `page_kind`.

    `page_kind`: `anonymous`, `shared-memory`, `file`, `pfn-map` (a driver's own pages or registers), `none`.
    """
    line, flags = "", []
    try:
        with smaps.open(encoding="utf-8", errors="replace") as text:
            inside = False
            for row in text:
                head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", row)
                if head:
                    if inside:
                        break
                    inside = int(head[1], 16) <= address < int(head[2], 16)
                    if inside:
                        line = row.rstrip("\n")
                elif inside and row.startswith("VmFlags:"):
                    flags = row.split()[1:]
    except OSError:
        return {"vma": "", "vm_flags": None, "page_kind": "unknown"}
    return {"vma": line, "vm_flags": flags, "page_kind": _page_kind(line, flags)}


def _page_kind(line: str, flags: list[str]) -> str:
    if not line:
        return "none"
    words = line.split(maxsplit=5)
    path = words[5].strip() if len(words) > 5 else ""
    if _DRIVER_FLAGS & set(flags) or (
        path.startswith("/dev/") and not path.startswith(("/dev/shm/", "/dev/zero"))
    ):
        return "pfn-map"
    if path.startswith(("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "[anon_shmem")):
        return "shared-memory"
    if words[4] != "0":
        return "file"
    return "anonymous"


def page_facts(state: Any) -> dict[str, Any]:
    """Return the places and counts of a page state, summed up."""
    if state is None or not readable(state):
        return {"places": None}
    record = state.as_record()
    places: dict[str, int] = {}
    for _, count, place in record["place"]:
        places[place] = places.get(place, 0) + count
    facts: dict[str, Any] = {"places": places}
    for key in ("refcount", "mapcount", "pincount"):
        values = [value for _, _, value in record.get(key) or []]
        facts[key] = [min(values), max(values)] if values else None
    return facts


def no_dmabuf(backend: Backend) -> str:
    """Return why a dma-buf of the GPU cannot be registered in this run; empty where it can be tried."""
    name, why = find_device(backend.options)
    if name is None:
        return why
    device = backend.device()
    if "ibv_reg_dmabuf_mr" not in device.verbs:
        return f"{name} does not register by ibv_reg_dmabuf_mr"
    try:
        # As NCCL asks (ncclIbDmaBufSupport): a provider without it refuses before it looks at the descriptor.
        device.register("ibv_reg_dmabuf_mr", 0, 0, iova=0, access=(), fd=-1)
    except OSError as error:
        if error.errno in (errnos.EOPNOTSUPP, errnos.EPROTONOSUPPORT, errnos.ENOSYS):
            provider = device.stand_in or "its driver"
            return (
                f"{name} has no dma-buf support: {provider} answers {errno_name(error.errno)} to "
                "ibv_reg_dmabuf_mr before it looks at the descriptor"
            )
    cuda = backend.cuda()
    if cuda is None:
        return backend.why_no_cuda()
    try:
        supported = ask(lambda: cuda.device_attribute("dma_buf_supported", backend.options.gpu))
    except OSError as error:
        return f"CUDA does not say whether the GPU exports dma-bufs: {error.strerror}"
    if supported:
        return ""
    if cuda.stand_in:
        return "the stand-in exports dma-bufs by udmabuf, and this kernel has no /dev/udmabuf"
    return "the GPU's driver exports no dma-buf (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED is 0)"


def no_peer_memory(backend: Backend) -> str:
    """Return why a GPU address cannot be registered by peer memory here; empty where it can be tried."""
    if not any((_MODULES / name).exists() for name in PEER_MEMORY_MODULES):
        return "no peer-memory module (nvidia-peermem) is loaded"
    cuda = backend.cuda()
    if cuda is None:
        return backend.why_no_cuda()
    if cuda.stand_in:
        return "the stand-in's device memory is host memory, which no peer-memory module would take"
    return ""


__all__ = ["CudaMemory", "CudaPin", "CudaRefusal", "no_dmabuf", "no_peer_memory"]
