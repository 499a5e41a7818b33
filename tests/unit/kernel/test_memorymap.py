"""The memory map, over kernels on paper: what is known, what is unknown, and wrong layouts that must be
caught.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kernel_fakes import PAGE, FakeKernel, FakeZone

from regrepro.kernel import btf, kallsyms, kcore, memoryblocks, memorymap, pageblocks, zones
from regrepro.kernel.memorymap import ABSENT, CMA, ISOLATE, MOVABLE_ZONE, ORDINARY, UNKNOWN, MemoryMap
from regrepro.kernel.pageblocks import BitmapLayout

pytestmark = pytest.mark.skipif(PAGE != 4096, reason="the kernels on paper have pages of 4 KiB")

BLOCK = 512
Read = Callable[..., MemoryMap]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Read the map of a fake kernel; `closed` names files that this user may not read."""

    def body(
        kernel: FakeKernel, *, closed: tuple[str, ...] = (), log: list[str] | None = None, **options: object
    ) -> MemoryMap:
        kernel.write()
        for name in closed:
            (kernel.folder / name).unlink()
        monkeypatch.setattr(btf, "BTF_PATH", kernel.folder / "btf")
        monkeypatch.setattr(kcore, "KCORE", kernel.folder / "kcore")
        monkeypatch.setattr(pageblocks, "PAGETYPEINFO", kernel.folder / "pagetypeinfo")
        monkeypatch.setattr(zones, "ZONEINFO", kernel.folder / "zoneinfo")
        monkeypatch.setattr(zones, "MEMINFO", kernel.folder / "meminfo")
        monkeypatch.setattr(zones, "CMA_SYSFS", kernel.folder / "none")
        monkeypatch.setattr(zones, "CMA_DEBUGFS", kernel.folder / "none")
        monkeypatch.setattr(zones, "kernel_log", lambda: log or [])
        monkeypatch.setattr(kallsyms, "KALLSYMS", kernel.folder / "none")
        monkeypatch.setattr(memoryblocks, "MEMORY_BLOCKS", kernel.folder / "memory")
        monkeypatch.setattr(memorymap.time, "sleep", lambda _: None)
        return memorymap.read_memory_map(**options)  # type: ignore[arg-type]

    return body


def with_cma(folder: Path, **changes: object) -> FakeKernel:
    """Three sections: zone DMA from PFN 1, DMA32, 24 CMA blocks across a section boundary, a hole."""
    types = dict.fromkeys(range(192), 1)
    types |= dict.fromkeys(range(4), 0) | dict.fromkeys(range(100, 124), 4) | {150: 2, 151: 3}
    for hole in range(180, 192):
        del types[hole]
    zones_ = [FakeZone(0, "DMA", 1, 8 * BLOCK - 1), FakeZone(0, "DMA32", 8 * BLOCK, 180 * BLOCK - 8 * BLOCK)]
    return dataclasses.replace(FakeKernel(folder, zones_, types), **changes)  # type: ignore[arg-type]


def without_cma(folder: Path) -> FakeKernel:
    """As 6.1 and 6.12 are built by Debian: no CMA, four bits a block, ZONE_MOVABLE at the end."""
    types = dict.fromkeys(range(128), 1) | dict.fromkeys(range(6), 0)
    zones_ = [FakeZone(0, "DMA32", 1, 64 * BLOCK - 1), FakeZone(0, "Movable", 64 * BLOCK, 64 * BLOCK)]
    return FakeKernel(folder, zones_, types, cma=False, isolate_bit=False)


def codes(memory_map: MemoryMap, *pfns: int) -> list[int]:
    return memory_map.classify(np.array(pfns, dtype=np.uint64)).tolist()


