"""A look at the process and the pages of a failure, at its moment and later."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro.core.pages import read_entries_at, runs
from regrepro.kernel.memorymap import PLACE_NAMES, MemoryMap, read_memory_map
from regrepro.kernel.pagestate import KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, PageReader, PageState
from regrepro.kernel.procfs import start_time
from regrepro.kernel.trace_flags import FlagNames
from regrepro.watch import open_devices, process
from regrepro.watch.evidence import Evidence, failed_call
from regrepro.watch.failed_registration import FailedRegistration, StuckPage
from regrepro.watch.process import Process
from regrepro.watch.short_term_pins import ShortTermPins

# A longer range is looked at where the pin failed: the kernel pins it in parts (docs/verdicts.md).
LOOK_LIMIT = 256 << 20
MAP_SECONDS = 600.0  # after which a memory map is read anew while nothing else is to be done
LASTING_SECONDS = 0.25  # after which the references of pages that stayed are looked at once more
# Bits of /proc/kpageflags that tell whether a per-CPU batch may refer to a page (docs/record.md, `look`).
_LISTS = {5: "lru", 6: "active", 33: "mlocked"}
_CHANGED_KEPT = 16  # of pins that came or went between looks
KPAGEFLAGS = Path("/proc/kpageflags")
_MET_KEPT = 4096


class Observer:
    """Looks at processes and pages. Keeps the memory map, and what processes were at their first opening."""

    def __init__(self, flags: FlagNames) -> None:
        self.memory_map: MemoryMap = read_memory_map()
        self._read_at = time.monotonic()
        self.pins = ShortTermPins(flags, self._pfn_of)
        self._met: dict[int, Process] = {}

    def meet(self, pid: int) -> None:
        """Keep what a process that opens an RDMA device is, for the case that it dies with its failure."""
        if len(self._met) > _MET_KEPT:
            for other in [other for other in self._met if not (process.PROC / str(other)).exists()]:
                del self._met[other]
        self._met[pid] = process.read_process(pid)

    def _of_process(self, failure: FailedRegistration) -> Process:
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
        nothing: tuple[Any, ...] = (None, "", {})  # as a zombie's command line and environment are
        older = [
            name
            for name, value in before.facts.items()
            if seen.facts.get(name) in nothing and value not in nothing
        ]
        seen.facts.update({name: before.facts[name] for name in older})
        if older:
            seen.facts["of_opening"] = sorted(older)

    def look(self, failure: FailedRegistration) -> Evidence:
        """Look at the process of a failure now: first its pages, then the rest."""
        begin = time.monotonic()
        evidence = Evidence(failure, Process(failure.pid))
        evidence.first, evidence.length = self._range(failure)
        if evidence.length and not failure.dmabuf:
            self._look_at_pages(evidence)
        evidence.pins = list(self.pins.on(failure, evidence.first, evidence.length))
        evidence.process = self._of_process(failure)
        evidence.devices = open_devices.device_names(open_devices.devices_of(failure.pid))
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
            for pin, now in self.pins.on(failure, address, length)
            if (now is False and id(pin) in held) or (now is not False and pin.ns > failure.ns)
        ]
        return [self.pins.as_record(pin, now, failure) for pin, now in changed[-_CHANGED_KEPT:]]

    def _snapshot(self, pid: int, first: int, length: int) -> PageState:
        """Read the pages of a process, and where they lie at this moment. Raises OSError."""
        reader = PageReader(self.memory_map, pid)
        try:
            state = reader.snapshot(first, length)
        finally:
            reader.close()
        state.place = self.memory_map.places_now(state.pfn)
        return state

    def _range(self, failure: FailedRegistration) -> tuple[int, int]:
        """Return address and length to look at: what the request asked for, or where that is not known, as
        the module has no types, what it could not pin.
        """
        if failure.address is None:
            return failed_call(failure) or (0, 0)
        if not failure.length or failure.length < 0:
            return 0, 0
        if failure.address + failure.length >= 1 << 64:
            return 0, 0
        if failure.length <= LOOK_LIMIT:
            return failure.address, failure.length
        return failed_call(failure) or (failure.address, LOOK_LIMIT)

    def _look_at_pages(self, evidence: Evidence) -> None:
        failure = evidence.failure
        try:
            state = self._snapshot(failure.pid, evidence.first, evidence.length)
        except OSError as error:
            evidence.pages_unknown = f"the pages could not be read: {error.strerror}"
            return
        finally:
            problems: list[str] = []
            maps = process.read_text(process.PROC / str(failure.pid) / "maps", problems, process.MAPS_LIMIT)
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
        evidence.plain_pins = [
            self.pins.as_record(pin, held, evidence.failure) for pin, held in evidence.pins
        ]
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


def _lists(state: PageState) -> list[list[Any]] | None:
    """Runs of what /proc/kpageflags says of pages in per-CPU batches: `[first, count, "lru active"]`."""
    if state.flags is None:
        return None
    mask = np.uint64(sum(1 << bit for bit in _LISTS))
    told = runs((state.flags & mask).astype(np.int64)).tolist()
    return [[i, n, " ".join(word for bit, word in _LISTS.items() if v >> bit & 1)] for i, n, v in told]
