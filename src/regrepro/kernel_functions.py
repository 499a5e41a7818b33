"""The kernel functions that matter to a registration: one row a function, whatever names it has had.

`run` and `watch` place their probes by this table, the judge reads what they returned by its families,
`explain` recognises them in a pasted log, `audit` looks for them in kallsyms. A function that is renamed gets
one name more, in its row. The sources: Linux 5.10 to 7.3, NVIDIA's kernel modules for those of `nvidia`.

None of the functions that are probed runs once per page, but for `alloc_migration_target`, which runs only
while pages move, and each costs other processes that call it well under a microsecond while it is followed.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import cache


class Returns(Enum):
    """A function's return type, which decides how the value is fetched, kept and read."""

    # An int comes in a 64-bit register with undefined upper half: as :s64, -12 would read 4294967284.
    INT = "int"
    LONG = "long"
    POINTER = "pointer"
    """An ERR_PTR is a failure, and so is NULL where there is nothing better to say."""
    POINTER_OR_NULL = "pointer or NULL"
    """NULL is the failure."""
    NV_STATUS = "NV_STATUS"
    """NVIDIA's own: 0 is success, everything else a failure that is no errno."""

    @property
    def fetch(self) -> str:
        """The type of the fetch argument (Documentation/trace/kprobetrace.rst)."""
        return "s32" if self in (Returns.INT, Returns.NV_STATUS) else "s64"

    @property
    def failed(self) -> str:
        """The condition of a failure, as an event filter (Documentation/trace/events.rst)."""
        if self is Returns.POINTER:
            return "ret < 0 && ret > -4096"  # IS_ERR(), include/linux/err.h
        return {Returns.POINTER_OR_NULL: "ret == 0", Returns.NV_STATUS: "ret != 0"}.get(self, "ret < 0")


class CallDepth(IntEnum):
    """Where in the call path a function lies: a function of a higher number is called by a lower one."""

    DRIVER = 0
    UMEM = 1
    GUP = 2
    LONGTERM = 3
    UNPINNABLE = 4
    MIGRATE = 5
    TARGET = 6


class Kept(Enum):
    """What `run` records of a function's returns."""

    NOTHING = auto()
    ALL = auto()
    FAILURES = auto()


class Watch(Enum):
    """What `watch` follows a function for."""

    REQUEST = auto()
    """A program's request enters here: int (*)(struct uverbs_attr_bundle *)."""
    OPEN = auto()
    """A program opens an RDMA device."""
    DRIVER = auto()
    PIN = auto()
    SHORT_TERM_PIN = auto()
    UNPIN = auto()
    """Pins are let go: a page or an array of pages comes first."""
    MIGRATION = auto()
    FAILURE = auto()
    """Its failures alone, as what failed inside of a request."""


class Family(Enum):
    """Functions that do one job, as the rules read them."""

    REQUEST = auto()
    DMABUF_REQUEST = auto()
    UVERBS = auto()
    """Where uverbs is entered, whatever for."""
    SYSTEM_CALL = auto()
    DRIVER = auto()
    IO_URING = auto()
    IO_PIN = auto()
    UMEM = auto()
    MLOCK = auto()
    DMABUF = auto()
    PEER = auto()
    GPU_PIN = auto()
    GUP = auto()
    """What `ib_umem_get` and io_uring pin by."""
    TAKES_PINS = auto()
    TAKES_REFERENCES = auto()
    LONGTERM = auto()
    UNPINNABLE = auto()
    """What moves pages out of unpinnable memory: -EAGAIN where they have moved and the pin is tried again."""
    GUP_PATH = auto()
    """GUP's own two paths: they return what it does."""
    MAPPING_CHECK = auto()
    CGROUP = auto()
    MIGRATE = auto()
    TARGET = auto()
    SG_TABLE = auto()
    DMA_MAP = auto()
    MKEY = auto()
    STEP = auto()
    """A step that is recognised, and from which no rule concludes anything."""


@dataclass(frozen=True)
class Name:
    """A name of a function. `since`, `until`: the kernel release that brought it and the one that took it
    away, each with the commit in torvalds/linux; "" for before 5.10, and for what still is.
    """

    name: str
    since: str = ""
    until: str = ""