def test_cma_blocks_are_found(tmp_path: Path, read: Read) -> None:
    seen = read(with_cma(tmp_path))
    assert seen.selfcheck["passed"] is True and seen.complete and seen.has_unpinnable is True
    assert seen.unpinnable_ranges == [(100 * BLOCK, 124 * BLOCK, "cma")]
    assert seen.unregistered_cma == [(100 * BLOCK, 124 * BLOCK)]  # no area claims it, as with kexec handover
    assert codes(seen, 5, 100 * BLOCK - 1, 100 * BLOCK, 124 * BLOCK - 1, 124 * BLOCK) == [
        ORDINARY,
        ORDINARY,
        CMA,
        CMA,
        ORDINARY,
    ]
    assert codes(seen, 0, 185 * BLOCK, 1 << 40) == [ABSENT, UNKNOWN, UNKNOWN]
    assert seen.locate(np.array([5, 1 << 40], dtype=np.uint64))[1].tolist() == [0, -1]
    assert seen.blocks is not None and seen.blocks[0, "DMA32"]["CMA"] == 24
    json.dumps(seen.as_record())


def test_isolated_blocks_are_unpinnable_with_cma_only(tmp_path: Path, read: Read) -> None:
    kernel = with_cma(tmp_path)
    kernel.types[110] = kernel.names.index("Isolate")
    assert codes(read(kernel), 110 * BLOCK, 111 * BLOCK) == [ISOLATE, CMA]
    other = without_cma(tmp_path)
    other.types[40] = other.names.index("Isolate")
    seen = read(other)
    assert seen.selfcheck["passed"] is True and codes(seen, 40 * BLOCK) == [ORDINARY]


def test_movable_zone(tmp_path: Path, read: Read) -> None:
    seen = read(without_cma(tmp_path))
    assert seen.complete and seen.has_unpinnable is True
    assert seen.unpinnable_ranges == [(64 * BLOCK, 128 * BLOCK, "movable-zone")]


def test_no_unpinnable_memory_is_proven(tmp_path: Path, read: Read) -> None:
    kernel = with_cma(tmp_path)
    kernel.types |= dict.fromkeys(range(100, 124), 1)
    seen = read(kernel)
    assert seen.complete and seen.has_unpinnable is False and seen.unpinnable_ranges == []


def test_zones_that_overlap_are_told_apart_by_the_pages(tmp_path: Path, read: Read) -> None:
    """A memory block onlined as movable in the middle of a zone, and two nodes whose spans interleave."""
    types = dict.fromkeys(range(192), 1)
    spans = [
        FakeZone(0, "Normal", 64, 192 * BLOCK - 64),
        FakeZone(0, "Movable", 64 * BLOCK, 64 * BLOCK),
        FakeZone(1, "Normal", 32 * BLOCK, 16 * BLOCK),
    ]
    own = dict.fromkeys(range(192), (0, "Normal"))
    own |= dict.fromkeys(range(64, 128), (0, "Movable")) | dict.fromkeys(range(32, 48), (1, "Normal"))
    seen = read(FakeKernel(tmp_path, spans, types, own_zone=own))
    assert seen.selfcheck["passed"] is True
    assert seen.unpinnable_ranges == [(64 * BLOCK, 128 * BLOCK, "movable-zone")]
    assert seen.locate(np.array([31, 32, 48], dtype=np.uint64) * np.uint64(BLOCK))[1].tolist() == [0, 1, 0]


def now(memory_map: MemoryMap, *pfns: int) -> list[int]:
    return memory_map.places_now(np.array(pfns, dtype=np.uint64)).tolist()


def test_places_are_those_of_the_moment(tmp_path: Path, read: Read) -> None:
    """A block is isolated, one becomes CMA, one is CMA no longer: the kernel's counts are not read again."""
    kernel = with_cma(tmp_path)
    seen = read(kernel)
    kernel.types |= {30: kernel.names.index("Isolate"), 40: 4, 100: 1}
    kernel.write()
    (tmp_path / "pagetypeinfo").unlink()
    pfns = [30 * BLOCK + 7, 40 * BLOCK, 100 * BLOCK, 101 * BLOCK, 29 * BLOCK, 0, 30 * BLOCK]
    assert codes(seen, *pfns) == [ORDINARY, ORDINARY, CMA, CMA, ORDINARY, ABSENT, ORDINARY]
    assert now(seen, *pfns) == [ISOLATE, CMA, ORDINARY, CMA, ORDINARY, ABSENT, ISOLATE]


