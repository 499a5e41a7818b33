"""What stands for the kernel, its engine and a node's processes in the tests of `watch`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

import regrepro
from regrepro.judge import judge_record
from regrepro.kernel.pagestate import PageState
from regrepro.kernel.trace_flags import FlagNames
from regrepro.kernel_functions import Returns
from regrepro.record import Record
from regrepro.watch.correlate import Correlator
from regrepro.watch.evidence import LOOKS, Evidence, record_events
from regrepro.watch.failed_registration import (
    Asked,
    Ended,
    FailedRegistration,
    Inner,
    LibraryWord,
    ShortTermPin,
    StuckPage,
)
from regrepro.watch.failure_trace import trace_of
from regrepro.watch.functions import Function, Functions
from regrepro.watch.happenings import Happening, Notice
from regrepro.watch.later_looks import CaughtFailure
from regrepro.watch.observe import Observer
from regrepro.watch.process import Process
from regrepro.watch.short_term_pins import ShortTermPins

ADDRESS, LENGTH = 0x7F0000000000, 32768
HANDLER, DMABUF_HANDLER = "ib_uverbs_reg_mr", "ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR"
DRIVER, GUP, PIN = "rxe_reg_user_mr", "__gup_longterm_locked", "pin_user_pages_fast"
FUNCTIONS = Functions(
    entries=[Function(name, "ib_uverbs") for name in (HANDLER, DMABUF_HANDLER)],
    drivers=[Function(DRIVER, "rdma_rxe", Returns.POINTER)],
    pins=[Function(name, "") for name in (PIN, "pin_user_pages")],
    inner=[Function(GUP, "", Returns.LONG)],
    open=Function("ib_uverbs_open", "ib_uverbs"),
    migrate=Function("migrate_pages", ""),
    reasons={9: "longterm_pin"},
)
FLAGS = FlagNames({"FOLL_WRITE": 1, "FOLL_LONGTERM": 256}, "a test")
SCHEMAS = Path(regrepro.__file__).parent / "schema"
SCHEMA = json.loads((SCHEMAS / "record-2.json").read_text())
VERDICTS = json.loads((SCHEMAS / "verdicts-1.json").read_text())
HEADER: dict[str, Any] = {
    "version": "0",
    "started": "2026-11-30T00:00:00+00:00",
    "run": {"profile": "watch", "names": [], "cuda": "auto", "trace": "on", "place": "as-allocated"},
    "node": {
        "hostname": "h",
        "kernel": "7.3.4",
        "kernel_version": "v",
        "arch": "x86_64",
        "page_size": 4096,
        "cmdline": "",
        "cpus": 1,
        "memory_total": 1,
        "euid": 0,
        "capabilities": [],
        "lockdown": None,
        "vm": {},
        "nvidia_driver": None,
        "limits": {"memlock_soft": None, "memlock_hard": None},
    },
    "lab": None,
    "stand_ins": [],
}
MEMORY_MAP: dict[str, Any] = {
    "page_size": 4096,
    "pageblock_order": 9,
    "complete": True,
    "has_unpinnable": True,
    "zones": [],
    "cma_areas": [],
    "unpinnable_ranges": [],
    "selfcheck": None,
    "sources": [],
    "problems": [],
}


READABLE = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

# What the engine tells


def ended(ret: int = -12, tid: int = 7, *, since: int = 90, ns: int = 140, **more: Any) -> Ended:
    """The end of a request of process 6 that failed."""
    return Ended(
        tid, 6, **{"comm": "python3", "function": HANDLER, "uid": 0, **more}, ns=ns, since=since, ret=ret
    )


def asked(ns: int = 139, start: int = ADDRESS, length: int = LENGTH, iova: int = ADDRESS) -> Asked:
    """What a request asked for that has a struct ib_uverbs_reg_mr."""
    return Asked(ns, start, length, iova, 7, None, None)


def word(ns: int = 150, tid: int = 7, verb: str = "ibv_reg_mr_iova2", **given: int) -> LibraryWord:
    """libibverbs gave NULL to process 6."""
    return LibraryWord(
        tid, 6, ns, verb, given or {"address": ADDRESS, "length": LENGTH, "iova": ADDRESS, "access": 7}
    )


def pinned_part(ret: int, start: int = ADDRESS, pages: int = 8, ns: int = 120) -> Inner:
    """A call of get_user_pages that failed."""
    return Inner(ns, PIN, ret, {"start": start, "nr_pages": pages, "gup_flags": 0x101})


def hold_pin(correlator: Correlator, tid: int = 7, stayed: int = 8) -> None:
    """Tell of a registration that failed since a page did not move."""
    correlator.migration_failed(tid, 100, stayed, 9)
    correlator.page_stayed(tid, StuckPage(0xFFFFEA0000000040, 1026, 0, 0, 0x17))
    for inner in (Inner(110, GUP, -12), pinned_part(-12), Inner(130, DRIVER, -12)):
        correlator.failed_inside(tid, inner)
    correlator.asked(tid, asked())
    correlator.request_failed(ended(tid=tid, pin_calls=1))


def fail_inside_driver(correlator: Correlator, ret: int, **more: Any) -> None:
    """Tell of a registration that failed within ib_umem_get."""
    correlator.failed_inside(7, Inner(130, DRIVER, ret))
    correlator.asked(7, asked())
    correlator.request_failed(ended(ret, **more))


class Seen:
    """What a correlator hands out. `library_speaks`: the library's word is waited for."""

    def __init__(self, *, library_speaks: bool = False) -> None:
        self.at_once: list[FailedRegistration] = []
        self.complete: list[FailedRegistration] = []
        self.time = 0.0
        self.correlator = Correlator(
            self.at_once.append, self.complete.append, reasons=FUNCTIONS.reasons, now=lambda: self.time
        )
        self.correlator.library_speaks = library_speaks


