"""Builds records by hand, event for event as docs/record.md has them, for tests.

`Builder` writes what a stage would; `reproduced_record` and its like are whole runs. Pages are lists of
PFNs; a place is that of the range a PFN lies in: below 1,000 unpinnable ("cma"), else ordinary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro.judge import judge_record

PAGE = 4096
ADDRESS = 0x7F0000000000
UNPINNABLE_BELOW = 1000
ACCESS = ["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ"]


@dataclass
class Record:
    """A record as `regrepro.record.read_record` gives it."""

    header: dict[str, Any]
    events: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)


def header(**node: Any) -> dict[str, Any]:
    """A header; keywords replace node facts."""
    return {
        "schema": "regrepro.record/2",
        "version": "0.1.0",
        "started": "2026-10-01T12:00:00.000+00:00",
        "run": {"profile": "default", "names": [], "cuda": "auto", "trace": "auto", "place": "gather"},
        "node": {
            "hostname": "guest",
            "kernel": "7.3.4+deb13-amd64",
            "kernel_version": "#1 SMP",
            "arch": "x86_64",
            "page_size": PAGE,
            "cmdline": "cma=512M",
            "cpus": 2,
            "memory_total": 2 << 30,
            "euid": 0,
            "capabilities": ["CAP_IPC_LOCK", "CAP_SYS_ADMIN"],
            "lockdown": "none",
            "vm": {},
            "nvidia_driver": None,
            "limits": {"memlock_soft": 8 << 20, "memlock_hard": 8 << 20},
            **node,
        },
        "lab": None,
        "stand_ins": [{"name": "rdma_rxe", "replaces": "an RDMA card", "what": "RDMA in software"}],
    }


def runs(values: Sequence[Any], step: int = 0) -> list[list[Any]]:
    """Run-length encode: `[first, value, count]` for PFNs (step 1), `[first, count, value]` else."""
    made: list[list[Any]] = []
    for index, value in enumerate(values):
        if (
            made
            and (made[-1][1] or not step)
            and value == (made[-1][1] + step * made[-1][2] if step else made[-1][1])
        ):
            made[-1][2] += 1
        else:
            made.append([index, value, 1])
    return made if step else [[first, count, value] for first, value, count in made]


def state(
    pfns: Sequence[int], refs: Sequence[int] | int = 1, maps: int | None = 1, **more: Any
) -> dict[str, Any]:
    """A page state. A PFN of 0 is an absent page."""
    refs = [refs] * len(pfns) if isinstance(refs, int) else list(refs)
    place = ["absent" if not pfn else "cma" if pfn < UNPINNABLE_BELOW else "ordinary" for pfn in pfns]
    return {
        "pages": len(pfns),
        "pfn": [run for run in runs(pfns, 1) if run[1]],
        "place": runs(place),
        "refcount": runs(refs),
        "pincount": None,
        "mapcount": None if maps is None else [[0, len(pfns), maps]],
        "node": [[0, len(pfns), 0]],
        "how": "observed",
        "source": "/proc/self/pagemap, pageblock bitmap by /proc/kcore",
        **more,
    }


def failing_trace(
    pages: int = 8, ret: int | None = None, reason: str = "longterm_pin", moved: int = 0
) -> dict[str, Any]:
    """The trace of a registration of which `pages` would not move, and others did; `ret` is what
    migrate_pages returned.
    """
    returned = pages if ret is None else ret
    path = [
        ("rxe_reg_user_mr", -12),
        ("__ib_umem_get_va", -12),
        ("pin_user_pages_fast", -12),
        ("__gup_longterm_locked", -12),
        ("migrate_pages", returned),
    ]
    events = migration(moved, pages, returned, reason)
    events += [
        {"t": 0.3 + n / 10, "fn": fn, "ret": value, "caller": "", "args": {}}
        for n, (fn, value) in enumerate(reversed(path[:-1]))
    ]
    tree = [
        {
            "depth": n,
            "fn": fn,
            "ret": value,
            "errno": "ENOMEM" if value == -12 else None,
            "failing": True,
            "text": "",
        }
        for n, (fn, value) in enumerate(path)
    ]
    return trace(events=events, tree=tree)


def succeeding_trace(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any]:
    """The trace of a registration that succeeded: the pages that have another frame afterwards migrated."""
    pages, moved = (before or after or {"pages": 8})["pages"], 0
    if before and after:
        one, other = (
            {first + n: pfn + n for first, pfn, count in item["pfn"] for n in range(count)}
            for item in (before, after)
        )
        moved = sum(1 for page, pfn in one.items() if other.get(page, pfn) != pfn)
    made = returns(("pin_user_pages_fast", pages), ("__ib_umem_get_va", 1), ("rxe_reg_user_mr", 1))
    if moved:
        made["events"][:0] = migration(moved, 0, 0)
    return made


def _trace_of(errno: str | None, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Any:
    """Of ENOMEM that of pages that would not move; of another errno one in which no function was reached."""
    if errno == "ENOMEM":
        return failing_trace((before or after or {"pages": 8})["pages"])
    return trace() if errno else succeeding_trace(before, after)


def migration(
    succeeded: int, failed: int, returned: int | None, reason: str = "longterm_pin"
) -> list[dict[str, Any]]:
    """The two events of one call of migrate_pages."""
    fields = {"nr_succeeded": succeeded, "nr_failed": failed, "mode": "MIGRATE_SYNC", "reason": reason}
    caller = "migrate_longterm_unpinnable_folios"
    return [
        {"t": 0.1, "tracepoint": "mm_migrate_pages", "fields": fields},
        {"t": 0.2, "fn": "migrate_pages", "ret": returned, "caller": caller, "args": {}},
    ]


def trace(**keys: Any) -> dict[str, Any]:
    """A complete trace; keywords replace what is in it."""
    return {
        "status": "complete",
        "why": "",
        "events": [],
        "tree": [],
        "missing": [],
        "misses": 0,
        "overrun": 0,
        **keys,
    }


def returns(*pairs: tuple[str, int]) -> dict[str, Any]:
    """A complete trace of these function returns, in time order."""
    return trace(events=[{"t": 0.0, "fn": fn, "ret": ret, "caller": "", "args": {}} for fn, ret in pairs])


class Builder:
    """Appends events of one run; `begin` and `end` bracket a pass."""

    def __init__(self, **node: Any) -> None:
        self.header = header(**node)
        self.events: list[dict[str, Any]] = []
        self._labels: dict[str, Any] = {}

    def event(self, event: str, **keys: Any) -> dict[str, Any]:
        """Append an event, with the labels of the pass that is open."""
        seq = len(self.events) + 1
        made = {"seq": seq, "t": seq / 100, "event": event, **self._labels, **keys}
        self.events.append(made)
        return made

    def memory_map(self, complete: bool = True, has_unpinnable: bool | None = True) -> None:
        """Append the memory map."""
        zone = {"node": 0, "zone": "DMA32", "start_pfn": 0, "spanned": 9999, "present": 9999, "managed": 9999}
        self.event(
            "memory-map",
            page_size=PAGE,
            pageblock_order=9,
            complete=complete,
            has_unpinnable=has_unpinnable,
            zones=[{**zone, "blocks": {"Movable": 10, "CMA": 2 if has_unpinnable else 0}}],
            cma_areas=[],
            unpinnable_ranges=[[1, 2 * UNPINNABLE_BELOW, "cma"]] if has_unpinnable else [],
            selfcheck={"passed": True, "differences": []},
            sources=["/proc/kcore", "/proc/pagetypeinfo"],
            problems=[],
        )

    def map_check(self, **keys: Any) -> None:
        """Append the look at the memory map when the pass has ended: nothing changed, there is none."""
        held = {"complete": True, "has_unpinnable": False, "changed": False, "block_events": 0}
        self.event("memory-map-check", **held | {"sources": ["/proc/zoneinfo"], "problems": []} | keys)

    def begin(
        self,
        scenario: str = "pin_then_register",
        control: str | None = None,
        *,
        contract: str = "pin",
        expects: dict[str, Any] | None = None,
        controls: dict[str, str] | None = None,
        needs: Iterable[str] = ("root", "unpinnable", "registrar"),
    ) -> None:
        """Open a pass."""
        self._labels = {"scenario": scenario, "variant": "default", "control": control}
        changes = (
            {"no-pin": "pin=none", "ordinary-memory": "place=ordinary"} if controls is None else controls
        )
        declared = {
            "shows": "sections 9 to 13",
            "needs": list(needs),
            "expects": expects or {"pin": "reproduced", "longterm": "not-reproduced"},
            "controls": changes,
            "profiles": ["default"],
            "timeout": 60,
        }
        self.event(
            "scenario-begin",
            file="pin_then_register.py",
            declared=declared,
            contract=contract,
            change=changes.get(control or ""),
            pid=100,
        )

    def buffer(self, pages: dict[str, Any] | None, number: int = 1, **keys: Any) -> None:
        """Append a buffer of as many pages as its state has (8 without one)."""
        length = (pages["pages"] if pages else 8) * PAGE
        sharing = "s" if keys.get("backing") in ("memfd", "shm", "file") else "p"
        self.event(
            "buffer",
            **{
                "buffer": number,
                "address": ADDRESS,
                "length": length,
                "page_size": PAGE,
                "backing": "anonymous",
                "owner": "host",
                "place": "unpinnable",
                "placed": "gather",
                "vma": f"{ADDRESS:x}-{ADDRESS + length:x} rw-{sharing} 00000000 00:00 0 ",
                "pages": pages,
                "stand_in": None,
                **keys,
            },
        )

    def pin(self, before: Any, after: Any, number: int = 1, **keys: Any) -> None:
        """Append a pin of the whole buffer."""
        pages = (before or after or {"pages": 8})["pages"]
        self.event(
            "pin",
            **{
                "pin": number,
                "buffer": 1,
                "kind": "pin",
                "owner": "process-vm",
                "offset": 0,
                "length": pages * PAGE,
                "errno": None,
                "before": before,
                "after": after,
                "trace": None,
                "stand_in": None,
                "api": "process_vm_writev+userfaultfd",
                **keys,
            },
        )

    def register(
        self,
        before: Any,
        after: Any,
        number: int = 1,
        errno: str | None = None,
        *,
        pins: Iterable[int] = (),
        **keys: Any,
    ) -> None:
        """Append a registration of the whole buffer, with living pins."""
        pages = (before or after or {"pages": 8})["pages"]
        self.event(
            "register",
            **{
                "registration": number,
                "buffer": 1,
                "verb": "ibv_reg_mr_iova2",
                "device": "rxe0",
                "address": ADDRESS,
                "length": pages * PAGE,
                "iova": ADDRESS,
                "access": list(ACCESS),
                "errno": errno,
                "lkey": None if errno else 1,
                "rkey": None if errno else 1,
                "seconds": 0.001,
                "before": before,
                "after": after,
                "pins": [{"pin": pin, "alive_before": True, "alive_after": True} for pin in pins],
                "trace": _trace_of(errno, before, after),
                "stand_in": "rdma_rxe",
                **keys,
            },
        )

    def release(self, after: Any, pin: int = 1, **keys: Any) -> None:
        """Append the release of a pin."""
        sums = {"checksum_before": 7, "checksum_after": 7}
        self.event(
            "release", **{"pin": pin, "errno": None, "was_alive": True, "after": after, **sums, **keys}
        )

    def end(self, outcome: str = "finished", **keys: Any) -> None:
        """Close the pass."""
        self.event("scenario-end", outcome=outcome, seconds=1.0, **keys)
        self._labels = {}

    def done(self, outcome: str = "finished") -> Record:
        """End the run and return the record."""
        self._labels = {}
        self.event("run-end", outcome=outcome)
        return self.record()

    def record(self) -> Record:
        """Return the record as it is, perhaps without its end. A copy: the builder's parts may be shared."""
        return Record(copy.deepcopy(self.header), copy.deepcopy(self.events))