@pytest.mark.parametrize("first", [64, 128], ids=["a block changed its zone", "a section is new"])
def test_a_block_that_became_movable(tmp_path: Path, read: Read, first: int) -> None:
    """The map shows the pages elsewhere, or not at all: it is read again, and checks itself."""
    zones_ = [FakeZone(0, "Normal", 1, 128 * BLOCK - 1)]
    kernel = FakeKernel(tmp_path, zones_, dict.fromkeys(range(128), 1), cma=False, isolate_bit=False)
    seen = read(kernel)
    assert seen.has_unpinnable is False
    kernel.types = dict.fromkeys(range(first + 64), 1)
    kernel.zones = [
        FakeZone(0, "Normal", 1, first * BLOCK - 1),
        FakeZone(0, "Movable", first * BLOCK, 64 * BLOCK),
    ]
    kernel.write()
    assert seen.zones_changed() is True
    assert now(seen, first * BLOCK, 5) == [MOVABLE_ZONE, ORDINARY]
    assert seen.has_unpinnable is True and seen.zones_changed() is False


def test_a_changed_zone_that_cannot_be_checked_is_unknown(tmp_path: Path, read: Read) -> None:
    zones_ = [FakeZone(0, "Normal", 1, 128 * BLOCK - 1)]
    kernel = FakeKernel(tmp_path, zones_, dict.fromkeys(range(128), 1))
    seen = read(kernel)
    kernel.zones = [FakeZone(0, "Normal", 1, 64 * BLOCK - 1), FakeZone(0, "Movable", 64 * BLOCK, 64 * BLOCK)]
    kernel.write()
    (tmp_path / "pagetypeinfo").unlink()
    assert now(seen, 64 * BLOCK, 0) == [UNKNOWN, ABSENT]


def test_a_section_that_went_offline_is_unknown(tmp_path: Path, read: Read) -> None:
    kernel = FakeKernel(tmp_path, [FakeZone(0, "Normal", 1, 128 * BLOCK - 1)], dict.fromkeys(range(128), 1))
    seen = read(kernel)
    kernel.types = dict.fromkeys(range(64), 1)
    kernel.write()
    assert now(seen, 64 * BLOCK, 5) == [UNKNOWN, ORDINARY]
    (tmp_path / "kcore").unlink()
    located = seen.locate_now(np.array([5, 0], dtype=np.uint64))
    assert located.place.tolist() == [UNKNOWN, ABSENT] and "could not be read again" in located.problem


def test_without_the_bitmap_places_hold_while_the_zones_do(tmp_path: Path, read: Read) -> None:
    kernel = without_cma(tmp_path)
    seen = read(kernel, closed=("kcore",))
    assert now(seen, 64 * BLOCK, 5, 0) == [MOVABLE_ZONE, ORDINARY, ABSENT]
    kernel.zones[1].spanned //= 2
    (tmp_path / "zoneinfo").write_text(kernel.zoneinfo())
    assert now(seen, 64 * BLOCK, 5, 0) == [UNKNOWN, UNKNOWN, ABSENT]


def test_a_second_look_at_a_map_that_held(tmp_path: Path, read: Read) -> None:
    kernel = with_cma(tmp_path)
    kernel.types |= dict.fromkeys(range(100, 124), 1)
    seen = read(kernel)
    (tmp_path / "pagetypeinfo").unlink()  # it is not read for this
    found = seen.check()
    assert (found["complete"], found["has_unpinnable"], found["changed"]) == (True, False, False)
    kernel.types[30] = kernel.names.index("Isolate")
    kernel.write()
    (tmp_path / "pagetypeinfo").unlink()
    found = seen.check()
    assert (found["complete"], found["has_unpinnable"], found["changed"]) == (True, True, True)
    assert seen.unpinnable_ranges == [(30 * BLOCK, 31 * BLOCK, "isolate")]  # what the next pass begins with
    (tmp_path / "kcore").unlink()
    assert seen.check()["complete"] is False


