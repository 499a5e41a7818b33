"""What is seen around a failure, and how it stands in the record (docs/record.md): a pass for each failure.

`look()` is for the moment of the failure, while the process has its mapping; `record_events()` is for later,
when the library has had its word, too.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro.core.pages import read_entries_at, read_pfns, runs
from regrepro.core.verbs import access_names
from regrepro.kernel import trace_tree
from regrepro.kernel.leftovers import start_time
from regrepro.kernel.memorymap import PLACE_NAMES, MemoryMap, read_memory_map
from regrepro.kernel.pagestate import KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, PageReader, PageState
from regrepro.kernel.trace_flags import FlagNames
from regrepro.watch import copies, process
from regrepro.watch.events import Failure, Inner, PlainPin, StuckPage
from regrepro.watch.functions import Functions
from regrepro.watch.process import Process

PAGE_SIZE: int = os.sysconf("SC_PAGE_SIZE")
SCENARIO = "watch"
# A longer range is looked at where the pin failed: the kernel pins it in parts (docs/verdicts.md).
LOOK_LIMIT = 256 << 20
MAP_SECONDS = 600.0  # after which a memory map is read anew while nothing else is to be done
LASTING_SECONDS = 0.25  # after which the references of pages that stayed are looked at once more
UNKNOWN_ERRNO = "EUNKNOWN"
LOOKS = (1.0, 3.0, 10.0, 31.0)
"""Seconds after a failure at which the frames that were left behind are looked at again. The last is longer
than a request of a block device is given (30 s: `nvme_io_timeout`, drivers/nvme/host/core.c; `SD_TIMEOUT`,
drivers/scsi/sd.h).
"""
# Pages of one call of get_user_pages for an MR: as many as a page holds pointers (__ib_umem_get_va(),
# drivers/infiniband/core/umem.c).
LOOK_PAGES = PAGE_SIZE // 8
# Bits of /proc/kpageflags that tell whether a per-CPU batch may refer to a page (docs/record.md, `look`).
_LISTS = {5: "lru", 6: "active", 33: "mlocked"}
_CHANGED_KEPT = 16  # of pins that came or went between looks
_PIN_KEPT = 512
_FRAMES_PAGES, _FRAMES_KEPT, _FRAMES_SECONDS = 1024, 1024, 0.02  # of pins whose frames are read at once
KPAGEFLAGS = Path("/proc/kpageflags")
_VM_CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}  # process_vm_readv, process_vm_writev
_MET_KEPT = 4096
_DECLARED: dict[str, Any] = {
    "shows": "a registration of a program on this node failed",
    "needs": [],
    "expects": {},
    "controls": {},
    "profiles": [],
    "timeout": 0,
}


@dataclass
class Evidence:
    """What was seen around one failure. `pages`: the page state of the range that was looked at."""

    failure: Failure
    process: Process
    first: int = 0
    length: int = 0
    vma: str = ""
    mappings: list[str] = field(default_factory=list)
    pages: PageState | None = None
    again: PageState | None = None
    again_after: float = 0.0
    pages_unknown: str = ""
    stuck: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    pins: list[tuple[PlainPin, bool | None]] = field(default_factory=list)  # and whether they were held
    plain_pins: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0  # that the look took, from the failure's arrival on
    lasting_due: float = 0.0  # time.monotonic()

    @property
    def stuck_or_enomem(self) -> bool:
        """Whether pages may be held: then they are looked at once more."""
        return bool(self.stuck) or self.failure.errno == "ENOMEM"

    @property
    def frames(self) -> tuple[int, int] | None:
        """Address and length of the pages among which those are that migrate_pages left behind: of the call
        that failed. None where there is nothing to look at again.
        """
        if self.pages is None or not self.failure.stuck or self.process.facts.get("starttime") is None:
            return None
        first, end = self.first, self.first + self.length
        call = _failed_call(self.failure)
        if call is not None:
            first, end = max(first, call[0]), min(end, call[0] + call[1])
        first = first // PAGE_SIZE * PAGE_SIZE
        return (first, end - first) if first < end <= first + LOOK_PAGES * PAGE_SIZE else None


def _failed_call(failure: Failure) -> tuple[int, int] | None:
    """Address and length of the get_user_pages call that failed, None where it was not seen."""
    part = next((item for item in reversed(failure.inner) if "nr_pages" in item.args), None)
    return (part.args["start"], max(part.args["nr_pages"], 1) * PAGE_SIZE) if part is not None else None


class Observer:
    """Looks at processes and pages. Keeps the memory map, and pins without FOLL_LONGTERM that were told."""

    def __init__(self, functions: Functions, flags: FlagNames) -> None:
        self._functions = functions
        self._flags = flags
        self.memory_map: MemoryMap = read_memory_map()
        self._read_at = time.monotonic()
        self._pins: dict[int, deque[PlainPin]] = {}
        self._met: dict[int, Process] = {}
        self._framed: deque[PlainPin] = deque()  # pins whose frames are known
        self._framed_at = float("-inf")

    def remember(self, pin: PlainPin) -> None:
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

    def _check_frames(self, pin: PlainPin) -> None:
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

    def meet(self, pid: int) -> None:
        """Keep what a process that opens an RDMA device is, for the case that it dies with its failure."""
        if len(self._met) > _MET_KEPT:
            for other in [other for other in self._met if not (process.PROC / str(other)).exists()]:
                del self._met[other]
        self._met[pid] = process.read_process(pid)

    def _of_process(self, failure: Failure) -> Process:
        """Read the process of a failure. What of one that dies can no longer be read is of the opening of its
        device; what it is limited to, the kernel has told of that very moment.
        """
        pid = failure.pid
        seen = process.read_process(pid)
        start = seen.facts.get("starttime")
        if failure.process_start is not None:
            its = process.start_ticks(failure.process_start)
            if start not in (None, its):
                seen = Process(pid, problems=[f"process {pid} is another one by now"])
                seen.facts["pid"] = pid
            start = seen.facts["starttime"] = its
        before = self._met.get(pid)
        if before is not None and start in (None, before.facts.get("starttime")):  # else of another process
            self._of_opening(seen, before)
        seen.limits.update(failure.limits)
        return seen

    @staticmethod
    def _of_opening(seen: Process, before: Process) -> None:
        """Fill in what cannot be read any more."""
        if seen.capabilities is None:
            seen.capabilities = before.capabilities
        for name, value in before.limits.items():
            if name not in ("vmpin", "vmlck"):  # what it had locked by then says nothing of now
                seen.limits.setdefault(name, value)
        nothing: tuple[Any, ...] = (
            None,
            "",
            {},
        )  # a zombie's command line is empty, and so is its environment
        older = [
            name
            for name, value in before.facts.items()
            if seen.facts.get(name) in nothing and value not in nothing
        ]
        seen.facts.update({name: before.facts[name] for name in older})
        if older:
            seen.facts["of_opening"] = sorted(older)

    def look(self, failure: Failure) -> Evidence:
        """Look at the process of a failure now: first its pages, then the rest."""
        begin = time.monotonic()
        evidence = Evidence(failure, Process(failure.pid))
        evidence.first, evidence.length = self._range(failure)
        if evidence.length and not failure.dmabuf:
            self._look_at_pages(evidence)
        evidence.pins = list(self._pins_on(failure, evidence.first, evidence.length))
        evidence.process = self._of_process(failure)
        evidence.devices = copies.device_names(copies.devices_of(failure.pid))
        evidence.memory = process.node_memory()
        evidence.stuck = list(self._stuck(failure.stuck))
        evidence.seconds = time.monotonic() - begin
        evidence.lasting_due = time.monotonic() + LASTING_SECONDS
        return evidence

    def look_again(self, evidence: Evidence) -> None:
        """Look at the pages once more: a reference that is still there is no passing one."""
        failure = evidence.failure
        if evidence.pages is None:
            return
        try:
            state = self._snapshot(failure.pid, evidence.first, evidence.length)
        except OSError:
            return
        if state.pages and bool((state.pfn != 0).any()):
            evidence.again = state
            evidence.again_after = time.monotonic() - failure.since

    def look_at_frames(self, evidence: Evidence) -> dict[str, Any]:
        """Look at the frames that were left behind, from outside; return the keys of an event `look`
        (docs/record.md). `ended` says why nothing further is to be seen of them.
        """
        failure, start = evidence.failure, evidence.process.facts.get("starttime")
        address, length = evidence.frames or (0, 0)
        seen: dict[str, Any] = {"address": address, "length": length, "pages": None, "lists": None}
        seen["after_seconds"] = round(time.monotonic() - failure.since, 6)
        ended = ""
        try:
            state = self._snapshot(failure.pid, address, length)
        except OSError as error:
            state, ended = None, f"the pages could not be read: {error.strerror}"
        if start is None or start_time(failure.pid) != start:  # after the look: the pages were its own
            state, ended = None, f"process {failure.pid} has ended"
        if state is not None:
            seen["pages"] = state.as_record()
            seen["lists"] = _lists(state)
        return {**seen, "ended": ended, "pins": self._changed_pins(evidence, address, length)}

    def _changed_pins(self, evidence: Evidence, address: int, length: int) -> list[dict[str, Any]]:
        """Return the pins on a range that were made since a failure and may be held, and those that were held
        then and have ended.
        """
        failure = evidence.failure
        held = {id(pin) for pin, was in evidence.pins if was}
        changed = [
            (pin, now)
            for pin, now in self._pins_on(failure, address, length)
            if (now is False and id(pin) in held) or (now is not False and pin.ns > failure.ns)
        ]
        return [self._told_pin(pin, now, failure) for pin, now in changed[-_CHANGED_KEPT:]]

    def _snapshot(self, pid: int, first: int, length: int) -> PageState:
        """Read the pages of a process, and where they lie at this moment. Raises OSError."""
        reader = PageReader(self.memory_map, pid)
        try:
            state = reader.snapshot(first, length)
        finally:
            reader.close()
        state.place = self.memory_map.places_now(state.pfn)
        return state

    def _range(self, failure: Failure) -> tuple[int, int]:
        if failure.address is None or not failure.length or failure.length < 0:
            return 0, 0
        if failure.address + failure.length >= 1 << 64:
            return 0, 0
        if failure.length <= LOOK_LIMIT:
            return failure.address, failure.length
        return _failed_call(failure) or (failure.address, LOOK_LIMIT)

    def _look_at_pages(self, evidence: Evidence) -> None:
        failure = evidence.failure
        try:
            state = self._snapshot(failure.pid, evidence.first, evidence.length)
        except OSError as error:
            evidence.pages_unknown = f"the pages could not be read: {error.strerror}"
            return
        finally:
            problems: list[str] = []
            maps = process._read(process.PROC / str(failure.pid) / "maps", problems)
            if maps:
                evidence.vma, evidence.mappings = process.vma_of(maps, evidence.first, evidence.length)
        if not maps or not state.pages:
            evidence.pages_unknown = (
                f"process {failure.pid} was gone before its pages could be read"
                if not maps
                else "; ".join(state.problems) or "no page could be read"
            )
            return
        evidence.pages = state

    def refresh(self) -> None:
        """Read the memory map anew. It takes a tenth of a second and more: not while a failure waits."""
        self.memory_map = read_memory_map()
        self._read_at = time.monotonic()

    def refresh_if_old(self) -> None:
        """Read the memory map anew if it is old: call it while nothing else is to be done."""
        if time.monotonic() - self._read_at > MAP_SECONDS:
            self.refresh()

    def complete(self, evidence: Evidence) -> None:
        """Do what may take its time: name the holders of pins, read a map anew whose zones have changed."""
        evidence.plain_pins = [self._told_pin(pin, held, evidence.failure) for pin, held in evidence.pins]
        if self.memory_map.zones_changed():
            self.refresh()

    def _stuck(self, pages: Sequence[StuckPage]) -> Iterator[dict[str, Any]]:
        """Yield the pages that migrate_pages left behind, with their PFNs and where they lie now."""
        found: list[tuple[int, StuckPage]] = []
        for page in pages:
            pfn = self._pfn_of(page.address)
            if pfn is not None:
                found.append((pfn, page))
        pfns = np.array([pfn for pfn, _ in found], dtype=np.uint64)
        large = _large(pfns)
        for (pfn, page), code, whole in zip(found, self.memory_map.places_now(pfns), large, strict=True):
            yield {
                "pfn": pfn,
                "place": PLACE_NAMES[int(code)],
                "refcount": page.refcount,
                "mapcount": page.mapcount + 1,  # the kernel counts from -1
                "flags": page.flags & 0xFFFFFFFF,
                **({"pincount": page.pincount} if whole else {}),
            }

    def _pfn_of(self, address: int) -> int | None:
        """Return the PFN of a struct page, None where that is not known."""
        sections = self.memory_map.sections
        if sections is None or not len(sections.coded_maps):
            return None
        size = sections.layout.pages.page_struct_size
        # With SPARSEMEM_VMEMMAP one base serves all sections (include/asm-generic/memory_model.h).
        first = int(sections.coded_maps[0])
        if (sections.coded_maps == sections.coded_maps[0]).all():
            pfn, rest = divmod((address - first) & (1 << 64) - 1, size)
        else:
            pfn, rest = self._in_sections(address, size)
        return pfn if not rest and pfn < 1 << 40 else None

    def _in_sections(self, address: int, size: int) -> tuple[int, int]:
        sections = self.memory_map.sections
        assert sections is not None
        for number, coded in zip(sections.numbers.tolist(), sections.coded_maps.tolist(), strict=True):
            pfn, rest = divmod((address - coded) & (1 << 64) - 1, size)
            if not rest and pfn >> sections.layout.section_shift == number:
                return pfn, 0
        return 0, 1

    def _pins_on(self, failure: Failure, first: int, length: int) -> Iterator[tuple[PlainPin, bool | None]]:
        """Yield the pins on a range that its process made, and whether they are held, None: not known.

        A number is given to another process once its process is gone: what was pinned before this one
        started was pinned by another.
        """
        begun, end = failure.process_start or 0, first + length
        last: dict[int, PlainPin] = {}
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

    def _told_pin(self, pin: PlainPin, held: bool | None, failure: Failure) -> dict[str, Any]:
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

    def trace(self, failure: Failure, lost: int, missed: int | None = None) -> dict[str, Any]:
        """Return the kernel's account of a failure, as the tracer of `run` would (docs/record.md).

        `lost`: events lost near it; `missed`: hits of probes that the kernel missed near it, None: not told.
        """
        functions = self._functions
        why_spoiled = []
        if lost:
            why_spoiled.append(f"{lost} events were lost near this failure: what is absent may have happened")
        if failure.doubt:
            why_spoiled.append(failure.doubt)
        if missed:
            why_spoiled.append(f"{missed} hits of probes were missed near this failure")
        if not failure.function and not failure.inner:
            why = "no handler of the kernel saw the request: libibverbs or the kernel's entry refused it"
            return {
                "status": "complete" if functions.entries and not why_spoiled else "spoiled",
                "why": "; ".join(why_spoiled)
                or (why if functions.entries else "the kernel's handlers are not followed"),
                "events": [],
                "tree": [],
                "missing": self._missing(),
                "probed": self._probed(),
                "probed_failures": self._probed_failures(),
                "misses": missed,
                "overrun": lost,
            }
        inner = [item for item in failure.inner if not self._of_something_else(item)]
        begin = inner[0].ns if inner else failure.ns
        events = [self._event(item, begin, failure.tid) for item in inner]
        failed_pins = sum(1 for item in inner if "nr_pages" in item.args)
        before = failure.pin_calls - failed_pins
        if before > 0 and functions.pins:
            done = {
                "t": 0.0,
                "tid": failure.tid,
                "fn": functions.pins[0].name,
                "ret": failure.pinned,
                "caller": None,
                "args": {},
                "calls": before,
            }
            events.insert(0, done)
        events.append(
            {
                "t": round((failure.ns - begin) / 1e9, 6),
                "tid": failure.tid,
                "fn": failure.function,
                "ret": failure.ret,
                "caller": None,
            }
        )
        return {
            "status": "spoiled" if why_spoiled else "complete",
            "why": "; ".join(why_spoiled),
            "events": events,
            "tree": self._tree(events, failure),
            "missing": self._missing(),
            "probed": self._probed(),
            "probed_failures": self._probed_failures(),
            "misses": missed,
            "overrun": lost,
            "flags_source": self._flags.source,
        }

    def _tree(self, events: list[dict[str, Any]], failure: Failure) -> list[dict[str, Any]]:
        tree = trace_tree.build(events, failure.tid)
        if any(item["fn"] == failure.function for item in tree):
            return tree
        name = trace_tree.errno_name(failure.ret)
        root = {
            "depth": 0,
            "fn": failure.function,
            "ret": failure.ret,
            "errno": name,
            "failing": True,
            "text": f"{failure.function} = -{name}" if name else f"{failure.function} = {failure.ret}",
        }
        if not tree:
            root["deepest"] = True
        return [root, *({**item, "depth": item["depth"] + 1} for item in tree)]

    def _of_something_else(self, item: Inner) -> bool:
        """A migration that compaction made in this thread, on its search for free memory."""
        return item.function == "migrate_pages" and item.args.get("reason") not in (
            "longterm_pin",
            "contig_range",
        )

    def _event(self, item: Inner, begin: int, tid: int) -> dict[str, Any]:
        args = dict(item.args)
        if "gup_flags" in args and self._flags.values:
            args["flags"] = self._flags.decode(args["gup_flags"])
        return {
            "t": round((item.ns - begin) / 1e9, 6),
            "tid": tid,
            "fn": item.function,
            "ret": item.ret,
            "caller": None,
            **({"args": args} if args else {}),
        }

    def _probed(self) -> list[str]:
        pins = [item.name for item in self._functions.pins]
        return pins if self._functions.entries else []

    def _probed_failures(self) -> list[str]:
        functions = self._functions
        rest = [*functions.entries, *functions.drivers, *functions.inner]
        if functions.migrate is not None:
            rest.append(functions.migrate)
        return [item.name for item in rest]

    def _missing(self) -> list[dict[str, str]]:
        return [{"fn": name, "why": why} for name, why in self._functions.missing.items()]


def _large(pfns: NDArray[np.uint64]) -> list[bool]:
    """Return whether each page is one of a large folio, which alone has a count of its pins."""
    try:
        fd = os.open(KPAGEFLAGS, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return [False] * len(pfns)
    try:
        flags = read_entries_at(fd, pfns)
    except OSError:
        return [False] * len(pfns)
    finally:
        os.close(fd)
    return [bool(value) for value in flags & np.uint64(1 << KPF_COMPOUND_HEAD | 1 << KPF_COMPOUND_TAIL)]


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


def _of_process_vm(pin: PlainPin) -> bool:
    """Whether a pin is one of process_vm_readv or process_vm_writev, which hold theirs for one call at most
    (process_vm_rw_single_vec(), mm/process_vm_access.c).
    """
    return any(frame.startswith("process_vm_rw") for frame in pin.stack)


def _ended(pin: PlainPin) -> bool | None:
    """Whether a pin is held whose thread has made another since: False, or None where that is not known."""
    return False if _of_process_vm(pin) else None


def _is_held(pin: PlainPin) -> bool | None:
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


def _lists(state: PageState) -> list[list[Any]] | None:
    """Runs of what /proc/kpageflags says of pages in per-CPU batches: `[first, count, "lru active"]`."""
    if state.flags is None:
        return None
    mask = np.uint64(sum(1 << bit for bit in _LISTS))
    told = runs((state.flags & mask).astype(np.int64)).tolist()
    return [[i, n, " ".join(word for bit, word in _LISTS.items() if v >> bit & 1)] for i, n, v in told]


def modules_of(stack: Iterable[str], kallsyms: Path = Path("/proc/kallsyms")) -> list[str]:
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


def labels(name: str) -> dict[str, Any]:
    """Return what names the pass of a failure, `failure-1` or so."""
    return {"scenario": SCENARIO, "variant": "default", "control": None, "failure": name}


def record_events(
    evidence: Evidence, trace: dict[str, Any], name: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of one failure's pass: (type, keys)."""
    failure, seen = evidence.failure, evidence.process
    label = labels(name)
    yield (
        "scenario-begin",
        {
            **label,
            "file": "",
            "declared": _DECLARED,
            "contract": "none",
            "body": SCENARIO,
            "change": None,
            "pid": failure.pid,
            "watched": {
                **seen.facts,
                "pid": failure.pid,
                "tid": failure.tid,
                "comm": failure.comm,
                "uid": failure.uid if failure.uid is not None else seen.facts.get("uid"),
                "not_read": seen.problems,
                "memory": evidence.memory,
                "looked_after_seconds": round(evidence.seconds, 6),
            },
        },
    )
    buffer = None
    state = evidence.pages.as_record() if evidence.pages is not None else None
    if evidence.length and not failure.dmabuf:
        buffer = 1
        backing = process.backing_of(evidence.vma)
        yield (
            "buffer",
            {
                **label,
                "buffer": buffer,
                "address": evidence.first,
                "length": evidence.length,
                "page_size": PAGE_SIZE,
                "backing": backing,
                "owner": "host",
                "place": "any",
                "placed": "as-allocated",
                "vma": evidence.vma or None,
                "mappings": evidence.mappings[:16],
                "pages": state,
                **({"pages_unknown": evidence.pages_unknown} if evidence.pages_unknown else {}),
                "stand_in": None,
            },
        )
    after = evidence.again.as_record() if evidence.again is not None else None
    yield (
        "register",
        {
            **label,
            "registration": 1,
            "buffer": buffer,
            "verb": failure.shown_verb,
            "verb_how": "observed" if failure.verb else "inferred",
            "device": evidence.devices[0] if len(evidence.devices) == 1 else None,
            "devices_open": evidence.devices,
            "address": failure.address,
            "length": failure.length,
            "iova": failure.iova,
            "access": access_names(failure.access) if failure.access is not None else None,
            "errno": failure.errno or UNKNOWN_ERRNO,
            "errno_how": failure.errno_how,
            "lkey": None,
            "rkey": None,
            "seconds": 0.0,
            "before": state,
            "after": after,
            "after_seconds": round(evidence.again_after, 6) if evidence.again is not None else None,
            "pins": [],
            "trace": trace,
            "limits": seen.limits,
            **({"capabilities": seen.capabilities} if seen.capabilities is not None else {}),
            **({"pages_unknown": evidence.pages_unknown} if evidence.pages_unknown else {}),
            "stuck": evidence.stuck,
            "plain_pins": evidence.plain_pins,
            "library_silent": failure.user_missing,
            "stand_in": None,
        },
    )
    yield "scenario-end", {**label, "outcome": "finished", "seconds": round(evidence.seconds, 6)}
