"""What was seen around a failure, and how it stands in the record (docs/record.md): each has a pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from regrepro.core.verbs import access_names
from regrepro.kernel.pagestate import PageState
from regrepro.watch import process
from regrepro.watch.failed_registration import FailedRegistration, ShortTermPin
from regrepro.watch.process import Process

PAGE_SIZE: int = os.sysconf("SC_PAGE_SIZE")
SCENARIO = "watch"
UNKNOWN_ERRNO = "EUNKNOWN"
LOOKS = (1.0, 3.0, 10.0, 31.0)
"""Seconds after a failure at which the frames that were left behind are looked at again. The last is longer
than a request of a block device is given (30 s: `nvme_io_timeout`, drivers/nvme/host/core.c; `SD_TIMEOUT`,
drivers/scsi/sd.h).
"""
# Pages of one call of get_user_pages for an MR: as many as a page holds pointers (__ib_umem_get_va(),
# drivers/infiniband/core/umem.c).
LOOK_PAGES = PAGE_SIZE // 8
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

    failure: FailedRegistration
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
    pins: list[tuple[ShortTermPin, bool | None]] = field(default_factory=list)  # and whether they were held
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
        call = failed_call(self.failure)
        if call is not None:
            first, end = max(first, call[0]), min(end, call[0] + call[1])
        first = first // PAGE_SIZE * PAGE_SIZE
        return (first, end - first) if first < end <= first + LOOK_PAGES * PAGE_SIZE else None


def failed_call(failure: FailedRegistration) -> tuple[int, int] | None:
    """Address and length of the get_user_pages call that failed, None where it was not seen."""
    part = next((item for item in reversed(failure.inner) if "nr_pages" in item.args), None)
    return (part.args["start"], max(part.args["nr_pages"], 1) * PAGE_SIZE) if part is not None else None


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
            "stand_in": None,
        },
    )
    yield "scenario-end", {**label, "outcome": "finished", "seconds": round(evidence.seconds, 6)}
