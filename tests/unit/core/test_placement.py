"""Where a process allocates, the giving back of single pages, and huge pages without compaction."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy
import pytest

from regrepro.core.memory import PAGE_SIZE, Range
from regrepro.core.placement import allocate_on_node, drop_pages, quiet_huge_pages

NODES = [int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*")]


def present(memory: Range) -> list[bool]:
    """Bit 63 of each page's pagemap entry."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(memory.address // PAGE_SIZE * 8)
        entries = numpy.frombuffer(file.read(memory.pages * 8), dtype=numpy.uint64)
    return [bool(entry >> numpy.uint64(63)) for entry in entries]


def test_marked_pages_are_given_back_and_no_others() -> None:
    with Range.anonymous(8 * PAGE_SIZE, huge=False) as memory:
        memory.populate()
        memory.fill(7)
        kept = memory.read(PAGE_SIZE, PAGE_SIZE)
        marks = numpy.array([1, 0, 1, 1, 0, 0, 0, 1], dtype=numpy.uint8)
        assert drop_pages(memory.address, marks) == 4
        assert present(memory) == [not mark for mark in marks]
        assert memory.read(PAGE_SIZE, PAGE_SIZE) == kept
        assert memory.read(0, PAGE_SIZE) == bytes(PAGE_SIZE)


@pytest.mark.parametrize("marks", [[0] * 4, [1] * 4])
def test_none_and_all(marks: list[int]) -> None:
    with Range.anonymous(4 * PAGE_SIZE, huge=False) as memory:
        memory.populate()
        assert drop_pages(memory.address, numpy.array(marks, dtype=numpy.uint8)) == sum(marks)
        assert present(memory) == [not mark for mark in marks]


def test_an_address_within_a_page_is_refused() -> None:
    with Range.anonymous(2 * PAGE_SIZE) as memory, pytest.raises(OSError, match="giving pages back") as error:
        drop_pages(memory.address + 8, numpy.ones(1, dtype=numpy.uint8))
    assert error.value.errno == errno.EINVAL


def test_what_is_not_mapped_is_an_error() -> None:
    memory = Range.anonymous(4 * PAGE_SIZE)
    memory.close()
    with pytest.raises(OSError, match="giving pages back") as error:
        drop_pages(memory.address, numpy.ones(4, dtype=numpy.uint8))
    assert error.value.errno == errno.ENOMEM


def test_a_node_is_asked_for_in_this_process_and_in_its_threads() -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            node = max(NODES, default=0)
            allocate_on_node(node)
            with Range.anonymous(64 * PAGE_SIZE, huge=False) as memory:
                memory.populate(threads=4)
            allocate_on_node(None)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("node", [900, 5000])
def test_a_node_that_is_not_there_is_refused(node: int) -> None:
    with pytest.raises(OSError, match=f"node {node}"):
        allocate_on_node(node)


@pytest.mark.parametrize(
    ("enabled", "defrag", "answer"),
    [
        ("[always] madvise never", "always defer defer+madvise [madvise] never", None),
        ("[always] madvise never", "always defer defer+madvise madvise [never]", None),
        ("[always] madvise never", "[always] defer defer+madvise madvise never", False),
        ("[always] madvise never", "always [defer] defer+madvise madvise never", False),
        ("always [madvise] never", "always defer defer+madvise [madvise] never", False),
        ("always [madvise] never", "always defer defer+madvise madvise [never]", True),
        ("always madvise [never]", "always defer defer+madvise [madvise] never", False),
    ],
)
def test_huge_pages_only_where_nothing_is_compacted(
    tmp_path: Path, enabled: str, defrag: str, answer: bool | None
) -> None:
    (tmp_path / "enabled").write_text(f"{enabled}\n")
    (tmp_path / "defrag").write_text(f"{defrag}\n")
    assert quiet_huge_pages(tmp_path) is answer


def test_a_kernel_without_huge_pages(tmp_path: Path) -> None:
    assert quiet_huge_pages(tmp_path / "none") is False
