"""Does what held the pages of a caught failure last? Each rule with evidence that lacks or turns exactly one
thing, and the later looks that make that evidence.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from regrepro.kernel.pagestate import PageState
from regrepro.watch import again, evidence, process
from regrepro.watch.again import KEPT, KEPT_PAGES, Again, Waiting, no_look
from regrepro.watch.events import Failure, Inner, PlainPin, StuckPage
from regrepro.watch.evidence import LOOKS, PAGE_SIZE, Evidence
from regrepro.watch.process import Process
from unit.watch.test_watch import (
    LIBRARY,
    Alone,
    Pages,
    Seen,
    held,
    held_pin,
    judged,
    lasting,
    later,
    observer,
    state,
)

ADDRESS = 0x7F0000000000


def got(moment: int = 3, **seen: Any) -> dict[str, Any]:
    """A held FOLL_GET: one reference beyond mapping and isolation."""
    return held(moment, **{"looks": lasting(2), **seen})


def with_look(at: int, **change: Any) -> list[dict[str, Any]]:
    looks = lasting()
    looks[at] = {**looks[at], **change}
    return looks


def replaced(at: int, look: dict[str, Any]) -> list[dict[str, Any]]:
    return [look if number == at else one for number, one in enumerate(lasting())]


def told(place: str = "cma", refcount: int = 1026, **change: Any) -> list[dict[str, Any]]:
    return [{"pfn": 4096, "place": place, "refcount": refcount, "mapcount": 1, **change}]


class Shared(Pages):
    """Pages of shared memory: the page cache has a reference of each."""

    def __init__(self, refcount: int, **change: Any) -> None:
        super().__init__("cma", refcount)
        self.state |= {"baseline": [[0, 8, 2]], **change}


def test_what_a_foll_get_and_a_foll_pin_make_is_proven_over_half_a_minute() -> None:
    assert held()["class"]["state"] == "proven" and "because a pin whose holder" in held()["reason"]
    assert got()["class"]["state"] == "proven" and "because a reference" in got()["reason"]


@pytest.mark.parametrize(
    ("looks", "why"),
    [
        (lasting()[:3], "they lasted 10.0 s"),
        ([lasting()[0], lasting()[3]], "they lasted 31.0 s"),
        ([*lasting()[:2], later(5.0), later(29.9)], "they lasted 29.9 s"),
        ([later(26.0), later(26.1), later(26.2), later(31.0)], "less than 3 looks that lay apart"),
        ([later(36.0), later(38.0), later(45.0), later(66.0)], "not looked at for 36 s"),
        (replaced(1, later(3.0, 1)), "gone from 8 of 8 pages 3.0 s later"),
        (replaced(3, later(31.0, 1)), "gone from 8 of 8 pages 31.0 s later"),
        (replaced(1, later(3.0, refcount=1, words="")), "gone from 8 of 8"),
        (with_look(2, pages={**state("cma", 1), "refcount": [[0, 2, 1025], [2, 6, 1]]}), "6 of 8 pages"),
        (with_look(3, pages={**state("cma", 1025), "pfn": [[0, 9000, 8]]}), "8 of 8 pages were no longer"),
        (with_look(3, pages={**state("cma", 1025), "pfn": [[0, 4096, 7]]}), "1 of 8 pages were no longer"),
        (with_look(3, pages={**state("cma", 1025), "refcount": None}), "were not known 31.0 s later"),
        (replaced(2, later(10.0, 2049)), "not the same at each look"),
        (replaced(1, later(3.0, 2)), "not the same at each look"),
        ([*lasting()[:2], no_look("process 6 has ended")], "until process 6 has ended"),
        ([no_look("64 other failures were being looked at again")], "(64 other failures"),
    ],
)
def test_what_did_not_last_is_likely_and_a_transient_is_not_excluded(looks: Any, why: str) -> None:
    verdict = held(looks=looks)
    assert verdict["class"]["state"] == "likely", verdict["reason"]
    assert why in verdict["reason"] and "a transient is not excluded" in verdict["reason"], verdict["reason"]
    (lasts,) = [check for check in verdict["checks"] if check["name"] == "lasting"]
    assert verdict["class"]["missing"] == [lasts["text"]]


@pytest.mark.parametrize(
    ("refcount", "words", "state_then"),
    [
        (2, "lru", "proven"),
        (2, "", "likely"),  # of the batch in which a page waits for its LRU list
        (3, "", "proven"),  # one of the two is
        (2, "lru mlocked", "likely"),  # of mlock's batch
        (3, "lru active mlocked", "proven"),
    ],
)
def test_the_one_reference_of_a_batch_is_told_apart(refcount: int, words: str, state_then: str) -> None:
    verdict = got(looks=lasting(refcount, words))
    assert verdict["class"]["state"] == state_then, verdict["reason"]
    assert ("per-CPU LRU batch" in verdict["reason"]) == (state_then == "likely")


def test_other_references_than_before_are_another_holders() -> None:
    looks = [later(after, refcount) for after, refcount in zip(LOOKS, (2, 2, 4, 2), strict=True)]
    verdict = got(looks=looks)
    assert verdict["class"]["state"] == "likely" and "not the same at each look" in verdict["reason"]
    # A batch may have had one of those.
    looks = [later(1.0, 3, ""), *lasting(2)[1:]]
    assert got(looks=looks)["class"]["state"] == "proven"


def test_what_kpageflags_does_not_say_may_be_a_batch() -> None:
    looks = [{**look, "lists": None} for look in lasting(2)]
    assert got(looks=looks)["class"]["state"] == "likely"
    assert held(looks=[{**look, "lists": None} for look in lasting()])["class"]["state"] == "proven"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stuck": told(refcount=3)}, "not the same at each look"),  # +1 then, a FOLL_PIN later
        ({"stuck": told(refcount=2)}, "no reference beyond what is due"),
        ({"stuck": told(pfn=9999)}, "no longer there right afterwards"),
        ({"stuck": told(place="isolate")}, "isolated pageblock"),
        ({"pages": Pages("isolate", 1025)}, "isolated pageblock"),
        ({"stuck": told(place="ordinary")}, "has changed"),
        ({"lost": 1}, "1 events were lost"),
    ],
)
def test_each_thing_that_is_missing_makes_it_likely(change: dict[str, Any], why: str) -> None:
    verdict = held(**change)
    assert verdict["class"]["state"] == "likely" and why in verdict["reason"], verdict["reason"]


def test_as_many_pages_are_known_as_were_left_behind() -> None:
    pages = Pages("cma", 1025)
    pages.state |= {"place": [[0, 5, "cma"], [5, 3, "ordinary"]]}
    verdict = held(pages=pages, again=pages)
    assert verdict["class"]["state"] == "likely" and "5 pages of that part" in verdict["reason"]


def test_page_cache_counts_among_what_is_due() -> None:
    due = {"baseline": [[0, 8, 2]]}
    assert held(1027, pages=Shared(1026), looks=lasting(1026, **due))["class"]["state"] == "proven"
    assert held(4, pages=Shared(3), looks=lasting(3, **due))["class"]["state"] == "proven"
    verdict = held(3, pages=Shared(2), looks=lasting(2, **due))
    assert verdict["class"]["state"] == "likely" and "no reference beyond" in verdict["reason"]


def of_a_large_folio(
    pincount: int = 8,
    looked: int = 8,
    moment: int | None = 8,
    *,
    mapcount: int = 0,
    count: int = 1,
    pins: Any = (),
) -> dict[str, Any]:
    seen = Seen()
    lines = [text.replace("M|7|100|8|9", f"M|7|100|{count}|9") for text in held_pin()]
    seen.lines(*lines, LIBRARY)
    large: dict[str, Any] = {
        "traits": [[0, 8, "anonymous exclusive large"]],
        "pincount": [[0, 8, looked]],
        "baseline": [[0, 8, 8]],
    }
    pages = Pages("cma", 8 + pincount)
    pages.state |= {**large, "pincount": [[0, 8, pincount]]}
    return judged(
        seen.complete[0],
        first=ADDRESS,
        length=32768,
        vma="7f0000000000-7f0000008000 rw-p 00000000 00:00 0 ",
        pages=pages,
        stuck=told(refcount=17, mapcount=mapcount, **({} if moment is None else {"pincount": moment})),
        looks=lasting(8 + looked, "lru", **large),
        plain_pins=list(pins),
    )


def test_pins_of_a_large_folio_are_its_pincount() -> None:
    verdict = of_a_large_folio()
    assert verdict["class"]["state"] == "proven" and "a pin whose holder" in verdict["reason"]
    assert of_a_large_folio(looked=4)["class"]["state"] == "likely"  # others
    assert of_a_large_folio(moment=0)["class"]["state"] == "likely"  # not known: its maps were not told


def test_a_hugetlb_page_whose_first_has_a_type_for_a_map_count_has_pins_too() -> None:
    assert of_a_large_folio(mapcount=-184549375)["class"]["state"] == "proven"


def test_a_pin_of_a_part_of_a_large_folio_is_of_that_folio() -> None:
    part = pin(**OF_VM, pfn=[[0, 4098, 2]])
    assert of_a_large_folio(pins=[part])["pin_owner"] == "process-vm"
    assert of_a_large_folio(pins=[{**part, "pfn": None, "nr_pages": 2}])["pin_owner"] == "process-vm"
    assert of_a_large_folio(pins=[{**part, "pfn": [[0, 9000, 2]]}])["pin_owner"] == "unknown"
    # Of two folios of which the kernel told one, a pin may be of one alone.
    assert of_a_large_folio(pins=[part], count=2)["pin_owner"] == "unknown"
    assert held(plain_pins=[part])["pin_owner"] == "unknown"


def pin(**change: Any) -> dict[str, Any]:
    return {
        "fn": "pin_user_pages",
        "start": ADDRESS,
        "nr_pages": 8,
        "flags": ["FOLL_WRITE"],
        "stack": [],
        "modules": ["nvidia"],
        "held": None,
        "pfn": [[0, 4096, 8]],
        **change,
    }


OF_VM = {"fn": "pin_user_pages_remote", "modules": [], "held": True}


@pytest.mark.parametrize(
    ("pins", "owner"),
    [
        ([pin()], "cuda"),
        ([pin(pfn=None)], "cuda"),
        ([pin(**OF_VM)], "process-vm"),
        ([pin(**{**OF_VM, "held": False})], "unknown"),
        ([pin(**{**OF_VM, "held": None})], "unknown"),
        ([pin(), pin(**{**OF_VM, "held": False})], "cuda"),
        ([pin(), pin(**OF_VM)], "unknown"),
        ([pin(flags=["FOLL_WRITE", "FOLL_LONGTERM"])], "unknown"),
        ([pin(held=False)], "unknown"),  # its unpin was seen
        ([pin(pfn=[[0, 9000, 8]])], "unknown"),  # of what lay there before
        ([pin(nr_pages=7, pfn=None)], "unknown"),
        ([pin(start=ADDRESS + 4096, pfn=None)], "unknown"),
    ],
)
def test_the_owner_is_who_pinned_these_frames_and_holds_them(pins: Any, owner: str) -> None:
    verdict = held(plain_pins=pins)
    assert verdict["pin_owner"] == owner and verdict["class"]["state"] == "proven", verdict["reason"]


@pytest.mark.parametrize(
    ("change", "state_then"),
    [
        ({"held": False}, "likely"),
        ({"held": True, "age_seconds": -2.0}, "likely"),
        ({"held": None, "pfn": None}, "likely"),
        ({"held": True, "nr_pages": 1, "pfn": [[0, 4096, 1]]}, "likely"),
        ({"held": True, "pfn": [[0, 9000, 8]]}, "proven"),
        ({"held": True, "start": ADDRESS + 8 * 4096, "pfn": None}, "proven"),
        ({"held": True, "flags": ["FOLL_LONGTERM"]}, "proven"),
    ],
)
def test_a_pin_that_came_or_went_between_looks_may_be_another(
    change: dict[str, Any], state_then: str
) -> None:
    looks = with_look(2, pins=[pin(**{**OF_VM, **change})])
    verdict = held(plain_pins=[pin(**OF_VM)], looks=looks)
    assert verdict["class"]["state"] == state_then, verdict["reason"]
    assert ("may be another's" in verdict["reason"]) == (state_then == "likely")
    # A FOLL_GET is no such pin's.
    assert (
        got(looks=[{**look, "pins": looks[2]["pins"]} for look in lasting(2)])["class"]["state"] == "proven"
    )


def test_a_function_that_makes_a_foll_pin_is_not_blamed_for_one_reference() -> None:
    verdict = got(plain_pins=[pin(), pin(**OF_VM)])
    assert verdict["class"]["state"] == "proven" and verdict["pin_owner"] == "unknown"
    (holder,) = [check for check in verdict["checks"] if check["name"] == "holder"]
    assert "is not what they bore" in holder["text"]


JUNK = (None, True, -1, 1.5, "x", [], {}, [[]], [1], [[0, 8, 1]], [["a", 2, 3]], [[0, 1, 1 << 70]], [{}])


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_no_junk_in_what_watch_records_crashes_the_judge(junk: Any) -> None:
    def changed(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for name in whole:
            yield {**whole, name: junk}

    cases: list[dict[str, Any]] = [
        *({"stuck": [page]} for page in changed(told()[0])),
        *({"plain_pins": [one]} for one in changed(pin())),
        *({"looks": replaced(3, one)} for one in changed(lasting()[3])),
        {"stuck": junk},
        {"plain_pins": junk},
    ]
    for change in cases:
        verdict = held(checked=False, **change)
        assert verdict["verdict"] in ("caught", "error", "unmet"), change


# The looks


def waiting(since: float = 0.0, pages: int = 8) -> Waiting:
    seen = Evidence(Failure(6, 6, "app", 1, since=since), Process(6))
    seen.pages = PageState(0, *(np.zeros(pages, dtype=kind) for kind in (np.uint64, np.uint8, np.uint8)))
    return Waiting(seen.failure, seen, {}, "failure-1")


def test_looks_are_few_and_at_growing_distances_beyond_what_io_lasts() -> None:
    assert all(b > 2 * a for a, b in itertools.pairwise(LOOKS)) and LOOKS[-1] > 30
    item = waiting(since=100.0)
    kept = Again()
    kept.take(item)
    assert kept.next_due == 101.0 and not kept.due(100.9) and kept.due(101.0) == [item]
    item.add(later(1.0))
    assert kept.next_due == 103.0 and not kept.due(102.0)
    item.add(later(25.0))  # a busy node made it late
    assert kept.next_due == 132.0


def test_no_more_wait_than_the_bound_and_the_others_say_so() -> None:
    kept = Again()
    assert [kept.take(waiting()) for _ in range(KEPT)] == [""] * KEPT
    assert kept.take(waiting()) == f"{KEPT} other failures were being looked at again" and kept.left_out == 1
    kept = Again()
    assert kept.take(waiting(pages=KEPT_PAGES - 1)) == "" and kept.take(waiting()) != ""


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Watch that has one failure to look at again, and what it wrote and showed."""
    alone = Alone(monkeypatch, tmp_path)
    monkeypatch.setattr(again.look, "record_events", lambda *_: [("register", {})])
    written: list[tuple[str, dict[str, Any]]] = []
    shown: list[Any] = []
    made: Any = alone.watch
    made._output.event = lambda kind, **keys: written.append((kind, keys))
    made._output.begin = lambda: written.append(("begin", {}))
    made._show = lambda item, verdict: shown.append(verdict)
    made._judge = lambda _item: {"class": {"name": "B", "state": "proven"}}
    made._observer.look_at_frames = lambda _seen: later(1.0)
    item = waiting(since=100.0)
    made._again.take(item)
    yield SimpleNamespace(watch=made, written=written, shown=shown, item=item)
    for fd in made._waker:
        os.close(fd)


