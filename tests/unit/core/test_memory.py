"""Ranges, populating, gathering and checksums, as an ordinary user on any kernel."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from regrepro._core import lib

from regrepro.core import memory
from regrepro.core.memory import PAGE_SIZE, Range


def frames(address: int, pages: int) -> list[int]:
    """Pagemap entries without the soft-dirty bit:

    an ordinary user reads PFN 0, and still sees what is present.
    """
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE_SIZE * 8)
        return [
            entry & ~(1 << 55) for entry in np.frombuffer(pagemap.read(pages * 8), dtype=np.uint64).tolist()
        ]


def present(address: int, pages: int) -> list[bool]:
    return [bool(entry >> 63) for entry in frames(address, pages)]


KINDS: dict[str, Callable[[int], Range]] = {
    "anonymous": Range.anonymous,
    "no huge pages": lambda length: Range.anonymous(length, huge=False),
    "memfd": Range.memfd,
    "shm": Range.shm,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_of_each_kind_holds_bytes_and_has_a_vma(kind: str) -> None:
    if kind == "shm" and not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm cannot be written")
    with KINDS[kind](3 * PAGE_SIZE + 1) as buffer:
        assert buffer.pages == 4
        assert buffer.address % PAGE_SIZE == 0
        assert present(buffer.address, 4) == [False] * 4
        buffer.populate()
        assert present(buffer.address, 4) == [True] * 4
        buffer.fill(1)
        first = buffer.checksum()
        buffer.write(3 * PAGE_SIZE, b"x")
        assert buffer.read(3 * PAGE_SIZE, 1) == b"x"
        assert buffer.checksum() != first
        start, _, rest = buffer.vma().partition("-")
        assert int(start, 16) <= buffer.address < int(rest.split()[0], 16)
        assert rest.split()[1].startswith("rw")
        assert (buffer.fd is None) == buffer.backing.startswith("anonymous")
        address = buffer.address
    assert memory.vma_line(address) == ""
    buffer.close()


def test_shared_memory_leaves_no_name() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm cannot be written")
    name = f"regrepro-test-{os.getpid()}"
    with Range.shm(PAGE_SIZE, name) as buffer:
        assert not Path("/dev/shm", name).exists()
        assert "/dev/shm/" in buffer.vma()
        assert "(deleted)" in buffer.vma()
    with pytest.raises(OSError, match="no name of a shared memory object"):
        Range.shm(PAGE_SIZE, "a/b")


def test_shared_ranges_are_seen_by_a_child() -> None:
    with Range.memfd(PAGE_SIZE) as buffer:
        child = os.fork()
        if child == 0:
            buffer.write(0, b"from the child")
            os._exit(0)
        os.waitpid(child, 0)
        assert buffer.read(0, 14) == b"from the child"


def test_a_file_is_grown_and_kept_and_never_shortened(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with Range.file(path, 2 * PAGE_SIZE) as buffer:
        buffer.write(0, b"kept")
        assert str(path) in buffer.vma()
    assert path.stat().st_size == 2 * PAGE_SIZE
    with Range.file(path, PAGE_SIZE) as buffer:
        assert buffer.read(0, 4) == b"kept"
    assert path.stat().st_size == 2 * PAGE_SIZE


def test_a_file_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Range.file(tmp_path / "no" / "such", PAGE_SIZE)
    with pytest.raises(OSError, match="a range of 0 bytes"):
        Range.file(tmp_path / "empty", 0)


@pytest.mark.parametrize("length", [0, -1, 1 << 63, 1 << 70])
def test_absurd_lengths_are_refused(length: int) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for make in (Range.anonymous, Range.memfd):
        with pytest.raises(OSError) as caught:
            make(length)
        assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError) as caught:
        Range.anonymous(1 << 62)
    assert caught.value.errno == errno.ENOMEM
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_huge_pages_are_aligned_or_refused_with_a_reason() -> None:
    size = memory.thp_size()
    if size is None:
        with pytest.raises(OSError, match="no transparent huge pages"):
            Range.anonymous(PAGE_SIZE, huge=True)
        return
    with Range.anonymous(3 * size + PAGE_SIZE, huge=True) as buffer:
        assert buffer.address % size == 0
        assert buffer.backing == "thp"
        buffer.populate()
        assert all(present(buffer.address, buffer.pages))


def test_hugetlb_without_a_pool_names_the_pool() -> None:
    size = 2 << 20
    pool = Path(f"/sys/kernel/mm/hugepages/hugepages-{size // 1024}kB")
    if not pool.exists():
        pytest.skip("this kernel has no 2 MiB hugetlb pages")
    if int((pool / "free_hugepages").read_text()):
        with Range.hugetlb(size, size) as buffer:
            buffer.populate()
            assert buffer.page_size == size
            assert buffer.pages == size // PAGE_SIZE
        return
    if int((pool / "nr_overcommit_hugepages").read_text()):
        pytest.skip("hugetlb pages may be overcommitted here")
    with pytest.raises(OSError, match="nr_hugepages") as caught:
        Range.hugetlb(size, size)
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(OSError, match="not made of huge pages"):
        Range.hugetlb(size + PAGE_SIZE, size)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 200])
def test_populating_by_threads_reaches_every_page_and_changes_none(threads: int) -> None:
    pages = 129
    with Range.anonymous(pages * PAGE_SIZE, huge=False) as buffer:
        buffer.write(5 * PAGE_SIZE, b"here before")
        buffer.populate(threads)
        assert all(present(buffer.address, pages))
        assert buffer.read(5 * PAGE_SIZE, 11) == b"here before"


@pytest.mark.parametrize("threads", [1, 3])
def test_populating_by_touch_does_the_same(threads: int) -> None:
    """What runs on kernels without MADV_POPULATE_WRITE."""
    pages = 40
    with Range.anonymous(pages * PAGE_SIZE, huge=False) as buffer:
        buffer.write(7 * PAGE_SIZE, b"here before")
        assert lib.rr_populate_by_touch(buffer.address, buffer.length, threads) == 0
        assert all(present(buffer.address, pages))
        assert buffer.read(7 * PAGE_SIZE, 11) == b"here before"
    with Range.anonymous(PAGE_SIZE, reserve_only=True) as reserved:
        assert lib.rr_populate_by_touch(reserved.address, PAGE_SIZE, 1) == -errno.EFAULT


def test_populating_what_cannot_be_populated_is_an_error_and_no_signal(tmp_path: Path) -> None:
    with Range.anonymous(PAGE_SIZE, reserve_only=True) as reserved, pytest.raises(OSError) as caught:
        reserved.populate()
    assert caught.value.errno in (errno.EFAULT, errno.ENOMEM, errno.EINVAL)
    with pytest.raises(OSError) as caught:
        memory.populate(reserved.address, PAGE_SIZE)
    assert caught.value.errno == errno.ENOMEM
    path = tmp_path / "short"
    with Range.file(path, 2 * PAGE_SIZE) as buffer:
        os.truncate(path, PAGE_SIZE)  # a touch of the second page would be SIGBUS
        with pytest.raises(OSError) as caught:
            buffer.populate()
        assert caught.value.errno == errno.EFAULT


def test_a_closed_range_is_not_touched() -> None:
    buffer = Range.anonymous(PAGE_SIZE)
    buffer.close()
    for use in (buffer.checksum, buffer.populate, lambda: buffer.fill(1), lambda: buffer.read(0, 1)):
        with pytest.raises(ValueError, match="closed"):
            use()


@given(offset=st.integers(-3, 20), length=st.integers(-3, 20))
def test_reads_stay_inside(offset: int, length: int) -> None:
    with Range.anonymous(10) as buffer:
        if offset >= 0 and length >= 0 and offset + length <= 10:
            assert buffer.read(offset, length) == bytes(length)
        else:
            with pytest.raises(IndexError):
                buffer.read(offset, length)


@given(data=st.binary(min_size=1, max_size=300), place=st.integers(0, 299), flip=st.integers(1, 255))
def test_any_changed_byte_changes_the_checksum(data: bytes, place: int, flip: int) -> None:
    place %= len(data)
    with Range.anonymous(len(data)) as buffer:
        buffer.write(0, data)
        before = buffer.checksum()
        buffer.write(place, bytes([data[place] ^ flip]))
        assert buffer.checksum() != before
        buffer.write(place, data[place : place + 1])
        assert buffer.checksum() == before


@given(data=st.lists(st.integers(0, 1), min_size=8, max_size=64))
def test_the_order_of_words_changes_the_checksum(data: list[int]) -> None:
    words = np.array(data, dtype=np.uint64)
    turned = np.roll(words, 1)
    with Range.anonymous(words.nbytes) as one, Range.anonymous(words.nbytes) as other:
        one.write(0, words.tobytes())
        other.write(0, turned.tobytes())
        assert (one.checksum() == other.checksum()) == bool((words == turned).all())


def test_fill_depends_on_seed_and_place() -> None:
    with Range.anonymous(4 * PAGE_SIZE) as one, Range.anonymous(4 * PAGE_SIZE) as other:
        one.fill(1)
        other.fill(2)
        words = np.frombuffer(one.read(0, one.length) + other.read(0, other.length), dtype=np.uint64)
        assert len(set(words.tolist())) == words.size
        other.fill(1)
        assert one.read(0, one.length) == other.read(0, other.length)
        assert one.checksum() == other.checksum()


def gather_sources(source: Range, order: list[int]) -> list[int]:
    return [source.address + index * PAGE_SIZE for index in order]


@given(order=st.permutations(range(12)), count=st.integers(0, 12), as_array=st.booleans())
def test_gather_moves_pages_in_any_order(order: list[int], count: int, as_array: bool) -> None:
    order = order[:count]
    with (
        Range.anonymous(12 * PAGE_SIZE, huge=False) as source,
        Range.anonymous(max(1, count) * PAGE_SIZE, reserve_only=True) as target,
    ):
        for index in range(12):
            source.write(index * PAGE_SIZE, f"page {index}".encode())
        before = frames(source.address, 12)
        sources = gather_sources(source, order)
        memory.gather(np.array(sources, dtype=np.uint64) if as_array else sources, target.address)
        assert frames(target.address, count) == [before[index] for index in order]
        for place, index in enumerate(order):
            assert target.read(place * PAGE_SIZE, 7).rstrip(b"\0") == f"page {index}".encode()


def test_the_sources_stay_reserved() -> None:
    """A hole would be taken by the next mmap, and unmapped under its owner when the source is closed."""
    with Range.anonymous(8 * PAGE_SIZE, huge=False) as source:
        source.populate()
        with Range.anonymous(8 * PAGE_SIZE, reserve_only=True) as target:
            memory.gather(gather_sources(source, list(range(8))), target.address)
            for index in range(8):
                assert memory.vma_line(source.address + index * PAGE_SIZE) != ""
            memory.gather([target.address], source.address)
            assert present(source.address, 1) == [True]


def test_a_gather_that_fails_says_how_far_it_came() -> None:
    with (
        Range.anonymous(4 * PAGE_SIZE, huge=False) as source,
        Range.anonymous(4 * PAGE_SIZE, reserve_only=True) as target,
    ):
        source.populate()
        sources = gather_sources(source, [0, 2, 1, 3])
        sources[2] += 1
        with pytest.raises(memory.GatherError, match="page 2 of 4") as caught:
            memory.gather(sources, target.address)
        assert caught.value.moved == 2
        assert caught.value.errno == errno.EINVAL
        assert present(target.address, 4) == [True, True, False, False]


RUN_OUT = """
import errno
from regrepro.core import memory
from pathlib import Path
limit = int(Path("/proc/sys/vm/max_map_count").read_text())
count = limit + 10
source = memory.Range.anonymous(2 * count * memory.PAGE_SIZE, huge=False)
source.write(0, b"touched")  # what was never touched merges wherever it is moved
target = memory.Range.anonymous(count * memory.PAGE_SIZE, reserve_only=True)
pages = [source.address + 2 * index * memory.PAGE_SIZE for index in range(count)]
try:
    memory.gather(pages, target.address)
