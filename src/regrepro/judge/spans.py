"""Sets of page indexes as sorted, disjoint, half-open spans: a buffer costs what its runs cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
Run = tuple[int, int, A]
"""`(first, end, value)`: the pages first … end - 1 all have this value."""


def pages_text(count: int) -> str:
    """Return `1 page`, `2 pages`."""
    return "1 page" if count == 1 else f"{count} pages"


@dataclass(frozen=True)
class Spans:
    """An immutable set of page indexes. `Spans.of([(0, 3), (5, 6)])` holds 0, 1, 2 and 5."""

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Spans:
        """Make a set of spans `(first, end)` in any order; they may overlap, empty ones are left out."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted(pair for pair in pairs if pair[0] < pair[1]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((first, end))
        return cls(tuple(merged))

    @classmethod
    def range(cls, first: int, end: int) -> Spans:
        """Make the set first … end - 1."""
        return cls.of([(first, end)])

    def __bool__(self) -> bool:
        return bool(self.pairs)

    @property
    def total(self) -> int:
        """How many pages."""
        return sum(end - first for first, end in self.pairs)

    @property
    def first(self) -> int:
        """The lowest index. Raises `ValueError` for the empty set."""
        if not self.pairs:
            raise ValueError("the empty set has no first page")
        return self.pairs[0][0]

    def __or__(self, other: Spans) -> Spans:
        return Spans.of((*self.pairs, *other.pairs))

    def __and__(self, other: Spans) -> Spans:
        return Spans.of((max(a, c), min(b, d)) for a, b, c, d in _overlaps(self.pairs, other.pairs))

    def __sub__(self, other: Spans) -> Spans:
        left: list[tuple[int, int]] = []
        at = 0
        for first, end in self.pairs:
            while at < len(other.pairs) and other.pairs[at][1] <= first:
                at += 1
            start, index = first, at
            while index < len(other.pairs) and other.pairs[index][0] < end:
                left.append((start, other.pairs[index][0]))
                start = other.pairs[index][1]
                index += 1
            left.append((start, end))
        return Spans.of(left)

    def __le__(self, other: Spans) -> bool:
        return not self - other

    def __str__(self) -> str:
        """Return `0-2, 5`; many spans are cut short."""
        shown = [str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in self.pairs[:6]]
        return ", ".join(shown) + (", …" if len(self.pairs) > 6 else "")


def _overlaps(
    left: tuple[tuple[int, int], ...], right: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, int, int, int]]:
    i = j = 0
    while i < len(left) and j < len(right):
        (a, b), (c, d) = left[i], right[j]
        if max(a, c) < min(b, d):
            yield a, b, c, d
        if b <= d:
            i += 1
        else:
            j += 1


def together(left: list[Run[A]], right: list[Run[B]]) -> Iterator[tuple[int, int, A, B]]:
    """Walk two sorted lists of runs and yield `(first, end, left's value, right's value)` where both are."""
    i = j = 0
    while i < len(left) and j < len(right):
        first, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first < end:
            yield first, end, left[i][2], right[j][2]
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