def test_it_is_shown_again_when_the_last_look_has_proven_it(looking: Any) -> None:
    for after in LOOKS[:-1]:
        looking.watch._look_again(100.0 + after)
    assert [kind for kind, _ in looking.written] == ["look"] * 3 and not looking.shown
    looking.watch._look_again(131.0)
    assert len(looking.shown) == 1 and looking.watch.metrics.proven == 1
    assert looking.watch._again.next_due is None
    assert {keys["failure"] for _, keys in looking.written} == {"failure-1"}


def test_what_stays_likely_is_not_shown_again(looking: Any) -> None:
    looking.watch._judge = lambda _item: {"class": {"name": "B", "state": "likely"}}
    looking.watch._observer.look_at_frames = lambda _seen: {**later(1.0), "ended": "process 6 has ended"}
    looking.watch._look_again(101.0)
    assert not looking.shown and not looking.watch._again.waiting and looking.watch.metrics.proven == 0


def test_a_record_that_is_completed_says_so_and_the_next_one_has_it_all(looking: Any) -> None:
    looking.watch._look_again(101.0)
    looking.watch._begin_next()
    looking.watch._look_again(103.0)
    kinds = [(kind, keys.get("ended")) for kind, keys in looking.written]
    assert kinds[0] == ("look", "") and kinds[1][0] == "look" and "completed" in str(kinds[1][1])
    assert kinds[2:] == [("begin", None), ("register", None), ("look", ""), ("look", "")]


