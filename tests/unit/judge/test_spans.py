"""Sets of pages as spans behave like sets; page states say what moved."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_builder import state

from regrepro.judge.pagestate import read_page_state
from regrepro.judge.rules import reached
from regrepro.judge.spans import Spans, together

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


def members(spans: Spans) -> set[int]:
    return {index for first, end in spans.pairs for index in range(first, end)}


def plain(pairs: list[tuple[int, int]]) -> set[int]:
    return {index for first, end in pairs for index in range(first, end)}


@given(PAIRS, PAIRS)
def test_spans_are_sets(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    a, b = Spans.of(one), Spans.of(two)
    assert members(a) == plain(one)
    assert members(a & b) == plain(one) & plain(two)
    assert members(a | b) == plain(one) | plain(two)
    assert members(a - b) == plain(one) - plain(two)
    assert (a <= b) == (plain(one) <= plain(two))
    assert bool(a) == bool(plain(one))
    assert a.total == len(plain(one))
    assert (a == b) == (plain(one) == plain(two))
    if a:
        assert a.first == min(plain(one))


def test_together_walks_runs_in_step() -> None:
    left, right = [(0, 4, "a"), (6, 9, "b")], [(2, 7, 1), (8, 20, 2)]
    assert list(together(left, right)) == [(2, 4, "a", 1), (6, 7, "b", 1), (8, 9, "b", 2)]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=12)
)
def test_movement_is_told_page_by_page(before: list[int], after: list[int]) -> None:
    size = min(len(before), len(after))
    problems: list[str] = []
    one = read_page_state(state(before[:size]), "one", problems)
    two = read_page_state(state(after[:size]), "two", problems)
    assert one is not None and two is not None and not problems
    both = [n for n in range(size) if before[n] and after[n]]
    assert members(one.moved(two)) == {n for n in both if before[n] != after[n]}
    assert members(one.unmoved(two)) == {n for n in both if before[n] == after[n]}


@pytest.mark.parametrize(
    "value",
    [
        7,
        {},
        {"pages": True},
        {"pages": -1},
        {"pages": 2},
        {"pages": 2, "pfn": [[0, 5]]},
        {"pages": 2, "pfn": [[0, 5, 3]]},
        {"pages": 2, "pfn": [[0, 5, 0]]},
        {"pages": 2, "pfn": [[0, 5, 2], [1, 9, 1]]},
        {"pages": 2, "pfn": [["0", 5, 2]]},
    ],
)
def test_a_malformed_state_is_unknown_and_told(value: Any) -> None:
    problems: list[str] = []
    assert read_page_state(value, "it", problems) is None
    assert problems


def all_of(first: int, end: int) -> Spans:
    return Spans.range(first, end)


@pytest.mark.parametrize(
    ("unpinnable", "stuck", "end"),
    [
        (
            all_of(0, 2000),
            all_of(10, 11),
            512,
        ),  # the call had nothing to take first: the whole batch was tried
        (all_of(0, 2000), all_of(700, 701), 1024),  # the second batch
        (
            all_of(5, 2000),
            all_of(10, 11),
            522,
        ),  # took 5, then what moved, then began at the page that is stuck
        (all_of(600, 601), all_of(600, 601), 1112),
        (all_of(1990, 2000), all_of(1995, 1996), 2000),
    ],
)
def test_how_far_a_failing_registration_came(unpinnable: Spans, stuck: Spans, end: int) -> None:
    asked = all_of(0, 2000)
    assert reached(asked, unpinnable, asked, stuck, 512) == all_of(0, end)
