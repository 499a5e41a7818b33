"""Some thousands of generated inputs to each parser of foreign text; `scripts/fuzz` gives them a million
each.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fuzz_properties import PROPERTIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCRIPTS = Path(__file__).parents[2] / "scripts"


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
    script = SCRIPTS / "fuzz"
    done = subprocess.run([script, "30", "versions"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "versions: 30 inputs, no crash, no hang" in done.stdout
    wrong = subprocess.run([script, "30", "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "no property nonsense" in wrong.stderr


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPTS / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planted(value: str) -> None:
    if "b" in value and str(2**63) in value:
        raise ZeroDivisionError("planted")


def slow(value: str) -> None:
    if "b" in value:
        time.sleep(0.02)


@pytest.mark.parametrize(("property_", "why"), [(planted, "ZeroDivisionError: planted"), (slow, "0 s")])
def test_the_long_run_ends_at_what_breaks_a_parser(
    property_: Any, why: str, fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hypothesis itself makes no "b": only kin can, which numbers and noise are part of.
    monkeypatch.setitem(PROPERTIES, "planted", (st.text(alphabet="ac"), property_, 1))
    monkeypatch.setattr(fuzz, "CHARACTERS", "ab1")
    monkeypatch.setattr(fuzz, "TOO_LONG", 0.01 if property_ is slow else 10.0)
    with pytest.raises(fuzz.Broken, match=why):
        fuzz.run("planted", 10_000)


@pytest.mark.parametrize(
    "value", ["text", b"bytes", ["a", [1]], {"a": 1, "b": {"c": "d"}}, 7, (b"data", 3)], ids=repr
)
def test_kin_keep_their_kind_and_differ(value: Any, fuzz: ModuleType) -> None:
    rng = random.Random(1)
    relatives = [fuzz.kin(value, [value], rng) for _ in range(200)]
    assert {type(one) for one in relatives} == {type(value)}
    assert len({repr(one) for one in relatives}) > 20


def test_kin_keep_the_range_of_a_number_beside_data(fuzz: ModuleType) -> None:
    rng = random.Random(1)
    assert {fuzz.kin((b"a", 1), [(b"a", 1), (b"b", 40)], rng)[1] for _ in range(100)} == {1, 40}
