"""Layers: each cause that says the same errno, told apart by trace, page state and what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import record_builder as build
from record_builder import ADDRESS, CMA, OUT, PAGE, Builder, Record, find, returns, state, trace

from regrepro.judge import judge_record

UNCAPABLE = {"capabilities": ["CAP_SYS_ADMIN"]}
PIN_FAILED = returns(("pin_user_pages_fast", -14), ("__ib_umem_get_va", -14), ("rxe_reg_user_mr", -14))


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


def layer(record: Record) -> tuple[str, str]:
    """Layer and how it is known."""
    verdict = judge_record(record)["verdicts"][0]
    # What names no cause, and what could be this bug, is left open; every other layer is another failure.
    open_cause = verdict["layer"] in ("unknown", "page-migration")
    assert verdict["verdict"] == "other-failure" or (open_cause and verdict["verdict"] == "unmet"), verdict
    return verdict["layer"], verdict["evidence"]["layer"]["how"]


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
        failed("EFAULT", {"status": "off", "why": "off"}, buffer=FILE, node=VENDOR, before=HALF),
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
    "EOPNOTSUPP on a file without a trace": (
        failed("EOPNOTSUPP", {"status": "off", "why": "off"}, buffer=FILE),
        UNDECIDED,
    ),
    "io_uring pins for writing": (
        failed(
            "EFAULT",
            stopped_at(0, path=IO_URING),
            buffer=FILE,
            access=[],
            verb="io_uring_register_buffers",
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


@pytest.mark.parametrize("name", FILES)
def test_the_layer_where_the_call_stopped(name: str) -> None:
    """`check_vma_flags` (mm/gup.c) refuses at a mapping's first page; a fault comes at any."""
    record, due = FILES[name]
    assert layer(record) == due


LIMITED = UNCAPABLE | {"limits": {"memlock_soft": 64 * PAGE, "memlock_hard": None}}
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
    "no limit": (
        failed("ENOMEM", UMEM_EARLY, node=UNCAPABLE | {"limits": {"memlock_soft": None}}, **PINNED),
        UNDECIDED,
    ),
    "the count changed meanwhile": (
        failed("ENOMEM", UMEM_EARLY, node=LIMITED, limits={"vmpin": 0, "vmpin_after": PAGE}),
        ("memlock-accounting", "inferred"),
    ),
    "not counted, no trace": (failed("ENOMEM", {"status": "off", "why": "off"}, node=LIMITED), UNDECIDED),
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
        failed("ENOMEM", {"status": "off", "why": "off"}, node=LIMITED, access=["ON_DEMAND"], **PINNED),
        UNDECIDED,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_counts_against_the_limit(name: str) -> None:
    """mm->pinned_vm (VmPin) does, mm->locked_vm (VmLck) does not: `__ib_umem_get_va`, core/umem.c."""
    record, due = COUNTED[name]
    assert layer(record) == due


@pytest.mark.parametrize("errno", ["EOPNOTSUPP", "EINVAL"])
def test_implicit_on_demand_paging_is_no_overflow(errno: str) -> None:
    record = failed(errno, address=0, length=2**64 - 1, iova=0, access=["LOCAL_WRITE", "ON_DEMAND"])
    assert layer(record) == ("arguments", "observed")
    assert "implicit on-demand paging" in judge_record(record)["verdicts"][0]["reason"]


def test_a_refusal_of_the_rdma_core_is_not_blamed_on_access_flags() -> None:
    """A guest whose DMA is bounced: `__ib_umem_get_va` says EOPNOTSUPP, whatever the flags."""
    traced = returns(("__ib_umem_get_va", -95), ("rxe_reg_user_mr", -95))
    assert layer(failed("EOPNOTSUPP", traced)) == UNDECIDED


def test_no_layer_is_observed_by_a_function_that_no_trace_holds() -> None:
    """What is seen of a page that would not move is the return value of migrate_pages."""
    from regrepro.judge.layers import MOVE_REFUSED

    assert MOVE_REFUSED.startswith("migrate_pages, mm/migrate.c")
    verdict = judge_record(build.reproduced_record())["verdicts"][0]
    assert verdict["evidence"]["layer"]["source"] == MOVE_REFUSED


