"""Pressure where no node has CMA: what counters say, who uses a GPU, the control group, the holder."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrepro.core.memory import PAGE_SIZE
from regrepro.errors import Unmet
from regrepro.kernel import pressure
from regrepro.kernel.journal import Journal
from regrepro.kernel.zones import Zone

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="holding memory is left to root")


def zone(node: int, name: str, free: int, free_cma: int | None = None, **more: int) -> Zone:
    managed = more.pop("managed", 64 * free)
    made = Zone(node, name, 1, managed, managed, managed, free, free_cma=free_cma)
    for key, value in more.items():
        setattr(made, key, value)
    return made


def test_cma_comes_out_once_it_is_more_than_half_of_what_is_free() -> None:
    seen = pressure.outlook([zone(0, "DMA32", 1000, 200)], 0)
    assert (seen.kind, seen.before, seen.ordinary) == ("cma", 600, 800)
    assert pressure.outlook([zone(0, "DMA32", 1000, 600)], 0).before == -200


def test_the_zones_above_come_first_down_to_their_low_watermark() -> None:
    zones = [zone(0, "DMA32", 500, 100), zone(0, "Normal", 1000, low=50)]
    assert pressure.outlook(zones, 0).before == 950 + 300


def test_zone_movable_needs_no_pressure() -> None:
    zones = [zone(0, "Normal", 1000), zone(0, "Movable", 10, low=3)]
    seen = pressure.outlook(zones, 0)
    assert (seen.kind, seen.before) == ("movable-zone", 0)
    assert pressure.outlook([zone(0, "Normal", 9), zone(0, "Movable", 3, low=3)], 0).kind is None


def test_the_reserve_comes_from_the_watermarks() -> None:
    seen = pressure.outlook([zone(0, "Normal", 1000, 100, min=10, low=15, high=20, managed=64)], 0)
    assert seen.reserve == 20 + 2 * 10
    assert seen.room == 900 - 40
    assert pressure.outlook([zone(0, "Normal", 1000, 100, managed=6400)], 0).reserve == 100


def test_the_nearest_node() -> None:
    zones = [zone(0, "Normal", 1000, 10), zone(1, "Normal", 100, 10), zone(2, "Normal", 5)]
    nearest = pressure.nearest_node(zones)
    assert nearest is not None
    assert nearest.node == 1
    assert pressure.nearest_node(zones[2:]) is None


@given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_holding_what_is_told_makes_cma_come_out(free: int, cma: int) -> None:
    """As the kernel counts: after `before` ordinary pages are gone, free CMA is half of what is free."""
    cma = min(cma, free)
    seen = pressure.outlook([zone(0, "Normal", free, cma)], 0)
    if seen.kind == "cma":
        left = free - max(0, seen.before)
        assert cma * 2 >= left


def test_half_of_the_cma_is_left_to_drivers() -> None:
    assert pressure.cma_cap([zone(0, "Normal", 1000, 100), zone(1, "Normal", 50)]) == 50 * PAGE_SIZE


def test_the_least_limit_suffices_for_what_it_is_told_for() -> None:
    zones = [zone(0, "Normal", 200_000, 50_000, managed=64)]
    least = pressure.least_limit(zones, 0, wanted=1 << 20)
    assert least is not None
    assert least > 100_000 * PAGE_SIZE
    assert pressure.least_limit([zone(0, "Normal", 10**9, 1, managed=64)], 0) is None
    assert pressure.least_limit([zone(0, "Normal", 10**9)], 0) is None


def test_free_memory_in_large_pieces() -> None:
    text = (
        "Node 0, zone      DMA      1      0      2\n"
        "Node 0, zone   Normal      9      5      3\n"
        "Node 1, zone   Normal      9      5      7\n"
    )
    assert pressure.free_large_bytes(text, 0, 2) == (2 + 3) * 4 * PAGE_SIZE
    assert pressure.free_large_bytes(text, 1, 1) == (5 * 2 + 7 * 4) * PAGE_SIZE
    assert pressure.free_large_bytes("nonsense", 0, 0) == 0


def test_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(pressure.time, "monotonic", lambda: now[0])
    psi = tmp_path / "memory"
    text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
    psi.write_text(text.format(1000))
    stalls = pressure.Stalls(psi)
    assert stalls.share() == 0.0
    now[0] += 2
    psi.write_text(text.format(1_001_000))
    assert stalls.share() == pytest.approx(0.5)
    now[0] += 2
    assert stalls.share() == 0.0
    assert stalls.worst == pytest.approx(0.5)
    without = pressure.Stalls(tmp_path / "missing")
    now[0] += 2
    assert without.share() == 0.0
    assert without.worst is None


def process(proc: Path, pid: int, name: str, *files: str) -> None:
    folder = proc / str(pid) / "fd"
    folder.mkdir(parents=True)
    (proc / str(pid) / "comm").write_text(f"{name}\n")
    for number, file in enumerate(files):
        (folder / str(number)).symlink_to(file)


def test_who_uses_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure.os, "getsid", lambda pid: 1 if pid in (0, 1000) else pid)
    process(tmp_path, 4000, "train", "/dev/null", "/dev/nvidia3")
    process(tmp_path, 4001, "shell", "/dev/nvidiactl")
    process(tmp_path, 4002, "nvidia-persiste", "/dev/nvidia0")
    process(tmp_path, 1000, "of our session", "/dev/nvidia0")
    process(tmp_path, os.getpid(), "ourselves", "/dev/nvidia0")
    assert pressure.gpu_users(tmp_path, ask_driver=False) == [(4000, "train")]


def test_nvidia_smi_is_asked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "_asked_of_nvidia_smi", lambda: [(77, "python3")])
    assert pressure.gpu_users(tmp_path) == [(77, "python3")]


def fake_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controllers: str, on: str) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text(controllers)
    (root / "cgroup.subtree_control").write_text(on)
    monkeypatch.setattr(pressure, "CGROUP_ROOTS", (tmp_path / "none", root))
    return root


def test_a_control_group_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fake_root(tmp_path, monkeypatch, "cpu memory", "cpu")
    journal = Journal(tmp_path)
    group = pressure.Cgroup(journal, 4096)
    assert group.path is not None
    assert (group.path / "memory.max").read_text() == "4096"
    assert (root / "cgroup.subtree_control").read_text() == "+memory"
    [entry] = journal.entries
    assert entry.data == {"path": str(group.path), "enabled": str(root / "cgroup.subtree_control")}
    for file in group.path.iterdir():  # the kernel's files go with the directory
        file.unlink()
    group.remove()
    assert journal.entries == []
    assert (root / "cgroup.subtree_control").read_text() == "-memory"
    assert not list(root.glob("regrepro-*"))


def test_no_control_group_is_no_obstacle_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "CGROUP_ROOTS", (tmp_path / "none",))
    assert "no control groups" in pressure.Cgroup(Journal(tmp_path), 1).why
    fake_root(tmp_path, monkeypatch, "cpu", "")
    group = pressure.Cgroup(Journal(tmp_path), 1)
    assert group.path is None
    assert "do not control memory" in group.why


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

    monkeypatch.setattr(pressure, "read_zones", zones)
    monkeypatch.setattr(pressure, "CGROUP_ROOTS", (tmp_path / "none",))
    monkeypatch.setattr(pressure, "gpu_users", list)
    monkeypatch.setattr(pressure._Holder, "_places", lambda self, memory: _ordinary(memory))
    monkeypatch.setattr(pressure, "_MARGIN", 1 << 20)
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
