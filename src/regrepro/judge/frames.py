"""Which pins stand on the pages of a registration: pages are the same if their frames (PFNs) are.

One page may be mapped at several addresses: a memfd mapped twice, NCCL's shared memory between processes. A
pin by one mapping holds the frame, and so the pages of every other mapping of it (`try_grab_folio`, mm/gup.c,
counts in the folio, which knows no mapping). And a buffer's address may get another frame while a pin still
holds the old one: copy-on-write after a fork, mremap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from regrepro.judge.facts import Pin, Registration
from regrepro.judge.pagestate import PageState
from regrepro.judge.spans import Run, Spans, together


@dataclass(frozen=True)
class _Shift:
    """The pages first … end - 1 of one buffer are the pages from `source` on of another."""

    first: int
    end: int
    source: int


def pins_on(registration: Registration) -> list[Pin]:
    """The pins that stood on pages of a registration when it began, as seen from its buffer.

    What each says of pages (`spans`, `before`, `after`, that of its release) is by page of the registration's
    buffer.
    """
    found = []
    for pin in registration.standing:
        seen = _seen_from(pin, registration)
        if seen is not None and seen.spans & registration.spans:
            found.append(seen)
    return found


def same_frames(one: PageState, pages: Spans, other: PageState) -> Spans:
    """The pages of `other` that have the frames of these pages of `one`."""
    return Spans.of((shift.first, shift.end) for shift in _shifts(one, pages, other))


def _seen_from(pin: Pin, registration: Registration) -> Pin | None:
    """A pin with its pages by those of a registration's buffer; None where it has none of its frames.

    Of its own buffer a pin holds the pages that are not known to have another frame by now.
    """
    before = registration.before
    own = pin.buffer == registration.buffer
    if pin.after is None or before is None:
        return pin if own else None
    gone = pin.spans & pin.after.moved(before) if own else pin.spans
    if not gone:
        return pin
    shifts = _shifts(pin.after, gone, before)
    if own:
        shifts += [_Shift(first, end, first) for first, end in (pin.spans - gone).pairs]
    if not shifts:
        return None
    release = pin.release
    if release is not None and release.after is not None:
        release = replace(release, after=_by_shifts(release.after, shifts, before.pages))
    return replace(
        pin,
        spans=Spans.of((shift.first, shift.end) for shift in shifts),
        before=_by_shifts(pin.before, shifts, before.pages) if pin.before is not None else None,
        after=_by_shifts(pin.after, shifts, before.pages),
        release=release,
    )


def _shifts(one: PageState, pages: Spans, other: PageState) -> list[_Shift]:
    """Where `other` has the frames that these pages of `one` have."""
    whole = [(first, end, None) for first, end in pages.pairs]
    frames = sorted((first + by, end + by, first) for first, end, by, _ in together(one.pfn, whole))
    starts = [frame[0] for frame in frames]
    found = []
    for first, end, by in other.pfn:
        at = max(0, bisect_right(starts, first + by) - 1)
        while at < len(frames) and frames[at][0] < end + by:
            low, high = max(first + by, frames[at][0]), min(end + by, frames[at][1])
            if low < high:
                found.append(_Shift(low - by, high - by, frames[at][2] + low - frames[at][0]))
            at += 1
    return found


def _by_shifts(state: PageState, shifts: list[_Shift], pages: int) -> PageState:
    """A state of the pages that the shifts name, by their numbers in the other buffer."""
    layers = list(_disjoint(shifts))

    def moved(runs: list[Run[object]], *, numbers: bool = False) -> list[Run[object]]:
        made: list[Run[object]] = []
        for layer in layers:
            for first, end, value, by in together(runs, layer):
                # The value of a PFN's run is the difference of PFN and page number.
                made.append((first + by, end + by, value - by if numbers else value))  # type: ignore[operator]
        return sorted(made, key=lambda run: run[0])

    return replace(
        state,
        pages=pages,
        pfn=moved(state.pfn, numbers=True),  # type: ignore[arg-type]
        place=moved(state.place),  # type: ignore[arg-type]
        counts={name: moved(runs) for name, runs in state.counts.items()},  # type: ignore[arg-type,misc]
        traits=moved(state.traits),  # type: ignore[arg-type]
        _compared={},
    )


def _disjoint(shifts: Iterable[_Shift]) -> Iterator[list[Run[int]]]:
    """Yield the shifts as lists of `(source, end of source, by)` that do not overlap: a buffer may have one
    frame at two addresses.
    """
    left = sorted(((shift.source, shift.first, shift.end) for shift in shifts), key=lambda item: item[0])
    while left:
        layer: list[Run[int]] = []
        rest = []
        for source, first, end in left:
            if layer and source < layer[-1][1]:
                rest.append((source, first, end))
            else:
                layer.append((source, source + end - first, first - source))
        yield layer
        left = rest
