"""Some thousands of generated inputs to each parser of foreign text; `scripts/fuzz` gives them a million
each.
"""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path

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


def test_the_long_run_works_and_names_what_it_does_not_know() -> None:
    script = Path(__file__).parents[2] / "scripts" / "fuzz"
    done = subprocess.run([script, "30", "versions"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "versions: 30 inputs, no crash, no hang" in done.stdout
    wrong = subprocess.run([script, "30", "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "no property nonsense" in wrong.stderr
