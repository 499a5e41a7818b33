"""Each rule of docs/verdicts.md without its evidence, and with its evidence turned round: never decided.

`consistency` names what two sources contradict each other in, a rule's own name what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import record_builder as build
from record_builder import ADDRESS, CMA, OUT, Record, find, state

from regrepro.judge import exit_code, judge_record
from unit.judge.turned import (
    CONTRADICTED,
    GOOD,
    HALF,
    ODP,
    OTHERS_PIN,
    PROBED,
    Edit,
    asked,
    backwards,
    both,
    by_get,
    by_kernel,
    by_pin,
    by_placement,
    counts,
    drop,
    event,
    misplaced,
    moved_out,
    one_of_eight,
    own_code,
    pages,
    repeat,
    reproduced,
    returned,
    shuffled,
    succeeded_first,
    swapped,
    trace,
    tracepoint,
    verdict,
    without_events,
    without_pass,
)


@pytest.mark.parametrize("make", GOOD, ids=lambda make: make.__name__)
def test_the_good_records_are_decided(make: Callable[[], Record]) -> None:
    item = verdict(make())
    assert (item["verdict"], item["basis"]) == GOOD[make], item["reason"]
    assert {"name": "consistency", "state": "ok"}.items() <= item["checks"][-1].items()


# what is wrong: (the good record, what is edited, the check that names it: else a contradiction)
TABLE: dict[str, tuple[Callable[[], Record], Edit] | tuple[Callable[[], Record], Edit, str]] = {
    # errno
    "errno: removed": (reproduced, lambda r: find(r, "register").pop("errno"), "record"),
    "errno: null": (reproduced, event("register", errno=None)),
    "errno: null, with keys": (reproduced, event("register", errno=None, lkey=1, rkey=1)),
    "errno: another": (reproduced, event("register", errno="EINVAL")),
    "errno: a refusal of rights": (reproduced, event("register", errno="EPERM")),
    "errno: a failure that gave a key": (reproduced, event("register", lkey=7)),
    "errno: a success that gave none": (by_kernel, event("register", rkey=None)),
    "errno: a success called a failure": (by_kernel, event("register", errno="ENOMEM")),
    "errno: a moved success called a failure": (
        moved_out,
        event("register", errno="ENOMEM", lkey=None, rkey=None),
    ),
    "errno: the provider succeeded": (reproduced, returned("rxe_reg_user_mr", 1)),
    "errno: the provider refused otherwise": (reproduced, returned("rxe_reg_user_mr", -22)),
    "errno: a success under -ENOMEM": (by_kernel, returned("rxe_reg_user_mr", -12)),
    "errno: a success under a refused umem": (by_kernel, returned("__ib_umem_get_va", -12)),
    "errno: a success under a refused pin": (by_pin, returned("pin_user_pages_fast", -12)),
    "errno: the umem hides the pin's refusal": (reproduced, returned("__ib_umem_get_va", 1)),
    "errno: the umem refused otherwise": (reproduced, returned("__ib_umem_get_va", -22)),
    "errno: the pin refused otherwise than within": (reproduced, returned("__gup_longterm_locked", -14)),
    # pin
    "pin: removed": (reproduced, drop("pin")),
    "pin: its life unknown": (
        reproduced,
        lambda r: find(r, "register")["pins"][0].update(alive_after=None),
        "pin",
    ),
    "pin: dead meanwhile": (reproduced, lambda r: find(r, "register")["pins"][0].update(alive_after=False)),
    "pin: dead before and alive after": (
        reproduced,
        lambda r: find(r, "register")["pins"][0].update(alive_before=False),
    ),
    "pin: dead from the start": (
        by_kernel,
        lambda r: find(r, "register")["pins"][0].update(alive_before=False, alive_after=False),
    ),
    "pin: not named by the registration": (reproduced, event("register", pins=[])),
    "pin: named though it was not held": (
        moved_out,
        event("register", pins=[{"pin": 3, "alive_before": True, "alive_after": True}]),
    ),
    "pin: called refused": (reproduced, event("pin", errno="ENOMEM")),
    "pin: called refused, and its references stand": (
        reproduced,
        both(event("pin", errno="EFAULT"), event("register", pins=[]), drop("release")),
    ),
    "pin: called none": (reproduced, event("pin", kind="none")),
    "pin: called long-term": (reproduced, event("pin", kind="longterm")),
    "pin: a FOLL_PIN called a FOLL_GET": (reproduced, event("pin", kind="get")),
    "pin: a FOLL_GET called a FOLL_PIN": (by_get, event("pin", kind="pin")),
    "pin: raised no reference": (reproduced, counts("pin", "after", 1)),
    "pin: raised one reference": (reproduced, counts("pin", "after", 2)),
    "pin: raised them on half of its pages": (reproduced, counts("pin", "after", HALF)),
    "pin: they stood there before": (reproduced, counts("pin", "before", 1025)),
    "pin: a FOLL_GET raised none": (by_get, counts("pin", "after", 1)),
    "pin: a FOLL_GET raised 1,024": (by_get, counts("pin", "after", 1025)),
    "pin: code of one's own that pins nothing": (
        own_code,
        both(counts("pin", "before", 1025), counts("release", "after", 1025)),
    ),
    "pin: code of one's own that lets a stranger's pin stand": (own_code, counts("release", "after", 1025)),
    "pin: pages of another buffer's size": (reproduced, pages("pin", "after", pages=9)),
    # what the pin asked for
    "flags: FOLL_LONGTERM in its trace": (reproduced, asked("FOLL_WRITE", "FOLL_LONGTERM")),
    "flags: own code that asked for FOLL_LONGTERM and stayed": (
        own_code,
        asked("FOLL_WRITE", "FOLL_LONGTERM"),
    ),
    "flags: a long-term pin without": (by_pin, asked("FOLL_WRITE")),
    "flags: by a function of FOLL_GET": (reproduced, asked("FOLL_WRITE", fn="get_user_pages_fast")),
    "flags: a FOLL_GET by a function of pins": (by_get, asked(fn="pin_user_pages_fast")),
    "flags: the kernel refused it": (reproduced, asked("FOLL_WRITE", ret=-14)),
    "flags: no call at all": (reproduced, without_events("pin_user_pages_remote", kind="pin")),
    # placement
    "placement: removed": (reproduced, event("register", before=None), "placement"),
    "placement: unknown": (reproduced, pages("register", "before", place=[[0, 8, "unknown"]]), "placement"),
    "placement: ordinary before, unpinnable after": (
        reproduced,
        pages("register", "before", place=[[0, 8, "ordinary"]]),
    ),
    "placement: ordinary all along, and migrated": (
        reproduced,
        both(
            pages("register", "before", place=[[0, 8, "ordinary"]]),
            pages("register", "after", place=[[0, 8, "ordinary"]]),
        ),
    ),
    "placement: another zone for one frame": (
        by_kernel,
        pages("register", "after", place=[[0, 8, "movable-zone"]]),
    ),
    "placement: places without frames": (reproduced, pages("register", "before", pfn=[])),
    "placement: frames called absent": (by_kernel, pages("register", "after", place=[[0, 8, "absent"]])),
    "placement: none on the node, and in CMA": (
        by_placement,
        both(
            pages("register", "before", place=[[0, 8, "cma"]]),
            pages("register", "after", place=[[0, 8, "cma"]]),
        ),
    ),
    "placement: a map without unpinnable memory that has CMA blocks": (
        by_placement,
        lambda r: r.events[0]["zones"][0]["blocks"].update(CMA=3),
    ),
    "placement: a map without unpinnable memory that has ranges": (
        by_placement,
        lambda r: r.events[0].update(unpinnable_ranges=[[1, 9, "cma"]]),
    ),
    "placement: a complete map that failed its self-check": (
        by_placement,
        lambda r: r.events[0]["selfcheck"].update(passed=False),
    ),
    "placement: the map removed": (by_placement, lambda r: r.events[0].update(complete=False), "placement"),
    "placement: a map that has nothing": (
        reproduced,
        lambda r: r.events[0].update(has_unpinnable=False, unpinnable_ranges=[]),
    ),
    # order
    "order: a success under the same pin": (reproduced, succeeded_first, "order"),
    "order: its evidence contradicted": (reproduced, repeat("register", errno=None, lkey=2, rkey=2)),
    "order: the clock runs backwards": (reproduced, backwards),
    "order: a line in another place": (reproduced, shuffled),
    # movement
    "movement: removed": (reproduced, event("register", after=None), "movement"),
    "movement: the pinned pages moved": (reproduced, event("register", after=state(OUT, 1025))),
    "movement: one of them moved": (reproduced, event("register", after=state([*CMA[:7], 5007], 1025))),
    "movement: an unpinned page stayed": (
        one_of_eight,
        event("register", after=state([*OUT[:3], CMA[3], *OUT[4:7], CMA[7]], [1, 1, 1, 1025, 1, 1, 1, 1])),
    ),
    "movement: more counted than moved": (reproduced, tracepoint(nr_succeeded=8)),
    "movement: moved, and none counted": (moved_out, tracepoint(nr_succeeded=0)),
    "movement: counted, and none moved": (
        by_kernel,
        lambda r: find(r, "register")["trace"]["events"].extend(build.migration(8, 0, 0)),
    ),
    "movement: moved, and no migration in sight": (
        moved_out,
        without_events("migrate_pages", "mm_migrate_pages"),
    ),
    "movement: the pin moved its pages, and none migrated": (
        by_pin,
        without_events("migrate_pages", "mm_migrate_pages", kind="pin"),
    ),
    "movement: the pin's pages migrated, and none moved": (
        by_kernel,
        lambda r: find(r, "pin")["trace"]["events"].extend(build.migration(8, 0, 0)),
    ),
    "movement: the second try moved nothing": (reproduced, event("register", 1, after=state(CMA, 1025))),
    # references
    "references: removed before": (reproduced, counts("register", "before", None), "references"),
    "references: removed after": (reproduced, counts("register", "after", None), "references"),
    "references: none under a living pin": (reproduced, counts("register", "after", 1)),
    "references: none before, under a living pin": (reproduced, counts("register", "before", 1)),
    "references: none of a FOLL_GET": (by_get, counts("register", "after", 1)),
    "references: a failure that pinned": (reproduced, counts("register", "after", OTHERS_PIN)),
    "references: somebody else's": (
        reproduced,
        both(counts("register", "before", OTHERS_PIN), counts("register", "after", OTHERS_PIN)),
        "references",
    ),
    "references: a success that pinned nothing": (by_kernel, counts("register", "after", 1025)),
    "references: an on-demand MR": (by_kernel, ODP),
    "references: a success that pinned half": (
        by_kernel,
        counts("register", "after", [[0, 4, 2049], [4, 4, 1025]]),
    ),
    "references: a pin that nobody saw": (by_kernel, without_events("pin_user_pages_fast")),
    "references: moved pages without": (moved_out, counts("register", "after", 1)),
    "references: of a FOLL_LONGTERM pin removed": (by_pin, counts("pin", "after", None), "pin contract"),
    "references: of a FOLL_LONGTERM pin, none": (by_pin, counts("pin", "after", 1)),
    "references: mappings that explain them": (
        reproduced,
        pages("register", "after", mapcount=[[0, 8, 1025]]),
    ),
    # trace
    "trace: removed": (reproduced, event("register", trace=None), "trace"),
    "trace: spoiled": (reproduced, trace(status="spoiled", why="overrun"), "trace"),
    "trace: unavailable where others are": (
        reproduced,
        event("register", trace={"status": "unavailable", "why": "no tracefs"}),
    ),
    "trace: of all registrations unavailable, those of pins are there": (
        reproduced,
        lambda r: [
            item.update(trace={"status": "unavailable", "why": "no tracefs"})
            for item in r.events
            if item["event"] == "register"
        ],
    ),
    "trace: left 3 where 8 stayed": (reproduced, both(returned("migrate_pages", 3), tracepoint(nr_failed=3))),
    "trace: left 9 where 8 stayed": (reproduced, both(returned("migrate_pages", 9), tracepoint(nr_failed=9))),
    "trace: left another count than its tracepoint": (reproduced, returned("migrate_pages", 7)),
    "trace: moved all, and its tracepoint counts failures": (reproduced, returned("migrate_pages", 0)),
    "trace: a tree that no event bears out": (reproduced, returned("migrate_pages", 3, tree=False)),
    "trace: migrate_pages hidden though probed": (
        reproduced,
        both(
            without_events("migrate_pages", "mm_migrate_pages"),
            trace(
                missing=[{"fn": fn, "why": "inlined"} for fn in ("migrate_pages", "migrate:mm_migrate_pages")]
            ),
        ),
    ),
    "trace: hidden here and probed in the other calls": (
        reproduced,
        both(
            without_events("migrate_pages", "mm_migrate_pages"),
            trace(
                missing=[
                    {"fn": fn, "why": "inlined"} for fn in ("migrate_pages", "migrate:mm_migrate_pages")
                ],
                probed=[name for name in PROBED if name != "migrate_pages"],
            ),
        ),
    ),
    "trace: hidden and seen": (
        reproduced,
        trace(missing=[{"fn": "migrate_pages", "why": "inlined"}], probed=["rxe_reg_user_mr"]),
    ),
    "trace: seen and not probed": (
        reproduced,
        trace(probed=[name for name in PROBED if name != "rxe_reg_user_mr"]),
    ),
    "trace: that of the next call": (reproduced, swapped),
    "trace: of other addresses": (
        reproduced,
        lambda r: [
            item["args"].update(start=ADDRESS + (1 << 30))
            for item in find(r, "register")["trace"]["events"]
            if item.get("fn") == "pin_user_pages_fast"
        ],
    ),
    "trace: a registration without FOLL_LONGTERM": (
        by_kernel,
        lambda r: find(r, "register")["trace"]["events"][0]["args"].update(flags=["FOLL_WRITE"]),
    ),
    "trace: fewer pages pinned than registered": (by_kernel, returned("pin_user_pages_fast", 5)),
    "trace: of io_uring for a verb": (
        by_kernel,
        lambda r: find(r, "register")["trace"]["events"][-1].update(fn="io_sqe_buffers_register", ret=0),
    ),
    "trace: of a verb for io_uring": (
        by_kernel,
        event("register", verb="io_uring_register_buffers", device="io_uring"),
    ),
    # release
    "release: removed": (reproduced, drop("release")),
    "release: the second try removed": (reproduced, drop("register", 1), "release"),
    "release: the second try called a failure": (reproduced, event("register", 1, errno="ENOMEM")),
    "release: changed bytes": (reproduced, event("release", checksum_after=8)),
    "release: changed bytes of a success": (by_kernel, event("release", checksum_after=8)),
    "release: of a dead pin": (reproduced, event("release", was_alive=False)),
    "release: of a dead pin of a success": (by_pin, event("release", was_alive=False)),
    "release: let nothing go": (reproduced, counts("release", "after", 1025)),
    "release: let nothing go, of a success": (by_kernel, counts("release", "after", 2049)),
    "release: refused": (reproduced, event("release", errno="EBADF"), "release"),
    "release: an MR deregistered that failed": (reproduced, event("deregister", registration=1)),
    # record
    "record: a registration twice": (reproduced, repeat("register")),
    "record: a registration twice, of a success": (by_kernel, repeat("register")),
    "record: a release twice": (reproduced, repeat("release"), "record"),
    "record: a pin twice": (reproduced, repeat("pin"), "record"),
    "record: a buffer freed twice": (reproduced, repeat("free")),
    "record: an MR deregistered twice": (reproduced, repeat("deregister")),
    "record: an unknown MR deregistered": (reproduced, event("deregister", registration=9)),
    "record: an event is missing": (reproduced, lambda r: r.events.remove(find(r, "free")), "record"),
    "record: the buffer was freed before": (reproduced, misplaced),
    # control
    "control: removed": (reproduced, without_pass("no-pin"), "control"),
    "control: failed": (
        reproduced,
        event("register", control="no-pin", errno="ENOMEM", lkey=None, rkey=None),
        "control",
    ),
    "control: contradicts itself": (reproduced, counts("register", "after", 1, control="no-pin"), "control"),
    "control: its success hides a refusal": (
        reproduced,
        lambda r: find(r, "register", 0, "no-pin")["trace"]["events"][-1].update(ret=-12),
        "control",
    ),
    "control: a long-term pin without FOLL_LONGTERM": (
        reproduced,
        lambda r: find(r, "pin", 0, "ordinary-memory")["trace"]["events"][0]["args"].update(
            flags=["FOLL_LONGTERM"]
        ),
        "control",
    ),
    "control: its release changed bytes": (
        reproduced,
        event("release", control="ordinary-memory", checksum_after=8),
        "control",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_turned_evidence_decides_nothing(name: str) -> None:
    make, edit, *named = TABLE[name]
    check = named[0] if named else CONTRADICTED
    record = make()
    edit(record)
    verdicts = judge_record(record)
    item = verdicts["verdicts"][0]
    assert item["verdict"] == "unmet", item["reason"]
    assert exit_code(verdicts) == 125
    failing = {entry["name"] for entry in item["checks"] if entry["state"] != "ok"}
    failing |= {entry["need"] for entry in item["unmet"]}
    assert check in failing, failing
    if check == CONTRADICTED:
        assert "contradicts itself" in item["reason"]
        assert CONTRADICTED in {entry["need"] for entry in item["unmet"]}
        assert "contradicted" in {entry["state"] for entry in item["checks"] if entry["name"] == CONTRADICTED}
