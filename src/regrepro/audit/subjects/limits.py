"""Limits of locked memory, and confinement: lockdown, seccomp, container, capabilities, evidence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from regrepro.audit import parse
from regrepro.audit.finding import Finding, size
from regrepro.audit.reader import Reader
from regrepro.audit.sheet import INFERRED, Sheet
from regrepro.kernel.zones import memparse

MEMLOCK_ENOUGH = 1 << 30
"""A finite locked-memory limit below this is called too small: one rank registers gigabytes."""
MAX_PROCESSES = 64
_IPC_LOCK = 14  # include/uapi/linux/capability.h


def collect(reader: Reader, sheet: Sheet) -> None:
    """Locked-memory limits: of this shell, of the service manager, of processes that hold an RDMA device
    open; then what confines this process.
    """
    for name, path in (("this-shell", "proc/self/limits"), ("service-manager", "proc/1/limits")):
        text = reader.read(path)
        pair = _memlock(text.text)
        if pair is None and name == "this-shell":
            soft, hard = reader.known("memlock_soft"), reader.known("memlock_hard")
            if soft.value is not None:
                pair = {"soft": _limit(soft.value), "hard": _limit(hard.value or soft.value)}
                text = soft
        sheet.state("limits", name, text, pair)
    text = reader.first(("etc/systemd/system.conf",))
    lines = list(text.lines)
    for name in reader.names("etc/systemd/system.conf.d"):
        lines += reader.read(f"etc/systemd/system.conf.d/{name}").lines
    candidates = [line.strip() for line in [*reversed(lines), *reader.command("systemctl-memlock").lines]]
    setting = next((line for line in candidates if line.startswith("DefaultLimitMEMLOCK=")), None)
    value = setting.partition("=")[2] if setting else None
    source = text.source if setting is None else text.source or "systemctl show"
    sheet.add("limits", "services-default", value, source, why=text.why or "DefaultLimitMEMLOCK is not set")
    sheet.add("limits", "processes", _holders(reader), "/proc/*/fd, /proc/*/limits")
    _confinement(reader, sheet)


def _limit(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,20}", text) and int(text) < 1 << 62 else None


def _memlock(text: str | None) -> dict[str, int | None] | None:
    """Return the limits of locked memory that a text of /proc/PID/limits has; None where it has none."""
    pair = parse.limits(text or "").get("Max locked memory")
    return {"soft": pair[0], "hard": pair[1]} if pair else None


def _holders(reader: Reader) -> list[dict[str, Any]]:
    """Processes with /dev/infiniband/uverbs* open. Without root only one's own can be seen."""
    found: list[dict[str, Any]] = []
    for pid in reader.names("proc"):
        if not pid.isdigit() or len(pid) > 10 or len(found) >= MAX_PROCESSES:
            continue
        base = f"proc/{pid}"
        links = (reader.link(f"{base}/fd/{number}") or "" for number in reader.names(f"{base}/fd"))
        if not any(link.startswith("/dev/infiniband/uverbs") for link in links):
            continue
        status = parse.status(reader.read(f"{base}/status").text or "")
        capabilities = status.get("CapEff", "")
        known = re.fullmatch(r"[0-9a-fA-F]{1,16}", capabilities)
        found.append(
            {
                "pid": int(pid),
                "command": status.get("Name"),
                "memlock": _memlock(reader.read(f"{base}/limits").text),
                "ipc_lock": bool(int(capabilities, 16) >> _IPC_LOCK & 1) if known else None,
                "locked": status.get("VmLck"),
                "pinned": status.get("VmPin"),
            }
        )
    return found


def _confinement(reader: Reader, sheet: Sheet) -> None:
    """Lockdown, seccomp, container, capabilities, and so what evidence can be had here."""
    add, state = partial(sheet.add, "confinement"), partial(sheet.state, "confinement")
    lockdown, stated = reader.read("sys/kernel/security/lockdown"), reader.known("lockdown")
    if lockdown.text is None and stated.value:
        state("lockdown", stated, stated.value)
    else:
        state("lockdown", lockdown, parse.choice(lockdown.text or ""))
    text = reader.read("proc/self/status")
    status = parse.status(text.text or "")
    state("seccomp", text, {"0": "off", "1": "strict", "2": "filter"}.get(status.get("Seccomp", "")))
    state("capabilities", text, status.get("CapEff"))
    container = reader.read("run/systemd/container")
    if container.value:
        add("container", container.value, container.source)
    elif reader.exists(".dockerenv"):
        add("container", "docker", "/.dockerenv")
    elif reader.read("proc/1/cgroup").text is not None or reader.live:
        add("container", "none seen", "/run/systemd/container, /.dockerenv", how=INFERRED)
    else:
        add("container", None, container.source, why="not captured")
    if reader.live:
        add("evidence", _evidence(sheet), "this process")


def _evidence(sheet: Sheet) -> dict[str, str]:
    """What evidence a run can have on this machine, as this user: name → "yes" or why not."""
    root = os.geteuid() == 0
    locked = sheet.value("confinement", "lockdown", "none") == "confidentiality"
    tracing = [
        path
        for path in ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")
        if os.access(path, os.R_OK | os.W_OK | os.X_OK)
    ]
    may_trace = tracing and (root or os.access("/sys/kernel/tracing/kprobe_events", os.W_OK))
    blocks = "lockdown forbids it" if locked else "needs root, or /proc/kcore is not there"
    userfaultfd = root or sheet.value("policy", "vm.unprivileged_userfaultfd") == 1
    return {
        "page frame numbers (/proc/self/pagemap)": "yes" if root else "needs root (CAP_SYS_ADMIN)",
        "page blocks (/proc/kcore)": "yes" if os.access("/proc/kcore", os.R_OK) and not locked else blocks,
        "kernel trace (tracefs)": "yes"
        if may_trace and not locked
        else "needs root and a mounted tracefs, without lockdown",
        "a pin from user space (userfaultfd)": "yes"
        if userfaultfd
        else "needs root or vm.unprivileged_userfaultfd=1",
    }


def findings(sheet: Sheet) -> Iterator[Finding]:
    """Yield the limits of locked memory that are too small for jobs."""
    small = []
    shell, default = sheet.value("limits", "this-shell"), sheet.value("limits", "services-default")
    if shell and shell["soft"] is not None:
        small.append(("this shell", shell["soft"], sheet.source("limits", "this-shell")))
    amount = memparse(default.partition(":")[0]) if default not in (None, "infinity", "unlimited") else None
    if amount is not None:
        source = sheet.source("limits", "services-default")
        small.append(("services (DefaultLimitMEMLOCK)", amount, source))
    for process in sheet.value("limits", "processes") or []:
        limit = process["memlock"]
        if limit and limit["soft"] is not None and process["ipc_lock"] is not True:
            small.append((f"{process['command']} (pid {process['pid']})", limit["soft"], "/proc/PID/limits"))
    small = [item for item in small if item[1] < MEMLOCK_ENOUGH]
    if small:
        yield Finding(
            "memlock-too-small",
            "warning",
            "Locked-memory limit too small: "
            f"{', '.join(f'{who} {size(limit)}' for who, limit, _ in small[:4])}",
            "RDMA counts registered pages against RLIMIT_MEMLOCK before it pins any, and answers ENOMEM "
            "beyond it. That is the most common cause of the same words, and needs no unpinnable memory at "
            "all.",
            "set memlock to unlimited for the jobs: LimitMEMLOCK=infinity in the service that starts them, "
            "or limits.conf",
            [{"what": who, "value": limit, "source": source} for who, limit, source in small],
        )
