"""The pages that a failed migration left behind in a program of somebody's, by their frames: which they are,
what they bore at that moment, and what they bore whenever `watch` looked again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from regrepro.judge.facts import Look, Pass, Registration
from regrepro.judge.pagestate import PIN_BIAS, PageState, cache_references, whole_number
from regrepro.judge.spans import Run, Spans, pages_text

T = TypeVar("T")

_LARGEST = 1 << 18
"""More pages of 4 KiB no folio has: 1 GiB."""

_ISOLATED = 1
"""A page on migrate_pages' list has one reference of its isolation (`folio_isolate_lru`, mm/vmscan.c)."""


@dataclass(frozen=True)
class Excess:
    """What a page bears beyond what is due: FOLL_PINs, other references, and how many of these per-CPU
    batches may hold (`slack`).
    """

    pins: int
    references: int
    slack: int = 0

    @property
    def held(self) -> bool:
        """Whether somebody holds the page, whatever batches hold."""
        return self.pins > 0 or self.references > self.slack

    @classmethod
    def of_small(cls, above: int, slack: int = 0) -> Excess:
        """Read it from a small page's references beyond those that are due (`GUP_PIN_COUNTING_BIAS`)."""
        return cls(above // PIN_BIAS, above % PIN_BIAS, slack)


@dataclass
class LeftBehind:
    """The pages of one failed registration that were left behind."""

    run: Pass
    registration: Registration

    @property
    def told(self) -> list[Mapping[str, Any]]:
        """Those of which the kernel told at that moment: the first few."""
        return self.registration.stuck

    @property
    def told_frames(self) -> set[int]:
        """The PFNs of those that the kernel told of."""
        return {pfn for page in self.told if (pfn := whole_number(page.get("pfn"))) is not None}

    @property
    def count(self) -> int:
        """How many the last migration left behind, as it returned (pages, or large folios: each as one)."""
        return self.registration.trace.left_behind

    def __str__(self) -> str:
        return pages_text(self.count)

    @cached_property
    def looks(self) -> list[Look]:
        """The later looks that saw something."""
        return [look for look in self.run.looks if look.state is not None]

    @cached_property
    def frames(self) -> dict[int, int]:
        """The PFNs by page of the range: those that lay in unpinnable memory right after the failure, in the
        part that was being pinned.
        """
        state = self.registration.before
        if state is None:
            return {}
        part = self.registration.spans
        if self.looks:
            first, seen = self.looks[0].first, self.looks[0].state
            part = Spans.range(first, first + seen.pages) if seen is not None else part
        return pfns(state, state.unpinnable & part)

    @cached_property
    def folios(self) -> list[set[int]]:
        """The pages of `frames` by their folio. Where the kernel did not tell the first page of each large
        folio, each page is taken for one by itself.
        """
        state = self.registration.before
        whole = set(pfns(state, state.trait("large"))) & self.frames.keys() if state is not None else set()
        told = (whole_number(page.get("pfn")) for page in self.told if "pincount" in page)
        heads = sorted(pfn for pfn in told if pfn is not None)
        if len(heads) < self.count - (len(self.frames) - len(whole)):
            return [{page} for page in self.frames]
        found: dict[int, set[int]] = {}
        for page, pfn in self.frames.items():
            at = bisect_right(heads, pfn) - 1
            head = heads[at] if page in whole and at >= 0 else pfn
            found.setdefault(head, set()).add(page)
        return list(found.values())

    def doubt(self) -> str:
        """Why `frames` may not be those that were left behind, "" where they are: as many, with those that
        the kernel told of among them.
        """
        state = self.registration.before
        if state is None:
            return f"which pages they are is not known ({self.registration.pages_unknown or 'not read'})"
        frames, whole = set(self.frames.values()), set(pfns(state, state.trait("large")).values())
        large = frames & whole
        for pfn in self.told_frames - frames:
            # Of a large folio the kernel told its first page, which the range may not have.
            if not any(0 < other - pfn < _LARGEST for other in large):
                return "pages that the kernel told of were no longer there right afterwards"
        small = len(frames - whole)
        if not small + bool(large) <= self.count <= small + len(large):
            return f"{len(frames)} pages of that part lay in unpinnable memory right then, not {self.count}"
        return ""

    def at_the_moment(self) -> dict[int, Excess]:
        """What the pages that the kernel told of bore when they would not move, by PFN.

        On migrate_pages' list a page has one reference for each mapping, one of the isolation, those of page
        and swap cache, and the holder's (`folio_expected_ref_count`, include/linux/mm.h). The count of a
        large folio's mappings was not told: its pins alone are known.
        """
        found: dict[int, Excess] = {}
        for page in self.told:
            numbers = (whole_number(page.get(name)) for name in ("pfn", "refcount", "mapcount"))
            pfn, count, maps = numbers
            pins = whole_number(page.get("pincount"))
            if pfn is None or count is None:
                continue
            if "pincount" in page:
                # The map count of a hugetlb page's first may be its type (PGTY_hugetlb, 6.11).
                if pins:
                    found[pfn] = Excess(pins, 0)
                continue
            if maps is None or maps < 0:
                continue
            above = count - maps - _ISOLATED - self._cached.get(pfn, self._of_backing)
            found[pfn] = Excess.of_small(max(above, 0))
        return found

    @cached_property
    def _of_backing(self) -> int:
        buffer = self.run.buffers.get(self.registration.buffer)
        return cache_references(buffer.backing) if buffer is not None else 0

    @cached_property
    def _cached(self) -> dict[int, int]:
        """References of page cache, swap cache and private data right afterwards, by PFN."""
        state = self.registration.before
        if state is None:
            return {}
        due, maps = (by_page(state.counts.get(name, [])) for name in ("baseline", "mapcount"))
        return {
            pfn: due[page] - maps[page] for page, pfn in self.frames.items() if page in due and page in maps
        }

    def at(self, look: Look) -> dict[int, Excess | None]:
        """What each page bore at a later look, None where its counts are not known. A page is left out whose
        frame is no longer the same.
        """
        state = look.state
        if state is None:
            return {}
        now, pins = pfns(state, state.present), by_page(state.counts.get("pincount", []))
        above, words = by_page(state.excess(self._of_backing)), by_page(look.lists or [])
        found: dict[int, Excess | None] = {}
        for page, pfn in self.frames.items():
            here = page - look.first
            if now.get(here) != pfn:
                continue
            if here not in above:
                found[page] = None
            elif here in pins:
                found[page] = Excess(pins[here], max(above[here] - pins[here], 0))
            else:
                found[page] = Excess.of_small(above[here], _slack(words.get(here)))
        return found


def _slack(words: str | None) -> int:
    """How many references of a small page per-CPU batches may hold (mm/swap.c).

    A page that is put back after a migration waits in a batch, with one reference, until it is on a list:
    PG_lru tells. Another waits in mlock's (mm/mlock.c). A page on a list may wait to be activated, too, which
    no flag tells; but whoever unmaps or exits on that CPU drains its batches (`lru_add_drain`), and half a
    minute is long for that.
    """
    if words is None:
        return 2
    told = words.split()
    return ("lru" not in told) + ("mlocked" in told)


def by_page(runs: list[Run[T]]) -> dict[int, T]:
    """Return runs as a value for each page."""
    return {page: value for first, end, value in runs for page in range(first, end)}


def pfns(state: PageState, pages: Spans) -> dict[int, int]:
    """Return the PFNs of some pages."""
    wanted = {page for first, end in pages.pairs for page in range(first, end)}
    return {page: page + ahead for page, ahead in by_page(state.pfn).items() if page in wanted}
