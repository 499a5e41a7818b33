"""Stages for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage_fakes import Bench, FakeBackend, RealMemory

from regrepro.stage import Stage


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A stage on a machine made of numbers, and the record that it writes."""
    return Bench(tmp_path, FakeBackend())


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A stage whose memory is this process' own."""
    return Bench(tmp_path, RealMemory()).stage