CMA = list(range(100, 108))
OUT = list(range(5000, 5008))


def no_pin_control(builder: Builder, scenario: str = "pin_then_register", pages: int = 8) -> None:
    """The control pin=none: the pages are unpinnable, nobody holds them, they move out."""
    cma, out = list(range(200, 200 + pages)), list(range(6000, 6000 + pages))
    builder.begin(scenario, "no-pin", contract="none")
    builder.buffer(state(cma))
    builder.pin(state(cma), state(cma), kind="none", owner="none", api=None)
    builder.register(state(cma), state(out, 1025))
    builder.end()


def ordinary_control(builder: Builder, scenario: str = "pin_then_register", pages: int = 8) -> None:
    """The control place=ordinary: pinned, but nothing has to move."""
    own = list(range(7000, 7000 + pages))
    builder.begin(scenario, "ordinary-memory")
    builder.buffer(state(own), place="ordinary")
    builder.pin(state(own), state(own, 1025))
    builder.register(state(own, 1025), state(own, 2049), pins=[1])
    builder.release(state(own, 1025))
    builder.end()


def failing_pass(
    builder: Builder,
    scenario: str = "pin_then_register",
    *,
    kind: str = "pin",
    owner: str = "process-vm",
    again: bool = True,
    **register: Any,
) -> None:
    """The scenario itself: pinned in CMA, ENOMEM; released, the same call succeeds and the pages move."""
    held = 1025 if kind == "pin" else 2
    builder.begin(scenario, contract=kind, expects={"pin": "reproduced", "get": "reproduced"})
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(CMA, held), kind=kind, owner=owner)
    builder.register(state(CMA, held), state(CMA, held), errno="ENOMEM", pins=[1], **register)
    builder.release(state(CMA))
    if again:
        builder.register(state(CMA), state(OUT, 1025), 2)
        builder.event("deregister", registration=2, errno=None)
    builder.event("free", buffer=1)
    builder.end()