def test_where_watch_ends_before_it_says_so(looking: Any) -> None:
    looking.watch._engine = None
    looking.watch._output.end = lambda _outcome: None
    looking.watch._finish()
    assert looking.written[-1][1]["ended"] == "watch ended before" and not looking.watch._again.waiting


def watched_failure(**change: Any) -> Evidence:
    failure = Failure(
        6, os.getpid(), "app", 1, ret=-12, stuck=[StuckPage(0, 3, 0, 0, 0)], since=time.monotonic()
    )
    failure.inner = [Inner(1, "pin_user_pages_fast", -12, {"start": ADDRESS, "nr_pages": 4})]
    made = Evidence(failure, Process(failure.pid, {"starttime": evidence.start_time(failure.pid)}))
    made.first, made.length, made.pages = ADDRESS - 4 * PAGE_SIZE, 16 * PAGE_SIZE, waiting().evidence.pages
    for name, value in change.items():
        setattr(made, name, value)
    return made


def test_the_frames_are_those_of_the_call_that_failed() -> None:
    assert watched_failure().frames == (ADDRESS, 4 * PAGE_SIZE)
    assert watched_failure(length=6 * PAGE_SIZE).frames == (ADDRESS, 2 * PAGE_SIZE)
    assert watched_failure(pages=None).frames is None
    assert watched_failure(process=Process(6)).frames is None
    seen = watched_failure(length=1 << 30)
    assert seen.frames == (ADDRESS, 4 * PAGE_SIZE)
    seen.failure.inner = []
    assert seen.frames is None  # too much to be looked at, and nobody knows which part
    seen.failure.stuck = []
    assert seen.frames is None


