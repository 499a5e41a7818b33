"""The layers in which a registration can fail: one row a layer, for verdicts, explanations, schemas.

Which errnos a layer gives: `__ib_umem_get_va` and `ib_umem_get` (drivers/infiniband/core/umem.c), mm/gup.c,
mm/memcontrol.c, core/umem_dmabuf.c, mlx5's mr.c and cmd.c, rxe, nvidia-peermem. What tells it is said in
docs/verdicts.md, and decided in judge/layers.py (by proof) and judge/narrowing.py (by what is left).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

Release = tuple[int, int]


class MemoryKind(Enum):
    """What is registered."""

    HOST = "host memory"
    GPU = "GPU memory"
    DMABUF = "a DMA-BUF"


class At(Enum):
    """Where in a registration a layer fails, in the order of time."""

    REQUEST = auto()
    """uverbs and the driver look at what is asked."""
    CHECK = auto()
    """`ib_umem_get`, before it pins."""
    PIN = auto()
    MAP = auto()
    """All pages, or some, are pinned: their table, the mapping for the device; io_uring's own checks."""
    DEVICE = auto()
    """The umem is there."""


@dataclass(frozen=True)
class LayerRow:
    """A layer. `command`: what tells on a node whether it is this one. `host`, `gpu`, `dmabuf`: the errnos
    that it gives for such memory, () for none at all. `kernels`: errnos that not every kernel gives for it,
    each with the first kernel release that does and the first that no longer does, or None.
    """

    name: str
    title: str
    command: str
    at: tuple[At, ...] = ()
    host: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    dmabuf: tuple[str, ...] = ()
    kernels: Mapping[str, tuple[Release, Release | None]] = field(default_factory=dict)

    def errnos(self, memory: MemoryKind | None) -> tuple[str, ...]:
        """The errnos that it gives for this memory; None: it is not known whether host's or a GPU's."""
        if memory is None:
            return tuple(dict.fromkeys((*self.host, *self.gpu)))
        return {MemoryKind.HOST: self.host, MemoryKind.GPU: self.gpu, MemoryKind.DMABUF: self.dmabuf}[memory]

    def gives(self, errno: str, memory: MemoryKind | None) -> bool:
        """Whether it gives this errno ("" for one that is not told) for this memory."""
        errnos = self.errnos(memory)
        return errno in errnos if errno else bool(errnos)

    def not_on(self, errno: str, since: Release, until: Release) -> bool:
        """Whether no kernel of these releases, first and last, gives it with this errno."""
        first, gone = self.kernels.get(errno, ((0, 0), None))
        return until < first or (gone is not None and since >= gone)

    def why_not(self, errno: str, memory: MemoryKind | None) -> str:
        """Say why it does not give this errno for this memory."""
        errnos = self.errnos(memory)
        if errnos:
            gives = f"{', '.join(errnos[:-1])} or {errnos[-1]}" if len(errnos) > 1 else errnos[0]
            return f"it gives {gives}, not {errno}" if len(errnos) < 4 else f"it does not give {errno}"
        if memory is MemoryKind.DMABUF:
            return "a DMA-BUF is not pinned by get_user_pages, not charged to the limit, no peer memory"
        if self.dmabuf:
            return "the call is no registration of a DMA-BUF"
        if memory is MemoryKind.GPU:
            return "the buffer is GPU memory, which has no host page to pin or move"
        return "the buffer is host memory" if self.gpu else "the call is a registration"


_MKEY = ("ENOMEM", "EINVAL", "EAGAIN", "EIO", "EREMOTEIO", "EBUSY", "ENOSPC")
_ARGUMENTS = (
    *("EINVAL", "EPERM", "EACCES", "EOPNOTSUPP", "ENOTSUP", "ENOSYS", "EPROTONOSUPPORT", "EOVERFLOW"),
    "EBADF",
)
_DEVICE = (
    *("EINVAL", "EPERM", "EACCES", "EAGAIN", "EOPNOTSUPP", "ENOSYS", "EPROTONOSUPPORT", "EIO", "EREMOTEIO"),
    *("ENODEV", "ENXIO", "ETIMEDOUT", "EBUSY", "ENOSPC", "EBADF", "EMFILE"),
)

