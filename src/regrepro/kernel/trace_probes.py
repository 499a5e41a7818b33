"""What to look at inside the kernel during a pin or a registration: functions, their arguments and returns.

Names and signatures differ between kernel versions; each point of interest lists the names that it has had.
Which of them exist and can be probed is asked of the running kernel, by trying (`Tracer.arm()`). The sources:
mm/gup.c, mm/migrate.c, drivers/infiniband/core/umem.c, the drivers' `reg_user_mr`, Linux 5.10 to 7.3.

None of these functions runs once per page, but for `alloc_migration_target`, which runs only while pages
move, and each costs other processes that call it well under a microsecond while armed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Returns(Enum):
    """A function's return type, which decides how the value is fetched, kept and read."""

    # An int comes in a 64-bit register with undefined upper half: as :s64, -12 would read 4294967284.
    INT = "int"
    LONG = "long"
    POINTER = "pointer"
    """An ERR_PTR is a failure, and so is NULL where there is nothing better to say."""
    NV_STATUS = "NV_STATUS"
    """NVIDIA's own: 0 is success, everything else a failure that is no errno."""

    @property
    def fetch(self) -> str:
        """The type of the fetch argument (Documentation/trace/kprobetrace.rst)."""
        return "s32" if self in (Returns.INT, Returns.NV_STATUS) else "s64"


class Layer(Enum):
    """Where in the call path a function lies: a function of a higher number is called by a lower one."""

    DRIVER = 0
    UMEM = 1
    GUP = 2
    LONGTERM = 3
    UNPINNABLE = 4
    MIGRATE = 5
    TARGET = 6


@dataclass(frozen=True)
class Point:
    """One thing to see: the names it has had, newest first.

    `arguments`: (name, position from 1, fetch type). `keep`: the condition under which a return is recorded
    (event filter), "" for always. `every`: probe all names that exist, not only the first.
    `module`: where it lives; not tried while that module is not loaded.
    """

    what: str
    names: tuple[str, ...]
    returns: Returns
    layer: Layer
    arguments: tuple[tuple[str, int, str], ...] = ()
    keep: str = ""
    every: bool = False
    module: str = ""


_FAILED = "ret < 0"
_FAILED_POINTER = "ret < 0 && ret > -4096"  # IS_ERR(), include/linux/err.h
_START_NR_FLAGS = (("start", 1, "x64"), ("nr_pages", 2, "s64"), ("gup_flags", 3, "x32"))
_START_INT_FLAGS = (("start", 1, "x64"), ("nr_pages", 2, "s32"), ("gup_flags", 3, "x32"))
# (mm, start, nr_pages, gup_flags, …) since 5.9; before, a task_struct came first.
_REMOTE = (("start", 2, "x64"), ("nr_pages", 3, "s64"), ("gup_flags", 4, "x32"))
_UNLOCKED = (("start", 1, "x64"), ("nr_pages", 2, "s64"), ("gup_flags", 4, "x32"))

_DRIVERS = {
    "rdma_rxe": ("rxe_reg_user_mr",),
    "siw": ("siw_reg_user_mr",),
    "mlx5_ib": ("mlx5_ib_reg_user_mr", "mlx5_ib_reg_user_mr_dmabuf"),
    "mlx4_ib": ("mlx4_ib_reg_user_mr",),
    "irdma": ("irdma_reg_user_mr", "irdma_reg_user_mr_dmabuf"),
    "bnxt_re": ("bnxt_re_reg_user_mr", "bnxt_re_reg_user_mr_dmabuf"),
    "efa": ("efa_reg_mr", "efa_reg_user_mr_dmabuf"),
    "erdma": ("erdma_reg_user_mr",),
    "hns_roce_hw_v2": ("hns_roce_reg_user_mr",),
    "mana_ib": ("mana_ib_reg_user_mr", "mana_ib_reg_user_mr_dmabuf"),
    "ocrdma": ("ocrdma_reg_user_mr",),
    "qedr": ("qedr_reg_user_mr",),
    "iw_cxgb4": ("c4iw_reg_user_mr",),
    "rdmavt": ("rvt_reg_user_mr",),
    "ionic_rdma": ("ionic_reg_user_mr", "ionic_reg_user_mr_dmabuf"),
    "ib_mthca": ("mthca_reg_user_mr",),
}

DRIVERS = tuple(
    Point(f"registration by {module}", names, Returns.POINTER, Layer.DRIVER, (), "", True, module)
    for module, names in _DRIVERS.items()
)

# NVIDIA's kernel driver: the pin behind cudaHostAlloc (nvidia/os-mlock.c) and peer memory (nvidia/nv-p2p.c).
NVIDIA = (
    Point(
        "NVIDIA's pin",
        ("os_lock_user_pages",),
        Returns.NV_STATUS,
        Layer.UMEM,
        keep="ret != 0",
        module="nvidia",
    ),
    Point(
        "GPU pages for peers",
        ("nvidia_p2p_get_pages", "nvidia_p2p_get_pages_persistent"),
        Returns.INT,
        Layer.UMEM,
        keep=_FAILED,
        every=True,
        module="nvidia",
    ),
)

