"""Pressure: hold ordinary memory of one NUMA node until the kernel hands out unpinnable memory by itself.

The kernel gives CMA pages to movable allocations once free CMA is more than half of a zone's free pages
(`__rmqueue`, mm/page_alloc.c), and ZONE_MOVABLE before any other zone. So what has to be held is known from
/proc/zoneinfo; what a process maps afterwards, also by `cudaHostAlloc`, then comes out of CMA.

The memory is held by a child process, which is first in line for the OOM killer, in a control group of its
own where the node has one to give, and never in this process: when it ends, for whatever reason, everything
is given back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from regrepro.errors import EnvironmentProblem, Unmet
from regrepro.kernel import procfs
from regrepro.kernel.journal import Entry, Journal
from regrepro.kernel.zones import PAGE_SIZE, Zone, read_meminfo, read_zones

if TYPE_CHECKING:
    from regrepro.core.memory import Range
    from regrepro.kernel.memorymap import MemoryMap

NEED = "pressure"
_MIB = 1 << 20

CGROUP_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
PSI = Path("/proc/pressure/memory")
BUDDYINFO = Path("/proc/buddyinfo")

_CHUNK = 128 * _MIB
# Free memory in large pieces that huge pages leave alone: they must not make the kernel compact.
_HUGE_SPARE = 16 * _MIB
# So near to the balance of ordinary memory and CMA single pages are looked at.
_NEAR = 4 * _MIB
# What the counters of /proc/zoneinfo may lag behind (per-CPU differences, lists of freed pages), and what a
# search touches beside the pages that it wants.
_MARGIN = 16 * _MIB
# Page tables and the holder's own pages count towards its control group.
_OVERHEAD = 4 * _MIB
_MOST_THREADS = 16
# Pressure gives up after so long, and the time that this many bytes a second take.
_SECONDS = 60.0
_SLOWEST = 8 << 30
# Share of the time in which everybody waited for memory, above which pressure ends.
_MOST_STALLED = 0.4
_STALL_WINDOW = 1.0

_ORDER = ("Movable", "Normal", "HighMem", "DMA32", "DMA")  # as movable allocations walk a node's zones


@dataclass(frozen=True)
class Outlook:
    """What the counters say of one node. Counts are pages.

    `before`: ordinary pages that are handed out before unpinnable ones; negative: so many unpinnable pages
    more than ordinary ones are free where they lie, and are handed out first. `kind`: `cma`, `movable-zone`,
    or None where the node has no free unpinnable memory. `reserve`: ordinary pages that stay free.
    """

    node: int
    kind: str | None
    before: int
    free: int
    free_cma: int
    reserve: int

    @property
    def ordinary(self) -> int:
        """Free pages that are not CMA."""
        return self.free - self.free_cma

    @property
    def room(self) -> int:
        """Ordinary pages that can be held and still leave the reserve."""
        return max(0, self.ordinary - self.reserve)


def outlook(zones: Iterable[Zone], node: int) -> Outlook:
    """Return what a node will hand out. The reserve is twice the way from its zones' minimum to their high
    watermark above the latter, and at least 1/64 of the memory.
    """
    its = sorted(
        (zone for zone in zones if zone.node == node and zone.populated and zone.name in _ORDER),
        key=lambda zone: _ORDER.index(zone.name),
    )
    ordinary = [zone for zone in its if zone.name != "Movable"]
    reserve = sum(max(zone.high + 2 * max(0, zone.high - zone.min), zone.managed // 64) for zone in ordinary)
    free, free_cma = sum(zone.free for zone in ordinary), sum(zone.free_cma or 0 for zone in ordinary)
    movable = [zone for zone in its if zone.name == "Movable"]
    if any(zone.free > zone.low for zone in movable):
        return Outlook(node, "movable-zone", 0, free, free_cma, reserve)
    before = 0
    for zone in ordinary:
        if zone.free_cma:
            own = zone.free - 2 * zone.free_cma
            return Outlook(node, "cma", before + own, free, free_cma, reserve)
        # Left alone below this: the kernel walks on to the next zone.
        before += max(0, zone.free - zone.low)
    return Outlook(node, None, before, free, free_cma, reserve)


def nearest_node(zones: Iterable[Zone]) -> Outlook | None:
    """Return the outlook of the node that hands out unpinnable memory soonest; None where none has any."""
    zones = list(zones)
    found = [outlook(zones, node) for node in sorted({zone.node for zone in zones if zone.populated})]
    having = [item for item in found if item.kind is not None]
    return min(having, key=lambda item: (item.before, item.node)) if having else None


def cma_cap(zones: Iterable[Zone] | None = None) -> int:
    """Return how many bytes of CMA a run may hold pinned: half of what is free. Drivers live on it too."""
    zones = read_zones() if zones is None else zones
    return sum(zone.free_cma or 0 for zone in zones) // 2 * PAGE_SIZE


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
        try:
            text = (proc / str(at) / "stat").read_text(errors="replace")
            at = int(text[text.rfind(")") + 2 :].split()[1])
        except (OSError, ValueError, IndexError):
            return False
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


def free_large_bytes(text: str, node: int, order: int) -> int:
    """Return bytes of a node's free memory that lie in pieces of at least `order`, from /proc/buddyinfo."""
    pages = 0
    for line in text.splitlines():
        match = re.match(r"Node (\d+), zone\s+(\S+)\s+(.*)", line)
        if match and int(match[1]) == node:
            counts = [int(word) for word in match[3].split()]
            pages += sum(count << index for index, count in enumerate(counts) if index >= order)
    return pages * PAGE_SIZE


