"""Zones and CMA areas, from texts as kernels print them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from regrepro.kernel import zones

PAGE = os.sysconf("SC_PAGE_SIZE")

ZONEINFO = """\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 2915
      nr_free_cma_like 5
  pages free     3776
        boost    0
        min      86
        low      107
        high     128
        spanned  4095
        present  3998
        managed  3840
        cma      0
        protection: (0, 1475, 1475, 1949)
      nr_free_pages 3776
      nr_free_cma  0
  pagesets
    cpu: 0
              count: 0
              high:  14
              batch: 1
  vm stats threshold: 4
    cpu: 1
              count: 3
              high:  14
  node_unreclaimable:  0
  start_pfn:           1
Node 0, zone    DMA32
  pages free     300000
        boost    0
        min      11177
        low      13971
        high     16765
        promo    19559
        spanned  520159
        present  520159
        managed  499312
        cma      131072
        protection: (0, 0, 0, 0, 0)
      nr_free_cma  130870
  node_unreclaimable:  0
  start_pfn:           4096
Node 0, zone   Normal
  pages free     0
        min      0
        spanned  0
        present  0
        managed  0
        cma      0
        protection: (0, 0, 0, 0, 0)
Node 1, zone  Movable
  pages free     9
        min      1
        low      2
        high     3
        spanned  131072
        present  131000
        managed  130000
        protection: (0, 0)
  start_pfn:           786432
"""


def test_zoneinfo() -> None:
    dma, dma32, normal, movable = zones.parse_zoneinfo(ZONEINFO)
    assert (dma.node, dma.name, dma.start_pfn, dma.end_pfn) == (0, "DMA", 1, 4096)
    assert (dma.free, dma.min, dma.low, dma.high) == (3776, 86, 107, 128)
    assert dma.free_pages_per_cpu == 3
    assert (dma32.cma, dma32.free_cma, dma32.present) == (131072, 130870, 520159)
    assert not normal.populated and normal.start_pfn is None
    assert movable.populated and movable.node == 1
    assert movable.cma is None and movable.free_cma is None


def test_an_empty_text_has_no_zones() -> None:
    assert zones.parse_zoneinfo("") == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 << 20),
        ("2g", 2 << 30),
        ("0x1000", 4096),
        ("0x2M", 2 << 20),
        ("64", 64),
        ("x", None),
        ("", None),
        ("1Z", None),
    ],
)
def test_sizes_as_the_kernel_reads_them(text: str, size: int | None) -> None:
    assert zones.parse_size(text) == size


def test_boot_messages() -> None:
    lines = ["cma: Reserved 512 MiB at 0x000000004a200000", "cma: Reserved 64 MiB in 1 range", "noise"]
    assert zones.parse_cma_lines(lines) == [(0x4A200000, 512 << 20)]


def test_areas_of_sysfs_and_debugfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs, debugfs = tmp_path / "sys", tmp_path / "debug"
    (sysfs / "hugetlb0").mkdir(parents=True)
    (sysfs / "hugetlb0" / "total_pages").write_text("262144\n")
    (sysfs / "hugetlb0" / "available_pages").write_text("262000\n")
    for name, text in {"base_pfn": "1048576", "count": "1024", "used": "3", "order_per_bit": "1"}.items():
        (debugfs / "cma-reserved").mkdir(parents=True, exist_ok=True)
        (debugfs / "cma-reserved" / name).write_text(text)
    monkeypatch.setattr(zones, "CMA_SYSFS", sysfs)
    monkeypatch.setattr(zones, "CMA_DEBUGFS", debugfs)
    (area,) = zones.cma_areas_of_sysfs()
    assert (area.name, area.pages, area.available, area.ranges) == ("hugetlb0", 262144, 262000, None)
    (area,) = zones.cma_areas_of_debugfs()
    assert (area.name, area.available, area.ranges) == ("reserved", 1018, [(1048576, 1049600)])
    monkeypatch.setattr(zones, "CMA_SYSFS", tmp_path / "none")
    assert zones.cma_areas_of_sysfs() == []


def test_this_node() -> None:
    found = [zone for zone in zones.read_zones() if zone.populated]
    assert found and all(zone.present <= zone.spanned for zone in found)