def reproduced_record(**node: Any) -> Record:
    """A perfect run of pin_then_register with both controls, on a node with CMA."""
    builder = Builder(**node)
    builder.memory_map()
    failing_pass(builder)
    no_pin_control(builder)
    ordinary_control(builder)
    return builder.done()


def get_record() -> Record:
    """The same with a FOLL_GET reference."""
    builder = Builder()
    builder.memory_map()
    failing_pass(builder, kind="get", owner="vmsplice")
    no_pin_control(builder)
    ordinary_control(builder)
    return builder.done()


def partly_pinned_record() -> Record:
    """Eight unpinnable pages, the fourth pinned: seven move out, one stays."""
    builder = Builder()
    builder.memory_map()
    refs = [1, 1, 1, 1025, 1, 1, 1, 1]
    mixed = [*OUT[:3], CMA[3], *OUT[4:]]
    builder.begin()
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(CMA, refs), ranges=[[3 * PAGE, PAGE]])
    builder.register(
        state(CMA, refs), state(mixed, refs), errno="ENOMEM", pins=[1], trace=failing_trace(1, moved=7)
    )
    builder.release(state(mixed))
    builder.register(state(mixed), state(OUT, 1025), 2)
    builder.end()
    no_pin_control(builder)
    ordinary_control(builder)
    return builder.done()


