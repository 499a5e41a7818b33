"""Has bpftrace told all that it has to tell of a moment? Asked by what it tells of us.

bpftrace reads a buffer of each CPU, in no order of time. Opening an RDMA device makes it tell of us, after
all that it has to tell of that CPU before. Once it has told of one opening on each CPU, nothing from before
is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from regrepro.core.uprobes import online_cpus
from regrepro.watch.process import kernel_boottime

DEVICES = Path("/dev/infiniband")
LATE_SECONDS = 5.0  # of silence, in which bpftrace must have told
_EVERY_SECONDS = 0.5  # rounds of openings
_LATE = "bpftrace did not say in time whether it had told all"
_ELSEWHERE = "it could not be made sure that bpftrace had told all of every CPU"


class Marker:
    """Rounds of openings. `sure(ns, doubt)` is called when all from before `ns` was told, or may never be:
    `doubt` then says why that is not sure.
    """

    def __init__(self, sure: Callable[[int, str], None], devices: Path = DEVICES) -> None:
        self._sure = sure
        self._devices = devices
        self._awaited: set[int] = set()  # CPUs of which bpftrace has not told yet
        self._elsewhere = False  # there are CPUs on which nothing could be opened
        self._at = float("-inf")  # time.monotonic() of the round
        self._ns = 0  # boottime, before its first opening

    def ask(self, now: float) -> None:
        """Begin a round, if none is under way and the last one is not of just now."""
        if self._awaited or now - self._at < _EVERY_SECONDS:
            return
        self._at = now
        self._ns = kernel_boottime()
        self._awaited, self._elsewhere = self._open_on_each_cpu()

    def told(self, ns: int, cpu: int) -> None:
        """Bpftrace told of an opening of this process."""
        if ns >= self._ns and cpu in self._awaited:
            self._awaited.discard(cpu)
            if not self._awaited:
                self._sure(self._ns, _ELSEWHERE if self._elsewhere else "")

    def wait_no_longer(self, now: float, heard: float) -> None:
        """End a round that bpftrace does not answer. `heard`: when it last told anything: as long as it does,
        it may have much to tell that is older.
        """
        if self._awaited and now - max(self._at, heard) > LATE_SECONDS:
            self._awaited.clear()
            self._sure(self._ns, _LATE)

    def _open_on_each_cpu(self) -> tuple[set[int], bool]:
        """Return the CPUs of which bpftrace will tell, and whether it will not of others."""
        files = sorted(str(path) for path in self._devices.glob("uverbs*"))
        cpus, done = set(online_cpus()), set()
        before = os.sched_getaffinity(0)
        try:
            for cpu in sorted(cpus):
                with suppress(OSError):  # a CPU set may forbid it, or it went offline
                    os.sched_setaffinity(0, {cpu})
                    if _opens(files):
                        done.add(cpu)
        finally:
            os.sched_setaffinity(0, before)
        # Where nothing can be opened: a CPU that nobody will tell of.
        return (done, done != cpus) if done else ({-1}, True)


def _opens(files: list[str]) -> bool:
    for file in files:
        with suppress(OSError):
            os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            return True
    return False