def test_a_second_look_at_zones_that_changed(tmp_path: Path, read: Read) -> None:
    kernel = FakeKernel(tmp_path, [FakeZone(0, "Normal", 1, 128 * BLOCK - 1)], dict.fromkeys(range(128), 1))
    seen = read(kernel)
    kernel.zones = [FakeZone(0, "Normal", 1, 64 * BLOCK - 1), FakeZone(0, "Movable", 64 * BLOCK, 64 * BLOCK)]
    kernel.write()
    assert seen.check().items() >= {"complete": True, "has_unpinnable": True, "changed": True}.items()
    kernel.zones = [FakeZone(0, "Normal", 1, 128 * BLOCK - 1)]
    kernel.write()
    (tmp_path / "pagetypeinfo").unlink()
    found = seen.check()
    assert found["has_unpinnable"] is None and found["complete"] is False and found["problems"]


@pytest.mark.parametrize("shift", [0, 3, 6, 10])
def test_any_node_field(tmp_path: Path, read: Read, shift: int) -> None:
    assert read(with_cma(tmp_path, nodes_shift=shift)).selfcheck["passed"] is True


@pytest.mark.parametrize(("order", "bits"), [(9, 27), (10, 27), (9, 28), (9, 29), (7, 27)])
def test_any_pageblock_and_section_size(tmp_path: Path, read: Read, order: int, bits: int) -> None:
    step = 1 << order
    types = dict.fromkeys(range(300), 1) | dict.fromkeys(range(40, 60), 4)
    kernel = FakeKernel(
        tmp_path, [FakeZone(0, "Normal", 0, 300 * step)], types, pageblock_order=order, section_bits=bits
    )
    seen = read(kernel)
    assert seen.selfcheck["passed"] is True, seen.problems
    assert seen.unpinnable_ranges == [(40 * step, 60 * step, "cma")]


