"""Registrations that fail, each with the layer that the judge names and how it is known.

Three tables: where a call stopped, what counts against the limit, and all the rest.
"""

from __future__ import annotations

from typing import Any

import record_builder as build
from record_builder import ADDRESS, CMA, OUT, PAGE, Builder, Record, returns, state, trace

UNCAPABLE = {"capabilities": ["CAP_SYS_ADMIN"]}
OFF = {"status": "off", "why": "--trace off"}
PIN_FAILED = returns(("pin_user_pages_fast", -14), ("__ib_umem_get_va", -14), ("rxe_reg_user_mr", -14))


def limited(soft: int | None) -> dict[str, Any]:
    """A node with a locked-memory limit, and without CAP_IPC_LOCK."""
    return UNCAPABLE | {"limits": {"memlock_soft": soft, "memlock_hard": soft}}


def failed(
    errno: str, traced: Any = None, *, node: dict[str, Any] | None = None, buffer: Any = None, **keys: Any
) -> Record:
    """A fault without a pin: one registration of ordinary memory that fails."""
    builder = Builder(**(node or {}))
    builder.memory_map()
    builder.begin("fault", contract="none", expects={"none": "other-failure"}, controls={}, needs=())
    builder.buffer(state(OUT), place="any", placed="as-allocated", **(buffer or {}))
    before, after = keys.pop("before", state(OUT)), keys.pop("after", state(OUT))
    builder.register(before, after, errno=errno, **{"trace": traced or trace(), **keys})
    builder.end()
    return builder.done()


def case(due: str, errno: str, traced: Any = None, **keys: Any) -> tuple[Record, tuple[str, str]]:
    """A registration that fails, and the layer with how it is known."""
    layer, how = due.split()
    return failed(errno, traced, **keys), (layer, how)


def vma(flags: str, path: str = "", pages: int = 8) -> dict[str, Any]:
    return {"vma": f"{ADDRESS:x}-{ADDRESS + pages * PAGE:x} {flags} 00000000 08:01 77 {path}".rstrip()}


GUP_ENOMEM = returns(("pin_user_pages_fast", -12), ("__ib_umem_get_va", -12), ("rxe_reg_user_mr", -12))
UMEM_EARLY = returns(("__ib_umem_get_va", -12), ("rxe_reg_user_mr", -12))
UMEM_REFUSED = returns(("__ib_umem_get_va", -1), ("rxe_reg_user_mr", -1))


VERBS = ("pin_user_pages_fast", "__ib_umem_get_va", "rxe_reg_user_mr")
IO_URING = ("pin_user_pages_fast", "io_pin_pages", "io_sqe_buffers_register")


def stopped_at(
    page: int,
    flags: tuple[str, ...] = ("FOLL_WRITE", "FOLL_LONGTERM"),
    errno: int = -14,
    path: tuple[str, ...] = VERBS,
) -> dict[str, Any]:
    """A trace in which pinning stopped at a page of the buffer."""
    traced = returns(*((name, errno) for name in path))
    traced["events"][0]["args"] = {"start": ADDRESS + page * PAGE, "nr_pages": 8 - page, "flags": list(flags)}
    return traced


def line(first: int, end: int, flags: str, path: str = "/data/file") -> str:
    """A line of /proc/self/maps, of pages of the buffer."""
    return f"{ADDRESS + first * PAGE:x}-{ADDRESS + end * PAGE:x} {flags} 00000000 08:01 77 {path}"


