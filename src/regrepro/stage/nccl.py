"""A network connection as NCCL 2.17.1 builds it: its banks of memory, its subranges, and their registration.

From NCCL's source at v2.17.1-1: `sendProxyConnect` and `recvProxyConnect` (src/transport/net.cc), sizes in
`computeBuffSizes` (src/init.cc), src/include/devcomm.h and comm.h; `ncclIbConnect`, `ncclIbAccept` and
`ncclIbRegMrDmaBuf` (src/transport/net_ib.cc). Dedicated buffers, as rings and trees have them.

A registration log has every field that the write-up asks for in section 19: address, length, host or CUDA,
send or receive, protocol, ordinary MR or dma-buf MR, errno.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from regrepro.scenario import Size
from regrepro.stage.cuda_memory import no_dmabuf, no_peer_memory
from regrepro.stage.ports import PAGE_SIZE

if TYPE_CHECKING:
    from regrepro.stage.buffers import Buffer
    from regrepro.stage.pins import Pin
    from regrepro.stage.registrations import Registration
    from regrepro.stage.stage import Stage

STEPS = 8  # NCCL_STEPS
LL_SIZE = (
    8 * 512 * STEPS * 16
)  # NCCL_LL_LINES_PER_THREAD × NCCL_LL_MAX_NTHREADS × steps × sizeof(ncclLLFifoLine)
LL128_SIZE = 120 * 640 * STEPS * 8  # NCCL_LL128_ELEMS_PER_THREAD × NCCL_LL128_MAX_NTHREADS × steps × uint64_t
SIMPLE_SIZE = 4 << 20  # DEFAULT_BUFFSIZE
SIMPLE_SIZE_ARM = 1 << 20  # DEFAULT_BUFFSIZE_ARM
CONTROL_SIZE = 4096  # ncclSendMem and ncclRecvMem, each padded to MEM_ALIGN
PROTOCOLS = ("LL", "LL128", "SIMPLE")  # in this order (NCCL_PROTO_LL is 0)

FIFO_SIZE = 32 * 64 * 8  # sizeof(ncclIbSendFifo) × MAX_REQUESTS × NCCL_NET_IB_MAX_RECVS
FIFO_OFFSET = (
    32 + 64 * 64
)  # struct ncclIbVerbs comes before it in a page-aligned structure, requests included
FLUSH_SIZE = 4  # ncclIbGpuFlush.hostMem, an int

ACCESS = ("LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ")
RELAXED = "RELAXED_ORDERING"


@dataclass(frozen=True)
class Subrange:
    """One protocol's part of a bank. `offset` and `length` in bytes; `memory` is `host` or `cuda`."""

    protocol: str
    memory: str
    offset: int
    length: int


@dataclass(frozen=True)
class Layout:
    """One connection's banks: sizes in bytes, the protocols' parts, offsets of the control structures."""

    host: int
    device: int
    subranges: tuple[Subrange, ...]
    send_mem: int
    recv_mem: int


def layout(direction: str = "send", *, gpudirect: bool = True, sizes: dict[str, int] | None = None) -> Layout:
    """Return the banks of a connection. `direction`: `send` or `recv`; `sizes`: bytes by protocol.

    A sender with GPUDirect leaves LL in host memory (`p != NCCL_PROTO_LL && useGdr`), a receiver does not.
    """
    lengths = {"LL": LL_SIZE, "LL128": LL128_SIZE, "SIMPLE": SIMPLE_SIZE} | (sizes or {})
    ends = {"host": 0, "cuda": 0}
    parts = []
    for protocol in PROTOCOLS:
        on_device = gpudirect and (direction == "recv" or protocol != "LL")
        memory = "cuda" if on_device else "host"
        parts.append(Subrange(protocol, memory, ends[memory], lengths[protocol]))
        ends[memory] += lengths[protocol]
    send_mem = ends["host"]
    return Layout(send_mem + 2 * CONTROL_SIZE, ends["cuda"], tuple(parts), send_mem, send_mem + CONTROL_SIZE)


def sizes_of(arch: str, ll: int = 0, ll128: int = 0, simple: int = 0) -> dict[str, int]:
    """Return sizes by protocol: those given (not 0), else NCCL's defaults on an architecture.

    `arch`: `x86-64`, `arm64`, or `auto` for this machine's.
    """
    machine = os.uname().machine if arch == "auto" else arch
    default = SIMPLE_SIZE_ARM if machine in ("arm64", "aarch64") else SIMPLE_SIZE
    return {"LL": ll or LL_SIZE, "LL128": ll128 or LL128_SIZE, "SIMPLE": simple or default}