def kernel_record() -> Record:
    """5.10: pinned in place, and registered all the same."""
    builder = Builder(kernel="5.10.0-46-amd64")
    builder.memory_map()
    builder.begin()
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(CMA, 1025))
    builder.register(state(CMA, 1025), state(CMA, 2049), pins=[1])
    builder.release(state(CMA, 1025))
    builder.end()
    ordinary_control(builder)
    return builder.done()


def longterm_record() -> Record:
    """The fixed driver's contract: the pin moves the pages out, the registration finds them ordinary."""
    builder = Builder()
    builder.memory_map()
    controls = {"pin-without-longterm": "pin=pin"}
    builder.begin("longterm_pin_then_register", contract="longterm", controls=controls)
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(OUT, 1025), kind="longterm", owner="io-uring", api="io_uring_register")
    builder.register(state(OUT, 1025), state(OUT, 2049), pins=[1])
    builder.release(state(OUT, 1025))
    builder.end()
    builder.begin("longterm_pin_then_register", "pin-without-longterm", controls=controls)
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(CMA, 1025))
    builder.register(state(CMA, 1025), state(CMA, 1025), errno="ENOMEM", pins=[1])
    builder.release(state(CMA))
    builder.end()
    return builder.done()


def placement_record() -> Record:
    """hugetlb_cma=0: no unpinnable memory at all."""
    builder = Builder(cmdline="hugetlb_cma=0")
    builder.memory_map(has_unpinnable=False)
    builder.begin()
    builder.buffer(state(OUT), placed="none-on-node")
    builder.pin(state(OUT), state(OUT, 1025))
    builder.register(state(OUT, 1025), state(OUT, 2049), pins=[1])
    builder.release(state(OUT, 1025))
    builder.end()
    return builder.done()


def map_checked_record() -> Record:
    """As `placement_record`, with the second look at the map, and a refusal that says what was mapped."""
    builder = Builder()
    builder.memory_map(has_unpinnable=False)
    builder.begin(contract="none")
    builder.buffer(state(OUT), placed="none-on-node")
    line = "7f0000000000-7f0000008000 rw-p 00000000 00:00 0"
    builder.register(state(OUT), state(OUT), errno="EFAULT", mappings=[line, line])
    builder.map_check()
    builder.end()
    return builder.done()


def no_pin_record() -> Record:
    """The scenario no_pin: nothing in the way."""
    builder = Builder()
    builder.memory_map()
    builder.begin(
        "no_pin", contract="none", expects={"none": "not-reproduced"}, controls={"with-pin": "pin=pin"}
    )
    builder.buffer(state(CMA))
    builder.register(state(CMA), state(OUT, 1025))
    builder.end()
    builder.begin("no_pin", "with-pin", expects={"none": "not-reproduced"}, controls={"with-pin": "pin=pin"})
    builder.buffer(state(CMA))
    builder.pin(state(CMA), state(CMA, 1025))
    builder.register(state(CMA, 1025), state(CMA, 1025), errno="ENOMEM", pins=[1])
    builder.release(state(CMA))
    builder.end()
    return builder.done()


def find(record: Record, event: str, number: int = 0, control: str | None = None) -> dict[str, Any]:
    """Return the n-th event of a type in a pass."""
    return [item for item in record.events if item["event"] == event and item.get("control") == control][
        number
    ]


def write(directory: Path, record: Record, *, verdicts: bool = True) -> Path:
    """Write a run directory as `run` does."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [record.header, *record.events]
    (directory / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if verdicts:
        (directory / "verdicts.json").write_text(json.dumps(judge_record(record)))
    return directory
