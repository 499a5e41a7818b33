"""What a node will hand out next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kernel_fakes import zone

from regrepro.core.memory import PAGE_SIZE
from regrepro.kernel.pressure.outlook import free_large_bytes, nearest_node, outlook


def test_cma_comes_out_once_it_is_more_than_half_of_what_is_free() -> None:
    seen = outlook([zone(0, "DMA32", 1000, 200)], 0)
    assert (seen.kind, seen.before, seen.ordinary) == ("cma", 600, 800)
    assert outlook([zone(0, "DMA32", 1000, 600)], 0).before == -200


def test_the_zones_above_come_first_down_to_their_low_watermark() -> None:
    zones = [zone(0, "DMA32", 500, 100), zone(0, "Normal", 1000, low=50)]
    assert outlook(zones, 0).before == 950 + 300


def test_zone_movable_needs_no_pressure() -> None:
    zones = [zone(0, "Normal", 1000), zone(0, "Movable", 10, low=3)]
    seen = outlook(zones, 0)
    assert (seen.kind, seen.before) == ("movable-zone", 0)
    assert outlook([zone(0, "Normal", 9), zone(0, "Movable", 3, low=3)], 0).kind is None


def test_the_reserve_comes_from_the_watermarks() -> None:
    seen = outlook([zone(0, "Normal", 1000, 100, min=10, low=15, high=20, managed=64)], 0)
    assert seen.reserve == 20 + 2 * 10
    assert seen.room == 900 - 40
    assert outlook([zone(0, "Normal", 1000, 100, managed=6400)], 0).reserve == 100


def test_the_nearest_node() -> None:
    zones = [zone(0, "Normal", 1000, 10), zone(1, "Normal", 100, 10), zone(2, "Normal", 5)]
    nearest = nearest_node(zones)
    assert nearest is not None
    assert nearest.node == 1
    assert nearest_node(zones[2:]) is None


@given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_holding_what_is_told_makes_cma_come_out(free: int, cma: int) -> None:
    """As the kernel counts: after `before` ordinary pages are gone, free CMA is half of what is free."""
    cma = min(cma, free)
    seen = outlook([zone(0, "Normal", free, cma)], 0)
    if seen.kind == "cma":
        left = free - max(0, seen.before)
        assert cma * 2 >= left


def test_free_memory_in_large_pieces() -> None:
    text = (
        "Node 0, zone      DMA      1      0      2\n"
        "Node 0, zone   Normal      9      5      3\n"
        "Node 1, zone   Normal      9      5      7\n"
    )
    assert free_large_bytes(text, 0, 2) == (2 + 3) * 4 * PAGE_SIZE
    assert free_large_bytes(text, 1, 1) == (5 * 2 + 7 * 4) * PAGE_SIZE
    assert free_large_bytes("nonsense", 0, 0) == 0