FILE = vma("rw-s", "/data/file") | {"backing": "file"}
VENDOR = {"kernel": "5.14.0-427.el9.x86_64"}
OLD = {"kernel": "6.1.0-57-amd64"}
READ = ("FOLL_LONGTERM",)
HALF = state([*OUT[:4], 0, 0, 0, 0])
NONE = state([0] * 8)
REFUSED, FAULT, UNDECIDED = "longterm-refused observed", "page-fault observed", "unknown missing"
FILES = {
    "refused at its first page": case(REFUSED, "EFAULT", stopped_at(0), buffer=FILE),
    "no write was asked for": case(
        FAULT, "EFAULT", stopped_at(4, READ), buffer=FILE, before=HALF, access=["REMOTE_READ"]
    ),
    "no write was asked for, at the first page": case(
        FAULT, "EFAULT", stopped_at(0, READ), buffer=FILE, before=NONE, access=["REMOTE_READ"]
    ),
    "no write was asked for, arguments not recorded": case(
        FAULT, "EFAULT", PIN_FAILED, buffer=FILE, before=HALF, access=["REMOTE_READ"]
    ),
    "pages before it were pinned": case(FAULT, "EFAULT", stopped_at(4), buffer=FILE, before=HALF),
    "the kernel has no such refusal": case(
        FAULT, "EFAULT", stopped_at(0), buffer=FILE, node=OLD, before=NONE
    ),
    "its symbol is not there, whatever the version": case(
        FAULT, "EFAULT", stopped_at(0), buffer=FILE, before=NONE, refuses_writable_files=False
    ),
    "its symbol is there, whatever the version": case(
        REFUSED, "EFAULT", stopped_at(0), buffer=FILE, before=NONE, node=OLD, refuses_writable_files=True
    ),
    "a vendor's kernel, the page is there": case(REFUSED, "EFAULT", stopped_at(0), buffer=FILE, node=VENDOR),
    "a vendor's kernel, no page is there": case(
        UNDECIDED, "EFAULT", stopped_at(0), buffer=FILE, node=VENDOR, before=NONE
    ),
    "a vendor's kernel without a trace, a page lacks": case(
        UNDECIDED, "EFAULT", OFF, buffer=FILE, node=VENDOR, before=HALF
    ),
    "nobody knows whether it was to be written": case(
        UNDECIDED, "EFAULT", PIN_FAILED, buffer=FILE, access=None
    ),
    "behind anonymous memory": case(
        REFUSED, "EFAULT", stopped_at(4), mappings=[line(0, 4, "rw-p", ""), line(4, 8, "rw-s")]
    ),
    "shared memory behind anonymous memory": case(
        FAULT, "EFAULT", stopped_at(4), mappings=[line(0, 4, "rw-p", ""), line(4, 8, "rw-s", "/memfd:x")]
    ),
    "half of it without access": case(
        FAULT,
        "EFAULT",
        stopped_at(4, READ),
        buffer=FILE,
        mappings=[line(0, 4, "rw-s"), line(4, 8, "---s")],
        access=["REMOTE_READ"],
    ),
    "a hole in it": case(
        FAULT, "EFAULT", stopped_at(4), buffer=FILE, mappings=[line(0, 4, "rw-s"), line(5, 8, "rw-s")]
    ),
    "the mapping was changed after the buffer was made": case(
        FAULT, "EFAULT", stopped_at(0), buffer=FILE, mappings=[line(0, 8, "r--s")]
    ),
    "fs-dax, for reading": case(
        REFUSED, "EOPNOTSUPP", stopped_at(0, READ, -95), buffer=vma("r--s", "/pmem/f"), access=["REMOTE_READ"]
    ),
    "EOPNOTSUPP on a file without a trace": case(UNDECIDED, "EOPNOTSUPP", OFF, buffer=FILE),
    "io_uring pins for writing": case(
        REFUSED,
        "EFAULT",
        stopped_at(0, path=IO_URING),
        buffer=FILE,
        access=[],
        verb="io_uring_register_buffers",
    ),
    "io_uring's own refusal of a file": case(
        "longterm-refused inferred",
        "EOPNOTSUPP",
        returns(("pin_user_pages", 8), ("io_pin_pages", -95), ("io_sqe_buffers_register", -95)),
        buffer=FILE,
        verb="io_uring_register_buffers",
    ),
    "io_uring refuses what is no file": case(
        UNDECIDED,
        "EOPNOTSUPP",
        returns(("pin_user_pages", 8), ("io_sqe_buffers_register", -95)),
        verb="io_uring_register_buffers",
    ),
    "a BAR behind anonymous memory": case(
        "bar-map observed",
        "EFAULT",
        stopped_at(7),
        mappings=[
            line(0, 7, "rw-p", ""),
            line(7, 8, "rw-s", "/sys/devices/pci0000:00/0000:00:01.0/resource1"),
        ],
    ),
    "frames without pages": case(
        "bar-map observed",
        "EFAULT",
        stopped_at(0),
        buffer=vma("rw-s", "/dev/some"),
        before=NONE | {"traits": [[0, 8, "special"]]},
    ),
    "a BAR that the call did not reach": case(
        FAULT,
        "EFAULT",
        stopped_at(3),
        before=HALF,
        mappings=[line(0, 3, "rw-p", ""), line(7, 8, "rw-s", "/dev/nvidia0")],
    ),
}


