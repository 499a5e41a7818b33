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
REFUSED, FAULT, UNDECIDED = (
    ("longterm-refused", "observed"),
    ("page-fault", "observed"),
    ("unknown", "missing"),
)
FILES: dict[str, tuple[Record, tuple[str, str]]] = {
    "refused at its first page": (failed("EFAULT", stopped_at(0), buffer=FILE), REFUSED),
    "no write was asked for": (
        failed("EFAULT", stopped_at(4, READ), buffer=FILE, before=HALF, access=["REMOTE_READ"]),
        FAULT,
    ),
    "no write was asked for, at the first page": (
        failed("EFAULT", stopped_at(0, READ), buffer=FILE, before=NONE, access=["REMOTE_READ"]),
        FAULT,
    ),
    "no write was asked for, arguments not recorded": (
        failed("EFAULT", PIN_FAILED, buffer=FILE, before=HALF, access=["REMOTE_READ"]),
        FAULT,
    ),
    "pages before it were pinned": (failed("EFAULT", stopped_at(4), buffer=FILE, before=HALF), FAULT),
    "the kernel has no such refusal": (
        failed("EFAULT", stopped_at(0), buffer=FILE, node=OLD, before=NONE),
        FAULT,
    ),
    "its symbol is not there, whatever the version": (
        failed("EFAULT", stopped_at(0), buffer=FILE, before=NONE, refuses_writable_files=False),
        FAULT,
    ),
    "its symbol is there, whatever the version": (
        failed("EFAULT", stopped_at(0), buffer=FILE, before=NONE, node=OLD, refuses_writable_files=True),
        REFUSED,
    ),
    "a vendor's kernel, the page is there": (
        failed("EFAULT", stopped_at(0), buffer=FILE, node=VENDOR),
        REFUSED,
    ),
    "a vendor's kernel, no page is there": (
        failed("EFAULT", stopped_at(0), buffer=FILE, node=VENDOR, before=NONE),
        UNDECIDED,
    ),
    "a vendor's kernel without a trace, a page lacks": (
        failed("EFAULT", OFF, buffer=FILE, node=VENDOR, before=HALF),
        UNDECIDED,
    ),
    "nobody knows whether it was to be written": (
        failed("EFAULT", PIN_FAILED, buffer=FILE, access=None),
        UNDECIDED,
    ),
    "behind anonymous memory": (
        failed("EFAULT", stopped_at(4), mappings=[line(0, 4, "rw-p", ""), line(4, 8, "rw-s")]),
        REFUSED,
    ),
    "shared memory behind anonymous memory": (
        failed("EFAULT", stopped_at(4), mappings=[line(0, 4, "rw-p", ""), line(4, 8, "rw-s", "/memfd:x")]),
        FAULT,
    ),
    "half of it without access": (
        failed(
            "EFAULT",
            stopped_at(4, READ),
            buffer=FILE,
            mappings=[line(0, 4, "rw-s"), line(4, 8, "---s")],
            access=["REMOTE_READ"],
        ),
        FAULT,
    ),
    "a hole in it": (
        failed("EFAULT", stopped_at(4), buffer=FILE, mappings=[line(0, 4, "rw-s"), line(5, 8, "rw-s")]),
        FAULT,
    ),
    "the mapping was changed after the buffer was made": (
        failed("EFAULT", stopped_at(0), buffer=FILE, mappings=[line(0, 8, "r--s")]),
        FAULT,
    ),
    "fs-dax, for reading": (
        failed("EOPNOTSUPP", stopped_at(0, READ, -95), buffer=vma("r--s", "/pmem/f"), access=["REMOTE_READ"]),
        REFUSED,
    ),
    "EOPNOTSUPP on a file without a trace": (failed("EOPNOTSUPP", OFF, buffer=FILE), UNDECIDED),
    "io_uring pins for writing": (
        failed(
            "EFAULT", stopped_at(0, path=IO_URING), buffer=FILE, access=[], verb="io_uring_register_buffers"
        ),
        REFUSED,
    ),
    "io_uring's own refusal of a file": (
        failed(
            "EOPNOTSUPP",
            returns(("pin_user_pages", 8), ("io_pin_pages", -95), ("io_sqe_buffers_register", -95)),
            buffer=FILE,
            verb="io_uring_register_buffers",
        ),
        ("longterm-refused", "inferred"),
    ),
    "io_uring refuses what is no file": (
        failed(
            "EOPNOTSUPP",
            returns(("pin_user_pages", 8), ("io_sqe_buffers_register", -95)),
            verb="io_uring_register_buffers",
        ),
        UNDECIDED,
    ),
    "a BAR behind anonymous memory": (
        failed(
            "EFAULT",
            stopped_at(7),
            mappings=[
                line(0, 7, "rw-p", ""),
                line(7, 8, "rw-s", "/sys/devices/pci0000:00/0000:00:01.0/resource1"),
            ],
        ),
        ("bar-map", "observed"),
    ),
    "frames without pages": (
        failed(
            "EFAULT",
            stopped_at(0),
            buffer=vma("rw-s", "/dev/some"),
            before=NONE | {"traits": [[0, 8, "special"]]},
        ),
        ("bar-map", "observed"),
    ),
    "a BAR that the call did not reach": (
        failed(
            "EFAULT",
            stopped_at(3),
            before=HALF,
            mappings=[line(0, 3, "rw-p", ""), line(7, 8, "rw-s", "/dev/nvidia0")],
        ),
        FAULT,
    ),
}


