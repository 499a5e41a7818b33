"""Does what held the pages of a caught failure last? Each rule with evidence that lacks or turns exactly one
thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from watch_fakes import ADDRESS, LENGTH, Pages, held, held_failure, judged, lasting, later, state

from regrepro.watch.evidence import LOOKS
from regrepro.watch.later_looks import no_look


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
    large: dict[str, Any] = {
        "traits": [[0, 8, "anonymous exclusive large"]],
        "pincount": [[0, 8, looked]],
        "baseline": [[0, 8, 8]],
    }
    pages = Pages("cma", 8 + pincount)
    pages.state |= {**large, "pincount": [[0, 8, pincount]]}
    return judged(
        held_failure(stayed=count),
        first=ADDRESS,
        length=LENGTH,
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
