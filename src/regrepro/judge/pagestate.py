"""What one page state of the record says, and what two of them say of movement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from regrepro.judge.spans import Run, Spans, together

UNPINNABLE = frozenset({"cma", "isolate", "movable-zone"})
"""Places where `folio_is_longterm_pinnable` (include/linux/mm.h) is false for an ordinary user page."""

PLACES = UNPINNABLE | {"ordinary", "unknown", "absent"}


PIN_BIAS = 1024
"""GUP_PIN_COUNTING_BIAS, include/linux/mm.h: what one FOLL_PIN adds to a small page's `_refcount`."""


def cache_references(backing: str) -> int:
    """References that a page of this backing has besides those of its mappings.

    The page cache holds one on pages of files, memfds and shared memory, none on anonymous ones
    (`folio_expected_ref_count`, include/linux/mm.h). So a shared-memory page at 2, mapped once, is not
    pinned.
    """
    return 0 if backing in ("anonymous", "thp", "cuda-host") else 1


def whole_number(value: object) -> int | None:
    """Return the value if it is an integer of JSON (a bool is none), else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(eq=False)
class PageState:
    """A buffer's pages at one moment. Runs are `(first, end, value)`; for `pfn` the value is the difference
    of PFN and page index, so that equal values on one page mean the same PFN.
    """

    pages: int
    pfn: list[Run[int]]
    place: list[Run[str]]
    counts: dict[str, list[Run[int]]] = field(default_factory=dict)
    traits: list[Run[str]] = field(default_factory=list)
    how: str = "observed"
    source: str = ""
    problems: list[str] = field(default_factory=list)
    _compared: dict[int, tuple[PageState, Spans, Spans]] = field(default_factory=dict, repr=False)

    @cached_property
    def present(self) -> Spans:
        """The pages that have a PFN."""
        return Spans.of((first, end) for first, end, _ in self.pfn)

    def placed(self, *names: str) -> Spans:
        """The pages in any of these places."""
        return Spans.of((first, end) for first, end, name in self.place if name in names)

    @cached_property
    def unpinnable(self) -> Spans:
        """The present pages from which Linux refuses a long-term pin."""
        return self.placed(*UNPINNABLE) & self.present

    def known(self, count: str) -> Spans:
        """The pages whose `refcount`, `mapcount`, `pincount` or `node` is known."""
        return where(self.counts.get(count, []), lambda _: True)

    def where(self, count: str, test: Callable[[int], bool]) -> Spans:
        """The pages whose count is known and passes a test."""
        return where(self.counts.get(count, []), test)

    def bounds(self, count: str, spans: Spans) -> tuple[int, int] | None:
        """Least and greatest known count on these pages; None where none is known."""
        within = [(first, end, None) for first, end in spans.pairs]
        values = [value for _, _, value, _ in together(self.counts.get(count, []), within)]
        return (min(values), max(values)) if values else None

    def unmoved(self, later: PageState) -> Spans:
        """The pages that have the same PFN in a later state."""
        return self._compare(later)[1]

    def moved(self, later: PageState) -> Spans:
        """The pages that have another PFN in a later state. Pages absent in either are in neither set."""
        return self._compare(later)[2]

    def _compare(self, later: PageState) -> tuple[PageState, Spans, Spans]:
        """Compare the PFNs of two states once; every rule asks again."""
        if id(later) not in self._compared:
            same: list[tuple[int, int]] = []
            other: list[tuple[int, int]] = []
            for first, end, old, new in together(self.pfn, later.pfn):
                (same if old == new else other).append((first, end))
            # The later state is kept, so that its id stays its own.
            self._compared[id(later)] = (later, Spans.of(same), Spans.of(other))
        return self._compared[id(later)]

    def excess(self, cached: int) -> list[Run[int]]:
        """References beyond those that are due, where that is known.

        What is due the record says itself (`baseline`); where it does not, one for each mapping and `cached`
        (see `cache_references`).
        """
        refcount, mapcount = self.counts.get("refcount", []), self.counts.get("mapcount", [])
        baseline = self.counts.get("baseline", [])
        if baseline:
            return [(a, b, refs - due) for a, b, refs, due in together(refcount, baseline)]
        return [(a, b, refs - maps - cached) for a, b, refs, maps in together(refcount, mapcount)]

    @property
    def explained(self) -> Spans:
        """The pages of which it is known how many references are due."""
        return self.known("baseline") if self.counts.get("baseline") else self.known("mapcount")

    @property
    def shared(self) -> Spans:
        """The pages that more than this process' one mapping refers to, or that KSM merged, as far as that is
        known: a write, or a pin for writing, copies them (`do_wp_page`, mm/memory.c).
        """
        merged = self.trait("shared") | self.trait("ksm")
        return self.where("mapcount", lambda count: count > 1) | merged

    def copied_by_a_write(self, *, shared_mapping: bool) -> Spans:
        """The pages that a write, or a pin for writing, replaces by copies: of a private mapping those that
        others refer to, and all of its file, mapped once or not (`do_wp_page`, mm/memory.c, copies what is
        not an exclusive anonymous page; where VM_SHARED is set it copies nothing).
        """
        return Spans() if shared_mapping else self.shared | self.trait("file")

    def trait(self, word: str) -> Spans:
        """The pages that bear a trait."""
        return Spans.of((first, end) for first, end, words in self.traits if word in words.split())

    def change(self, later: PageState, count: str) -> list[Run[int]]:
        """By how much a count changed on pages that kept their PFN."""
        steps = together(self.counts.get(count, []), later.counts.get(count, []))
        changes = [(a, b, new - old) for a, b, old, new in steps]
        same = [(a, b, 0) for a, b in self.unmoved(later).pairs]
        return [(a, b, step) for a, b, step, _ in together(changes, same)]


def where(runs: list[Run[int]], test: Callable[[int], bool]) -> Spans:
    """The pages of runs whose value passes a test."""
    return Spans.of((first, end) for first, end, value in runs if test(value))


class StateReader:
    """Reads page states of a record, each once: large ones stand in it once and are referred to."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[object, PageState | None, list[str]]] = {}

    def __call__(self, value: object, what: str, problems: list[str]) -> PageState | None:
        """As `read_page_state`."""
        if id(value) not in self._read:
            found: list[str] = []
            # The value is kept, so that its id stays its own.
            self._read[id(value)] = (value, read_page_state(value, what, found), found)
        _, state, found = self._read[id(value)]
        problems += found
        return state