LIMITED = limited(64 * PAGE)
PINNED = {"limits": {"vmpin": 60 * PAGE, "vmpin_after": 60 * PAGE, "vmlck": 0}}
MEMLOCK, ROOM = (
    ("memlock-accounting", "observed"),
    {"limits": {"vmpin": 0, "vmpin_after": 0, "vmlck": 64 * PAGE}},
)
COUNTED: dict[str, tuple[Record, tuple[str, str]]] = {
    "io_uring or a series pinned before": (failed("ENOMEM", UMEM_EARLY, node=LIMITED, **PINNED), MEMLOCK),
    "the limit has room": (failed("ENOMEM", UMEM_EARLY, node=LIMITED, **ROOM), UNDECIDED),
    "with the capability": (
        failed("ENOMEM", UMEM_EARLY, node={"limits": LIMITED["limits"]}, **PINNED),
        UNDECIDED,
    ),
    "no limit": (failed("ENOMEM", UMEM_EARLY, node=limited(None), **PINNED), UNDECIDED),
    "the count changed meanwhile": (
        failed("ENOMEM", UMEM_EARLY, node=LIMITED, limits={"vmpin": 0, "vmpin_after": PAGE}),
        ("memlock-accounting", "inferred"),
    ),
    "not counted, no trace": (failed("ENOMEM", OFF, node=LIMITED), UNDECIDED),
    "not counted, a page was pinned": (
        failed("ENOMEM", returns(("pin_user_pages_fast", 4), ("__ib_umem_get_va", -12)), node=LIMITED),
        ("umem-alloc", "inferred"),
    ),
    "the umem was never reached": (
        failed("ENOMEM", returns(("rxe_reg_user_mr", -12)), node=LIMITED, **PINNED),
        ("mkey", "inferred"),
    ),
    "a dma-buf is not counted": (
        failed("ENOMEM", UMEM_EARLY, node=LIMITED, verb="ibv_reg_dmabuf_mr", **PINNED),
        UNDECIDED,
    ),
    "nor what is mapped on demand": (
        failed("ENOMEM", OFF, node=LIMITED, access=["ON_DEMAND"], **PINNED),
        UNDECIDED,
    ),
}


