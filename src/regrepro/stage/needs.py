"""The needs of a scenario, checked before its body runs. An unmet one says why, and how to meet it."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable

from regrepro.errors import Unmet
from regrepro.scenario import KERNEL_NEED
from regrepro.stage.cuda_memory import no_dmabuf, no_peer_memory
from regrepro.stage.ports import PAGE_SIZE, Backend, join, told
from regrepro.stage.rdma import find_device

_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def check(needs: Iterable[str], backend: Backend) -> None:
    """Check needs in order. Raises `Unmet` for the first that is not met."""
    for need in needs:
        match = KERNEL_NEED.fullmatch(need)
        if match:
            _kernel(need, match[1], (int(match[2]), int(match[3])))
        else:
            _CHECKS[need](backend)


def _kernel(need: str, comparison: str, wanted: tuple[int, int]) -> None:
    release = os.uname().release
    running = re.match(r"(\d+)\.(\d+)", release)
    if running is None or not _COMPARE[comparison]((int(running[1]), int(running[2])), wanted):
        raise Unmet(
            need, f"this kernel is {release}", "boot another kernel: regrepro lab run --kernel SERIES"
        )


def _root(backend: Backend) -> None:
    if os.geteuid() != 0:
        raise Unmet(
            "root",
            f"this runs as user {os.geteuid()}, to whom the kernel shows no PFNs, pageblock types or traces",
            "run it as root (sudo): root sees where each page lies, and may hold the pin by userfaultfd",
        )


def _unpinnable(backend: Backend) -> None:
    memory_map = backend.memory_map
    if (
        memory_map is None
        or memory_map.has_unpinnable is None
        or not (memory_map.has_unpinnable or memory_map.complete)
    ):
        problems = join(memory_map.problems) if memory_map is not None else ""
        raise Unmet(
            "unpinnable",
            problems or "it is not known whether this node has unpinnable memory",
            "run as root on a kernel with /proc/kcore and BTF, without lockdown",
        )
    # A node that provably has none is an answer, too: the steps run on ordinary pages, and the verdict says
    # so.


def _has_place(need: str, memory: str, code: str, how: str) -> Callable[[Backend], None]:
    def check_place(backend: Backend) -> None:
        _unpinnable(backend)
        assert backend.memory_map is not None
        ranges = backend.memory_map.as_record().get("unpinnable_ranges") or []
        if not any(item[2] == code for item in ranges):
            raise Unmet(need, f"this node has no {memory} memory", how)

    return check_place


def _device(backend: Backend) -> None:
    if backend.device().name == "io_uring":
        _io_uring(backend)


def _rdma(backend: Backend) -> None:
    name, why = find_device(backend.options)
    if name is None:
        raise Unmet(
            "rdma",
            why,
            "use a machine with an RDMA device, or make one: rdma link add rxe0 type rxe netdev DEV",
        )
    backend.device()


def _page_state(backend: Backend) -> None:
    memory = backend.allocate(PAGE_SIZE, "anonymous")
    try:
        memory.populate()
        told(backend.snapshot(memory.address, memory.length, counts=False))
    finally:
        memory.close()


def _probe_pin(need: str, kind: str, how: str) -> Callable[[Backend], None]:
    def probe(backend: Backend) -> None:
        memory = backend.allocate(PAGE_SIZE, "anonymous")
        try:
            memory.populate()
            backend.hold(kind, memory.address, memory.length).release()
        except OSError as error:
            raise Unmet(need, error.strerror or str(error), how) from None
        finally:
            memory.close()

    return probe


_userfaultfd = _probe_pin("userfaultfd", "pin", "run as root, or set vm.unprivileged_userfaultfd=1")
_io_uring = _probe_pin(
    "io-uring",
    "longterm",
    "use a kernel with CONFIG_IO_URING, kernel.io_uring_disabled=0, and enough memlock",
)


def _unless(need: str, why_not: Callable[[Backend], str], how: str) -> Callable[[Backend], None]:
    """Return the check of a need that is met where `why_not` returns nothing."""

    def check_it(backend: Backend) -> None:
        if why := why_not(backend):
            raise Unmet(need, why, how)

    return check_it


_CHECKS: dict[str, Callable[[Backend], None]] = {
    "root": _root,
    "unpinnable": _unpinnable,
    "cma": _has_place(
        "cma", "CMA", "cma", "boot with cma=512M or hugetlb_cma=2G, on a kernel with CONFIG_CMA"
    ),
    "movable-zone": _has_place(
        "movable-zone",
        "ZONE_MOVABLE",
        "movable-zone",
        "boot with movablecore=512M, or use --place online-movable",
    ),
    "registrar": _device,
    "rdma": _rdma,
    "cuda": _unless(
        "cuda",
        lambda backend: backend.why_no_cuda(),
        "run on a GPU node, or with --cuda standin:pin or standin:longterm",
    ),
    "dmabuf": _unless(
        "dmabuf",
        no_dmabuf,
        "use an RDMA card whose driver has it (mlx5 since Linux 5.12), and NVIDIA's open kernel modules",
    ),
    "peer-memory": _unless("peer-memory", no_peer_memory, "on a GPU node: modprobe nvidia-peermem"),
    "page-state": _page_state,
    "userfaultfd": _userfaultfd,
    "io-uring": _io_uring,
    "lab": _unless(
        "lab",
        lambda backend: "" if backend.in_lab else "this scenario could hurt a node",
        "run it in a virtual machine: regrepro lab run",
    ),
}