WRONG: dict[str, Callable[[BitmapLayout], BitmapLayout]] = {
    f"shift {by}": lambda layout, by=by: dataclasses.replace(layout, flags_offset=layout.flags_offset + by)  # type: ignore[misc]
    for by in (-8, -1, 1, 8, 64)
}
WRONG |= {
    "width": lambda layout: dataclasses.replace(layout, bits_per_block=12 - layout.bits_per_block),
    "type bits": lambda layout: dataclasses.replace(layout, type_bits=1),
    "order": lambda layout: dataclasses.replace(layout, pageblock_order=layout.pageblock_order + 1),
    "section": lambda layout: dataclasses.replace(layout, section_shift=layout.section_shift - 1),
    "cma": lambda layout: dataclasses.replace(layout, cma=2),
    "isolate": lambda layout: dataclasses.replace(layout, isolate=1),
    "map": lambda layout: dataclasses.replace(layout, map_offset=layout.usage_offset),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layouts_are_caught(tmp_path: Path, read: Read, name: str) -> None:
    seen = read(with_cma(tmp_path), alter=WRONG[name])
    assert seen.selfcheck["passed"] is not True and seen.sections is None
    assert not seen.complete and seen.problems
    assert codes(seen, 100 * BLOCK) == [UNKNOWN]
    assert seen.has_unpinnable is True  # /proc/pagetypeinfo's own count still proves that there is some


def test_a_count_that_differs_is_unknown(tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = with_cma(tmp_path)
    truth = kernel.pagetypeinfo()
    monkeypatch.setattr(kernel, "pagetypeinfo", lambda: truth.replace("          24 ", "          25 "))
    seen = read(kernel)
    assert seen.selfcheck["passed"] is False and seen.selfcheck["attempts"] > 1
    assert {"node": 0, "zone": "DMA32", "type": "CMA", "map": 24, "pagetypeinfo": 25} in seen.selfcheck[
        "differences"
    ]
    assert not seen.complete and codes(seen, 5, 8 * BLOCK, 100 * BLOCK) == [ORDINARY, UNKNOWN, UNKNOWN]


def test_other_types_may_drift(tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = with_cma(tmp_path)
    truth = kernel.pagetypeinfo()
    kernel.types[60] = kernel.types[61] = 2
    monkeypatch.setattr(kernel, "pagetypeinfo", lambda: truth)
    assert read(kernel).selfcheck["passed"] is True


def test_kcore_closed_without_cma_is_still_complete(tmp_path: Path, read: Read) -> None:
    seen = read(without_cma(tmp_path), closed=("kcore", "pagetypeinfo"))
    assert seen.complete and seen.has_unpinnable is True and seen.selfcheck["passed"] is None
    assert seen.unpinnable_ranges == [(64 * BLOCK, 128 * BLOCK, "movable-zone")]
    assert seen.blocks is None and seen.sections is None


def test_kcore_closed_with_cma_is_unknown(tmp_path: Path, read: Read) -> None:
    seen = read(with_cma(tmp_path), closed=("kcore", "pagetypeinfo"))
    assert not seen.complete and seen.has_unpinnable is None
    assert codes(seen, 8 * BLOCK, 100 * BLOCK) == [UNKNOWN, UNKNOWN]


def test_kcore_closed_and_no_cma_block_counted(tmp_path: Path, read: Read) -> None:
    kernel = with_cma(tmp_path)
    kernel.types |= dict.fromkeys(range(100, 124), 1)
    seen = read(kernel, closed=("kcore",))
    assert seen.complete and seen.has_unpinnable is False


def test_kcore_closed_and_the_boot_log_tells_where(
    tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = with_cma(tmp_path)
    area = zones.CmaArea("reserved", 24 * BLOCK)
    log = [f"cma: Reserved 48 MiB at {100 * BLOCK * PAGE:#018x}"]
    monkeypatch.setattr(zones, "cma_areas_of_sysfs", lambda: [area])
    monkeypatch.setattr(zones, "read_meminfo", lambda: {"CmaTotal": 24 * BLOCK * PAGE})
    seen = read(kernel, closed=("kcore",), log=log)
    assert seen.complete and seen.unpinnable_ranges == [(100 * BLOCK, 124 * BLOCK, "cma")]
    assert codes(seen, 99 * BLOCK, 100 * BLOCK) == [ORDINARY, CMA]


def test_overlap_without_kcore_asks_the_memory_blocks(tmp_path: Path, read: Read) -> None:
    types = dict.fromkeys(range(192), 1)
    spans = [FakeZone(0, "Normal", 64, 192 * BLOCK - 64), FakeZone(0, "Movable", 64 * BLOCK, 64 * BLOCK)]
    own = {block: (0, "Movable" if 64 <= block < 128 else "Normal") for block in range(192)}
    kernel = FakeKernel(tmp_path, spans, types, cma=False, isolate_bit=False, own_zone=own)
    closed = read(kernel, closed=("kcore", "pagetypeinfo"))
    assert not closed.complete and closed.has_unpinnable is True and codes(closed, 64 * BLOCK) == [UNKNOWN]
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "block_size_bytes").write_text(f"{64 * BLOCK * PAGE:x}\n")
    for number, name in enumerate(("Normal", "Movable", "Normal")):
        (folder / f"memory{number}").mkdir()
        (folder / f"memory{number}" / "state").write_text("online\n")
        (folder / f"memory{number}" / "valid_zones").write_text(f"{name}\n")
    seen = read(kernel, closed=("kcore", "pagetypeinfo"))
    assert seen.complete and seen.unpinnable_ranges == [(64 * BLOCK, 128 * BLOCK, "movable-zone")]


@pytest.mark.parametrize("name", ["btf", "zoneinfo", "meminfo", "pagetypeinfo", "kcore"])
@pytest.mark.parametrize("damage", [b"", b"nonsense\n" * 20])
def test_damaged_sources_are_said(
    tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch, name: str, damage: bytes
) -> None:
    kernel = with_cma(tmp_path)
    write = kernel.write

    def spoiled() -> None:
        write()
        (kernel.folder / name).write_bytes(damage)

    monkeypatch.setattr(kernel, "write", spoiled)
    seen = read(kernel)
    if name != "meminfo":
        assert not seen.complete and seen.problems
    json.dumps(seen.as_record())


def test_this_node() -> None:
    seen = memorymap.read_memory_map()
    assert seen.zones and seen.page_size == PAGE
    assert seen.has_unpinnable in (True, False, None)
    assert seen.complete or seen.problems