def read_page_state(value: object, what: str, problems: list[str]) -> PageState | None:
    """Read a page state of docs/record.md. What is malformed is told in `problems` and counts as unknown."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        problems.append(f"{what} is no page state")
        return None
    pages = whole_number(value.get("pages"))
    if pages is None or pages < 0:
        problems.append(f"{what} does not say how many pages it has")
        return None
    pfn_runs: list[Run[int]] = []
    given = value.get("pfn")
    if not isinstance(given, list):
        problems.append(f"{what} has no PFNs")
        return None
    for run in given:
        # `type` and not `isinstance`: a bool is no number, and a buffer may have a million runs.
        if type(run) is not list or len(run) != 3 or any(type(item) is not int for item in run):
            problems.append(f"{what} has a malformed run of PFNs")
            return None
        pfn_runs.append((run[0], run[0] + run[2], run[1] - run[0]))
    if not _well_formed(pfn_runs, pages):
        problems.append(f"{what} has runs of PFNs that overlap or lie outside of the buffer")
        return None
    state = PageState(
        pages,
        sorted(pfn_runs),
        [],
        how=value["how"] if isinstance(value.get("how"), str) else "observed",
        source=value["source"] if isinstance(value.get("source"), str) else "",
    )
    place = value_runs(value.get("place"), pages, str)
    if place is None:
        problems.append(f"{what} has malformed places")
    else:
        state.place = [(first, end, name if name in PLACES else "unknown") for first, end, name in place]
    for name in ("refcount", "pincount", "mapcount", "baseline", "node", "traits"):
        if value.get(name) is None:
            continue
        runs = value_runs(value[name], pages, str if name == "traits" else int)
        if runs is None:
            problems.append(f"{what} has {'' if name == 'traits' else 'a '}malformed {name}")
        elif name == "traits":
            state.traits = runs
        else:
            state.counts[name] = runs
    told = value.get("problems")
    if isinstance(told, list):
        state.problems = [text for text in told if isinstance(text, str)]
    return state


def value_runs(value: Any, pages: int, kind: type) -> list[Run[Any]] | None:
    """Read runs `[first, count, value]` as `(first, end, value)`; None where they are malformed."""
    if not isinstance(value, list):
        return None
    runs: list[Run[Any]] = []
    for run in value:
        if not isinstance(run, list) or len(run) != 3:
            return None
        first, count, what = whole_number(run[0]), whole_number(run[1]), run[2]
        if first is None or count is None or not isinstance(what, kind) or isinstance(what, bool):
            return None
        runs.append((first, first + count, what))
    runs.sort(key=lambda run: run[0])
    return runs if _well_formed(runs, pages) else None


def _well_formed(runs: list[Run[Any]], pages: int) -> bool:
    """Runs are not empty, lie within the buffer and do not overlap."""
    ordered = sorted(runs, key=lambda run: run[0])
    inside = all(0 <= first < end <= pages for first, end, _ in ordered)
    return inside and all(before[1] <= after[0] for before, after in pairwise(ordered))