def rounded(address: int, length: int, page: int = PAGE_SIZE) -> tuple[int, int]:
    """Return what the IB plugin registers for a range: from its first page on, whole pages."""
    start = address & -page
    return start, -(-(address + length - start) // page) * page


@dataclass
class MrCache:
    """The IB plugin's cache of a device's registrations, by page address and number of pages."""

    slots: dict[tuple[int, int], Registration] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """How a connection is made. `sizes` are bytes by protocol."""

    direction: str = "send"
    gpudirect: bool = True
    dmabuf: bool = True
    relaxed_ordering: bool = True
    multi_process: bool = False
    stop_at_first_failure: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    place: str = "unpinnable"

    @classmethod
    def of(cls, stage: Stage, **changes: Any) -> Settings:
        """Return the settings that a scenario's options (`OPTIONS`) give."""
        sizes = sizes_of(
            stage.option("arch"),
            stage.option("ll_size"),
            stage.option("ll128_size"),
            stage.option("simple_size"),
        )
        values: dict[str, Any] = {
            "direction": stage.option("direction"),
            "gpudirect": stage.option("gpudirect"),
            "dmabuf": stage.option("dmabuf"),
            "relaxed_ordering": stage.option("relaxed_ordering"),
            "multi_process": stage.option("process") == "multi",
            "stop_at_first_failure": not stage.option("go_on"),
            "sizes": sizes,
        }
        return cls(**(values | changes))


OPTIONS: dict[str, Any] = {
    "direction": ("send", "recv"),
    "gpudirect": True,
    "dmabuf": True,
    "relaxed_ordering": True,
    "process": ("same", "multi"),
    "go_on": False,
    "arch": ("auto", "x86-64", "arm64"),
    "ll_size": Size(0),
    "ll128_size": Size(0),
    "simple_size": Size(0),
}
"""The options of a scenario that makes connections; a size of 0 is NCCL's default."""


class Connection:
    """One connection: what it allocated and registered. Made by `connect`."""

    def __init__(self, stage: Stage, settings: Settings, cache: MrCache, name: str) -> None:
        self._stage = stage
        self._settings = settings
        self._cache = cache
        self._name = name
        self._failed: list[dict[str, Any]] = []
        self.pin: Pin | None = None
        self.stopped = False
        self.layout = layout(settings.direction, gpudirect=settings.gpudirect, sizes=settings.sizes or None)

    def open(self) -> None:
        """Allocate and register in NCCL's order: the plugin's own, the banks, each protocol's subrange."""
        self._plugin_s_own()
        if self.stopped:
            return
        device = self._device_bank()
        host = self._host_bank()
        if host is None:
            return  # CUDA itself refused the host bank: the pin's event says so
        self._stage.step(
            "nccl-connection",
            connection=self._name,
            direction=self._settings.direction,
            host_bank={"buffer": host.id, "address": host.address, "length": self.layout.host},
            device_bank={
                "buffer": device.id if device is not None else None,
                "length": self.layout.device,
            },
            subranges=[asdict(part) for part in self.layout.subranges],
            send_mem=self.layout.send_mem,
            recv_mem=self.layout.recv_mem,
            stand_in=self._stand_in(),
        )
        for part in self.layout.subranges:
            bank = host if part.memory == "host" else device
            if self.stopped or bank is None:
                self._log(part, None, outcome="not-tried", why="NCCL stops at the first failure")
            else:
                self._register(part, bank)
        if self._settings.multi_process and self._settings.direction == "send":
            # The proxy registers for RDMA first; the main process maps the same memory and pins it then
            # (ncclShmOpen with a device pointer).
            self.pin = self._stage.pin(host)

    def release_and_retry(self) -> None:
        """Let CUDA's pin of the host bank go, and make each call that had failed again: the proof."""
        if self.pin is not None:
            self.pin.release()
        for again in self._failed:
            self._stage.register(**again).deregister()

    def _plugin_s_own(self) -> None:
        """The IB plugin's structures: ordinary memory, ordinary MRs."""
        stage, receives = self._stage, self._settings.direction == "recv"
        own = stage.buffer(length=FIFO_OFFSET + FIFO_SIZE + PAGE_SIZE)
        fifo = "remote fifo" if receives else "fifo"
        self._own(fifo, own, FIFO_OFFSET, FIFO_SIZE, ACCESS)
        # Flushing is for GPUDirect through peer memory (ncclIbGdrSupport).
        if receives and not self.stopped and not no_peer_memory(stage.backend):
            self._own("flush", own, own.length - PAGE_SIZE, FLUSH_SIZE, ("LOCAL_WRITE",))

    def _own(self, what: str, own: Buffer, offset: int, length: int, access: tuple[str, ...]) -> None:
        made = self._stage.register(
            own, self._verb("ibv_reg_mr"), access=access, offset=offset, length=length
        )
        self._log(Subrange(what, "host", offset, length), made, address=own.address + offset)
        self.stopped = self.stopped or not made

    def _device_bank(self) -> Buffer | None:
        if not self.layout.device:
            return None
        return self._stage.cuda.device_alloc(self.layout.device)

    def _host_bank(self) -> Buffer | None:
        if self._settings.multi_process and self._settings.direction == "send":
            # A reference count of an int stands behind the bank (ncclShmOpen).
            return self._stage.buffer(length=self.layout.host + 4, backing="shm", place=self._settings.place)
        self.pin = self._stage.cuda.host_alloc(length=self.layout.host, place=self._settings.place)
        return None if self.pin.errno else self.pin.buffer

    def _verb(self, verb: str) -> str:
        device = self._stage.backend.device()
        return verb if verb in device.verbs else device.verb

    def _register(self, part: Subrange, bank: Buffer) -> None:
        settings, stage = self._settings, self._stage
        address = bank.address + part.offset
        start, length = rounded(address, part.length)
        access = (*ACCESS, RELAXED) if settings.relaxed_ordering else ACCESS
        fd: int | None = None
        if part.memory == "cuda":
            why = no_dmabuf(stage.backend) if settings.dmabuf else no_peer_memory(stage.backend)
            if why:
                self._log(part, None, address=address, outcome="unmet", why=why)
                return
        verb = "ibv_reg_mr_iova2" if settings.relaxed_ordering else "ibv_reg_mr"
        if part.memory == "cuda" and settings.dmabuf:
            verb = "ibv_reg_dmabuf_mr"
            fd = stage.cuda.export_dmabuf(bank, part.offset, part.length)
            if fd is None:
                self._log(part, None, address=address, outcome="failed", why="the dma-buf was not exported")
                self.stopped = settings.stop_at_first_failure
                return
        key = (start, length // PAGE_SIZE)
        try:
            cached = self._cache.slots.get(key)
            if cached:
                self._log(part, cached, address=address, cached=True)
                return
            call: dict[str, Any] = {
                "buffer": bank,
                "verb": self._verb(verb),
                "access": access,
                "address": start,
                "length": length,
            }
            made = stage.register(**call, fd=fd)
        finally:
            if fd is not None:
                os.close(fd)  # NCCL closes it right after
        self._log(part, made, address=address)
        if made:
            self._cache.slots[key] = made
        else:
            if fd is None:
                self._failed.append(call)
            self.stopped = settings.stop_at_first_failure

    def _stand_in(self) -> str | None:
        cuda = self._stage.backend.cuda()
        return cuda.stand_in if cuda is not None else None

    def _log(
        self,
        part: Subrange,
        made: Registration | None,
        *,
        address: int | None = None,
        cached: bool = False,
        outcome: str = "",
        why: str = "",
    ) -> None:
        """Write one line of the registration log."""
        dmabuf = part.memory == "cuda" and self._settings.dmabuf
        self._stage.step(
            "nccl-registration",
            connection=self._name,
            address=address,
            length=part.length,
            memory=part.memory,
            direction=self._settings.direction,
            protocol=part.protocol,
            mr="dma-buf" if dmabuf else "ordinary",
            verb=made.verb if made is not None else None,
            registered_address=made.address if made is not None else None,
            registered_length=made.length if made is not None else None,
            registration=made.id if made is not None else None,
            cached=cached,
            outcome=outcome or ("registered" if made else "failed"),
            errno=made.errno if made is not None else None,
            **({"why": why} if why else {}),
            stand_in=self._stand_in() if part.protocol in PROTOCOLS else None,
        )


def connect(
    stage: Stage, settings: Settings, *, cache: MrCache | None = None, name: str = "first"
) -> Connection:
    """Make a connection; `release_and_retry` of what this returns is the proof of why it failed."""
    made = Connection(stage, settings, cache if cache is not None else MrCache(), name)
    made.open()
    return made