class Stalls:
    """Watches pressure stall information: the share of time in which all waited for memory.

    None of it where the kernel keeps none (no CONFIG_PSI, psi=0).
    """

    def __init__(self, path: Path = PSI) -> None:
        self._path = path
        self._since = time.monotonic()
        self._total = self._read()
        self.worst: float | None = None if self._total is None else 0.0

    def _read(self) -> int | None:
        try:
            found = re.search(r"^full .*total=(\d+)", self._path.read_text(), re.M)
        except OSError:
            return None
        return int(found[1]) if found else None

    def share(self) -> float:
        """Return the share of the last second or more; of a shorter time 0."""
        now = time.monotonic()
        if self._total is None or now - self._since < _STALL_WINDOW:
            return 0.0
        total = self._read()
        if total is None:
            return 0.0
        share = (total - self._total) / 1e6 / (now - self._since)
        self._since, self._total = now, total
        self.worst = max(self.worst or 0.0, share)
        return share


def oom_kills() -> int | None:
    """Return how often the OOM killer has ended a process since boot; None before Linux 4.13."""
    return procfs.counts(procfs.text(procfs.VMSTAT) or "").get("oom_kill")


# The control group


class Cgroup:
    """A control group (version 2) with `memory.max`, removed when it ends. `path` is None where there is
    none to be had, and `why` says so.
    """

    def __init__(self, journal: Journal, limit: int) -> None:
        self.path: Path | None = None
        self.why = ""
        self._journal = journal
        self._entry: Entry | None = None
        self._enabled: Path | None = None
        root = next((root for root in CGROUP_ROOTS if (root / "cgroup.controllers").exists()), None)
        if root is None:
            self.why = "no control groups of version 2 are mounted"
            return
        try:
            self._make(root, limit)
        except OSError as error:
            self.why = f"no control group of our own: {error.strerror or error}"
            self.remove()

    def _make(self, root: Path, limit: int) -> None:
        if "memory" not in (root / "cgroup.controllers").read_text().split():
            self.why = "control groups of version 2 do not control memory here"
            return
        path = root / f"regrepro-pressure-{os.getpid()}"
        switch = root / "cgroup.subtree_control"
        off = "memory" not in switch.read_text().split()
        self._entry = self._journal.add("cgroup", path=str(path), enabled=str(switch) if off else None)
        if off:
            switch.write_text("+memory")
            self._enabled = switch
        path.mkdir(exist_ok=True)
        self.path = path
        (path / "memory.max").write_text(str(limit))
        # What is held must not be swapped out: that would undo the pressure.
        with contextlib.suppress(OSError):
            (path / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        """Move this process in."""
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def events(self) -> dict[str, int]:
        """Return memory.events: `{"oom_kill": 0, …}`."""
        if self.path is None:
            return {}
        return procfs.counts(procfs.text(self.path / "memory.events") or "")

    def remove(self) -> None:
        """Remove it; its processes must be gone. What cannot be removed stays in the journal."""
        deadline = time.monotonic() + 5
        while self.path is not None:
            try:
                self.path.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.02)
        self.path = None
        if self._enabled is not None:
            with contextlib.suppress(OSError):
                self._enabled.write_text("-memory")
            self._enabled = None
        if self._entry is not None:
            self._journal.remove(self._entry)
            self._entry = None