def held_failure(stayed: int = 8) -> FailedRegistration:
    """The failure of `hold_pin`, with the library's word."""
    seen = Seen(library_speaks=True)
    hold_pin(seen.correlator, stayed=stayed)
    seen.correlator.library_failed(word())
    return seen.complete[0]


class FakeEngine:
    """In the place of an engine: each turn runs the next part of a script."""

    def __init__(self, correlator: Correlator, script: Sequence[Callable[[Any], None]] = ()) -> None:
        self.correlator = correlator
        self.script = list(script)
        self.lost = 0
        self.hits: int | None = 0
        self.ended = False
        self.waits = False
        self.started = -1000.0
        self.stopped = 0
        self.probes = 3
        self.by_kprobe: list[str] = []
        self.followed: list[tuple[int, int]] = []
        self.forgotten: list[tuple[int, int]] = []

    @property
    def follows_libraries(self) -> bool:
        return bool(self.followed)

    def follows(self, copy: Any) -> bool:
        return copy.key in self.followed

    def follow(self, copies: Iterable[Any]) -> list[tuple[Any, OSError]]:
        self.followed += [copy.key for copy in copies]
        return []

    def forget(self, keys: Sequence[tuple[int, int]]) -> None:
        self.forgotten += keys

    def fds(self) -> list[int]:
        return [READABLE] if self.script else []

    def missed(self) -> int | None:
        return self.hits

    def why(self) -> str:
        return "it ended"

    def take(self, _until: int) -> bool:
        if self.script:
            self.script.pop(0)(self)
        return not self.script

    def stop(self) -> None:
        self.stopped += 1


class CollectingSink:
    """Keeps all that happens."""

    def __init__(self, *_: object) -> None:
        self.all: list[Happening] = []

    def take(self, happening: Happening) -> None:
        self.all.append(happening)

    @property
    def said(self) -> list[str]:
        return [item.sentence for item in self.all if isinstance(item, Notice) and item.sentence]

    @property
    def told(self) -> list[tuple[str, dict[str, Any]]]:
        return [(item.what, dict(item.keys)) for item in self.all if isinstance(item, Notice) and item.what]


# What is seen of processes and pages


def observer() -> Observer:
    """One that looks at nothing."""
    made = Observer.__new__(Observer)
    made.pins = ShortTermPins(FLAGS, lambda _page: None)
    made._met = {}
    return made


class Node:
    """In the place of Observer: its process is this one, its pages are made up."""

    def __init__(self, *_: object) -> None:
        self.memory_map = self
        self.pins = ShortTermPins(FLAGS, lambda _page: None)
        self.met: list[int] = []
        self.meet = self.met.append

    def as_record(self) -> dict[str, Any]:
        return MEMORY_MAP

    def refresh_if_old(self) -> None: ...

    def complete(self, evidence: Evidence) -> None: ...

    def look(self, failure: FailedRegistration) -> Evidence:
        stuck = [
            {"pfn": 4096, "place": "cma", "refcount": page.refcount, "mapcount": 1} for page in failure.stuck
        ]
        return Evidence(failure, Process(failure.pid, {"rank": {"RANK": "5"}}), stuck=stuck)

    def look_again(self, evidence: Evidence) -> None: ...

    def look_at_frames(self, _evidence: Evidence) -> dict[str, Any]:
        return later(1.0)