LIMITED = limited(64 * PAGE)
PINNED = {"limits": {"vmpin": 60 * PAGE, "vmpin_after": 60 * PAGE, "vmlck": 0}}
ROOM = {"limits": {"vmpin": 0, "vmpin_after": 0, "vmlck": 64 * PAGE}}
MEMLOCK = "memlock-accounting observed"
COUNTED = {
    "io_uring or a series pinned before": case(MEMLOCK, "ENOMEM", UMEM_EARLY, node=LIMITED, **PINNED),
    "the limit has room": case(UNDECIDED, "ENOMEM", UMEM_EARLY, node=LIMITED, **ROOM),
    "with the capability": case(
        UNDECIDED, "ENOMEM", UMEM_EARLY, node={"limits": LIMITED["limits"]}, **PINNED
    ),
    "no limit": case(UNDECIDED, "ENOMEM", UMEM_EARLY, node=limited(None), **PINNED),
    "the count changed meanwhile": case(
        "memlock-accounting inferred",
        "ENOMEM",
        UMEM_EARLY,
        node=LIMITED,
        limits={"vmpin": 0, "vmpin_after": PAGE},
    ),
    "not counted, no trace": case(UNDECIDED, "ENOMEM", OFF, node=LIMITED),
    "not counted, a page was pinned": case(
        "umem-alloc inferred",
        "ENOMEM",
        returns(("pin_user_pages_fast", 4), ("__ib_umem_get_va", -12)),
        node=LIMITED,
    ),
    "the umem was never reached": case(
        "mkey inferred", "ENOMEM", returns(("rxe_reg_user_mr", -12)), node=LIMITED, **PINNED
    ),
    "a dma-buf is not counted": case(
        UNDECIDED, "ENOMEM", UMEM_EARLY, node=LIMITED, verb="ibv_reg_dmabuf_mr", **PINNED
    ),
    "nor what is mapped on demand": case(
        UNDECIDED, "ENOMEM", OFF, node=LIMITED, access=["ON_DEMAND"], **PINNED
    ),
}


