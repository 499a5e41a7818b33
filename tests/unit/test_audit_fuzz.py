"""Some thousands of generated inputs to each parser of foreign text; `scripts/fuzz` gives them a million
each.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from fuzz_properties import PROPERTIES
from hypothesis import HealthCheck, given, settings


@pytest.mark.parametrize("name", PROPERTIES)
def test_no_crash_and_no_hang(name: str) -> None:
    strategy, holds, count = PROPERTIES[name]

    @settings(
        max_examples=count,
        deadline=timedelta(seconds=5),
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(value: object) -> None:
        holds(value)

    check()


def test_they_are_some_thousands() -> None:
    assert sum(count for _, _, count in PROPERTIES.values()) >= 3000