ROWS: tuple[LayerRow, ...] = (
    LayerRow(
        "memlock-accounting",
        "the locked-memory limit (RLIMIT_MEMLOCK), which is checked before any page is pinned",
        "grep 'Max locked memory' /proc/PID/limits    of a rank while it runs, not of your shell",
        (At.CHECK,),
        host=("ENOMEM", "EPERM"),
        gpu=("ENOMEM", "EPERM"),  # without a peer-memory driver its address goes the way of host memory
    ),
    LayerRow(
        "page-migration",
        "a page in unpinnable memory (CMA, ZONE_MOVABLE) that cannot move, because something else holds it",
        "regrepro audit && regrepro run pin_then_register    on that node",
        (At.PIN,),
        host=("ENOMEM",),
    ),
    LayerRow(
        "migration-target",
        "a page in unpinnable memory that could move, and no memory outside of it to move to",
        "grep -E 'CmaFree|MemFree|HugePages_Free' /proc/meminfo    while it fails; regrepro audit",
        (At.PIN,),
        host=("ENOMEM",),
    ),
    LayerRow(
        "memory-cgroup",
        "the memory limit of the process's control group",
        "cat /sys/fs/cgroup/PATH/memory.events; dmesg | grep 'Memory cgroup out of memory'",
        (At.PIN,),
        host=("ENOMEM",),
    ),
    LayerRow(
        "umem-alloc",
        "the kernel could not allocate its own bookkeeping for the registration",
        "dmesg | grep -A3 'page allocation failure'",
        (At.CHECK, At.PIN, At.MAP, At.DEVICE),
        *(("ENOMEM",),) * 3,
    ),
    LayerRow(
        "dma-map",
        "DMA mapping: the IOMMU has no addresses left, or the bounce buffers are used up",
        "dmesg | grep -iE 'iommu|DMAR|smmu|swiotlb'",
        (At.MAP,),
        *(("ENOMEM", "EIO"),) * 3,
    ),
    LayerRow(
        "mkey",
        "the device is out of memory regions (MKeys), or its firmware is out of pages for them",
        "rdma resource show; ibv_devinfo -v | grep max_mr; dmesg | grep -iE 'mkey|MANAGE_PAGES'",
        (At.REQUEST, At.DEVICE),
        _MKEY,
        _MKEY,
        ("ENOMEM", "EINVAL", "EAGAIN"),
    ),
    LayerRow(
        "peer-memory",
        "the GPU's peer-memory driver: nvidia-peermem is missing, or it failed",
        "lsmod | grep -E 'nvidia_peermem|nv_peer_mem'; dmesg | grep nvidia-peermem",
        (At.PIN,),
        gpu=("ENOMEM", "EFAULT", "EINVAL", "EIO"),
    ),
    LayerRow(
        "bar-map",
        "a mapping of a device or its BAR: BAR1 is used up, or the address has no pages behind it",
        "nvidia-smi -q | grep -A3 'BAR1 Memory Usage'",
        (At.PIN,),
        host=("EFAULT",),  # a host pointer can be a mapping of registers
        gpu=("ENOMEM", "EFAULT"),
        dmabuf=("ENOMEM",),
    ),
    LayerRow(
        "dma-buf",
        "DMA-BUF: the provider or the GPU driver has none, or the buffer could not be exported or mapped",
        "regrepro audit    (it checks the conditions); dmesg | tail",
        (At.REQUEST,),
        dmabuf=(
            *("ENOMEM", "EINVAL", "EOPNOTSUPP", "ENOSYS", "EPROTONOSUPPORT", "EBADF", "EFAULT", "EIO"),
            "EPERM",
        ),
    ),
    LayerRow(
        "page-fault",
        "an address that is not mapped, or not with the rights that are asked for",
        "grep -i ADDRESS /proc/PID/maps    while the process lives",
        (At.PIN,),
        host=("EFAULT",),
        gpu=("EFAULT",),
    ),
    LayerRow(
        "longterm-refused",
        "memory that Linux lets nobody pin for long: a file that is written through its mapping (since 6.5) "
        "or lies in persistent memory, or a huge page in unpinnable memory (5.12 to 6.5)",
        "grep -i ADDRESS /proc/PID/maps    and look at what is mapped there",
        (At.PIN,),
        host=("EFAULT", "ENOMEM", "EOPNOTSUPP"),  # a file, a huge page, fs-dax
        kernels={
            # 8ac268436e6d "mm/gup: disallow FOLL_LONGTERM GUP-nonfast writing to file-backed mappings"
            "EFAULT": ((6, 5), None),
            # follow_hugetlb_page (mm/hugetlb.c) takes a huge page by what refuses an unpinnable one from
            # 0fa5bc4023c1 "mm/hugetlb: grab head page refcount once for group of subpages" (its
            # try_grab_compound_head became try_grab_folio with 822951d84684, 5.18) to 4849807114b8 "mm/gup:
            # retire follow_hugetlb_page()"; then such a page is moved as any other.
            "ENOMEM": ((5, 12), (6, 6)),
        },
    ),
    LayerRow(
        "cuda-pin",
        "the GPU driver's own pin of host memory failed, before any registration",
        "dmesg | grep NVRM; regrepro audit    (it says what this driver's pin asks for)",
    ),
    LayerRow(
        "arguments",
        "what was asked for: access flags, length, or an iova that does not fit",
        "ibv_devinfo -v    and compare with the flags and the length of the call",
        (At.REQUEST, At.CHECK),
        _ARGUMENTS,
        _ARGUMENTS,
        ("EINVAL", "EOPNOTSUPP", "EPROTONOSUPPORT", "EFAULT"),
    ),
    LayerRow(
        "device",
        "the device: it was removed, is in reset, or may not be used by this user",
        "ls -l /dev/infiniband; rdma link show; dmesg | tail",
        (At.REQUEST, At.DEVICE),
        _DEVICE,
        _DEVICE,
        ("EAGAIN", "EIO", "ENODEV", "EPERM"),
    ),
    LayerRow(
        "unknown",
        "something that is not shown",
        "regrepro watch    on the node, which records the kernel's own path of the next failure",
    ),
)
LAYERS = tuple(row.name for row in ROWS)
BY_NAME = {row.name: row for row in ROWS}
