"""What /proc tells of another process, at once: it may be gone a moment later.

Every function tells what it could read and names what it could not; none raises for a process that is gone.
"""

from __future__ import annotations

import functools
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro.kernel import procfs
from regrepro.kernel.node import decode_capabilities
from regrepro.kernel.others import read_at_most
from regrepro.kernel.procfs import start_time
from regrepro.kernel.zones import MEMINFO, PAGE_SIZE, read_meminfo, read_zones

PROC = Path("/proc")

# Names of a parallel job's variables: which rank this is, of which job. Nothing else of it is kept.
_RANK = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES"
    r"|NCCL_IB_HCA|NCCL_DMABUF_ENABLE|NCCL_NET_GDR_LEVEL|JOB_ID|PBS_JOBID|LSB_JOBID"
    r"|SLURM_(JOB_?ID|STEP_?ID|PROCID|LOCALID|NODEID|NTASKS|JOB_NAME|ARRAY_JOB_ID|ARRAY_TASK_ID)"
    r"|OMPI_COMM_WORLD_(RANK|SIZE|LOCAL_RANK|NODE_RANK)|PMI_(RANK|SIZE)|PMIX_RANK|MPI_LOCALRANKID"
    r"|MV2_COMM_WORLD_(RANK|LOCAL_RANK))$"
)
_CONTAINER = re.compile(r"([0-9a-f]{64})")
_RUNTIME = re.compile(r"kubepods|docker|libpod|crio|containerd|lxc|slurm|apptainer|singularity")
_MAPS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)$")
_CMDLINE_LIMIT = 512
# Bytes that are read of a text whose size the process has in its hand, and of its mappings.
TEXT_LIMIT, MAPS_LIMIT = 64 << 10, 8 << 20
_STATUS_LIMIT = 1 << 20  # the kernel's own, but it may list 65,536 groups


@dataclass
class Process:
    """Facts of a process at one moment. `problems`: what could not be read, and why."""

    pid: int
    facts: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    capabilities: list[str] | None = None
    problems: list[str] = field(default_factory=list)


def read_text(path: Path, problems: list[str], limit: int = TEXT_LIMIT) -> str | None:
    """Return a file's text, its first `limit` bytes; None where it cannot be read. `problems` say so, and
    where there was more.
    """
    try:
        text, more = read_at_most(path, limit)
    except OSError as error:
        problems.append(f"{path}: {error.strerror}")
        return None
    if more:
        problems.append(f"{path}: only its first {limit} bytes were read")
    return text.decode(errors="replace")


def rank_variables(environ: str) -> dict[str, str]:
    """Return the variables of a parallel job in the text of /proc/PID/environ."""
    pairs = (item.partition("=") for item in environ.split("\0"))
    return {name: value for name, equals, value in pairs if equals and _RANK.match(name)}


def container_of(cgroup: str) -> dict[str, str] | None:
    """Return what a control group's path says of a container: `runtime`, `id`; None where it says nothing."""
    runtime, identity = _RUNTIME.search(cgroup), _CONTAINER.search(cgroup)
    if not runtime and not identity:
        return None
    found = {"runtime": runtime[0]} if runtime else {}
    if identity:
        found["id"] = identity[1]
    return found


def owner_of(pid: int, uid: int | None, proc: Path = PROC) -> tuple[int | None, str]:
    """Return whose a failure is: the user, as the kernel said, and the container; "" without one, or where
    the process is gone.
    """
    cgroup = read_text(proc / str(pid) / "cgroup", [])
    return uid, (container_of(cgroup or "") or {}).get("id", "")


def memlock_limit(limits: str) -> int | str | None:
    """Return the soft limit of locked memory in bytes, None for unlimited, "" where it is not told."""
    found = re.search(r"^Max locked memory\s+(\S+)\s", limits, re.MULTILINE)
    if not found:
        return ""
    return None if found[1] == "unlimited" else int(found[1])


def vma_of(maps: str, address: int, length: int) -> tuple[str, list[str]]:
    """Return the line of the mapping at `address` in /proc/PID/maps, and of all that a range touches."""
    lines, first = [], ""
    for line in maps.splitlines():
        found = _MAPS.match(line)
        if not found:
            continue
        low, high = int(found[1], 16), int(found[2], 16)
        if low < address + max(length, 1) and high > address:
            lines.append(line)
            if low <= address < high:
                first = line
    return first, lines


def backing_of(vma: str) -> str:
    """Return what backs a mapping (docs/record.md, `backing`), as its line tells; "unknown" without one."""
    found = _MAPS.match(vma)
    if not found:
        return "unknown"
    path, shared = found[4].strip(), "s" in found[3]
    if path.startswith(("/memfd:", "/dev/shm/", "/SYSV", "/dev/zero")) or (shared and not path):
        return "memfd" if path.startswith("/memfd:") else "shm"
    if path.startswith("/dev/"):
        return "device"
    if "hugepage" in path:  # /anon_hugepage, a mount of hugetlbfs
        return "hugetlb"
    if path.startswith("/"):
        return "file"
    return "anonymous"


