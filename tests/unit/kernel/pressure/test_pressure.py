"""Pressure on this machine, where no node has CMA: what it holds, refuses and gives back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from kernel_fakes import zone

from regrepro.core.memory import PAGE_SIZE
from regrepro.errors import Unmet
from regrepro.kernel.journal import Journal
from regrepro.kernel.pressure import cgroup, holder, pressure
from regrepro.kernel.zones import Zone

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="holding memory is left to root")

# The holder, on this machine: zones are made up, memory is real but little.


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Counters of a node with 96 MiB of ordinary memory and 64 MiB of CMA, as the holder's own use changes
    them.
    """
    facts: dict[str, Any] = {"ordinary": (96 << 20) // PAGE_SIZE, "cma": (64 << 20) // PAGE_SIZE, "slow": 0.0}

    def held() -> int:
        """Pages of this process' mappings without reserve: those that the holder makes."""
        size = total = 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if line.startswith("Rss:"):
                size = int(line.split()[1])
            elif line.startswith("VmFlags:") and "nr" in line.split():
                total += size
        return total * 1024 // PAGE_SIZE

    def zones() -> list[Zone]:
        time.sleep(facts["slow"])
        ordinary = facts["ordinary"] - held()
        return [zone(0, "Normal", ordinary + facts["cma"], facts["cma"], managed=64)]

    monkeypatch.setattr(holder, "read_zones", zones)
    monkeypatch.setattr(pressure, "read_zones", zones)
    monkeypatch.setattr(cgroup, "CGROUP_ROOTS", (tmp_path / "none",))
    monkeypatch.setattr(pressure, "gpu_users", list)
    monkeypatch.setattr(holder.Holder, "_places", lambda self, memory: _ordinary(memory))
    monkeypatch.setattr(holder, "_MARGIN", 1 << 20)
    return facts


def _ordinary(memory: Any) -> Any:
    import numpy

    return numpy.zeros(memory.length // PAGE_SIZE, dtype=numpy.uint8)


@needs_root
def test_it_holds_until_cma_would_come_out(scarce: dict[str, Any], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with pressure.Pressure(
        limit=256 << 20,
        memory_map=None,
        journal=Journal(tmp_path),
        report=lambda *held: told.append(held),
    ) as held:
        report = held.press(2 << 20)
        assert (96 - 64 + 2) << 20 <= report.held <= 48 << 20
        assert report.excess >= 2 << 20
        assert report.node == 0
        assert report.no_cgroup
        assert told
        assert held.held == report.held
        assert held.release() == report.held
        assert held.press(2 << 20).held >= 34 << 20
    assert list(tmp_path.glob("*.json")) == []


@needs_root
def test_too_small_a_limit_is_unmet_with_numbers(scarce: dict[str, Any], tmp_path: Path) -> None:
    with (
        pressure.Pressure(limit=16 << 20, memory_map=None, journal=Journal(tmp_path)) as held,
        pytest.raises(Unmet) as unmet,
    ):
        held.press(2 << 20)
    assert "64 MiB of free CMA" in unmet.value.why
    assert "limit is 16 MiB" in unmet.value.why
    assert "--pressure-limit" in unmet.value.how


@needs_root
def test_the_reserve_is_never_touched(scarce: dict[str, Any], tmp_path: Path) -> None:
    scarce["cma"] = 256  # 1 MiB: ordinary memory would have to be gone
    with (
        pressure.Pressure(limit=256 << 20, memory_map=None, journal=Journal(tmp_path)) as held,
        pytest.raises(Unmet, match="stay free for the kernel"),
    ):
        held.press(1 << 20)


@needs_root
def test_it_gives_up_in_good_time(scarce: dict[str, Any], tmp_path: Path) -> None:
    scarce["slow"] = 0.3
    began = time.monotonic()
    with (
        pressure.Pressure(limit=1 << 30, memory_map=None, journal=Journal(tmp_path), seconds=0.2) as held,
        pytest.raises(Unmet, match=r"not reached in 0 s: .* were held"),
    ):
        held.press(2 << 20)
    assert time.monotonic() - began < 10


@needs_root
def test_a_holder_that_is_killed_is_unmet(scarce: dict[str, Any], tmp_path: Path) -> None:
    with pressure.Pressure(limit=256 << 20, memory_map=None, journal=Journal(tmp_path)) as held:
        held.press(1 << 20)
        os.kill(held._pid, signal.SIGKILL)
        with pytest.raises(Unmet, match="is gone"):
            held.press(1 << 20)
        assert held._pid == 0


@needs_root
def test_it_is_refused_beside_gpu_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "gpu_users", lambda: [(4242, "train")])
    with pytest.raises(Unmet, match=r"train \(4242\)"):
        pressure.Pressure(limit=1 << 20, memory_map=None).start()


def test_it_is_left_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure.os, "geteuid", lambda: 1000)
    with pytest.raises(Unmet, match="left to root"):
        pressure.Pressure(limit=1 << 20, memory_map=None).start()
