"""How the child process of a pass ends: the wait for it, its kill, and what it leaves to be read."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from regrepro.kernel import procfs

_OUTPUT_LIMIT = 8000


@dataclass
class End:
    """How a child ended."""

    status: int = 0
    signal: int | None = None
    timed_out: bool = False
    interrupted: bool = False
    blocked: bool = False
    where: str | None = None
    memory_events: dict[str, int] | None = None


class Watched:
    """Waits for the end of one child, by pidfd where the kernel has it (5.3), else by looking again."""

    def __init__(self, pid: int, wakeup_fd: int) -> None:
        self._pid = pid
        self._wakeup_fd = wakeup_fd
        self._poll = select.poll()
        self._poll.register(wakeup_fd, select.POLLIN)
        try:
            self._fd = os.pidfd_open(pid)
            self._poll.register(self._fd, select.POLLIN)
        except (OSError, AttributeError):
            self._fd = -1

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _is_dead(self) -> bool:
        # WNOWAIT: it stays a zombie, so that its process group cannot be another's yet.
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ended(self, seconds: float) -> bool:
        """Return whether the child has ended, after waiting at most so long; a signal ends the wait."""
        deadline = time.monotonic() + seconds
        while True:
            if self._is_dead():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            step = left if self._fd >= 0 else min(left, 0.02)
            for fd, _ in self._poll.poll(step * 1000):
                if fd == self._wakeup_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup_fd, 512)
                    return self._is_dead()


def kill(pid: int) -> None:
    """Kill a child and all that is left of its session's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def await_group(pid: int, seconds: float = 1.0) -> None:
    """Wait until the killed processes of a child's group are gone, and their pins with them."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.005)


def where(pid: int) -> str | None:
    """Return where in the kernel a process waits, as far as it may be seen."""
    for name in ("stack", "wchan"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
            if text and text != "0":
                return text[:2000]
    return None


def memory_events(pid: int) -> dict[str, int] | None:
    """Return `memory.events` of the memory cgroup (v2) that an ended process, not yet reaped, was in.

    None where it is the one that this process is in itself: its counts may be anyone's, of any time.
    """
    with contextlib.suppress(OSError, ValueError):
        own, its, root = procfs.cgroup2_of(), procfs.cgroup2_of(pid), procfs.cgroup2_root()
        if root and own and its and own != its:
            return procfs.counts((root / its.lstrip("/") / "memory.events").read_text())
    return None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_output(fd: int) -> str:
    size = os.fstat(fd).st_size
    text = os.pread(fd, _OUTPUT_LIMIT, 0).decode("utf-8", "backslashreplace").strip()
    if size > _OUTPUT_LIMIT:
        text += f" … ({size - _OUTPUT_LIMIT} bytes more)"
    return text
