"""Texts of /proc and /sys that more than one part of regrepro asks for: where each lies, and what it says.

/proc/zoneinfo and /proc/meminfo are read in `zones`, /proc/pagetypeinfo in `pageblocks`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CMDLINE = Path("/proc/cmdline")
VMSTAT = Path("/proc/vmstat")
KALLSYMS = Path("/proc/kallsyms")
BTF_PATH = Path("/sys/kernel/btf/vmlinux")

INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h


class Mounted(NamedTuple):
    """One line of /proc/self/mounts: where a file system is mounted, and its type."""

    place: Path
    kind: str


def text(path: str | Path) -> str | None:
    """Return what a file says, without space around it; None where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def chosen(path: str | Path) -> str | None:
    """Return the word in brackets of a file that lists choices; None where there is none."""
    found = re.search(r"\[(\w+)\]", text(path) or "")
    return found[1] if found else None


def command_line() -> str | None:
    """Return what the kernel was booted with; None where it cannot be read."""
    return text(CMDLINE)


def boot_id() -> str:
    """Return this boot's id, empty where the kernel does not tell."""
    return text("/proc/sys/kernel/random/boot_id") or ""


def lockdown() -> str | None:
    """Return the lockdown mode (`none`, `integrity`, `confidentiality`); None where it cannot be read."""
    return chosen("/sys/kernel/security/lockdown")


def pid_namespace() -> int:
    """Return the number of this process' PID namespace, 0 where the kernel does not tell."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def stat_fields(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """Return what /proc/PID/stat says after the name, from the state on; empty where there is no process."""
    return (text(proc / str(pid) / "stat") or "").rpartition(")")[2].split()


def start_time(pid: int) -> int | None:
    """Return a process' start time in clock ticks since boot (field 22 of its stat), None if there is none,
    or only a zombie, which holds nothing any more.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else None


def mounts() -> Iterator[Mounted]:
    """Yield what is mounted for this process. Raises OSError."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, place, kind, *_ = line.split(" ")
        yield Mounted(Path(place), kind)


def cgroup2_root() -> Path | None:
    """Return where control groups of version 2 are mounted, None where they are not. Raises OSError."""
    return next((mount.place for mount in mounts() if mount.kind == "cgroup2"), None)


def cgroup2_of(pid: int | str = "self") -> str | None:
    """Return the control group (version 2) of a process, by its path below the root; None without one."""
    found = re.search(r"^0::(.*)", text(f"/proc/{pid}/cgroup") or "", re.M)
    return found[1] if found else None


def counts(content: str) -> dict[str, int]:
    """Parse lines of a name and a number: /proc/vmstat, a control group's memory.events."""
    return {name: int(number) for name, number in (line.split() for line in content.splitlines())}


def init_environment() -> list[str]:
    """Return the environment of process 1 as NAME=VALUE; empty where it cannot be read."""
    return [item for item in (text("/proc/1/environ") or "").split("\0") if item]


def end_first_when_memory_runs_out() -> None:
    """Have the OOM killer take this process before any of the node's own."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return