@dataclass(frozen=True)
class KernelFunction:
    """A function. `known_as`: newest first. `module`: where it lies or what brings it, "" for the kernel
    itself; it is not probed while that is not loaded. `arguments`: (name, position from 1, fetch type).
    What neither `run` nor `watch` probes is read in the logs of other tracers alone.
    """

    what: str
    known_as: tuple[Name, ...]
    source: str
    families: tuple[Family, ...]
    module: str = ""
    returns: Returns = Returns.INT
    depth: CallDepth | None = None
    arguments: tuple[tuple[str, int, str], ...] = ()
    run: Kept = Kept.NOTHING
    watch: tuple[Watch, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it has had, newest first."""
        return tuple(item.name for item in self.known_as)

    @property
    def keep(self) -> str:
        """The condition under which `run` records a return (event filter), "" for always."""
        return self.returns.failed if self.run is Kept.FAILURES else ""

    @property
    def probed(self) -> bool:
        """Whether `run` or `watch` sees it."""
        return self.run is not Kept.NOTHING or bool(self.watch)


_IB = "drivers/infiniband"
_GUP, _MIGRATE, _DMA = "mm/gup.c", "mm/migrate.c", "kernel/dma/mapping.c"
_DMA_BUF = "drivers/dma-buf/dma-buf.c"
_P2P, _MLX5 = "nvidia/nv-p2p.c", "drivers/net/ethernet/mellanox/mlx5/core"
_GUP_ARGUMENTS = {
    "": (("start", 1, "x64"), ("nr_pages", 2, "s64"), ("gup_flags", 3, "x32")),
    "fast": (("start", 1, "x64"), ("nr_pages", 2, "s32"), ("gup_flags", 3, "x32")),
    # (mm, start, nr_pages, gup_flags, …) since 5.9; before, a task_struct came first.
    "remote": (("start", 2, "x64"), ("nr_pages", 3, "s64"), ("gup_flags", 4, "x32")),
    "unlocked": (("start", 1, "x64"), ("nr_pages", 2, "s64"), ("gup_flags", 4, "x32")),
}
PINS_IN_PLACE = "check_and_migrate_cma_pages"
"""The one of the unpinnable family that pins in place where a page cannot move."""


def _names(*names: Name | str) -> tuple[Name, ...]:
    return tuple(Name(item) if isinstance(item, str) else item for item in names)


def _driver(name: str, module: str, source: str) -> KernelFunction:
    what, where, depth = f"registration by {module}", f"{_IB}/{source}", CallDepth.DRIVER
    told = (where, (Family.DRIVER,), module, Returns.POINTER, depth, (), Kept.ALL, (Watch.DRIVER,))
    return KernelFunction(what, _names(name), *told)


def _request(
    what: str, name: Name, source: str, *families: Family, run: Kept = Kept.NOTHING
) -> KernelFunction:
    depth = CallDepth.DRIVER if run is Kept.ALL else None  # above a driver's, where only `watch` looks
    told = (f"{_IB}/core/{source}", (Family.REQUEST, *families), "ib_uverbs", Returns.INT, depth)
    return KernelFunction(what, (name,), *told, run=run, watch=(Watch.REQUEST,))


def _gup(name: str, how: str, family: Family, *watch: Watch, read: tuple[Family, ...] = ()) -> KernelFunction:
    """GUP itself, which returns how many pages it took. `how` it takes its arguments."""
    pins = family is Family.TAKES_PINS
    names = _names(Name(name, "5.6 eddb1c228f79") if pins else name)
    returns = Returns.INT if how == "fast" else Returns.LONG
    told = (_GUP, (family, *read), "", returns, CallDepth.GUP, _GUP_ARGUMENTS[how], Kept.ALL, watch)
    return KernelFunction("pins" if pins else "references", names, *told)


def _inner(
    what: str,
    source: str,
    family: Family,
    depth: CallDepth,
    *names: Name | str,
    module: str = "",
    returns: Returns = Returns.INT,
    run: Kept = Kept.FAILURES,
    watch: bool = True,
) -> KernelFunction:
    """What a registration calls: `watch` follows its failures alone."""
    followed = (Watch.FAILURE,) if watch else ()
    return KernelFunction(what, _names(*names), source, (family,), module, returns, depth, (), run, followed)


def _unpin(name: str) -> KernelFunction:
    return KernelFunction("pins let go", _names(name), _GUP, (), watch=(Watch.UNPIN,))


def _foreign(what: str, names: str, source: str, family: Family, module: str = "") -> KernelFunction:
    """What the logs of other tracers alone show; `names` are no renaming, but do one job."""
    return KernelFunction(what, _names(*names.split()), source, (family,), module)


FUNCTIONS: tuple[KernelFunction, ...] = (
    _driver("rxe_reg_user_mr", "rdma_rxe", "sw/rxe/rxe_verbs.c"),
    _driver("siw_reg_user_mr", "siw", "sw/siw/siw_verbs.c"),
    _driver("mlx5_ib_reg_user_mr", "mlx5_ib", "hw/mlx5/mr.c"),
    _driver("mlx5_ib_reg_user_mr_dmabuf", "mlx5_ib", "hw/mlx5/mr.c"),
    _driver("mlx4_ib_reg_user_mr", "mlx4_ib", "hw/mlx4/mr.c"),
    _driver("irdma_reg_user_mr", "irdma", "hw/irdma/verbs.c"),
    _driver("irdma_reg_user_mr_dmabuf", "irdma", "hw/irdma/verbs.c"),
    _driver("bnxt_re_reg_user_mr", "bnxt_re", "hw/bnxt_re/ib_verbs.c"),
    _driver("bnxt_re_reg_user_mr_dmabuf", "bnxt_re", "hw/bnxt_re/ib_verbs.c"),
    _driver("efa_reg_mr", "efa", "hw/efa/efa_verbs.c"),
    _driver("efa_reg_user_mr_dmabuf", "efa", "hw/efa/efa_verbs.c"),
    _driver("erdma_reg_user_mr", "erdma", "hw/erdma/erdma_verbs.c"),
    _driver("hns_roce_reg_user_mr", "hns_roce_hw_v2", "hw/hns/hns_roce_mr.c"),
    _driver("mana_ib_reg_user_mr", "mana_ib", "hw/mana/mr.c"),
    _driver("mana_ib_reg_user_mr_dmabuf", "mana_ib", "hw/mana/mr.c"),
    _driver("ocrdma_reg_user_mr", "ocrdma", "hw/ocrdma/ocrdma_verbs.c"),
    _driver("qedr_reg_user_mr", "qedr", "hw/qedr/verbs.c"),
    _driver("c4iw_reg_user_mr", "iw_cxgb4", "hw/cxgb4/mem.c"),
    _driver("rvt_reg_user_mr", "rdmavt", "sw/rdmavt/mr.c"),
    _driver("ionic_reg_user_mr", "ionic_rdma", "hw/ionic/ionic_controlpath.c"),
    _driver("ionic_reg_user_mr_dmabuf", "ionic_rdma", "hw/ionic/ionic_controlpath.c"),
    _driver("mthca_reg_user_mr", "ib_mthca", "hw/mthca/mthca_provider.c"),
    _inner(
        *("NVIDIA's pin, behind cudaHostAlloc", "nvidia/os-mlock.c", Family.GPU_PIN, CallDepth.UMEM),
        "os_lock_user_pages",
        module="nvidia",
        returns=Returns.NV_STATUS,
        watch=False,
    ),
    _inner("GPU pages for peers", _P2P, Family.PEER, CallDepth.UMEM, "nvidia_p2p_get_pages", module="nvidia"),
    _inner(
        *("GPU pages for peers, for good", _P2P, Family.PEER, CallDepth.UMEM),
        "nvidia_p2p_get_pages_persistent",
        module="nvidia",
    ),
    _request(
        "dma-buf registration in uverbs",
        Name("ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR", "5.12 bfe0cc6eb249"),
        "uverbs_std_types_mr.c",
        Family.DMABUF_REQUEST,
        run=Kept.ALL,
    ),
    _request("registration in uverbs, by command", Name("ib_uverbs_reg_mr"), "uverbs_cmd.c"),
    _request(
        "registration in uverbs, by attributes",
        Name("ib_uverbs_handler_UVERBS_METHOD_REG_MR"),
        "uverbs_std_types_mr.c",
    ),
    KernelFunction(
        *("an RDMA device opened", _names("ib_uverbs_open"), f"{_IB}/core/uverbs_main.c", (), "ib_uverbs"),
        watch=(Watch.OPEN,),
    ),
    _inner(
        *("the MKey's creation", f"{_MLX5}/mr.c", Family.MKEY, CallDepth.UMEM, "mlx5_core_create_mkey"),
        module="mlx5_core",
    ),
    _inner(
        *("io_uring's fixed buffers", "io_uring/rsrc.c", Family.IO_URING, CallDepth.DRIVER),
        "io_sqe_buffers_register",
        run=Kept.ALL,
        watch=False,
    ),
    _inner(
        *("io_uring's pin", "io_uring/memmap.c, rsrc.c", Family.IO_PIN, CallDepth.UMEM, "io_pin_pages"),
        returns=Returns.POINTER,
        run=Kept.ALL,
        watch=False,
    ),
    _inner(
        *("the umem", f"{_IB}/core/umem.c", Family.UMEM, CallDepth.UMEM),
        Name("__ib_umem_get_va", "7.2 28fb701c642b"),
        Name("ib_umem_get", "", "7.2 28fb701c642b"),
        module="ib_core",
        returns=Returns.POINTER,
        run=Kept.ALL,
    ),
    _inner(
        *("the dma-buf umem", f"{_IB}/core/umem_dmabuf.c", Family.DMABUF, CallDepth.UMEM),
        Name("ib_umem_dmabuf_get_with_dma_device", "6.12 682358fd35de"),
        Name("ib_umem_dmabuf_get", "5.12 368c0159d492"),
        module="ib_uverbs",
        returns=Returns.POINTER,
        run=Kept.ALL,
    ),
    _inner("the dma-buf", _DMA_BUF, Family.DMABUF, CallDepth.GUP, "dma_buf_get", returns=Returns.POINTER),
    # Inline before 5.15.
    _inner(
        "mapping for the device",
        _DMA,
        Family.DMA_MAP,
        CallDepth.GUP,
        Name("dma_map_sgtable", "5.15 fffe3cc8c219"),
    ),
    _gup("pin_user_pages_fast", "fast", Family.TAKES_PINS, Watch.PIN, read=(Family.GUP,)),
    _gup("pin_user_pages", "", Family.TAKES_PINS, Watch.PIN, Watch.SHORT_TERM_PIN, read=(Family.GUP,)),
    _gup("pin_user_pages_remote", "remote", Family.TAKES_PINS, Watch.SHORT_TERM_PIN),
    _gup("pin_user_pages_unlocked", "unlocked", Family.TAKES_PINS),
    _gup("get_user_pages_fast", "fast", Family.TAKES_REFERENCES),
    _gup("get_user_pages", "", Family.TAKES_REFERENCES),
    _gup("get_user_pages_remote", "remote", Family.TAKES_REFERENCES),
    _gup("get_user_pages_unlocked", "unlocked", Family.TAKES_REFERENCES),
    _inner(
        *("long-term pinning", _GUP, Family.LONGTERM, CallDepth.LONGTERM, "__gup_longterm_locked"),
        returns=Returns.LONG,
    ),
    _inner(
        *("moving pages out of unpinnable memory", _GUP, Family.UNPINNABLE, CallDepth.UNPINNABLE),
        Name("migrate_longterm_unpinnable_folios", "6.11 53ba78de064b"),
        Name("migrate_longterm_unpinnable_pages", "6.1 67e139b02d99", "6.11 53ba78de064b"),
        # These two return a long; what they return reads the same as an int.
        Name("check_and_migrate_movable_pages", "5.13 d1e153fea2a8"),
        Name(PINS_IN_PLACE, "", "5.13 d1e153fea2a8"),
    ),
    KernelFunction(
        *("migration", _names("migrate_pages"), _MIGRATE, (Family.MIGRATE,), "", Returns.INT),
        CallDepth.MIGRATE,
        run=Kept.ALL,
        watch=(Watch.MIGRATION,),
    ),
    _inner(
        *("a page to move to", _MIGRATE, Family.TARGET, CallDepth.TARGET, "alloc_migration_target"),
        returns=Returns.POINTER_OR_NULL,
        watch=False,
    ),
    *map(_unpin, ("unpin_user_page", "unpin_user_pages", "unpin_user_pages_dirty_lock")),
    _unpin("unpin_user_page_range_dirty_lock"),
    _foreign("folios checked", "check_and_migrate_movable_folios", _GUP, Family.UNPINNABLE),
    _foreign(
        "GUP's paths",
        "gup_fast_fallback internal_get_user_pages_fast __get_user_pages",
        _GUP,
        Family.GUP_PATH,
    ),
    _foreign("a page fault", "faultin_page handle_mm_fault", f"{_GUP}, mm/memory.c", Family.STEP),
    _foreign("the mapping", "check_vma_flags writable_file_mapping_allowed", _GUP, Family.MAPPING_CHECK),
    _foreign("the limit", "can_do_mlock", "mm/mlock.c", Family.MLOCK),
    _foreign(
        "the charge to the memory cgroup",
        "__mem_cgroup_charge mem_cgroup_charge charge_memcg try_charge_memcg try_charge",
        "mm/memcontrol.c",
        Family.CGROUP,
    ),
    _foreign(
        "the table of pages",
        "sg_alloc_append_table_from_pages __sg_alloc_table_from_pages",
        "lib/scatterlist.c",
        Family.SG_TABLE,
    ),
    _foreign(
        "mapping for the device, by parts",
        "ib_dma_map_sgtable_attrs dma_map_sg_attrs __dma_map_sg_attrs",
        _DMA,
        Family.DMA_MAP,
    ),
    _foreign(
        "the dma-buf's steps",
        "ib_umem_dmabuf_map_pages dma_buf_dynamic_attach dma_buf_attach dma_buf_pin dma_buf_map_attachment"
        " dma_buf_map_attachment_unlocked",
        _DMA_BUF,
        Family.DMABUF,
    ),
    _foreign(
        "peer memory's steps",
        "ib_umem_get_peer nv_mem_get_pages nv_mem_get_pages_nc nvidia_p2p_dma_map_pages",
        "nvidia-peermem/nvidia-peermem.c",
        Family.PEER,
        "nvidia_peermem",
    ),
    _foreign(
        "the driver's steps to its pin",
        "nv_lock_user_pages RmCreateOsDescriptor osCreateOsDescriptorFromPageArray",
        "nvidia/os-mlock.c",
        Family.GPU_PIN,
        "nvidia",
    ),
    _foreign(
        "an MR of the device",
        "mlx5_ib_create_mkey mlx5_mr_cache_alloc reg_create rxe_add_to_pool __rxe_add_to_pool rxe_alloc",
        f"{_IB}/hw/mlx5/mr.c, {_IB}/sw/rxe/rxe_pool.c",
        Family.MKEY,
    ),
    _foreign(
        "the device's firmware",
        "mlx5_satisfy_startup_pages give_pages mlx5_cmd_exec mlx5_cmd_do",
        _MLX5,
        Family.STEP,
        "mlx5_core",
    ),
    _foreign("migration by batches", "migrate_pages_batch migrate_pages_sync", _MIGRATE, Family.STEP),
    _foreign(
        "uverbs, whatever for",
        "ib_uverbs_write ib_uverbs_ioctl ib_uverbs_cmd_verbs",
        f"{_IB}/core",
        Family.UVERBS,
        "ib_uverbs",
    ),
    _foreign(
        "system calls",
        "__x64_sys_ioctl __arm64_sys_ioctl do_syscall_64 invoke_syscall",
        "fs/ioctl.c, arch",
        Family.SYSTEM_CALL,
    ),
)

DRIVER = re.compile(r"^(?!ib_)(?:\w+_)?reg(?:_user)?_mr(?:_dmabuf)?$")
"""A provider's `reg_user_mr`, also of one that no row names."""
TRACEPOINTS = (("migrate", "mm_migrate_pages"),)
REASONS = {"MR_LONGTERM_PIN": "longterm_pin", "MR_CONTIG_RANGE": "contig_range"}
"""`enum migrate_reason` (include/linux/migrate_mode.h) of a migration out of unpinnable memory for a pin, as
the tracepoint prints it: MR_LONGTERM_PIN since 5.13, MR_CONTIG_RANGE before (check_and_migrate_cma_pages)."""


@cache
def of_family(*families: Family) -> tuple[str, ...]:
    """Return the names of all functions of these families."""
    return tuple(name for row in FUNCTIONS if set(families) & set(row.families) for name in row.names)


def watched(what: Watch) -> tuple[KernelFunction, ...]:
    """Return the functions that `watch` follows for this."""
    return tuple(row for row in FUNCTIONS if what in row.watch)


def first_release_with(names: Container[str]) -> tuple[int, int]:
    """Return the first kernel release that has all of these functions by these names."""
    told = (item.since for row in FUNCTIONS for item in row.known_as if item.since and item.name in names)
    numbers = (since.split()[0].split(".") for since in told)
    return max(((int(major), int(minor)) for major, minor in numbers), default=(0, 0))


BY_NAME: dict[str, KernelFunction] = {name: row for row in FUNCTIONS for name in row.names}
