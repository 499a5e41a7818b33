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


# what is wrong: (the good record, what is edited, the verdict that is due, the check that names it)
TABLE: dict[str, tuple[Callable[[], Record], Edit, str, str]] = {
    # errno
    "errno: removed": (reproduced, lambda r: find(r, "register").pop("errno"), "unmet", "record"),
    "errno: null": (reproduced, event("register", errno=None), "unmet", CONTRADICTED),
    "errno: null, with keys": (
        reproduced,
        event("register", errno=None, lkey=1, rkey=1),
        "unmet",
        CONTRADICTED,
    ),
    "errno: another": (reproduced, event("register", errno="EINVAL"), "unmet", CONTRADICTED),
    "errno: a refusal of rights": (reproduced, event("register", errno="EPERM"), "unmet", CONTRADICTED),
    "errno: a failure that gave a key": (reproduced, event("register", lkey=7), "unmet", CONTRADICTED),
    "errno: a success that gave none": (by_kernel, event("register", rkey=None), "unmet", CONTRADICTED),
    "errno: a success called a failure": (
        by_kernel,
        event("register", errno="ENOMEM"),
        "unmet",
        CONTRADICTED,
    ),
    "errno: a moved success called a failure": (
        moved_out,
        event("register", errno="ENOMEM", lkey=None, rkey=None),
        "unmet",
        CONTRADICTED,
    ),
    "errno: the provider succeeded": (reproduced, returned("rxe_reg_user_mr", 1), "unmet", CONTRADICTED),
    "errno: the provider refused otherwise": (
        reproduced,
        returned("rxe_reg_user_mr", -22),
        "unmet",
        CONTRADICTED,
    ),
    "errno: a success under -ENOMEM": (by_kernel, returned("rxe_reg_user_mr", -12), "unmet", CONTRADICTED),
    "errno: a success under a refused umem": (
        by_kernel,
        returned("__ib_umem_get_va", -12),
        "unmet",
        CONTRADICTED,
    ),
    "errno: a success under a refused pin": (
        by_pin,
        returned("pin_user_pages_fast", -12),
        "unmet",
        CONTRADICTED,
    ),
    "errno: the umem hides the pin's refusal": (
        reproduced,
        returned("__ib_umem_get_va", 1),
        "unmet",
        CONTRADICTED,
    ),
    "errno: the umem refused otherwise": (
        reproduced,
        returned("__ib_umem_get_va", -22),
        "unmet",
        CONTRADICTED,
    ),
    "errno: the pin refused otherwise than within": (
        reproduced,
        returned("__gup_longterm_locked", -14),
        "unmet",
        CONTRADICTED,
    ),
    # pin
    "pin: removed": (reproduced, drop("pin"), "unmet", CONTRADICTED),
    "pin: its life unknown": (
        reproduced,
        lambda r: find(r, "register")["pins"][0].update(alive_after=None),
        "unmet",
        "pin",
    ),
    "pin: dead meanwhile": (
        reproduced,
        lambda r: find(r, "register")["pins"][0].update(alive_after=False),
        "unmet",
        CONTRADICTED,
    ),
    "pin: dead before and alive after": (
        reproduced,
        lambda r: find(r, "register")["pins"][0].update(alive_before=False),
        "unmet",
        CONTRADICTED,
    ),
    "pin: dead from the start": (
        by_kernel,
        lambda r: find(r, "register")["pins"][0].update(alive_before=False, alive_after=False),
        "unmet",
        CONTRADICTED,
    ),
    "pin: not named by the registration": (reproduced, event("register", pins=[]), "unmet", CONTRADICTED),
    "pin: named though it was not held": (
        moved_out,
        event("register", pins=[{"pin": 3, "alive_before": True, "alive_after": True}]),
        "unmet",
        CONTRADICTED,
    ),
    "pin: called refused": (reproduced, event("pin", errno="ENOMEM"), "unmet", CONTRADICTED),
    "pin: called refused, and its references stand": (
        reproduced,
        both(event("pin", errno="EFAULT"), event("register", pins=[]), drop("release")),
        "unmet",
        CONTRADICTED,
    ),
    "pin: called none": (reproduced, event("pin", kind="none"), "unmet", CONTRADICTED),
    "pin: called long-term": (reproduced, event("pin", kind="longterm"), "unmet", CONTRADICTED),
    "pin: a FOLL_PIN called a FOLL_GET": (reproduced, event("pin", kind="get"), "unmet", CONTRADICTED),
    "pin: a FOLL_GET called a FOLL_PIN": (by_get, event("pin", kind="pin"), "unmet", CONTRADICTED),
    "pin: raised no reference": (reproduced, counts("pin", "after", 1), "unmet", CONTRADICTED),
    "pin: raised one reference": (reproduced, counts("pin", "after", 2), "unmet", CONTRADICTED),
    "pin: raised them on half of its pages": (
        reproduced,
        counts("pin", "after", HALF),
        "unmet",
        CONTRADICTED,
    ),
    "pin: they stood there before": (reproduced, counts("pin", "before", 1025), "unmet", CONTRADICTED),
    "pin: a FOLL_GET raised none": (by_get, counts("pin", "after", 1), "unmet", CONTRADICTED),
    "pin: a FOLL_GET raised 1,024": (by_get, counts("pin", "after", 1025), "unmet", CONTRADICTED),
    "pin: code of one's own that pins nothing": (
        own_code,
        both(counts("pin", "before", 1025), counts("release", "after", 1025)),
        "unmet",
        CONTRADICTED,
    ),
    "pin: code of one's own that lets a stranger's pin stand": (
        own_code,
        counts("release", "after", 1025),
        "unmet",
        CONTRADICTED,
    ),
    "pin: pages of another buffer's size": (
        reproduced,
        pages("pin", "after", pages=9),
        "unmet",
        CONTRADICTED,
    ),
    # what the pin asked for
    "flags: FOLL_LONGTERM in its trace": (
        reproduced,
        asked("FOLL_WRITE", "FOLL_LONGTERM"),
        "unmet",
        CONTRADICTED,
    ),
    "flags: own code that asked for FOLL_LONGTERM and stayed": (
        own_code,
        asked("FOLL_WRITE", "FOLL_LONGTERM"),
        "unmet",
        CONTRADICTED,
    ),
    "flags: a long-term pin without": (by_pin, asked("FOLL_WRITE"), "unmet", CONTRADICTED),
    "flags: by a function of FOLL_GET": (
        reproduced,
        asked("FOLL_WRITE", fn="get_user_pages_fast"),
        "unmet",
        CONTRADICTED,
    ),
    "flags: a FOLL_GET by a function of pins": (
        by_get,
        asked(fn="pin_user_pages_fast"),
        "unmet",
        CONTRADICTED,
    ),
    "flags: the kernel refused it": (reproduced, asked("FOLL_WRITE", ret=-14), "unmet", CONTRADICTED),
    "flags: no call at all": (
        reproduced,
        without_events("pin_user_pages_remote", kind="pin"),
        "unmet",
        CONTRADICTED,
    ),
    # placement
    "placement: removed": (reproduced, event("register", before=None), "unmet", "placement"),
    "placement: unknown": (
        reproduced,
        pages("register", "before", place=[[0, 8, "unknown"]]),
        "unmet",
        "placement",
    ),
    "placement: ordinary before, unpinnable after": (
        reproduced,
        pages("register", "before", place=[[0, 8, "ordinary"]]),
        "unmet",
        CONTRADICTED,
    ),
    "placement: ordinary all along, and migrated": (
        reproduced,
        both(
            pages("register", "before", place=[[0, 8, "ordinary"]]),
            pages("register", "after", place=[[0, 8, "ordinary"]]),
        ),
        "unmet",
        CONTRADICTED,
    ),
    "placement: another zone for one frame": (
        by_kernel,
        pages("register", "after", place=[[0, 8, "movable-zone"]]),
        "unmet",
        CONTRADICTED,
    ),
    "placement: places without frames": (
        reproduced,
        pages("register", "before", pfn=[]),
        "unmet",
        CONTRADICTED,
    ),
    "placement: frames called absent": (
        by_kernel,
        pages("register", "after", place=[[0, 8, "absent"]]),
        "unmet",
        CONTRADICTED,
    ),
    "placement: none on the node, and in CMA": (
        by_placement,
        both(
            pages("register", "before", place=[[0, 8, "cma"]]),
            pages("register", "after", place=[[0, 8, "cma"]]),
        ),
        "unmet",
        CONTRADICTED,
    ),
    "placement: a map without unpinnable memory that has CMA blocks": (
        by_placement,
        lambda r: r.events[0]["zones"][0]["blocks"].update(CMA=3),
        "unmet",
        CONTRADICTED,
    ),
    "placement: a map without unpinnable memory that has ranges": (
        by_placement,
        lambda r: r.events[0].update(unpinnable_ranges=[[1, 9, "cma"]]),
        "unmet",
        CONTRADICTED,
    ),
    "placement: a complete map that failed its self-check": (
        by_placement,
        lambda r: r.events[0]["selfcheck"].update(passed=False),
        "unmet",
        CONTRADICTED,
    ),
    "placement: the map removed": (
        by_placement,
        lambda r: r.events[0].update(complete=False),
        "unmet",
        "placement",
    ),
    "placement: a map that has nothing": (
        reproduced,
        lambda r: r.events[0].update(has_unpinnable=False, unpinnable_ranges=[]),
        "unmet",
        CONTRADICTED,
    ),
    # order
    "order: a success under the same pin": (
        reproduced,
        succeeded_first,
        "unmet",
        "order",
    ),
    "order: its evidence contradicted": (
        reproduced,
        repeat("register", errno=None, lkey=2, rkey=2),
        "unmet",
        CONTRADICTED,
    ),
    "order: the clock runs backwards": (reproduced, backwards, "unmet", CONTRADICTED),
    "order: a line in another place": (reproduced, shuffled, "unmet", CONTRADICTED),
    # movement
    "movement: removed": (reproduced, event("register", after=None), "unmet", "movement"),
    "movement: the pinned pages moved": (
        reproduced,
        event("register", after=state(OUT, 1025)),
        "unmet",
        CONTRADICTED,
    ),
    "movement: one of them moved": (
        reproduced,
        event("register", after=state([*CMA[:7], 5007], 1025)),
        "unmet",
        CONTRADICTED,
    ),
    "movement: an unpinned page stayed": (
        one_of_eight,
        event("register", after=state([*OUT[:3], CMA[3], *OUT[4:7], CMA[7]], [1, 1, 1, 1025, 1, 1, 1, 1])),
        "unmet",
        CONTRADICTED,
    ),
    "movement: more counted than moved": (reproduced, tracepoint(nr_succeeded=8), "unmet", CONTRADICTED),
    "movement: moved, and none counted": (moved_out, tracepoint(nr_succeeded=0), "unmet", CONTRADICTED),
    "movement: counted, and none moved": (
        by_kernel,
        lambda r: find(r, "register")["trace"]["events"].extend(build.migration(8, 0, 0)),
        "unmet",
        CONTRADICTED,
    ),
    "movement: moved, and no migration in sight": (
        moved_out,
        without_events("migrate_pages", "mm_migrate_pages"),
        "unmet",
        CONTRADICTED,
    ),
    "movement: the pin moved its pages, and none migrated": (
        by_pin,
        without_events("migrate_pages", "mm_migrate_pages", kind="pin"),
        "unmet",
        CONTRADICTED,
    ),
    "movement: the pin's pages migrated, and none moved": (
        by_kernel,
        lambda r: find(r, "pin")["trace"]["events"].extend(build.migration(8, 0, 0)),
        "unmet",
        CONTRADICTED,
    ),
    "movement: the second try moved nothing": (
        reproduced,
        event("register", 1, after=state(CMA, 1025)),
        "unmet",
        CONTRADICTED,
    ),
    # references
    "references: removed before": (reproduced, counts("register", "before", None), "unmet", "references"),
    "references: removed after": (reproduced, counts("register", "after", None), "unmet", "references"),
    "references: none under a living pin": (
        reproduced,
        counts("register", "after", 1),
        "unmet",
        CONTRADICTED,
    ),
    "references: none before, under a living pin": (
        reproduced,
        counts("register", "before", 1),
        "unmet",
        CONTRADICTED,
    ),
    "references: none of a FOLL_GET": (by_get, counts("register", "after", 1), "unmet", CONTRADICTED),
    "references: a failure that pinned": (
        reproduced,
        counts("register", "after", OTHERS_PIN),
        "unmet",
        CONTRADICTED,
    ),
    "references: somebody else's": (
        reproduced,
        both(counts("register", "before", OTHERS_PIN), counts("register", "after", OTHERS_PIN)),
        "unmet",
        "references",
    ),
    "references: a success that pinned nothing": (
        by_kernel,
        counts("register", "after", 1025),
        "unmet",
        CONTRADICTED,
    ),
    "references: an on-demand MR": (by_kernel, ODP, "unmet", CONTRADICTED),
    "references: a success that pinned half": (
        by_kernel,
        counts("register", "after", [[0, 4, 2049], [4, 4, 1025]]),
        "unmet",
        CONTRADICTED,
    ),
    "references: a pin that nobody saw": (
        by_kernel,
        without_events("pin_user_pages_fast"),
        "unmet",
        CONTRADICTED,
    ),
    "references: moved pages without": (moved_out, counts("register", "after", 1), "unmet", CONTRADICTED),
    "references: of a FOLL_LONGTERM pin removed": (
        by_pin,
        counts("pin", "after", None),
        "unmet",
        "pin contract",
    ),
    "references: of a FOLL_LONGTERM pin, none": (by_pin, counts("pin", "after", 1), "unmet", CONTRADICTED),
    "references: mappings that explain them": (
        reproduced,
        pages("register", "after", mapcount=[[0, 8, 1025]]),
        "unmet",
        CONTRADICTED,
    ),
    # trace
    "trace: removed": (reproduced, event("register", trace=None), "unmet", "trace"),
    "trace: spoiled": (reproduced, trace(status="spoiled", why="overrun"), "unmet", "trace"),
    "trace: unavailable where others are": (
        reproduced,
        event("register", trace={"status": "unavailable", "why": "no tracefs"}),
        "unmet",
        CONTRADICTED,
    ),
    "trace: of all registrations unavailable, those of pins are there": (
        reproduced,
        lambda r: [
            item.update(trace={"status": "unavailable", "why": "no tracefs"})
            for item in r.events
            if item["event"] == "register"
        ],
        "unmet",
        CONTRADICTED,
    ),
    "trace: left 3 where 8 stayed": (
        reproduced,
        both(returned("migrate_pages", 3), tracepoint(nr_failed=3)),
        "unmet",
        CONTRADICTED,
    ),
    "trace: left 9 where 8 stayed": (
        reproduced,
        both(returned("migrate_pages", 9), tracepoint(nr_failed=9)),
        "unmet",
        CONTRADICTED,
    ),
    "trace: left another count than its tracepoint": (
        reproduced,
        returned("migrate_pages", 7),
        "unmet",
        CONTRADICTED,
    ),
    "trace: moved all, and its tracepoint counts failures": (
        reproduced,
        returned("migrate_pages", 0),
        "unmet",
        CONTRADICTED,
    ),
    "trace: a tree that no event bears out": (
        reproduced,
        returned("migrate_pages", 3, tree=False),
        "unmet",
        CONTRADICTED,
    ),
    "trace: migrate_pages hidden though probed": (
        reproduced,
        both(
            without_events("migrate_pages", "mm_migrate_pages"),
            trace(
                missing=[{"fn": fn, "why": "inlined"} for fn in ("migrate_pages", "migrate:mm_migrate_pages")]
            ),
        ),
        "unmet",
        CONTRADICTED,
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
        "unmet",
        CONTRADICTED,
    ),
    "trace: hidden and seen": (
        reproduced,
        trace(missing=[{"fn": "migrate_pages", "why": "inlined"}], probed=["rxe_reg_user_mr"]),
        "unmet",
        CONTRADICTED,
    ),
    "trace: seen and not probed": (
        reproduced,
        trace(probed=[name for name in PROBED if name != "rxe_reg_user_mr"]),
        "unmet",
        CONTRADICTED,
    ),
    "trace: that of the next call": (reproduced, swapped, "unmet", CONTRADICTED),
    "trace: of other addresses": (
        reproduced,
        lambda r: [
            item["args"].update(start=ADDRESS + (1 << 30))
            for item in find(r, "register")["trace"]["events"]
            if item.get("fn") == "pin_user_pages_fast"
        ],
        "unmet",
        CONTRADICTED,
    ),
    "trace: a registration without FOLL_LONGTERM": (
        by_kernel,
        lambda r: find(r, "register")["trace"]["events"][0]["args"].update(flags=["FOLL_WRITE"]),
        "unmet",
        CONTRADICTED,
    ),
    "trace: fewer pages pinned than registered": (
        by_kernel,
        returned("pin_user_pages_fast", 5),
        "unmet",
        CONTRADICTED,
    ),
    "trace: of io_uring for a verb": (
        by_kernel,
        lambda r: find(r, "register")["trace"]["events"][-1].update(fn="io_sqe_buffers_register", ret=0),
        "unmet",
        CONTRADICTED,
    ),
    "trace: of a verb for io_uring": (
        by_kernel,
        event("register", verb="io_uring_register_buffers", device="io_uring"),
        "unmet",
        CONTRADICTED,
    ),
    # release
    "release: removed": (reproduced, drop("release"), "unmet", CONTRADICTED),
    "release: the second try removed": (reproduced, drop("register", 1), "unmet", "release"),
    "release: the second try called a failure": (
        reproduced,
        event("register", 1, errno="ENOMEM"),
        "unmet",
        CONTRADICTED,
    ),
    "release: changed bytes": (reproduced, event("release", checksum_after=8), "unmet", CONTRADICTED),
    "release: changed bytes of a success": (
        by_kernel,
        event("release", checksum_after=8),
        "unmet",
        CONTRADICTED,
    ),
    "release: of a dead pin": (reproduced, event("release", was_alive=False), "unmet", CONTRADICTED),
    "release: of a dead pin of a success": (by_pin, event("release", was_alive=False), "unmet", CONTRADICTED),
    "release: let nothing go": (reproduced, counts("release", "after", 1025), "unmet", CONTRADICTED),
    "release: let nothing go, of a success": (
        by_kernel,
        counts("release", "after", 2049),
        "unmet",
        CONTRADICTED,
    ),
    "release: refused": (reproduced, event("release", errno="EBADF"), "unmet", "release"),
    "release: an MR deregistered that failed": (
        reproduced,
        event("deregister", registration=1),
        "unmet",
        CONTRADICTED,
    ),
    # record
    "record: a registration twice": (reproduced, repeat("register"), "unmet", CONTRADICTED),
    "record: a registration twice, of a success": (by_kernel, repeat("register"), "unmet", CONTRADICTED),
    "record: a release twice": (reproduced, repeat("release"), "unmet", "record"),
    "record: a pin twice": (reproduced, repeat("pin"), "unmet", "record"),
    "record: a buffer freed twice": (reproduced, repeat("free"), "unmet", CONTRADICTED),
    "record: an MR deregistered twice": (reproduced, repeat("deregister"), "unmet", CONTRADICTED),
    "record: an unknown MR deregistered": (
        reproduced,
        event("deregister", registration=9),
        "unmet",
        CONTRADICTED,
    ),
    "record: an event is missing": (
        reproduced,
        lambda r: r.events.remove(find(r, "free")),
        "unmet",
        "record",
    ),
    "record: the buffer was freed before": (reproduced, misplaced, "unmet", CONTRADICTED),
    # control
    "control: removed": (reproduced, without_pass("no-pin"), "unmet", "control"),
    "control: failed": (
        reproduced,
        event("register", control="no-pin", errno="ENOMEM", lkey=None, rkey=None),
        "unmet",
        "control",
    ),
    "control: contradicts itself": (
        reproduced,
        counts("register", "after", 1, control="no-pin"),
        "unmet",
        "control",
    ),
    "control: its success hides a refusal": (
        reproduced,
        lambda r: find(r, "register", 0, "no-pin")["trace"]["events"][-1].update(ret=-12),
        "unmet",
        "control",
    ),
    "control: a long-term pin without FOLL_LONGTERM": (
        reproduced,
        lambda r: find(r, "pin", 0, "ordinary-memory")["trace"]["events"][0]["args"].update(
            flags=["FOLL_LONGTERM"]
        ),
        "unmet",
        "control",
    ),
    "control: its release changed bytes": (
        reproduced,
        event("release", control="ordinary-memory", checksum_after=8),
        "unmet",
        "control",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_turned_evidence_decides_nothing(name: str) -> None:
    make, edit, due, check = TABLE[name]
    record = make()
    edit(record)
    verdicts = judge_record(record)
    item = verdicts["verdicts"][0]
    assert item["verdict"] == due, item["reason"]
    assert exit_code(verdicts) == (11 if due == "other-failure" else 125)
    failing = {entry["name"] for entry in item["checks"] if entry["state"] != "ok"}
    failing |= {entry["need"] for entry in item["unmet"]}
    assert not check or check in failing, failing
    if check == CONTRADICTED:
        assert "contradicts itself" in item["reason"]
        assert CONTRADICTED in {entry["need"] for entry in item["unmet"]}
        assert "contradicted" in {entry["state"] for entry in item["checks"] if entry["name"] == CONTRADICTED}
