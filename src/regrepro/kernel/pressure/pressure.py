"""Pressure as the stage uses it: press, release, close."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from regrepro.errors import EnvironmentProblem, Unmet
from regrepro.kernel.journal import Entry, Journal
from regrepro.kernel.pressure.cgroup import Cgroup
from regrepro.kernel.pressure.gpu_users import gpu_users
from regrepro.kernel.pressure.holder import Holder, PressureReport, mib
from regrepro.kernel.pressure.outlook import nearest_node
from regrepro.kernel.pressure.stalls import oom_kills
from regrepro.kernel.zones import read_zones

if TYPE_CHECKING:
    from regrepro.kernel.memorymap import MemoryMap

NEED = "pressure"
# Pressure gives up after so long, and the time that this many bytes a second take.
_SECONDS = 60.0
_SLOWEST = 8 << 30


class Pressure:
    """Holds ordinary memory for as long as it is needed. A context manager.

    Start it before anything is pinned and before CUDA is opened, for it forks a child.

    `limit`: the most that is held, bytes. `node`: the NUMA node to hold memory on; None: the one where
    unpinnable memory is nearest. `beside_gpu_jobs`: go on though other processes use the GPUs. `seconds`:
    when it gives up; by default a minute, and more for a large limit. `report`: called with (held, goal) in
    bytes while it fills.
    """

    def __init__(
        self,
        *,
        limit: int,
        memory_map: MemoryMap | None,
        node: int | None = None,
        journal: Journal | None = None,
        beside_gpu_jobs: bool = False,
        seconds: float | None = None,
        report: Callable[[int, int], object] | None = None,
    ) -> None:
        self._limit = limit
        self._memory_map = memory_map
        self._node = node
        self._journal = journal if journal is not None else Journal()
        self._beside_gpu_jobs = beside_gpu_jobs
        self._seconds = seconds if seconds is not None else _SECONDS + limit / _SLOWEST
        self._report = report
        self._pid = 0
        self._socket: socket.socket | None = None
        self._entry: Entry | None = None
        self._cgroup: Cgroup | None = None
        self.held = 0

    def __enter__(self) -> Pressure:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the holder; it holds nothing yet. Raises Unmet: no root, or the GPUs are in use."""
        if self._pid:
            return
        if os.geteuid():
            raise Unmet(NEED, "holding memory on purpose is left to root", "run it as root")
        if not self._beside_gpu_jobs:
            users = gpu_users()
            if users:
                names = ", ".join(f"{name} ({pid})" for pid, name in users[:4])
                raise Unmet(
                    NEED,
                    f"{len(users)} other processes use the GPUs: {names}",
                    "run it while no job runs, or say --pressure-beside-gpu-jobs",
                )
        try:
            self._cgroup = Cgroup(self._journal, self._limit)
        except EnvironmentProblem as problem:
            raise Unmet(NEED, str(problem), "make /run writable") from None
        parent = os.getpid()
        try:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
        except OSError as error:
            self.close()
            raise Unmet(NEED, f"no process to hold memory: {error.strerror}", "free some resources") from None
        if pid == 0:
            try:
                mine.close()
                Holder(theirs, parent, self._cgroup, self._limit, self._memory_map).serve()
            finally:
                os._exit(0)
        theirs.close()
        self._pid, self._socket = pid, mine
        with suppress(EnvironmentProblem):
            self._entry = self._journal.add("process", pid=pid)

    def press(self, wanted: int, *, node: int | None = None) -> PressureReport:
        """Hold ordinary memory until the next `wanted` bytes that are touched on the node come out of
        unpinnable memory.

        Raises Unmet with the numbers where that cannot be; nothing is held then. Pages that wait on a CPU's
        own list of free pages are handed out first all the same: look where a page came to lie, and take
        another.
        """
        self.start()
        goal = self._node if node is None else node
        if goal is None:
            nearest = nearest_node(read_zones())
            if nearest is None:
                raise Unmet(
                    NEED,
                    "no node has free CMA or ZONE_MOVABLE memory that pressure could bring out",
                    "boot with cma=512M or hugetlb_cma=2G, or use --place online-movable",
                )
            goal = nearest.node
        kills = oom_kills()
        answer = self._ask({"do": "press", "node": goal, "wanted": wanted, "seconds": self._seconds})
        if "why" in answer:
            self.held = 0
            raise Unmet(NEED, answer["why"], answer["how"])
        report = PressureReport(**answer["report"])
        self.held = report.held
        after = oom_kills()
        if kills is not None and after is not None and after > kills:
            self.release()
            raise Unmet(
                NEED,
                f"the OOM killer was at work while {mib(report.held)} were held",
                "a smaller --pressure-limit, or --place online-movable",
            )
        return report

    def release(self) -> int:
        """Give back what is held, and wait until it is free. Returns bytes. The holder stays."""
        if not self._pid:
            return 0
        try:
            given = int(self._ask({"do": "release"})["released"])
        except Unmet:
            given = self.held  # it is gone, and its memory with it
        self.held = 0
        return given

    def close(self) -> None:
        """Give everything back and end the holder."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._pid:
            _end(self._pid)
            self._pid = 0
        if self._entry is not None:
            self._journal.remove(self._entry)
            self._entry = None
        if self._cgroup is not None:
            self._cgroup.remove()
            self._cgroup = None
        self.held = 0

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        deadline = time.monotonic() + self._seconds + 30
        try:
            self._socket.send(json.dumps(question).encode())
            while True:
                left = deadline - time.monotonic()
                ready, _, _ = select.select([self._socket], [], [], max(0.0, left))
                if not ready:
                    self._gone(f"the holder did not answer in {self._seconds + 30:.0f} s and was ended")
                data = self._socket.recv(1 << 16)
                if not data:
                    self._gone("the process that holds the memory is gone")
                message: dict[str, Any] = json.loads(data)
                if "held" not in message:
                    return message
                self.held = message["held"]
                if self._report is not None:
                    self._report(message["held"], message["goal"])
        except OSError:
            self._gone("the process that holds the memory is gone")

    def _gone(self, why: str) -> NoReturn:
        events = self._cgroup.events() if self._cgroup is not None else {}
        if events.get("oom_kill"):
            why += f"; its control group's limit of {mib(self._limit)} was reached"
        held = self.held
        self.close()
        raise Unmet(NEED, f"{why} ({mib(held)} were held)", "a smaller --pressure-limit")


def _end(pid: int) -> None:
    """End our child: it ends by itself when the socket closes; after a while it is killed."""
    deadline = time.monotonic() + 2
    while True:
        try:
            done, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return
        if done:
            return
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            return
        time.sleep(0.002)