def test_a_look_says_that_the_process_is_another_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = observer()
    monkeypatch.setattr(made, "_snapshot", lambda *_: waiting().evidence.pages)
    monkeypatch.setattr(made, "_pins", {}, raising=False)
    seen = watched_failure()
    assert made.look_at_frames(seen)["ended"] == "" and made.look_at_frames(seen)["pages"]["pages"] == 8
    seen.process.facts["starttime"] += 1
    told_then = made.look_at_frames(seen)
    assert told_then["ended"] == f"process {os.getpid()} has ended" and told_then["pages"] is None


def test_what_kpageflags_says_stands_as_words() -> None:
    pages: Any = waiting().evidence.pages
    assert evidence._lists(pages) is None
    pages.flags = np.array([1 << 5] * 3 + [1 << 5 | 1 << 6 | 1 << 33 | 1 << 2] + [1] * 4, dtype=np.uint64)
    assert evidence._lists(pages) == [[0, 3, "lru"], [3, 1, "lru active mlocked"], [4, 4, ""]]


# Pins that are remembered


def plain(ns: int, tid: int = 7, **change: Any) -> PlainPin:
    keys: dict[str, Any] = {"start": ADDRESS, "pages": 8, "flags": 1, "stack": ["process_vm_rw_core+1"]}
    return PlainPin(ns, tid, 6, "pin_user_pages_remote", **{**keys, **change})


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that remembers pins, and returns those on the range of a failure: (ns, held)."""
    monkeypatch.setattr(process, "PROC", tmp_path)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    monkeypatch.setattr(evidence, "_frames_at", lambda *_: None)
    call = tmp_path / "6" / "task" / "7" / "syscall"
    call.parent.mkdir(parents=True)

    def run(*pins: PlainPin, syscall: str = "311 0x1 0x2", start: int | None = None) -> list[tuple[int, Any]]:
        call.write_text(syscall + "\n")
        made = observer()
        made._pins, made._framed, made._framed_at = {}, evidence.deque(), float("-inf")
        for one in pins:
            made.remember(one)
        failure = Failure(6, 6, "app", 1000, process_start=start)
        return [(one.ns, is_held) for one, is_held in made._pins_on(failure, ADDRESS, 8 * PAGE_SIZE)]

    return run


def test_a_process_vm_pin_is_held_while_its_thread_is_in_that_call(remembering: Any) -> None:
    assert remembering(plain(5)) == [(5, True)]
    assert remembering(plain(5), syscall="0 0x1") == [(5, False)]
    assert remembering(plain(5), syscall="running") == [(5, None)]
    assert remembering(plain(5, tid=8)) == [(5, False)]  # there is no such thread
    # A call lets go of one part of its pages before it pins the next.
    assert remembering(plain(5), plain(6, start=ADDRESS + (1 << 20))) == [(5, False)]
    assert remembering(plain(5, stack=["os_lock_user_pages+1"])) == [(5, None)]


def test_a_look_tells_the_pins_that_came_or_went_since_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    made = observer()
    pins = {number: plain(number * 1_000_000, pages=4) for number in (1, 2, 50, 60)}
    now = {1: False, 2: True, 50: None, 60: False}
    found = [(pins[number], now[number]) for number in pins]
    monkeypatch.setattr(made, "_pins_on", lambda *_: iter(found))
    seen = Evidence(Failure(6, 6, "app", 40_000_000), Process(6))
    seen.pins = [(pins[1], True), (pins[2], True)]
    told_then = made._changed_pins(seen, ADDRESS, 4 * PAGE_SIZE)
    assert [(one["held"], one["age_seconds"] < 0) for one in told_then] == [(False, False), (None, True)]
    seen.pins = [(pins[1], None)]  # it may have ended before
    assert [one["held"] for one in made._changed_pins(seen, ADDRESS, 4 * PAGE_SIZE)] == [None]


def test_a_pin_from_before_the_process_started_is_of_another(remembering: Any) -> None:
    assert remembering(plain(5), plain(50), start=20) == [(50, True)]
    assert remembering(plain(5, start=ADDRESS + (1 << 20))) == []


def test_a_pin_has_ended_whose_unpin_was_seen(remembering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = observer()
    monkeypatch.setattr(made, "_pfn_of", lambda page: page // 64, raising=False)
    made._pins = {}
    first, second, other = (
        plain(number, stack=[], frames=np.arange(frame, frame + 8))
        for number, frame in ((1, 100), (5, 100), (6, 200))
    )
    made._pins[6] = evidence.deque([first, second, other])
    made.unpinned(7, 10, 64 * 100)  # another process
    made.unpinned(6, 10, 64 * 99)
    assert not any(pin.ended for pin in (first, second, other))
    made.unpinned(6, 10, 64 * 103)
    made.unpinned(6, 3, 64 * 203)  # before it was pinned
    assert [pin.ended for pin in (first, second, other)] == [False, True, False]
    made.unpinned(6, 11, 64 * 100)
    assert [pin.ended for pin in (first, second, other)] == [True, True, False]
    monkeypatch.setattr(process, "PROC", Path("/nowhere"))
    failure = Failure(6, 6, "app", 1000)
    found = [(pin.ns, is_held) for pin, is_held in made._pins_on(failure, ADDRESS, 8 * PAGE_SIZE)]
    assert found == [(1, False), (5, False), (6, None)]


@pytest.mark.parametrize("pages", [8, 1 << 20])
def test_pages_that_were_mapped_there_after_the_pin_are_not_what_was_pinned(
    monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """A pin tells the first page that it pinned; where it lies may be mapped anew before it is read."""
    monkeypatch.setattr(evidence, "_frames_at", lambda _pid, _first, number: np.arange(number) + 4096)
    for first, found in ((4096, None if pages > 8 else 8), (777, 1), (0, None if pages > 8 else 8)):
        made = observer()
        monkeypatch.setattr(made, "_pfn_of", lambda page: page // 64, raising=False)
        made._pins, made._framed, made._framed_at = {}, evidence.deque(), float("-inf")
        made.remember(plain(1, pages=pages, page=first * 64))
        ((one, _),) = made._pins_on(Failure(6, 6, "app", 1000), ADDRESS, 8 * PAGE_SIZE)
        assert (one.frames is None) == (found is None), first
        if one.frames is not None:
            assert len(one.frames) == found and one.frames[0] == (first or 4096)


def test_few_pins_are_remembered_with_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(evidence, "_frames_at", lambda _pid, first, pages: np.arange(pages) + first)
    monkeypatch.setattr(evidence, "_FRAMES_KEPT", 2)
    made = observer()
    made._pins, made._framed, made._framed_at = {}, evidence.deque(), float("-inf")
    pins = [plain(number) for number in range(4)]
    for one in pins[:2]:
        made.remember(one)
    assert [one.frames is not None for one in pins[:2]] == [True, False]  # they came too fast
    for one in pins[2:]:
        now[0] += 1.0
        made.remember(one)
    assert [one.frames is not None for one in pins] == [False, False, True, True]
    told_pin = made._told_pin(pins[2], None, Failure(6, 6, "app", 2_000_000_002))
    assert told_pin["pfn"] == [[0, ADDRESS, 8]] and told_pin["age_seconds"] == 2.0
    large = plain(9, pages=1 << 20)
    now[0] += 1.0
    made.remember(large)
    assert large.frames is None