except memory.GatherError as error:
    assert error.errno == errno.ENOMEM, error
    assert 0 < error.moved < count
    print(error)
"""


def test_running_out_of_mappings_names_the_limit() -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 300_000:
        pytest.skip(f"vm.max_map_count={limit} is too high to reach in a test")
    if resource.getrlimit(resource.RLIMIT_AS)[0] not in (resource.RLIM_INFINITY,):
        pytest.skip("RLIMIT_AS is set")
    done = subprocess.run([sys.executable, "-c", RUN_OUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"vm.max_map_count={limit}" in done.stdout


def test_lines_of_a_range() -> None:
    """Neighbours that `gather()` leaves are one; another protection, or a file, is another mapping."""
    with memory.Range.anonymous(8 * PAGE_SIZE, huge=False) as buffer:
        [line] = memory.vma_lines(buffer.address, buffer.length)
        assert line == memory.vma_line(buffer.address)
        mprotect(buffer.address + 2 * PAGE_SIZE, PAGE_SIZE, 0)
        lines = memory.vma_lines(buffer.address, buffer.length)
        assert [text.split()[1] for text in lines] == ["rw-p", "---p", "rw-p"]
        assert len(memory.vma_lines(buffer.address + 2 * PAGE_SIZE, PAGE_SIZE)) == 1
    assert memory.vma_lines(4096, 4096) == []
    lines = ["1000-2000 rw-p 00000000 00:00 0"]
    memory._add_vma(lines, "2000-3000 rw-p 7f0000 00:00 0")
    memory._add_vma(lines, "3000-4000 rw-s 00003000 00:01 77 /memfd:x (deleted)")
    memory._add_vma(lines, "4000-5000 rw-s 00009000 00:01 77 /memfd:x (deleted)")
    assert [text.split()[0] for text in lines] == ["1000-3000", "3000-4000", "4000-5000"]


def mprotect(address: int, length: int, protection: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).mprotect
    assert call(ctypes.c_void_p(address), ctypes.c_size_t(length), protection) == 0