CASES = {
    "memlock exceeded": case(MEMLOCK, "ENOMEM", UMEM_EARLY, node=limited(4 * PAGE)),
    "memlock exceeded, no trace": case("memlock-accounting inferred", "ENOMEM", OFF, node=limited(4 * PAGE)),
    "memlock zero": case(MEMLOCK, "EPERM", UMEM_REFUSED, node=limited(0)),
    "memlock enough": case(
        UNDECIDED, "ENOMEM", UMEM_EARLY, node=limited(64 * PAGE), limits={"vmpin": 0, "vmpin_after": 0}
    ),
    "memlock unlimited": case(UNDECIDED, "ENOMEM", UMEM_EARLY, node=limited(None)),
    "memlock with the capability": case(
        UNDECIDED, "ENOMEM", UMEM_EARLY, node={"limits": {"memlock_soft": 0, "memlock_hard": 0}}
    ),
    "memlock not recorded": case(UNDECIDED, "ENOMEM", UMEM_EARLY, node=UNCAPABLE | {"limits": {}}),
    "memlock by the call's own word": case(
        MEMLOCK, "ENOMEM", UMEM_EARLY, capabilities=[], limits={"memlock_soft": 0}
    ),
    "unmapped address": case(
        FAULT, "EFAULT", PIN_FAILED, address=ADDRESS + (1 << 30), iova=ADDRESS + (1 << 30)
    ),
    "read-only mapping": case(FAULT, "EFAULT", PIN_FAILED, buffer=vma("r--p")),
    "a hole in the middle": case(FAULT, "EFAULT", PIN_FAILED, before=state([*OUT[:3], 0, *OUT[4:]])),
    "a range beyond the mapping": case(FAULT, "EFAULT", PIN_FAILED, length=1 << 43),
    "EFAULT alone": case(UNDECIDED, "EFAULT", OFF),
    "a file mapping": case(
        REFUSED, "EFAULT", PIN_FAILED, buffer=vma("rw-s", "/var/tmp/f") | {"backing": "file"}
    ),
    "a huge page that the kernel does not try to move": case(
        REFUSED,
        "ENOMEM",
        returns(("pin_user_pages_fast", -12), ("ib_umem_get", -12), ("rxe_reg_user_mr", -12)),
        before=state(CMA),
        after=state(CMA),
        buffer={"backing": "hugetlb"},
    ),
    "a huge page where migration is hidden": case(
        UNDECIDED,
        "ENOMEM",
        GUP_ENOMEM | {"missing": [{"fn": "migrate_pages", "why": "inlined"}]},
        before=state(CMA),
        after=state(CMA),
        buffer={"backing": "hugetlb"},
    ),
    "an ordinary huge page": case(UNDECIDED, "ENOMEM", GUP_ENOMEM, buffer={"backing": "hugetlb"}),
    "a private file mapping": case(
        FAULT, "EFAULT", PIN_FAILED, buffer=vma("rw-p", "/var/tmp/f") | {"backing": "file"}
    ),
    "a BAR": case("bar-map observed", "EFAULT", PIN_FAILED, buffer=vma("rw-s", "/dev/nvidia0")),
    "a GPU address": case(
        "peer-memory inferred", "EFAULT", PIN_FAILED, buffer={"owner": "cuda", "backing": "cuda-device"}
    ),
    "peer memory refused": case("peer-memory observed", "ENOMEM", returns(("nvidia_p2p_get_pages", -12))),
    "on-demand paging that uverbs refuses": case(
        "arguments inferred", "EINVAL", trace(), access=["LOCAL_WRITE", "ON_DEMAND"]
    ),
    "no cause in sight": case(UNDECIDED, "EINVAL", trace(), access=["LOCAL_WRITE"]),
    "no byte at the begin of a page": case(
        "arguments observed", "EINVAL", returns(("rxe_reg_user_mr", -22)), length=0
    ),
    "2^46 bytes": case(
        "arguments observed",
        "EINVAL",
        returns(("__ib_umem_get_va", -22), ("rxe_reg_user_mr", -22)),
        length=1 << 46,
    ),
    "2^46 bytes, no trace": case("arguments inferred", "EINVAL", OFF, length=1 << 46),
    "address and length overflow": case("arguments inferred", "EINVAL", length=(1 << 64) - PAGE),
    "iova elsewhere in the page": case("arguments inferred", "EINVAL", iova=ADDRESS + 8),
    "remote write without local write": case("arguments inferred", "EINVAL", access=["REMOTE_WRITE"]),
    "a flag that the device refuses": case(
        "arguments observed",
        "EOPNOTSUPP",
        returns(("rxe_reg_user_mr", -95)),
        access=["LOCAL_WRITE", "HUGETLB"],
    ),
    "EINVAL alone": case(UNDECIDED, "EINVAL", {"status": "unavailable", "why": "no tracefs"}),
    "MRs exhausted": case("mkey inferred", "EINVAL", returns(("rxe_reg_user_mr", -22))),
    "MRs exhausted on 6.1": case("mkey inferred", "ENOMEM", returns(("rxe_reg_user_mr", -12))),
    "an MKey refused": case(
        "mkey observed",
        "ENOMEM",
        returns(("pin_user_pages_fast", 8), ("mlx5_core_create_mkey", -12), ("mlx5_ib_reg_user_mr", -12)),
    ),
    "the DMA mapping failed": case(
        "dma-map observed",
        "EIO",
        returns(("pin_user_pages_fast", 8), ("dma_map_sgtable", -5), ("__ib_umem_get_va", -5)),
    ),
    "the table of pages failed after a part": case(
        "umem-alloc inferred", "ENOMEM", returns(("pin_user_pages_fast", 4), ("__ib_umem_get_va", -12))
    ),
    "the table of pages failed after the last part": case(
        "umem-alloc inferred", "ENOMEM", returns(("pin_user_pages_fast", 8), ("__ib_umem_get_va", -12))
    ),
    "the table of pages or the mapping for the device": case(
        UNDECIDED,
        "ENOMEM",
        returns(("pin_user_pages_fast", 8), ("__ib_umem_get_va", -12))
        | {"missing": [{"fn": "dma_map_sgtable", "why": "inlined"}]},
    ),
    "no dma-buf support": case("dma-buf observed", "EOPNOTSUPP", verb="ibv_reg_dmabuf_mr"),
    "no dma-buf behind the fd": case(
        "dma-buf observed",
        "EBADF",
        returns(("ib_umem_dmabuf_get_with_dma_device", -9)),
        verb="ibv_reg_dmabuf_mr",
    ),
    "the device vanished": case("device observed", "EIO"),
    "the device may not be opened": case("device inferred", "EACCES"),
    "no page to move to": case(
        "migration-target observed",
        "ENOMEM",
        build.failing_trace(8, ret=-12),
        before=state(CMA),
        after=state(CMA),
    ),
    "no huge page to move to, while one is held": case(
        UNDECIDED,
        "ENOMEM",
        build.failing_trace(8, ret=-12),
        buffer={"backing": "thp"},
        before=state(CMA, 1025, pincount=[[0, 8, 1]]),
        after=state(CMA, 1025, pincount=[[0, 8, 1]]),
    ),
    "something held the pages": case(
        UNDECIDED, "ENOMEM", build.failing_trace(8), before=state(CMA), after=state(CMA)
    ),
    "lost events": case(
        UNDECIDED, "EINVAL", returns(("rxe_reg_user_mr", -22)) | {"status": "spoiled", "why": "overrun"}
    ),
    "only failures of GUP are in sight": case(
        UNDECIDED,
        "EINVAL",
        returns(("rxe_reg_user_mr", -22))
        | {"probed": ["rxe_reg_user_mr"], "probed_failures": ["pin_user_pages_fast"]},
    ),
    "all in sight": case(
        "mkey inferred",
        "EINVAL",
        returns(("rxe_reg_user_mr", -22))
        | {
            "probed": ["rxe_reg_user_mr", "pin_user_pages_fast", "pin_user_pages", "ib_umem_get"],
            "probed_failures": [],
        },
    ),
    "GUP cannot be seen": case(
        UNDECIDED,
        "EINVAL",
        returns(("rxe_reg_user_mr", -22))
        | {"missing": [{"fn": name, "why": "inlined"} for name in ("pin_user_pages_fast", "pin_user_pages")]},
    ),
}