POINTS: tuple[Point, ...] = (
    *DRIVERS,
    *NVIDIA,
    Point(
        "dma-buf registration in uverbs",
        ("ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR",),
        Returns.INT,
        Layer.DRIVER,
        module="ib_uverbs",
    ),
    Point(
        "the MKey's creation",
        ("mlx5_core_create_mkey",),
        Returns.INT,
        Layer.UMEM,
        keep=_FAILED,
        module="mlx5_core",
    ),
    Point("io_uring's fixed buffers", ("io_sqe_buffers_register",), Returns.INT, Layer.DRIVER),
    Point("io_uring's pin", ("io_pin_pages",), Returns.POINTER, Layer.UMEM),
    Point("the umem", ("__ib_umem_get_va", "ib_umem_get"), Returns.POINTER, Layer.UMEM, module="ib_core"),
    Point(
        "the dma-buf umem",
        ("ib_umem_dmabuf_get_with_dma_device", "ib_umem_dmabuf_get"),
        Returns.POINTER,
        Layer.UMEM,
        module="ib_uverbs",
    ),
    Point("the dma-buf", ("dma_buf_get",), Returns.POINTER, Layer.GUP, keep=_FAILED_POINTER),
    Point("mapping for the device", ("dma_map_sgtable",), Returns.INT, Layer.GUP, keep=_FAILED),
    Point("pins", ("pin_user_pages_fast",), Returns.INT, Layer.GUP, _START_INT_FLAGS),
    Point("pins", ("pin_user_pages",), Returns.LONG, Layer.GUP, _START_NR_FLAGS),
    Point("pins", ("pin_user_pages_remote",), Returns.LONG, Layer.GUP, _REMOTE),
    Point("pins", ("pin_user_pages_unlocked",), Returns.LONG, Layer.GUP, _UNLOCKED),
    Point("references", ("get_user_pages_fast",), Returns.INT, Layer.GUP, _START_INT_FLAGS),
    Point("references", ("get_user_pages",), Returns.LONG, Layer.GUP, _START_NR_FLAGS),
    Point("references", ("get_user_pages_remote",), Returns.LONG, Layer.GUP, _REMOTE),
    Point("references", ("get_user_pages_unlocked",), Returns.LONG, Layer.GUP, _UNLOCKED),
    Point("long-term pinning", ("__gup_longterm_locked",), Returns.LONG, Layer.LONGTERM, keep=_FAILED),
    Point(
        "moving pages out of unpinnable memory",
        (
            "migrate_longterm_unpinnable_folios",
            "migrate_longterm_unpinnable_pages",
            "check_and_migrate_movable_pages",
            "check_and_migrate_cma_pages",
        ),
        # All int but check_and_migrate_*, which are long: what they return reads the same as an int.
        Returns.INT,
        Layer.UNPINNABLE,
        keep=_FAILED,
    ),
    Point("migration", ("migrate_pages",), Returns.INT, Layer.MIGRATE),
    Point("a page to move to", ("alloc_migration_target",), Returns.POINTER, Layer.TARGET, keep="ret == 0"),
)

LAYERS: dict[str, Layer] = {name: point.layer for point in POINTS for name in point.names}
RETURNS: dict[str, Returns] = {name: point.returns for point in POINTS for name in point.names}
POINTER_FUNCTIONS = frozenset(name for name, kind in RETURNS.items() if kind is Returns.POINTER)
GUP_FUNCTIONS = frozenset(name for point in POINTS if point.arguments for name in point.names)
MAPPING_FUNCTIONS = frozenset({"dma_map_sgtable"})

TRACEPOINTS = (("migrate", "mm_migrate_pages"),)


def kept(name: str, value: int) -> int:
    """Return what is kept of a return value: of a pointer only its errno, 0 for NULL, else 1.

    A kernel address says nothing here and does not belong in a file that is passed on.
    """
    return 1 if value and name in POINTER_FUNCTIONS and not -4096 < value < 0 else value


def return_probe(group: str, event: str, name: str, point: Point, *, with_arguments: bool) -> str:
    """Return the line for kprobe_events that records a return (and, since 6.9, its arguments with it)."""
    line = f"r:{group}/{event} {name}"
    if with_arguments:
        line += _fetches(point)
    return f"{line} ret=$retval:{point.returns.fetch}"


def entry_probe(group: str, event: str, name: str, point: Point) -> str:
    """Return the line for kprobe_events that records a call's arguments."""
    return f"p:{group}/{event} {name}{_fetches(point)}"


def _fetches(point: Point) -> str:
    return "".join(f" {name}=$arg{position}:{kind}" for name, position, kind in point.arguments)
