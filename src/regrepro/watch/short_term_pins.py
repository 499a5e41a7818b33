"""Pins without FOLL_LONGTERM that were told, remembered for the failure that may follow."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro.core.pages import read_pfns, runs
from regrepro.kernel.procfs import KALLSYMS
from regrepro.kernel.trace_flags import FlagNames
from regrepro.watch import process
from regrepro.watch.failed_registration import FailedRegistration, ShortTermPin

PAGE_SIZE: int = os.sysconf("SC_PAGE_SIZE")
_PIN_KEPT = 512  # of a process
_FRAMES_PAGES, _FRAMES_KEPT, _FRAMES_SECONDS = 1024, 1024, 0.02  # of pins whose frames are read at once
_VM_CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}  # process_vm_readv, process_vm_writev


class ShortTermPins:
    """Pins by process. `pfn_of`: the PFN of a struct page, None where that is not known."""

    def __init__(self, flags: FlagNames, pfn_of: Callable[[int], int | None]) -> None:
        self._flags = flags
        self._pfn_of = pfn_of
        self._pins: dict[int, deque[ShortTermPin]] = {}
        self._framed: deque[ShortTermPin] = deque()  # pins whose frames are known
        self._framed_at = float("-inf")

    def remember(self, pin: ShortTermPin) -> None:
        """Keep a pin without FOLL_LONGTERM for the failure that may follow; its frames where few come."""
        if len(self._pins) > 4096:
            for pid in [pid for pid in self._pins if not (process.PROC / str(pid)).exists()]:
                del self._pins[pid]
        self._pins.setdefault(pin.pid, deque(maxlen=_PIN_KEPT)).append(pin)
        now = time.monotonic()
        if now - self._framed_at < _FRAMES_SECONDS or not 0 < pin.pages <= _FRAMES_PAGES:
            return
        self._framed_at = now
        pin.frames = _frames_at(pin.pid, pin.start // PAGE_SIZE * PAGE_SIZE, pin.pages)
        self._check_frames(pin)
        self._framed.append(pin)
        if len(self._framed) > _FRAMES_KEPT:
            self._framed.popleft().frames = None

    def _check_frames(self, pin: ShortTermPin) -> None:
        """Where other pages were mapped since a pin was made, what was read there is not what was pinned: the
        first page is known, which the kernel told.
        """
        pinned = self._pfn_of(pin.page) if pin.page else None
        if pinned is None:
            return
        there = pin.frames
        if there is None:
            there = _frames_at(pin.pid, pin.start // PAGE_SIZE * PAGE_SIZE, 1)
        if there is None or pinned not in there[:1]:
            pin.frames = np.array([pinned], dtype=np.int64)

    def unpinned(self, pid: int, ns: int, page: int) -> None:
        """Keep that a process unpinned pages, `page` first (its struct): its last pin of that has ended."""
        pfn = self._pfn_of(page) if pid in self._pins else None
        for pin in reversed(self._pins[pid]) if pfn is not None else ():
            if pin.frames is not None and pin.ns < ns and not pin.ended and pfn in pin.frames:
                pin.ended = True
                return

    def on(
        self, failure: FailedRegistration, first: int, length: int
    ) -> Iterator[tuple[ShortTermPin, bool | None]]:
        """Yield the pins on a range that its process made, and whether they are held, None: not known.

        A number is given to another process once its process is gone: what was pinned before this one
        started was pinned by another.
        """
        begun, end = failure.process_start or 0, first + length
        last: dict[int, ShortTermPin] = {}
        pins = [pin for pin in self._pins.get(failure.pid, ()) if pin.ns >= begun]
        for pin in pins:
            last[pin.tid] = pin
        for pin in pins:
            start = pin.start // PAGE_SIZE * PAGE_SIZE
            if start < end and start + pin.pages * PAGE_SIZE > first:
                if pin.frames is None:
                    self._check_frames(pin)
                held = _is_held(pin) if last[pin.tid] is pin else _ended(pin)
                yield pin, False if pin.ended else held

    def as_record(self, pin: ShortTermPin, held: bool | None, failure: FailedRegistration) -> dict[str, Any]:
        """Return a pin as the record has it (docs/record.md)."""
        return {
            "fn": pin.function,
            "start": pin.start,
            "nr_pages": pin.pages,
            "flags": self._flags.decode(pin.flags) if self._flags.values else None,
            "stack": pin.stack,
            "modules": modules_of(pin.stack),
            "tid": pin.tid,
            "age_seconds": round((failure.ns - pin.ns) / 1e9, 6),
            "held": held,
            "pfn": None
            if pin.frames is None
            else [[i, v, n] for i, n, v in runs(pin.frames, 1).tolist() if v],
        }


def _frames_at(pid: int, first: int, pages: int) -> NDArray[np.int64] | None:
    """Return the PFNs of a process' pages now, 0 where there is none; None where they cannot be read."""
    try:
        fd = os.open(process.PROC / str(pid) / "pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return read_pfns(first, pages, fd).astype(np.int64)
    except OSError:
        return None
    finally:
        os.close(fd)


def _of_process_vm(pin: ShortTermPin) -> bool:
    """Whether a pin is one of process_vm_readv or process_vm_writev, which hold theirs for one call at most
    (process_vm_rw_single_vec(), mm/process_vm_access.c).
    """
    return any(frame.startswith("process_vm_rw") for frame in pin.stack)


def _ended(pin: ShortTermPin) -> bool | None:
    """Whether a pin is held whose thread has made another since: False, or None where that is not known."""
    return False if _of_process_vm(pin) else None


def _is_held(pin: ShortTermPin) -> bool | None:
    """Whether a thread's last pin is held: one of process_vm_readv while its thread is in that call. Of
    others it is not known.
    """
    numbers = _VM_CALLS.get(os.uname().machine)
    if not _of_process_vm(pin) or numbers is None:
        return None
    try:
        told = (process.PROC / str(pin.pid) / "task" / str(pin.tid) / "syscall").read_text().split()
    except OSError:
        return None if (process.PROC / str(pin.pid) / "task" / str(pin.tid)).exists() else False
    if not told or told[0] == "running":
        return None
    return told[0] in map(str, numbers)


def modules_of(stack: Iterable[str], kallsyms: Path = KALLSYMS) -> list[str]:
    """Return the modules whose functions stand in a stack, innermost first. Reads all symbols: a driver may
    have been loaded since the last time.
    """
    frames = [frame.partition("+")[0] for frame in stack]
    wanted = set(frames)
    known: dict[str, str] = {}
    with suppress(OSError), kallsyms.open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.endswith("]\n"):
                words = line.split()
                module = words[3].strip("[]")
                # Programs of BPF, ours among them, and trampolines of ftrace stand there as modules, too.
                if words[2] in wanted and module != "bpf" and not module.startswith("__builtin"):
                    known.setdefault(words[2], module)
    return list(dict.fromkeys(known[frame] for frame in frames if frame in known))