def state(place: str, refcount: int) -> dict[str, Any]:
    return {
        "pages": 8,
        "pfn": [[0, 4096, 8]],
        "place": [[0, 8, place]],
        "refcount": [[0, 8, refcount]],
        "mapcount": [[0, 8, 1]],
        "pincount": None,
        "baseline": [[0, 8, 1]],
        "node": [[0, 8, 0]],
        "how": "observed",
        "source": "a test",
    }


class Pages:
    """In the place of a PageState."""

    def __init__(self, place: str, refcount: int) -> None:
        self.state = state(place, refcount)
        self.pages = 8

    def as_record(self) -> dict[str, Any]:
        return self.state


def at_start(pid: int, start: int, limit: int) -> Process:
    return Process(pid, {"pid": pid, "starttime": start, "comm": f"of {start}"}, {"memlock_soft": limit})


# Failures in the record, judged


def judged(
    failure: FailedRegistration,
    lost: int = 0,
    looks: Sequence[dict[str, Any]] = (),
    checked: bool = True,
    **seen: Any,
) -> dict[str, Any]:
    """Write a failure's pass and later looks, hold them to the schema, and judge it."""
    process = Process(failure.pid, limits=seen.pop("limits", {}), capabilities=seen.pop("capabilities", []))
    found = Evidence(failure, process, **seen)
    record = [{"schema": "regrepro.record/2", **HEADER}]
    for kind, keys in record_events(found, trace_of(failure, FUNCTIONS, FLAGS, lost), "failure-1"):
        record.append({"seq": len(record), "t": 0.0, "event": kind, **keys})
    item = CaughtFailure(failure, found, {}, "failure-1")
    for seen_later in looks:
        kind, keys = item.event(seen_later)
        record.append({"seq": len(record), "t": 0.0, "event": kind, **keys})
    record.append({"seq": len(record), "t": 0.0, "event": "run-end", "outcome": "finished"})
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for entry in record if checked else []:
        problems = [error.message for error in validator.iter_errors(entry)]
        assert not problems, (entry.get("event"), problems)
    verdicts = judge_record(Record(record[0], record[1:]))
    jsonschema.Draft202012Validator(VERDICTS).validate(verdicts)
    assert verdicts["complete"] and (not verdicts["problems"] or not checked)
    return dict(verdicts["verdicts"][0])


def later(after: float, refcount: int = 1025, words: str = "lru", **change: Any) -> dict[str, Any]:
    """A later look at the eight pages."""
    return {
        "after_seconds": after,
        "address": ADDRESS,
        "length": LENGTH,
        "pages": {**state("cma", refcount), **change},
        "lists": [[0, 8, words]],
        "ended": "",
    }


def lasting(refcount: int = 1025, words: str = "lru", **change: Any) -> list[dict[str, Any]]:
    """All later looks, each with the same references."""
    return [later(after, refcount, words, **change) for after in LOOKS]


def held(refcount: int = 1026, place: str = "cma", **seen: Any) -> dict[str, Any]:
    """The verdict of a failure by a held pin, all of which was seen, but for what is given."""
    keys: dict[str, Any] = {
        "first": ADDRESS,
        "length": LENGTH,
        "vma": "7f0000000000-7f0000008000 rw-p 00000000 00:00 0 ",
        "pages": Pages(place, refcount - 1),
        "again": Pages(place, refcount - 1),
        "again_after": 0.25,
        "stuck": [{"pfn": 4096, "place": place, "refcount": refcount, "mapcount": 1}],
        "looks": lasting(refcount - 1),
    }
    return judged(held_failure(), **{**keys, **seen})


def page_state(pages: int = 8) -> PageState:
    """The state of pages of which nothing is known."""
    return PageState(0, *(np.zeros(pages, dtype=kind) for kind in (np.uint64, np.uint8, np.uint8)))


def waiting(since: float = 0.0, pages: int = 8) -> CaughtFailure:
    """A failure with frames to be looked at again."""
    seen = Evidence(FailedRegistration(6, 6, "app", 1, since=since), Process(6))
    seen.pages = page_state(pages)
    return CaughtFailure(seen.failure, seen, {}, "failure-1")


def short_term(ns: int, tid: int = 7, **change: Any) -> ShortTermPin:
    """A pin of process_vm_readv by process 6."""
    keys: dict[str, Any] = {"start": ADDRESS, "pages": 8, "flags": 1, "stack": ["process_vm_rw_core+1"]}
    return ShortTermPin(ns, tid, 6, "pin_user_pages_remote", **{**keys, **change})
