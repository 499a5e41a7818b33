"""What a failed registration can be and what it cannot be.

The causes are the judge's layers. A cause is `decided` where a trace or the kernel's own message names
the layer, `supported` where something in the text or the audit speaks for it, `possible` where nothing
speaks against it, and `impossible` where something does. The same words have many causes, and none is
named that the text does not carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regrepro.explain.formats import GPU, HOST

DECIDED = "decided"
SUPPORTED = "supported"
POSSIBLE = "possible"
IMPOSSIBLE = "impossible"
NOTHING_AGAINST = "nothing in the text speaks against it"
ORDER = (DECIDED, SUPPORTED, POSSIBLE, IMPOSSIBLE)


@dataclass(frozen=True)
class Cause:
    """A cause in general: what it is, and the command that tells whether it is this one."""

    title: str
    command: str


CAUSES: dict[str, Cause] = {
    "memlock-accounting": Cause(
        "the locked-memory limit (RLIMIT_MEMLOCK), which is checked before any page is pinned",
        "grep 'Max locked memory' /proc/PID/limits    of a rank while it runs, not of your shell",
    ),
    "page-migration": Cause(
        "a page in unpinnable memory (CMA, ZONE_MOVABLE) that cannot move, because something else holds it",
        "regrepro audit && regrepro run pin_then_register    on that node",
    ),
    "migration-target": Cause(
        "a page in unpinnable memory that could move, and no memory outside of it to move to",
        "grep -E 'CmaFree|MemFree|HugePages_Free' /proc/meminfo    while it fails; regrepro audit",
    ),
    "memory-cgroup": Cause(
        "the memory limit of the process's control group",
        "cat /sys/fs/cgroup/PATH/memory.events; dmesg | grep 'Memory cgroup out of memory'",
    ),
    "umem-alloc": Cause(
        "the kernel could not allocate its own bookkeeping for the registration",
        "dmesg | grep -A3 'page allocation failure'",
    ),
    "dma-map": Cause(
        "DMA mapping: the IOMMU has no addresses left, or the bounce buffers are used up",
        "dmesg | grep -iE 'iommu|DMAR|smmu|swiotlb'",
    ),
    "mkey": Cause(
        "the device is out of memory regions (MKeys), or its firmware is out of pages for them",
        "rdma resource show; ibv_devinfo -v | grep max_mr; dmesg | grep -iE 'mkey|MANAGE_PAGES'",
    ),
    "peer-memory": Cause(
        "the GPU's peer-memory driver: nvidia-peermem is missing, or it failed",
        "lsmod | grep -E 'nvidia_peermem|nv_peer_mem'; dmesg | grep nvidia-peermem",
    ),
    "bar-map": Cause(
        "a mapping of a device or its BAR: BAR1 is used up, or the address has no pages behind it",
        "nvidia-smi -q | grep -A3 'BAR1 Memory Usage'",
    ),
    "dma-buf": Cause(
        "DMA-BUF: the provider or the GPU driver has none, or the buffer could not be exported or mapped",
        "regrepro audit    (it checks the conditions); dmesg | tail",
    ),
    "page-fault": Cause(
        "an address that is not mapped, or not with the rights that are asked for",
        "grep -i ADDRESS /proc/PID/maps    while the process lives",
    ),
    "longterm-refused": Cause(
        "a mapping that Linux lets nobody pin for long: a file that is written through it",
        "grep -i ADDRESS /proc/PID/maps    and look at what is mapped there",
    ),
    "cuda-pin": Cause(
        "the GPU driver's own pin of host memory failed, before any registration",
        "dmesg | grep NVRM; regrepro audit    (it says what this driver's pin asks for)",
    ),
    "arguments": Cause(
        "what was asked for: access flags, length, or an iova that does not fit",
        "ibv_devinfo -v    and compare with the flags and the length of the call",
    ),
    "device": Cause(
        "the device: it was removed, is in reset, or may not be used by this user",
        "ls -l /dev/infiniband; rdma link show; dmesg | tail",
    ),
    "unknown": Cause(
        "something that the text does not show",
        "regrepro watch    on the node, which records the kernel's own path of the next failure",
    ),
}

HOST_ONLY = (
    "page-migration",
    "migration-target",
    "memory-cgroup",
    "page-fault",
    "longterm-refused",
    "memlock-accounting",
)
GPU_ONLY = ("peer-memory", "bar-map")
_DEVICE_FULL = "mkey"

# Which causes give which errno, for a registration of plain memory. Sources: __ib_umem_get_va and
# ib_umem_get (drivers/infiniband/core/umem.c), mm/gup.c, mlx5's mr.c and cmd.c, rxe, nvidia-peermem.
BY_ERRNO: dict[str, tuple[str, ...]] = {
    "ENOMEM": (
        "memlock-accounting",
        "page-migration",
        "migration-target",
        "memory-cgroup",
        "umem-alloc",
        "dma-map",
        "mkey",
        "peer-memory",
        "bar-map",
    ),
    "EFAULT": ("page-fault", "longterm-refused", "peer-memory", "bar-map"),
    "EINVAL": ("arguments", "mkey", "peer-memory", "device"),
    "EPERM": ("memlock-accounting", "device", "arguments"),
    "EACCES": ("device", "arguments"),
    "EAGAIN": ("mkey", "device"),
    "EOPNOTSUPP": ("arguments", "device"),
    "ENOSYS": ("arguments", "device"),
    "EPROTONOSUPPORT": ("arguments", "device"),
    "EIO": ("device", "dma-map", "mkey", "peer-memory"),
    "EREMOTEIO": ("device", "mkey"),
    "ENODEV": ("device",),
    "ENXIO": ("device",),
    "ETIMEDOUT": ("device",),
    "EBUSY": ("device", "mkey"),
    "ENOSPC": ("mkey", "device"),
    "EINTR": ("unknown",),
    "EOVERFLOW": ("arguments",),
    "EBADF": ("arguments", "device"),
    "EMFILE": ("device",),
}
BY_ERRNO_DMABUF: dict[str, tuple[str, ...]] = {
    "ENOMEM": ("dma-buf", "bar-map", "dma-map", "umem-alloc", "mkey"),
    "EINVAL": ("arguments", "dma-buf", "mkey"),
    "EOPNOTSUPP": ("dma-buf", "arguments"),
    "ENOSYS": ("dma-buf",),
    "EPROTONOSUPPORT": ("dma-buf", "arguments"),
    "EBADF": ("dma-buf",),
    "EFAULT": ("dma-buf", "arguments"),
    "EAGAIN": ("mkey", "device"),
    "EIO": ("device", "dma-map", "dma-buf"),
    "ENODEV": ("device",),
    "EPERM": ("device", "dma-buf"),
}
EVERY = tuple(name for name in CAUSES if name not in ("cuda-pin", "unknown"))
_WHY_NOT = {
    "memlock-accounting": "the locked-memory check gives ENOMEM or EPERM",
    "page-migration": "a page that will not move gives ENOMEM",
    "migration-target": "a missing migration target gives ENOMEM",
    "memory-cgroup": "it gives ENOMEM, or the process is killed",
    "umem-alloc": "it gives ENOMEM",
    "page-fault": "a bad address gives EFAULT",
    "longterm-refused": "it gives EFAULT",
    "mkey": "a device without MKeys gives ENOMEM, EAGAIN, EINVAL or EIO",
    "dma-map": "it gives ENOMEM or EIO",
    "dma-buf": "the call is no registration of a DMA-BUF",
    "peer-memory": "it does not give this errno",
    "bar-map": "it does not give this errno",
    "arguments": "it does not give this errno",
    "device": "it does not give this errno",
}


def weigh(  # noqa: PLR0917
    call: str,
    errno: str | None,
    buffer: str | None,
    layer: str | None,
    layer_why: str,
    remaining: frozenset[str] | None,
    excluded: dict[str, str],
    *,
    supports: dict[str, str] | None = None,
    audit: dict[str, Any] | None = None,
) -> list[dict[str, str]]:
    """Weigh every cause for one kind of failure. Returns `{cause, status, why, title, command}`, best
    first.
    """
    if layer is not None:
        return [_entry(layer, DECIDED, layer_why)]
    dmabuf = "dmabuf" in call
    table = BY_ERRNO_DMABUF if dmabuf else BY_ERRNO
    names = table.get(errno or "", EVERY if errno is None else ("unknown",))
    status: dict[str, tuple[str, str]] = {}
    for name in names:
        status[name] = (POSSIBLE, NOTHING_AGAINST)
    for name in EVERY:
        if name in status:
            continue
        why = _WHY_NOT[name]
        if dmabuf and name in HOST_ONLY:
            why = "a DMA-BUF is not pinned by get_user_pages and not charged to the limit"
        elif dmabuf and name == "peer-memory":
            why = "a DMA-BUF does not go through peer memory"
        elif dmabuf and name == "dma-buf":
            why = "it does not give this errno"
        elif name == "dma-buf" and not dmabuf:
            why = _WHY_NOT["dma-buf"]
        elif errno is not None:
            why = f"{why}, not {errno}" if "gives" in why else f"it does not give {errno}"
        status[name] = (IMPOSSIBLE, why)
    if not dmabuf and "dma-buf" in status and errno is None:
        status["dma-buf"] = (IMPOSSIBLE, _WHY_NOT["dma-buf"])
    if buffer == HOST:
        for name in GPU_ONLY:
            if name == "bar-map" and errno == "EFAULT":
                continue  # a host pointer can be a mapping of registers
            status[name] = (IMPOSSIBLE, "the buffer is host memory")
    if buffer == GPU and not dmabuf:
        for name in HOST_ONLY:
            if name == "memlock-accounting" or (name == "page-fault" and errno == "EFAULT"):
                # Without a peer-memory driver a GPU address goes the way of host memory.
                continue
            status[name] = (IMPOSSIBLE, "the buffer is GPU memory, which has no host page to pin or move")
    if remaining is not None:
        for name in list(status):
            if name not in remaining and status[name][0] != IMPOSSIBLE:
                status[name] = (IMPOSSIBLE, excluded.get(name, "the text shows another place"))
        for name in remaining:
            status[name] = (POSSIBLE, layer_why or "the text leaves it open")
    for name, why in excluded.items():
        if name in status and not (remaining and name in remaining):
            status[name] = (IMPOSSIBLE, why)
    for name, why in (supports or {}).items():
        if name in status and status[name][0] == POSSIBLE:
            status[name] = (SUPPORTED, why)
    if audit is not None:
        narrow(status, audit, errno, buffer)
    if not any(state != IMPOSSIBLE for state, _ in status.values()):
        status["unknown"] = (POSSIBLE, "everything that is known is excluded")
    entries = [_entry(name, state, why) for name, (state, why) in status.items()]
    return sorted(
        entries, key=lambda entry: (ORDER.index(entry["status"]), list(CAUSES).index(entry["cause"]))
    )


def _entry(name: str, status: str, why: str) -> dict[str, str]:
    cause = CAUSES.get(name, CAUSES["unknown"])
    return {"cause": name, "status": status, "why": why, "title": cause.title, "command": cause.command}


def narrow(
    status: dict[str, tuple[str, str]], audit: dict[str, Any], errno: str | None, buffer: str | None
) -> None:
    """Narrow by an audit of the node (`regrepro audit --json`): what it excludes, and what it speaks
    for.
    """
    facts = {
        (one.get("group"), one.get("name")): one for one in audit.get("facts", []) if isinstance(one, dict)
    }

    def value(group: str, name: str) -> Any:
        one = facts.get((group, name))
        return one.get("value") if one else None

    def close(name: str, why: str) -> None:
        if name in status:
            status[name] = (IMPOSSIBLE, f"the audit: {why}")

    def support(name: str, why: str) -> None:
        if name in status and status[name][0] in (POSSIBLE, SUPPORTED):
            status[name] = (SUPPORTED, f"the audit: {why}")

    findings = {one.get("id"): one for one in audit.get("findings", []) if isinstance(one, dict)}
    conditions: dict[str, Any] = {}
    for exposure in audit.get("exposure", []):
        if isinstance(exposure, dict) and exposure.get("class") == "B":
            for one in exposure.get("conditions", []):
                conditions[str(one.get("what", ""))] = one
            if exposure.get("state") == "exposed":
                support("page-migration", "the node is exposed to it")
    for what, one in conditions.items():
        if (one.get("holds") is False and "unpinnable memory" in what) or (
            one.get("holds") is False and "the kernel refuses" in what
        ):
            close("page-migration", str(one.get("reason")))
            close("migration-target", str(one.get("reason")))
        elif one.get("holds") is False and "pins host memory" in what and "page-migration" in status:
            state, why = status["page-migration"]
            if state != IMPOSSIBLE:
                status["page-migration"] = (
                    state,
                    f"{why}; the holder is not the NVIDIA driver's pin (the audit: {one.get('reason')})",
                )
    processes = value("limits", "processes")
    if isinstance(processes, list) and processes:
        free = [
            one.get("ipc_lock") is True
            or (isinstance(one.get("memlock"), dict) and one["memlock"].get("soft") is None)
            for one in processes
            if isinstance(one, dict)
        ]
        if free and all(free):
            close("memlock-accounting", "no process with an RDMA device open has a locked-memory limit")
    if "memlock-too-small" in findings:
        support("memlock-accounting", str(findings["memlock-too-small"].get("title")))
    loaded = value("nvidia", "peermem")
    if loaded == [] and errno == "EFAULT" and buffer != HOST:
        support("peer-memory", "nvidia-peermem is not loaded, so a GPU address cannot be registered this way")
    elif loaded == []:
        close("peer-memory", "nvidia-peermem is not loaded")
    if "mr-limit" in findings:
        support("mkey", str(findings["mr-limit"].get("title")))
    for name in ("bar1-small", "bar1-used"):
        if name in findings:
            support("bar-map", str(findings[name].get("title")))
    if findings.get("dmabuf", {}).get("severity") == "warning":
        support("dma-buf", str(findings["dmabuf"].get("title")))
    if value("nvidia", "state") == "absent":
        close("peer-memory", "there is no NVIDIA driver on this node")
        close("cuda-pin", "there is no NVIDIA driver on this node")
