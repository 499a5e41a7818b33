"""Which other processes use a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from regrepro.kernel import procfs


def gpu_users(proc: Path = Path("/proc"), *, ask_driver: bool = True) -> list[tuple[int, str]]:
    """Return (PID, name) of other processes that use a GPU.

    Open /dev/nvidia0 … tell, and nvidia-smi where it is installed. Left out are this session's own processes
    and the driver's daemon, which only keeps the driver loaded.
    """
    found: dict[int, str] = {}
    session = os.getsid(0)
    for entry in proc.glob("[0-9]*"):
        pid = int(entry.name)
        try:
            name = (entry / "comm").read_text(errors="replace").strip()
            if name.startswith("nvidia-persiste") or pid == os.getpid() or _is_ancestor(proc, pid):
                continue
            if (
                any(
                    re.fullmatch(r"/dev/nvidia\d+", str(link.readlink())) for link in (entry / "fd").iterdir()
                )
                and os.getsid(pid) != session
            ):
                found[pid] = name
        except OSError:
            continue
    if ask_driver:
        for pid, name in _asked_of_nvidia_smi():
            if pid not in found and pid != os.getpid() and not _is_ancestor(proc, pid):
                found[pid] = name
    return sorted(found.items())


def _is_ancestor(proc: Path, pid: int) -> bool:
    """Whether a process is one that started this one."""
    at = os.getppid()
    while at > 1:
        if at == pid:
            return True
        fields = procfs.stat_fields(at, proc)
        at = int(fields[1]) if fields else 0
    return False


def _asked_of_nvidia_smi() -> list[tuple[int, str]]:
    """Processes that compute on a GPU as the driver tells, also those of other users."""
    if not Path("/proc/driver/nvidia/version").exists():
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(",", 1) for line in done.stdout.splitlines() if "," in line]
    return [(int(pid), name.strip()) for pid, name in rows if pid.strip().isdigit()]