CASES: dict[str, tuple[Record, tuple[str, str]]] = {
    "memlock exceeded": (
        failed(
            "ENOMEM",
            UMEM_EARLY,
            node=UNCAPABLE | {"limits": {"memlock_soft": 4 * PAGE, "memlock_hard": None}},
        ),
        ("memlock-accounting", "observed"),
    ),
    "memlock exceeded, no trace": (
        failed(
            "ENOMEM",
            {"status": "off", "why": "--trace off"},
            node=UNCAPABLE | {"limits": {"memlock_soft": 4 * PAGE, "memlock_hard": None}},
        ),
        ("memlock-accounting", "inferred"),
    ),
    "memlock zero": (
        failed("EPERM", UMEM_REFUSED, node=UNCAPABLE | {"limits": {"memlock_soft": 0, "memlock_hard": 0}}),
        ("memlock-accounting", "observed"),
    ),
    "memlock enough": (
        failed(
            "ENOMEM",
            UMEM_EARLY,
            node=UNCAPABLE | {"limits": {"memlock_soft": 64 * PAGE, "memlock_hard": None}},
            limits={"vmpin": 0, "vmpin_after": 0},
        ),
        ("unknown", "missing"),
    ),
    "memlock unlimited": (
        failed(
            "ENOMEM", UMEM_EARLY, node=UNCAPABLE | {"limits": {"memlock_soft": None, "memlock_hard": None}}
        ),
        ("unknown", "missing"),
    ),
    "memlock with the capability": (
        failed("ENOMEM", UMEM_EARLY, node={"limits": {"memlock_soft": 0, "memlock_hard": 0}}),
        ("unknown", "missing"),
    ),
    "memlock not recorded": (
        failed("ENOMEM", UMEM_EARLY, node=UNCAPABLE | {"limits": {}}),
        ("unknown", "missing"),
    ),
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
    "EFAULT alone": (failed("EFAULT", {"status": "off", "why": "off"}), ("unknown", "missing")),
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
        ("unknown", "missing"),
    ),
    "an ordinary huge page": (
        failed("ENOMEM", GUP_ENOMEM, buffer={"backing": "hugetlb"}),
        ("unknown", "missing"),
    ),
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
    "2^46 bytes, no trace": (
        failed("EINVAL", {"status": "off", "why": "off"}, length=1 << 46),
        ("arguments", "inferred"),
    ),
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
    "EINVAL alone": (
        failed("EINVAL", {"status": "unavailable", "why": "no tracefs"}),
        ("unknown", "missing"),
    ),
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
        ("unknown", "missing"),
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
        ("unknown", "missing"),
    ),
    "something held the pages": (
        failed("ENOMEM", build.failing_trace(8), before=state(CMA), after=state(CMA)),
        ("unknown", "missing"),
    ),
    "lost events": (
        failed("EINVAL", returns(("rxe_reg_user_mr", -22)) | {"status": "spoiled", "why": "overrun"}),
        ("unknown", "missing"),
    ),
    "only failures of GUP are in sight": (
        failed(
            "EINVAL",
            returns(("rxe_reg_user_mr", -22))
            | {"probed": ["rxe_reg_user_mr"], "probed_failures": ["pin_user_pages_fast"]},
        ),
        ("unknown", "missing"),
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
        ("unknown", "missing"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_layer_of(name: str) -> None:
    record, due = CASES[name]
    assert layer(record) == due


@pytest.mark.parametrize("name", [name for name, (_, due) in CASES.items() if due[0] == "unknown"])
def test_unknown_says_what_is_missing(name: str) -> None:
    evidence = judge_record(CASES[name][0])["verdicts"][0]["evidence"]["layer"]
    assert len(evidence["value"]["why"]) > 20


def test_no_errno_alone_names_a_layer() -> None:
    """Whatever the errno: with no trace, no page state and an ordinary request, nothing is named."""
    for errno in ("ENOMEM", "EFAULT", "EINVAL", "EPERM", "EOPNOTSUPP", "EBUSY", "EAGAIN"):
        record = failed(errno, {"status": "off", "why": "off"}, before=None, after=None)
        assert layer(record)[0] == "unknown", errno


def test_earlier_registrations_count_against_the_limit() -> None:
    node = UNCAPABLE | {"limits": {"memlock_soft": 12 * PAGE, "memlock_hard": None}}
    for given_back, due in ((False, "observed"), (True, "inferred")):
        builder = Builder(**node)
        builder.begin("fault", contract="none", controls={}, needs=())
        builder.buffer(state(OUT), place="any")
        builder.register(state(OUT), state(OUT), 1)
        if given_back:
            builder.event("deregister", registration=1, errno=None)
        builder.register(state(OUT), state(OUT), 2, errno="ENOMEM", trace=UMEM_EARLY)
        builder.end()
        assert layer(builder.done()) == ("memlock-accounting", due)


def test_a_step_tells_the_limit() -> None:
    builder = Builder()
    builder.begin("fault", contract="none", controls={}, needs=())
    builder.buffer(state(OUT), place="any")
    builder.event("step", name="limits", memlock_soft=0, capabilities=[])
    builder.register(state(OUT), state(OUT), errno="EPERM", trace=UMEM_REFUSED)
    builder.end()
    assert layer(builder.done())[0] == "memlock-accounting"


def test_io_uring_counts_after_it_has_pinned() -> None:
    node = UNCAPABLE | {"limits": {"memlock_soft": 4 * PAGE, "memlock_hard": None}}
    traced = returns(("pin_user_pages_fast", 8), ("io_sqe_buffers_register", -12))
    record = failed("ENOMEM", traced, node=node, verb="io_uring_register_buffers", device="io_uring")
    assert layer(record)[0] == "memlock-accounting"


def test_a_reference_that_went_by_itself_is_page_migration() -> None:
    """Held by nobody we know, gone at the retry: the layer is right, and it is not this bug."""
    builder = Builder()
    builder.memory_map()
    builder.begin("transient", contract="none", expects={"none": "other-failure"}, controls={})
    builder.buffer(state(CMA))
    held = state(CMA, 1025)
    builder.register(held, held, errno="ENOMEM")
    builder.register(state(CMA), state(OUT, 1025), 2)
    builder.end()
    record = builder.done()
    assert layer(record) == ("page-migration", "observed")
    find(record, "register")["trace"] = None
    assert layer(record)[0] == "unknown"
    record = builder.done()
    find(record, "register")["before"] = find(record, "register")["after"] = state(CMA)
    assert layer(record)[0] == "unknown"
    record = builder.done()
    find(record, "register", 1)["errno"] = "ENOMEM"
    assert layer(record)[0] == "unknown"


def test_a_pin_that_fails_by_itself() -> None:
    for owner, due in (("cuda", "cuda-pin"), ("standin:longterm", "cuda-pin"), ("io-uring", "unknown")):
        builder = Builder()
        builder.begin()
        builder.buffer(state(CMA))
        builder.pin(
            state(CMA), state(CMA), kind="longterm", owner=owner, errno="ENOMEM", api="io_uring_register"
        )
        builder.end()
        assert layer(builder.done())[0] == due


def test_the_memory_cgroup_kills() -> None:
    builder = Builder()
    builder.begin("cgroup", contract="none", controls={}, needs=("lab",))
    builder.end("killed", signal="SIGKILL", memory_events={"oom": 1, "oom_kill": 1})
    assert layer(builder.done()) == ("memory-cgroup", "observed")
    builder = Builder()
    builder.begin("cgroup", contract="none", controls={}, needs=("lab",))
    builder.end("killed", signal="SIGKILL", memory_events={"oom": 0, "oom_kill": 0})
    assert judge_record(builder.done())["verdicts"][0]["verdict"] == "error"


def test_a_wait_that_nothing_ends() -> None:
    for stack, due in (
        (["ib_uverbs_remove_one+0x1f2/0x2a0", "remove_client_context"], "other-failure"),
        (["do_nanosleep"], "error"),
        (None, "error"),
    ):
        builder = Builder()
        builder.begin("vanishing", contract="none", controls={}, needs=("lab",))
        builder.end("blocked", **({"where": stack} if stack else {}))
        verdict = judge_record(builder.done())["verdicts"][0]
        assert verdict["verdict"] == due
        assert verdict["layer"] == ("device" if due == "other-failure" else None)


def test_bytes_that_do_not_arrive_are_a_failure() -> None:
    for errno, intact, due in (("EIO", False, "device"), (None, False, "unknown")):
        builder = Builder()
        builder.begin("transfer", contract="none", controls={}, needs=())
        builder.buffer(state(OUT), place="any")
        builder.register(state(OUT), state(OUT, 1025))
        builder.event("transfer", registration=1, opcode="RDMA_WRITE", bytes=PAGE, errno=errno, intact=intact)
        builder.end()
        assert layer(builder.done())[0] == due


def test_compaction_beside_is_no_migration_of_ours() -> None:
    """A migration for another reason between tracepoint and return of ours changes nothing."""
    record = build.reproduced_record()
    events = find(record, "register")["trace"]["events"]
    fields = {"nr_succeeded": 3, "nr_failed": 0, "mode": "MIGRATE_ASYNC", "reason": "compaction"}
    events.append({"t": 0.9, "tracepoint": "mm_migrate_pages", "fields": fields})
    events.insert(0, {"t": 0.0, "tracepoint": "mm_migrate_pages", "fields": fields})
    assert judge_record(record)["verdicts"][0]["verdict"] == "reproduced"


def test_an_earlier_batch_that_moved_is_not_the_failing_one() -> None:
    """A tracer that records failures only gives the tracepoint of the batch that moved, and no return."""
    record = build.reproduced_record()
    events = find(record, "register")["trace"]["events"]
    fields = {"nr_succeeded": 0, "nr_failed": 0, "mode": "MIGRATE_SYNC", "reason": "longterm_pin"}
    events.insert(0, {"t": 0.0, "tracepoint": "mm_migrate_pages", "fields": fields})
    assert judge_record(record)["verdicts"][0]["verdict"] == "reproduced"
    events.append({"t": 0.9, "tracepoint": "mm_migrate_pages", "fields": fields})
    assert judge_record(record)["verdicts"][0]["verdict"] == "unmet"


@pytest.mark.parametrize(
    "lost", [{"misses": 1}, {"overrun": 5}, {"status": "spoiled", "why": "events were lost"}]
)
def test_lost_events_never_count_as_did_not_happen(lost: dict[str, Any]) -> None:
    """Each of these is named because a function was not called: with events lost, nobody knows."""
    for errno, ret in (("EINVAL", -22), ("EOPNOTSUPP", -95), ("ENOMEM", -12)):
        whole = failed(errno, returns(("rxe_reg_user_mr", ret)))
        gap = failed(errno, returns(("rxe_reg_user_mr", ret)) | lost)
        assert layer(whole)[0] in ("mkey", "arguments"), errno
        name, how = layer(gap)
        assert (name == "unknown" or how == "inferred") and how != "observed", (errno, name, how)
    limits = UNCAPABLE | {"limits": {"memlock_soft": 0, "memlock_hard": 0}}
    assert layer(failed("EPERM", UMEM_REFUSED, node=limits))[1] == "observed"
    assert layer(failed("EPERM", UMEM_REFUSED | lost, node=limits))[1] == "inferred"


def test_a_step_tells_the_mapping_as_it_is_at_the_call() -> None:
    builder = Builder()
    builder.memory_map()
    builder.begin("fault", contract="none", expects={"none": "other-failure"}, controls={}, needs=())
    builder.buffer(state(OUT), place="any", placed="as-allocated", **vma("rw-p"))
    builder.event("step", name="read-only", buffer=1, **vma("r--p"))
    builder.register(state(OUT), state(OUT), errno="EFAULT", trace=PIN_FAILED)
    builder.event("step", name="writable", buffer=1, **vma("rw-p"))
    builder.end()
    verdict = judge_record(builder.done())["verdicts"][0]
    assert "read-only" in verdict["reason"]


def test_a_pin_of_a_file_that_io_uring_refused_itself() -> None:
    """Before 6.5 `io_pin_pages` (io_uring/rsrc.c) pins the pages of a file, and gives them back."""
    builder = Builder(**OLD)
    builder.begin("fault", contract="longterm", controls={}, needs=())
    builder.buffer(state(OUT), place="any", **FILE)
    refused = returns(("pin_user_pages", 8), ("io_pin_pages", -95), ("io_sqe_buffers_register", -95))
    pin = {"kind": "longterm", "owner": "io-uring", "api": None, "errno": "EOPNOTSUPP"}
    builder.pin(state(OUT), state(OUT), trace=refused, **pin)
    builder.end()
    assert layer(builder.done()) == ("longterm-refused", "inferred")