# The holder


@dataclass
class Report:
    """What pressure did. Sizes in bytes.

    `excess`: how many more bytes of CMA than of ordinary memory are free where CMA lies: so much is handed
    out out of CMA from now on. `stalled`: the worst share of a second in which all waited for memory, None
    where the kernel does not tell.
    """

    node: int
    held: int = 0
    huge: int = 0
    wanted: int = 0
    excess: int = 0
    limit: int = 0
    reserve: int = 0
    free: int = 0
    free_cma: int = 0
    threads: int = 1
    seconds: float = 0.0
    stalled: float | None = None
    cgroup: str | None = None
    no_cgroup: str = ""

    def as_record(self) -> dict[str, Any]:
        """Return the value of `search.pressure` of event `buffer` (docs/record.md)."""
        return asdict(self)


@dataclass
class _Refused(Exception):
    """The holder cannot do it: Unmet's words."""

    why: str
    how: str
    report: dict[str, Any] = field(default_factory=dict)


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
                _Holder(theirs, parent, self._cgroup, self._limit, self._memory_map).serve()
            finally:
                os._exit(0)
        theirs.close()
        self._pid, self._socket = pid, mine
        with contextlib.suppress(EnvironmentProblem):
            self._entry = self._journal.add("process", pid=pid)

    def press(self, wanted: int, *, node: int | None = None) -> Report:
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
        report = Report(**answer["report"])
        self.held = report.held
        after = oom_kills()
        if kills is not None and after is not None and after > kills:
            self.release()
            raise Unmet(
                NEED,
                f"the OOM killer was at work while {_mib(report.held)} were held",
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
            why += f"; its control group's limit of {_mib(self._limit)} was reached"
        held = self.held
        self.close()
        raise Unmet(NEED, f"{why} ({_mib(held)} were held)", "a smaller --pressure-limit")


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
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            return
        time.sleep(0.002)


def map_for(length: int, *, huge: bool) -> Range:
    """Map memory to be held, in huge pages where that moves no others; not populated. Raises OSError."""
    from regrepro.core.memory import Range as Memory
    from regrepro.core.placement import quiet_huge_pages

    return Memory.anonymous(length, huge=quiet_huge_pages() if huge else False)


class _Holder:
    """The child: holds memory as it is told, until the socket closes."""

    def __init__(
        self,
        link: socket.socket,
        parent: int,
        cgroup: Cgroup,
        limit: int,
        memory_map: MemoryMap | None,
    ) -> None:
        self._link = link
        self._parent = parent
        self._cgroup = cgroup
        self._limit = limit
        self._memory_map = memory_map
        self._reader: Any = None
        self._ranges: list[Any] = []
        self._held = 0
        self._huge = 0
        self._node = -1
        self._goal = 0
        self._told = 0.0

    def serve(self) -> None:
        """Answer questions until nobody asks any more."""
        from regrepro.kernel.parent import die_with_parent

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        if not die_with_parent(self._parent):
            return
        procfs.end_first_when_memory_runs_out()
        with contextlib.suppress(OSError):
            self._cgroup.enter()
        while True:
            data = self._link.recv(1 << 12)
            if not data:
                return
            question = json.loads(data)
            if question["do"] == "release":
                answer: dict[str, Any] = {"released": self._release()}
            else:
                try:
                    report = self._press(question["node"], question["wanted"], question["seconds"])
                    answer = {"report": report}
                except _Refused as refused:
                    self._release()
                    answer = {"why": refused.why, "how": refused.how}
                except (OSError, Unmet) as error:
                    held = self._release()
                    answer = {
                        "why": f"{getattr(error, 'strerror', None) or error}, with {_mib(held)} held",
                        "how": "a smaller --pressure-limit",
                    }
            self._link.send(json.dumps(answer).encode())

    def _release(self) -> int:
        held = self._held
        for memory in self._ranges:
            memory.close()
        self._ranges.clear()
        self._held = self._huge = 0
        return held

    def _press(self, node: int, wanted: int, seconds: float) -> dict[str, Any]:
        from regrepro.core.placement import allocate_on_node

        if node != self._node:
            allocate_on_node(node)
            self._node = node
        self._stalls = Stalls()
        self._deadline = time.monotonic() + seconds
        self._began = time.monotonic()
        self._seconds = seconds
        self._threads = max(1, min(len(os.sched_getaffinity(0)), _MOST_THREADS))
        excess = (wanted + max(_MARGIN, wanted // 4)) // PAGE_SIZE
        reached = 0
        first = self._look()
        if first.kind is None:
            raise _Refused(
                f"node {node} has no free CMA or ZONE_MOVABLE memory that pressure could bring out",
                "boot with cma=512M or hugetlb_cma=2G, or use --place online-movable",
            )
        if first.kind == "cma":
            self._check_possible(first, wanted, excess)
            self._goal = self._held + max(0, first.before + excess) * PAGE_SIZE
            self._fill()
            reached = self._exceed(excess)
        last = self._look()
        if first.kind == "cma" and reached * PAGE_SIZE < wanted:
            raise _Refused(
                f"with {_mib(self._held)} held, {_mib(reached * PAGE_SIZE)} would come out of CMA first, "
                f"where {_mib(wanted)} are wanted",
                "try again on a quieter node, or --place online-movable",
            )
        return Report(
            node=node,
            held=self._held,
            huge=self._huge,
            wanted=wanted,
            excess=reached * PAGE_SIZE,
            limit=self._limit,
            reserve=last.reserve * PAGE_SIZE,
            free=last.free * PAGE_SIZE,
            free_cma=last.free_cma * PAGE_SIZE,
            threads=self._threads,
            seconds=round(time.monotonic() - self._began, 6),
            stalled=None if self._stalls.worst is None else round(self._stalls.worst, 3),
            cgroup=None if self._cgroup.path is None else str(self._cgroup.path),
            no_cgroup=self._cgroup.why,
        ).as_record()

    def _look(self) -> Outlook:
        return outlook(read_zones(), self._node)

    def _most(self) -> int:
        """How many bytes may be held altogether; page tables and the like count towards the limit."""
        return max(0, self._limit - _OVERHEAD - self._limit // 256)

    def _check_possible(self, seen: Outlook, wanted: int, excess: int) -> None:
        """Say no before anything is touched where the numbers rule it out."""
        must = (seen.before + excess) * PAGE_SIZE
        if must <= 0:
            return
        numbers = (
            f"node {seen.node} has {_mib(seen.free_cma * PAGE_SIZE)} of free CMA and "
            f"{_mib(seen.ordinary * PAGE_SIZE)} of free ordinary memory, so {_mib(must)} "
            f"would have to be held for {_mib(wanted)} to come out of CMA"
        )
        if self._held + must > self._most():
            raise _Refused(
                f"{numbers}; the limit is {_mib(self._limit)}",
                f"--pressure-limit {-(-(self._held + must + _OVERHEAD + must // 128) // _MIB)}M, "
                "or --place online-movable",
            )
        if must > seen.room * PAGE_SIZE:
            raise _Refused(
                f"{numbers}; {_mib(seen.reserve * PAGE_SIZE)} stay free for the kernel",
                "free CMA first (drop caches), a larger CMA area, or --place online-movable",
            )

    def _fill(self) -> None:
        """Hold ordinary memory until it is as scarce as CMA."""
        from regrepro.core.memory import thp_size
        from regrepro.core.placement import quiet_huge_pages

        huge_size = (thp_size() or 0) if quiet_huge_pages() is not False else 0
        while True:
            seen = self._look()
            before = seen.before * PAGE_SIZE
            # Around the balance the kernel hands out both in turn: the rest is for _exceed.
            if seen.kind != "cma" or before < _NEAR:
                return
            self._check_going(seen)
            size = min(before, _CHUNK * self._threads, self._most() - self._held, seen.room * PAGE_SIZE)
            size = size // PAGE_SIZE * PAGE_SIZE
            if size < PAGE_SIZE:
                return
            large = self._huge_bytes(huge_size, size, seen)
            self._huge += large
            memory = map_for(large or size, huge=bool(large))
            self._ranges.append(memory)
            memory.populate(threads=self._threads)
            self._held += memory.length
            self._tell()

    def _huge_bytes(self, huge_size: int, size: int, seen: Outlook) -> int:
        """How much of a chunk to take in huge pages: at most what lies about in such pieces outside CMA."""
        if not huge_size or size < 4 * huge_size:
            return 0
        try:
            order = (huge_size // PAGE_SIZE).bit_length() - 1
            large = free_large_bytes(BUDDYINFO.read_text(), self._node, order)
        except OSError:
            return 0
        large -= seen.free_cma * PAGE_SIZE + _HUGE_SPARE
        usable = min(size - huge_size, large) // huge_size * huge_size
        return usable if usable >= 4 * huge_size else 0

    def _exceed(self, excess: int) -> int:
        """Have `excess` pages more of free CMA than of ordinary memory. Returns how many there are.

        Near the balance the kernel hands out both in turn: what is ordinary stays held, what is CMA is given
        back at the end. Not before: freed pages wait on a list of this CPU and would be handed out again.
        """
        import numpy

        from regrepro.core.memory import Range
        from regrepro.core.placement import drop_pages
        from regrepro.kernel.memorymap import ORDINARY

        taken: list[tuple[int, Any]] = []
        spare = 0  # CMA pages that are held for now
        while True:
            seen = self._look()
            lacking = seen.before - spare + excess
            if seen.kind != "cma" or lacking <= 0:
                break
            self._check_going(seen)
            left = (self._most() - self._held) // PAGE_SIZE - spare
            if lacking > min(seen.room, left):
                raise _Refused(
                    f"{_mib(lacking * PAGE_SIZE)} more of the ordinary memory of node {self._node} "
                    f"would have to be held; {_mib(self._held)} are, the limit is {_mib(self._limit)}, "
                    f"{_mib(seen.reserve * PAGE_SIZE)} stay free for the kernel",
                    "a larger --pressure-limit, or --place online-movable",
                )
            # Before the balance every page is an ordinary one, after it every other.
            pages = min(lacking if seen.before > 0 else 2 * lacking, left, _CHUNK // PAGE_SIZE)
            memory = Range.anonymous(pages * PAGE_SIZE, huge=False)
            self._ranges.append(memory)
            memory.populate(threads=self._threads)
            marks = (self._places(memory) != ORDINARY).astype(numpy.uint8)
            taken.append((memory.address, marks))
            special = int(marks.sum())
            spare += special
            self._held += (pages - special) * PAGE_SIZE
            self._tell()
        for address, marks in taken:
            drop_pages(address, marks)
        return excess - lacking if seen.kind == "cma" else 0

    def _places(self, memory: Any) -> Any:
        if self._reader is None:
            if self._memory_map is None:
                raise _Refused("where pages lie cannot be read here", "run as root")
            from regrepro.kernel.pagestate import PageReader

            self._reader = PageReader(self._memory_map)
        return self._reader.snapshot(memory.address, memory.length, counts=False).place

    def _check_going(self, seen: Outlook) -> None:
        """Give up in good time."""
        numbers = (
            f"{_mib(self._held)} were held, {_mib(seen.ordinary * PAGE_SIZE)} of ordinary memory and "
            f"{_mib(seen.free_cma * PAGE_SIZE)} of CMA were free"
        )
        if time.monotonic() > self._deadline:
            raise _Refused(
                f"CMA was not reached in {self._seconds:.0f} s: {numbers}",
                "try again on a quieter node, or --place online-movable",
            )
        share = self._stalls.share()
        if share > _MOST_STALLED:
            raise _Refused(
                f"in {share:.0%} of the last second every process waited for memory: {numbers}",
                "a smaller --pressure-limit, or --place online-movable",
            )

    def _tell(self) -> None:
        """Tell how far it is, at most twice a second."""
        now = time.monotonic()
        if now - self._told >= 0.5:
            self._told = now
            message = {"held": self._held, "goal": max(self._goal, self._held)}
            self._link.send(json.dumps(message).encode())


def _mib(size: int) -> str:
    return f"{size / _MIB:.0f} MiB"


def least_limit(zones: Iterable[Zone] | None = None, node: int | None = None, wanted: int = 0) -> int | None:
    """Return the least `--pressure-limit` (bytes) that could bring `wanted` bytes out of CMA; None where no
    limit could.
    """
    zones = read_zones() if zones is None else list(zones)
    seen = nearest_node(zones) if node is None else outlook(zones, node)
    if seen is None or seen.kind is None:
        return None
    must = max(0, seen.before * PAGE_SIZE + wanted + max(_MARGIN, wanted // 4)) if seen.kind == "cma" else 0
    if must > seen.room * PAGE_SIZE or must > read_meminfo().get("MemAvailable", must):
        return None
    return must + _OVERHEAD + must // 128 + _MIB
