"""Facts of the node and of this process' rights on it: key `node` of the record's header (docs/record.md)."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

from regrepro.kernel import procfs
from regrepro.kernel.procfs import text as _text
from regrepro.kernel.zones import MEMINFO, PAGE_SIZE, parse_meminfo

# include/uapi/linux/capability.h, by bit.
CAPABILITIES = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
]

# /proc/sys/vm entries that bear on pins, placement or what a scenario may do.
VM_SYSCTLS = (
    "compact_unevictable_allowed",
    "compaction_proactiveness",
    "max_map_count",
    "min_free_kbytes",
    "nr_hugepages",
    "overcommit_memory",
    "swappiness",
    "unprivileged_userfaultfd",
    "watermark_scale_factor",
    "zone_reclaim_mode",
)


def capabilities() -> list[str]:
    """Return the effective capabilities of this process (CapEff of /proc/self/status), by name."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", _text("/proc/self/status") or "", re.MULTILINE)
    return decode_capabilities(int(found[1], 16)) if found else []


def decode_capabilities(mask: int) -> list[str]:
    """Return the names of the bits of a capability mask; bits that are newer than our list by number."""
    names = dict(enumerate(CAPABILITIES))
    return [names.get(bit, f"CAP_{bit}") for bit in range(mask.bit_length()) if mask >> bit & 1]


def container() -> str | None:
    """Return what hints at a container, None where nothing does. A hint, not a proof."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    named = (_text("/run/systemd/container") or "").split("\n")[0]
    if named:
        return named
    for item in procfs.init_environment():
        if item.startswith("container=") and item != "container=":
            return item.partition("=")[2]
    groups = _text("/proc/1/cgroup") or ""
    found = re.search(r"kubepods|docker|libpod|lxc", groups)
    return found[0] if found else None


def in_initial_user_namespace() -> bool | None:
    """Whether this process is in the first user namespace: rights over kernel memory count only there."""
    mapping = _text("/proc/self/uid_map")
    if mapping is None:
        return None
    return mapping.split() == ["0", "0", "4294967295"]


def nvidia_module() -> bool:
    """Whether NVIDIA's kernel module is loaded: its folder of /sys/module is there while it is."""
    return Path("/sys/module/nvidia/initstate").exists()


def nvidia_driver() -> str | None:
    """Return the version of the loaded NVIDIA driver, None where none is loaded."""
    version = _text("/sys/module/nvidia/version")
    if version:
        return version
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)\s", _text("/proc/driver/nvidia/version") or "")
    return found[1] if found else None


def vm_sysctls() -> dict[str, int | str]:
    """Return the /proc/sys/vm entries that this kernel has and this user may read."""
    values: dict[str, int | str] = {}
    for name in VM_SYSCTLS:
        text = _text(f"/proc/sys/vm/{name}")
        if text is not None:
            values[name] = int(text) if re.fullmatch(r"-?\d+", text) else text
    # NUMA balancing moves pages by itself, and on a hint that it left also at the moment of a LONGTERM pin.
    for name in ("io_uring_disabled", "numa_balancing"):
        text = _text(f"/proc/sys/kernel/{name}")
        if text is not None and text.isdigit():
            values[f"kernel.{name}"] = int(text)
    return values


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def node_facts() -> dict[str, Any]:
    """Return key `node` of the header; facts that this user may not read are null. A limit of null is
    "unlimited".
    """
    uname = os.uname()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "hostname": uname.nodename,
        "kernel": uname.release,
        "kernel_version": uname.version,
        "arch": uname.machine,
        "page_size": PAGE_SIZE,
        "cmdline": procfs.command_line(),
        "cpus": os.cpu_count(),
        "memory_total": parse_meminfo(_text(MEMINFO) or "").get("MemTotal"),
        "euid": os.geteuid(),
        "capabilities": capabilities(),
        "user_namespace_initial": in_initial_user_namespace(),
        "lockdown": procfs.lockdown(),
        "container": container(),
        "vm": vm_sysctls(),
        "transparent_hugepage": procfs.chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "nvidia_module": nvidia_module(),
        "nvidia_driver": nvidia_driver(),
        "limits": {"memlock_soft": _limit(soft), "memlock_hard": _limit(hard)},
    }
