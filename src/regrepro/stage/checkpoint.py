"""A checkpoint beside registrations, and how often they fail with each part of it: rates, not a proof.

Checkpointing forks workers that keep writing in the address space that they inherited, fills the page cache
and has it written back. Each round puts the node at a random distance from where the kernel begins to hand
out CMA, as allocator history would, runs the parts of a checkpoint that are switched on, and allocates, pins
and registers a buffer. All settings take their turn at each distance, in an order that is shuffled, so that
only the switches differ, and what a round leaves behind in the kernel's lists falls on all of them alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrepro.errors import Unmet, errno_name
from regrepro.stage.disk import written_back
from regrepro.stage.ports import PAGE_SIZE, UNPINNABLE, Backend, Range, readable, register_whole
from regrepro.stage.search import consume_first

if TYPE_CHECKING:
    from regrepro.stage.stage import Stage

_MADV_DONTFORK = 10
_HUGE = 2 << 20
# A CPU's list of free pages holds CMA pages that earlier rounds freed; so many small pages empty it.
_SOAK = 8 << 20
_LISTS = Path("/proc/sys/vm/percpu_pagelist_high_fraction")
_Z95 = 1.959964


@dataclass(frozen=True)
class Switches:
    """One setting. Sizes in bytes.

    `when` the buffer is pinned and registered: `before` the checkpoint (the mitigation), `during`, `after`,
    or `none`: without any. `workers` forked processes each write `written` bytes of inherited memory, again
    and again. `page_cache` bytes of a file are written; with `writeback` they are flushed to the disk, too.
    `inherited`: the buffer was touched before the fork; `dontfork`: with MADV_DONTFORK.
    """

    when: str = "none"
    workers: int = 0
    written: int = 0
    page_cache: int = 0
    writeback: bool = False
    inherited: bool = False
    dontfork: bool = False


def settings(workers: int, written: int, page_cache: int) -> dict[str, Switches]:
    """Return the settings that a run compares, by name; nothing that is switched off altogether."""
    forks: dict[str, Any] = {"workers": workers, "written": written} if workers and written else {}
    file: dict[str, Any] = {"page_cache": page_cache} if page_cache else {}
    made = {"without checkpoint": Switches()}
    if forks or file:
        made["registered before"] = Switches("before", **forks, **file)
        made["registered during"] = Switches("during", **forks, **file, writeback=bool(file))
        made["registered after"] = Switches("after", **forks, **file)
    if forks:
        made["during, workers alone"] = Switches("during", **forks)
        made["touched before the fork"] = Switches("during", **forks, inherited=True)
        made["touched before, MADV_DONTFORK"] = Switches("during", **forks, inherited=True, dontfork=True)
    if file:
        made["during, page cache alone"] = Switches("during", **file)
        made["during, page cache and writeback"] = Switches("during", **file, writeback=True)
    return made


def interval(failed: int, rounds: int) -> tuple[float, float]:
    """Return the 95 % interval of a rate (Wilson's score interval)."""
    if not rounds:
        return 0.0, 1.0
    rate, square = failed / rounds, _Z95 * _Z95
    middle = (rate + square / (2 * rounds)) / (1 + square / rounds)
    half = (
        _Z95 * math.sqrt(rate * (1 - rate) / rounds + square / (4 * rounds * rounds)) / (1 + square / rounds)
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def measure(
    stage: Stage,
    chosen: dict[str, Switches],
    *,
    rounds: int,
    length: int,
    fill: float,
    spread: int,
    seed: int = 1,
) -> None:
    """Run `rounds` rounds of each setting and record its rate, in the scenario itself (no control needs it).

    `length`: bytes of the buffer. `fill`: the part of the rounds, 0 to 1, that begin beyond the point where
    CMA is handed out; `spread`: over how many bytes the starting points are spread. Raises `Unmet` where the
    kernel's counters name no such point.
    """
    if stage.control is not None:
        return
    backend = stage.backend
    ground = _Ground(_heap(backend, chosen), _directory(backend, chosen))
    ballast: list[Range] = []
    try:
        with _short_lists(backend):
            _consume(backend, ballast, leave=2 * spread + _SOAK)
            outcomes: dict[str, list[_Outcome]] = {name: [] for name in chosen}
            draws = random.Random(seed)
            for _ in range(rounds):
                distance = int(draws.uniform(-fill, 1 - fill) * spread)
                for name in draws.sample(sorted(chosen), len(chosen)):
                    outcomes[name].append(_round(stage, chosen[name], ground, length, distance))
        for name, switches in chosen.items():
            how = {"length": length, "fill": fill, "spread": spread}
            _record(stage, name, switches, outcomes[name], how)
    finally:
        for memory in [*ballast, ground.heap]:
            memory.close()


@dataclass(frozen=True)
class _Ground:
    """What the rounds of all settings share: the memory that workers inherit, and a directory on a disk."""

    heap: Range
    directory: str


def _directory(backend: Backend, chosen: dict[str, Switches]) -> str:
    if not any(one.page_cache for one in chosen.values()):
        return ""
    return written_back(backend.in_lab)


@dataclass(frozen=True)
class _Outcome:
    """What became of one round: errno of the registration or of the pin, and where the pages lay."""

    errno: str | None
    pin_errno: str | None
    unpinnable: int
    seconds: float


def _record(
    stage: Stage, name: str, switches: Switches, outcomes: list[_Outcome], how: dict[str, Any]
) -> None:
    failed = [one for one in outcomes if one.errno]
    errnos: dict[str, int] = {}
    for one in failed:
        errnos[str(one.errno)] = errnos.get(str(one.errno), 0) + 1
    low, high = interval(len(failed), len(outcomes))
    owner = stage.backend.default_pin()[1]
    stage.step(
        "checkpoint-rate",
        setting=name,
        switches=asdict(switches),
        rounds=len(outcomes),
        failed=len(failed),
        errnos=errnos,
        pins_refused=sum(1 for one in outcomes if one.pin_errno),
        rate=round(len(failed) / len(outcomes), 4) if outcomes else None,
        interval_95=[round(low, 4), round(high, 4)],
        rounds_with_unpinnable_pages=sum(1 for one in outcomes if one.unpinnable),
        seconds=round(sum(one.seconds for one in outcomes), 3),
        **how,
        stand_in=owner if owner != "cuda" else None,
    )


def _heap(backend: Backend, chosen: dict[str, Switches]) -> Range:
    """What the workers inherit and write to."""
    size = max([one.written for one in chosen.values()] + [PAGE_SIZE])
    heap = backend.allocate(-(-size // PAGE_SIZE) * PAGE_SIZE, "anonymous")
    heap.populate()
    return heap


@contextlib.contextmanager
def _short_lists(backend: Backend) -> Iterator[None]:
    """Keep the CPUs' lists of free pages short meanwhile, in the lab: what they hold is nowhere counted."""
    before = ""
    if backend.in_lab:
        with contextlib.suppress(OSError):
            before = _LISTS.read_text().strip()
            _LISTS.write_text("1000000")
    try:
        yield
    finally:
        if before:
            with contextlib.suppress(OSError):
                _LISTS.write_text(before)


def _to_go(backend: Backend) -> int:
    """Return how many bytes are handed out before CMA is, on this process' node. Raises `Unmet`."""
    zones = backend.zones()
    if not any(zone.free_cma for zone in zones):
        raise Unmet("cma", "no zone has free CMA memory", "boot with cma=512M or hugetlb_cma=2G")
    outlook = consume_first(zone for zone in zones if zone.name != "Movable")
    return min(outlook.values(), default=0) * PAGE_SIZE


def _consume(backend: Backend, held: list[Range], leave: int) -> None:
    """Hold memory until the kernel is `leave` bytes from handing out CMA."""
    for _ in range(64):
        surplus = _to_go(backend) - leave
        if surplus < _HUGE:
            return
        if surplus > backend.available_memory() // 2 and not backend.in_lab:
            raise Unmet(
                "fill",
                f"{surplus} bytes would have to be held until this node hands out CMA",
                "measure in the lab: regrepro lab run checkpoint_fork --boot cma=512M",
            )
        size = min(surplus, 256 << 20) // _HUGE * _HUGE
        memory = backend.allocate(size, "thp")
        held.append(memory)
        memory.populate()


def _round(stage: Stage, switches: Switches, ground: _Ground, length: int, distance: int) -> _Outcome:
    """Make one round, beginning `distance` bytes before the kernel hands out CMA (less than 0: beyond)."""
    backend, noise = stage.backend, []
    started = time.perf_counter()
    try:
        surplus = _to_go(backend) - max(distance, 0)
        # Beyond the point each page taken is CMA or not by turns: so much further it has to go.
        surplus += 2 * max(-distance, 0)
        huge = max(0, surplus - _SOAK) // _HUGE * _HUGE
        for size, backing in ((huge, "thp"), (surplus - huge, "anonymous")):
            if size >= PAGE_SIZE:
                noise.append(backend.allocate(size // PAGE_SIZE * PAGE_SIZE, backing))
                noise[-1].populate()
        memory = backend.allocate(length, "anonymous")
        try:
            if switches.inherited:
                memory.populate()
            if switches.dontfork:
                _dontfork(memory)
            if switches.when in ("none", "before"):
                return _attempt(
                    stage, memory, started, switches if switches.when == "before" else None, ground
                )
            with _checkpoint(backend, switches, ground) as end_workers:
                if switches.when == "after":
                    end_workers()
                return _attempt(stage, memory, started, None, ground)
        finally:
            memory.close()
    finally:
        for one in noise:
            one.close()


def _attempt(stage: Stage, memory: Range, started: float, then: Switches | None, ground: _Ground) -> _Outcome:
    """Pin and register; `then`: the checkpoint that comes while both are held."""
    import numpy

    backend = stage.backend
    memory.populate()
    state = backend.snapshot(memory.address, memory.length, counts=False)
    unpinnable = int(numpy.isin(state.place, UNPINNABLE).sum()) if state and readable(state) else 0
    errno = None
    try:
        pin = backend.hold_default(memory.address, memory.length)
    except OSError as error:
        return _Outcome(None, errno_name(error.errno or 0), unpinnable, time.perf_counter() - started)
    try:
        region = register_whole(backend.device(), memory.address, memory.length)
        if then is not None:
            with _checkpoint(backend, then, ground):
                pass
        region.deregister()
    except OSError as error:
        errno = errno_name(error.errno or 0)
    finally:
        pin.release()
    return _Outcome(errno, None, unpinnable, time.perf_counter() - started)


@contextlib.contextmanager
def _checkpoint(backend: Backend, switches: Switches, ground: _Ground) -> Iterator[Any]:
    """Have the workers written once and going on, and the file in the page cache; yields how to end them."""
    workers: list[int] = []

    def end() -> None:
        while workers:
            pid = workers.pop()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    with _page_cache(ground.directory, switches):
        try:
            for _ in range(switches.workers):
                workers.append(_worker(backend, ground.heap, switches.written))
            yield end
        finally:
            end()


def _worker(backend: Backend, heap: Range, written: int) -> int:
    """Fork a process that writes to what it inherited until it is killed; return once it has written all."""
    import numpy

    ready, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        os.read(ready, 1)
        os.close(ready)
        return pid
    try:
        words = numpy.frombuffer(backend.view(heap.address, written), dtype=numpy.uint8)
        words[::PAGE_SIZE] += 1
        os.write(told, b"w")
        while True:
            words[::PAGE_SIZE] += 1
            time.sleep(0.01)
    finally:
        os._exit(1)


@contextlib.contextmanager
def _page_cache(directory: str, switches: Switches) -> Iterator[None]:
    """Keep a file's bytes in the page cache meanwhile; without `writeback` they stay dirty."""
    if not switches.page_cache:
        yield
        return
    room = os.statvfs(directory)
    size = min(switches.page_cache, room.f_bavail * room.f_frsize * 3 // 4)
    with tempfile.NamedTemporaryFile(prefix="regrepro-", dir=directory) as file:
        chunk = b"checkpoint" * 6554
        for _ in range(max(1, size // len(chunk))):
            file.write(chunk)
        file.flush()
        if switches.writeback:
            os.fsync(file.fileno())
        yield


def _dontfork(memory: Range) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(memory.address, memory.length, _MADV_DONTFORK):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise(MADV_DONTFORK): {os.strerror(number)}")


__all__ = ["Switches", "interval", "measure", "settings"]