CASES: dict[str, tuple[Record, tuple[str, str]]] = {
    "memlock exceeded": (
        failed("ENOMEM", UMEM_EARLY, node=limited(4 * PAGE)),
        ("memlock-accounting", "observed"),
    ),
    "memlock exceeded, no trace": (
        failed("ENOMEM", OFF, node=limited(4 * PAGE)),
        ("memlock-accounting", "inferred"),
    ),
    "memlock zero": (failed("EPERM", UMEM_REFUSED, node=limited(0)), ("memlock-accounting", "observed")),
    "memlock enough": (
        failed("ENOMEM", UMEM_EARLY, node=limited(64 * PAGE), limits={"vmpin": 0, "vmpin_after": 0}),
        UNDECIDED,
    ),
    "memlock unlimited": (failed("ENOMEM", UMEM_EARLY, node=limited(None)), UNDECIDED),
    "memlock with the capability": (
        failed("ENOMEM", UMEM_EARLY, node={"limits": {"memlock_soft": 0, "memlock_hard": 0}}),
        UNDECIDED,
    ),
    "memlock not recorded": (failed("ENOMEM", UMEM_EARLY, node=UNCAPABLE | {"limits": {}}), UNDECIDED),
    "memlock by the call's own word": (
        failed("ENOMEM", UMEM_EARLY, capabilities=[], limits={"memlock_soft": 0}),
        ("memlock-accounting", "observed"),
    ),
    "unmapped address": (
        failed("EFAULT", PIN_FAILED, address=ADDRESS + (1 << 30), iova=ADDRESS + (1 << 30)),
        ("page-fault", "observed"),
    ),
    "read-only mapping": (failed("EFAULT", PIN_FAILED, buffer=vma("r--p")), ("page-fault", "observed")),
    "a hole in the middle": (
        failed("EFAULT", PIN_FAILED, before=state([*OUT[:3], 0, *OUT[4:]])),
        ("page-fault", "observed"),
    ),
    "a range beyond the mapping": (failed("EFAULT", PIN_FAILED, length=1 << 43), ("page-fault", "observed")),
    "EFAULT alone": (failed("EFAULT", OFF), ("unknown", "missing")),
    "a file mapping": (
        failed("EFAULT", PIN_FAILED, buffer=vma("rw-s", "/var/tmp/f") | {"backing": "file"}),
        ("longterm-refused", "observed"),
    ),
    "a huge page that the kernel does not try to move": (
        failed("ENOMEM", GUP_ENOMEM, before=state(CMA), after=state(CMA), buffer={"backing": "hugetlb"}),
        ("longterm-refused", "observed"),
    ),
    "a huge page where migration is hidden": (
        failed(
            "ENOMEM",
            GUP_ENOMEM | {"missing": [{"fn": "migrate_pages", "why": "inlined"}]},
            before=state(CMA),
            after=state(CMA),
            buffer={"backing": "hugetlb"},
        ),
        UNDECIDED,
    ),
    "an ordinary huge page": (failed("ENOMEM", GUP_ENOMEM, buffer={"backing": "hugetlb"}), UNDECIDED),
    "a private file mapping": (
        failed("EFAULT", PIN_FAILED, buffer=vma("rw-p", "/var/tmp/f") | {"backing": "file"}),
        ("page-fault", "observed"),
    ),
    "a BAR": (failed("EFAULT", PIN_FAILED, buffer=vma("rw-s", "/dev/nvidia0")), ("bar-map", "observed")),
    "a GPU address": (
        failed("EFAULT", PIN_FAILED, buffer={"owner": "cuda", "backing": "cuda-device"}),
        ("peer-memory", "inferred"),
    ),
    "peer memory refused": (
        failed("ENOMEM", returns(("nvidia_p2p_get_pages", -12))),
        ("peer-memory", "observed"),
    ),
    "on-demand paging that uverbs refuses": (
        failed("EINVAL", trace(), access=["LOCAL_WRITE", "ON_DEMAND"]),
        ("arguments", "inferred"),
    ),
    "no cause in sight": (failed("EINVAL", trace(), access=["LOCAL_WRITE"]), ("unknown", "missing")),
    "no byte at the begin of a page": (
        failed("EINVAL", returns(("rxe_reg_user_mr", -22)), length=0),
        ("arguments", "observed"),
    ),
    "2^46 bytes": (
        failed("EINVAL", returns(("__ib_umem_get_va", -22), ("rxe_reg_user_mr", -22)), length=1 << 46),
        ("arguments", "observed"),
    ),
    "2^46 bytes, no trace": (failed("EINVAL", OFF, length=1 << 46), ("arguments", "inferred")),
    "address and length overflow": (failed("EINVAL", length=(1 << 64) - PAGE), ("arguments", "inferred")),
    "iova elsewhere in the page": (failed("EINVAL", iova=ADDRESS + 8), ("arguments", "inferred")),
    "remote write without local write": (
        failed("EINVAL", access=["REMOTE_WRITE"]),
        ("arguments", "inferred"),
    ),
    "a flag that the device refuses": (
        failed("EOPNOTSUPP", returns(("rxe_reg_user_mr", -95)), access=["LOCAL_WRITE", "HUGETLB"]),
        ("arguments", "observed"),
    ),
    "EINVAL alone": (failed("EINVAL", {"status": "unavailable", "why": "no tracefs"}), UNDECIDED),
    "MRs exhausted": (failed("EINVAL", returns(("rxe_reg_user_mr", -22))), ("mkey", "inferred")),
    "MRs exhausted on 6.1": (failed("ENOMEM", returns(("rxe_reg_user_mr", -12))), ("mkey", "inferred")),
    "an MKey refused": (
        failed(
            "ENOMEM",
            returns(("pin_user_pages_fast", 8), ("mlx5_core_create_mkey", -12), ("mlx5_ib_reg_user_mr", -12)),
        ),
        ("mkey", "observed"),
    ),
    "the DMA mapping failed": (
        failed("EIO", returns(("pin_user_pages_fast", 8), ("dma_map_sgtable", -5), ("__ib_umem_get_va", -5))),
        ("dma-map", "observed"),
    ),
    "the table of pages failed after a part": (
        failed("ENOMEM", returns(("pin_user_pages_fast", 4), ("__ib_umem_get_va", -12))),
        ("umem-alloc", "inferred"),
    ),
    "the table of pages failed after the last part": (
        failed("ENOMEM", returns(("pin_user_pages_fast", 8), ("__ib_umem_get_va", -12))),
        ("umem-alloc", "inferred"),
    ),
    "the table of pages or the mapping for the device": (
        failed(
            "ENOMEM",
            returns(("pin_user_pages_fast", 8), ("__ib_umem_get_va", -12))
            | {"missing": [{"fn": "dma_map_sgtable", "why": "inlined"}]},
        ),
        UNDECIDED,
    ),
    "no dma-buf support": (failed("EOPNOTSUPP", verb="ibv_reg_dmabuf_mr"), ("dma-buf", "observed")),
    "no dma-buf behind the fd": (
        failed("EBADF", returns(("ib_umem_dmabuf_get_with_dma_device", -9)), verb="ibv_reg_dmabuf_mr"),
        ("dma-buf", "observed"),
    ),
    "the device vanished": (failed("EIO"), ("device", "observed")),
    "the device may not be opened": (failed("EACCES"), ("device", "inferred")),
    "no page to move to": (
        failed("ENOMEM", build.failing_trace(8, ret=-12), before=state(CMA), after=state(CMA)),
        ("migration-target", "observed"),
    ),
    "no huge page to move to, while one is held": (
        failed(
            "ENOMEM",
            build.failing_trace(8, ret=-12),
            buffer={"backing": "thp"},
            before=state(CMA, 1025, pincount=[[0, 8, 1]]),
            after=state(CMA, 1025, pincount=[[0, 8, 1]]),
        ),
        UNDECIDED,
    ),
    "something held the pages": (
        failed("ENOMEM", build.failing_trace(8), before=state(CMA), after=state(CMA)),
        UNDECIDED,
    ),
    "lost events": (
        failed("EINVAL", returns(("rxe_reg_user_mr", -22)) | {"status": "spoiled", "why": "overrun"}),
        UNDECIDED,
    ),
    "only failures of GUP are in sight": (
        failed(
            "EINVAL",
            returns(("rxe_reg_user_mr", -22))
            | {"probed": ["rxe_reg_user_mr"], "probed_failures": ["pin_user_pages_fast"]},
        ),
        UNDECIDED,
    ),
    "all in sight": (
        failed(
            "EINVAL",
            returns(("rxe_reg_user_mr", -22))
            | {
                "probed": ["rxe_reg_user_mr", "pin_user_pages_fast", "pin_user_pages", "ib_umem_get"],
                "probed_failures": [],
            },
        ),
        ("mkey", "inferred"),
    ),
    "GUP cannot be seen": (
        failed(
            "EINVAL",
            returns(("rxe_reg_user_mr", -22))
            | {
                "missing": [
                    {"fn": name, "why": "inlined"} for name in ("pin_user_pages_fast", "pin_user_pages")
                ]
            },
        ),
        UNDECIDED,
    ),
}