def comm_of(pid: int, tid: int, proc: Path = PROC) -> str:
    """Return the name of a thread, "?" where it is gone."""
    try:
        return (proc / str(pid) / "task" / str(tid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return "?"


def read_process(pid: int, proc: Path = PROC) -> Process:
    """Read what /proc tells of a process but its memory."""
    result = Process(pid)
    base, problems, facts = proc / str(pid), result.problems, result.facts
    facts["pid"] = pid
    facts["starttime"] = start_time(pid) if proc == PROC else None
    status = read_text(base / "status", problems, _STATUS_LIMIT)
    if status is not None:
        fields = dict(re.findall(r"^(\w+):\s*(.*)$", status, re.MULTILINE))
        facts["comm"] = fields.get("Name")
        facts["uid"] = int(fields["Uid"].split()[1]) if fields.get("Uid") else None
        facts["nspid"] = [int(item) for item in fields.get("NSpid", "").split()]
        result.capabilities = _capabilities(base, int(fields.get("CapEff") or "0", 16), proc)
        for name in ("VmPin", "VmLck"):
            found = re.match(r"(\d+) kB", fields.get(name, ""))
            if found:
                result.limits[name.lower()] = int(found[1]) * 1024
    limits = read_text(base / "limits", problems)
    if limits is not None:
        soft = memlock_limit(limits)
        if not isinstance(soft, str):
            result.limits["memlock_soft"] = soft
    for name in ("mnt", "pid"):
        try:
            own = (base / "ns" / name).stat().st_ino
            first = (proc / "1" / "ns" / name).stat().st_ino
        except OSError as error:
            problems.append(f"{error.filename}: {error.strerror}")
            continue
        facts[f"{name}_namespace"] = "its own" if own != first else "the node's"
    environ = read_text(base / "environ", problems)
    if environ is not None:
        facts["rank"] = rank_variables(environ)
    command = read_text(base / "cmdline", [], 4 * _CMDLINE_LIMIT)
    if command is not None:
        facts["cmdline"] = command.replace("\0", " ").strip()[:_CMDLINE_LIMIT]
    cgroup = read_text(base / "cgroup", problems)
    if cgroup is not None:
        line = next((line for line in cgroup.splitlines() if line.startswith("0::")), cgroup.split("\n")[0])
        facts["cgroup"] = line.split(":", 2)[-1]
        facts["container"] = container_of(cgroup)
    return result


def _capabilities(base: Path, mask: int, proc: Path) -> list[str]:
    """Capabilities count for the kernel's limits only in the first user namespace."""
    try:
        if (base / "ns" / "user").stat().st_ino != (proc / "1" / "ns" / "user").stat().st_ino:
            return []
    except OSError:
        pass
    return decode_capabilities(mask)


def start_ticks(boottime_ns: int) -> int:
    """Return the start of a process, as the kernel has it, in the units and the time namespace of
    /proc/PID/stat's (nsec_to_clock_t() and timens_add_boottime_ns() in fs/proc/array.c).
    """
    return (boottime_ns + _boottime_offset()) // (1_000_000_000 // os.sysconf("SC_CLK_TCK"))


def kernel_boottime() -> int:
    """Return CLOCK_BOOTTIME of the kernel (ns), in whatever time namespace this process is."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - _boottime_offset()


@functools.cache
def _boottime_offset() -> int:
    """Return what this process' time namespace adds, ns."""
    try:
        text = Path("/proc/self/timens_offsets").read_text()
    except OSError:  # a kernel without time namespaces
        return 0
    found = re.search(r"^boottime\s+(-?\d+)\s+(\d+)", text, re.M)
    return int(found[1]) * 1_000_000_000 + int(found[2]) if found else 0


def node_memory() -> dict[str, Any]:
    """Return free memory of the node: `CmaTotal`, `CmaFree`, `MemFree` and, by NUMA node, bytes."""
    try:
        memory = read_meminfo()
    except OSError as error:
        return {"problem": f"{MEMINFO}: {error.strerror}"}
    names = ("MemFree", "MemAvailable", "CmaTotal", "CmaFree", "HugePages_Free", "HugePages_Total")
    answer: dict[str, Any] = {name: memory[name] for name in names if name in memory}
    nodes: dict[str, dict[str, int]] = {}
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        found = re.search(r"MemFree:\s+(\d+) kB", procfs.text(path / "meminfo") or "")
        if found:
            nodes.setdefault(path.name[4:], {})["MemFree"] = int(found[1]) * 1024
    with suppress(OSError):
        for zone in read_zones():
            if zone.free_cma is not None:
                kept = nodes.setdefault(str(zone.node), {})
                kept["CmaFree"] = kept.get("CmaFree", 0) + zone.free_cma * PAGE_SIZE
    if nodes:
        answer["nodes"] = nodes
    return answer
