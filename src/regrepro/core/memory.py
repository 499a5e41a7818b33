"""Ranges of user memory in any backing that a registration can meet, and the moving of pages between them."""

from __future__ import annotations

import errno as errnos
import mmap as _mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrepro._core import ffi, lib
from regrepro.core.calls import Closing, check, failure

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PAGE_SIZE: int = os.sysconf("SC_PAGE_SIZE")

# include/uapi/asm-generic/mman.h and mman-common.h; the same on x86-64 and arm64.
_PROT_NONE = 0
_PROT_READ_WRITE = _mmap.PROT_READ | _mmap.PROT_WRITE
_MAP_SHARED = _mmap.MAP_SHARED
_MAP_PRIVATE_ANONYMOUS = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS
_MAP_NORESERVE = 0x4000
_MAP_HUGETLB = 0x40000
_MAP_HUGE_SHIFT = 26
_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15

_THP_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def round_up(length: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `length`."""
    return -(-length // unit) * unit


def keep_from_numa_balancing() -> bool:
    """Keep NUMA balancing away from this process' memory and its children's, from now on.

    It moves pages to the node that touches them, and so away from where a scenario put them. Returns
    False where the policy cannot be set (no CONFIG_NUMA, and so no balancing; a container that forbids it).
    """
    return bool(lib.rr_keep_from_numa_balancing() == 0)


def thp_size() -> int | None:
    """Return the size in bytes of a transparent huge page (PMD size), or None on a kernel without them."""
    try:
        return int(_THP_SIZE_FILE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


class Range(Closing):
    """One mapping of this process.

    `address` and `length` are in bytes, `backing` is the record's word, `fd` the file's descriptor or None.

    Made by the class methods; a context manager that unmaps. Pages come into being at the first touch or by
    `populate()`. Everything that the kernel refuses is an OSError with its errno.
    """

    __slots__ = ("_mapped", "address", "backing", "fd", "length", "page_size")

    def __init__(
        self, address: int, length: int, backing: str, *, fd: int | None = None, page_size: int = PAGE_SIZE
    ) -> None:
        self.address = address
        self.length = length
        self.backing = backing
        self.fd = fd
        self.page_size = page_size
        self._mapped = True

    @classmethod
    def anonymous(cls, length: int, *, huge: bool | None = None, reserve_only: bool = False) -> Range:
        """Map private anonymous memory.

        `huge`: True aligns it to a transparent huge page and asks for them (backing `thp`), False forbids
        them, None leaves it to the system's setting. `reserve_only` takes addresses without access, as the
        target of `gather()`. Raises OSError: ENOMEM without the address space; EINVAL for `huge=True` on a
        kernel without them.
        """
        protection = _PROT_NONE if reserve_only else _PROT_READ_WRITE
        flags = _MAP_PRIVATE_ANONYMOUS | _MAP_NORESERVE
        alignment = 0
        if huge:
            size = thp_size()
            if size is None:
                raise failure(errnos.EINVAL, "this kernel has no transparent huge pages")
            alignment = size
        memory = cls(_map(length, alignment, protection, flags), length, "thp" if huge else "anonymous")
        if huge is None:
            return memory
        status = lib.rr_advise(memory.address, memory._whole, _MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE)
        if status and (
            huge or status != -errnos.EINVAL
        ):  # without THP in the kernel, forbidding it is no error
            memory.close()
            raise failure(status, "madvise(MADV_HUGEPAGE)" if huge else "madvise(MADV_NOHUGEPAGE)")
        return memory

    @classmethod
    def memfd(cls, length: int) -> Range:
        """Map a new memfd, shared. Raises OSError."""
        return cls._of_file(os.memfd_create("regrepro", os.MFD_CLOEXEC), length, "memfd")

    @classmethod
    def shm(cls, length: int, name: str | None = None) -> Range:
        """Map a new POSIX shared memory object, whose name is unlinked before this returns.

        Raises OSError: EEXIST when the name is taken, ENOENT or EACCES where /dev/shm cannot be used.
        """
        if name is None:
            name = f"regrepro-{os.getpid()}-{secrets.token_hex(4)}"
        if not name or "/" in name.lstrip("/") or "\0" in name:
            raise failure(errnos.EINVAL, f"{name!r} is no name of a shared memory object")
        fd = lib.rr_shm_unlinked(f"/{name.lstrip('/')}".encode())
        if fd < 0:
            raise failure(fd, f"shm_open of /{name.lstrip('/')}")
        return cls._of_file(fd, length, "shm")

    @classmethod
    def file(cls, path: str | os.PathLike[str], length: int) -> Range:
        """Map a file, shared, made and grown (never shortened) to `length` bytes as needed; it stays.

        Raises OSError: ENOSPC when the disk cannot hold it, and whatever open(2) says.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return cls._of_file(fd, length, "file")

    @classmethod
    def hugetlb(cls, length: int, page_size: int) -> Range:
        """Map private hugetlb pages of `page_size` bytes; `length` must be a multiple of it.

        Raises OSError: ENOMEM when the pool has not enough of them, EINVAL for a size that this kernel lacks.
        """
        if page_size <= PAGE_SIZE or page_size & (page_size - 1) or length % page_size:
            raise failure(errnos.EINVAL, f"{length} bytes are not made of huge pages of {page_size} bytes")
        flags = _MAP_PRIVATE_ANONYMOUS | _MAP_HUGETLB | (page_size.bit_length() - 1) << _MAP_HUGE_SHIFT
        cell = ffi.new("uintptr_t *")
        status = lib.rr_map(length, 0, _PROT_READ_WRITE, flags, -1, 0, cell)
        if status:
            pool = f"/sys/kernel/mm/hugepages/hugepages-{page_size // 1024}kB/nr_hugepages"
            raise failure(status, f"{length // page_size} huge pages of {page_size} bytes (pool: {pool})")
        return cls(int(cell[0]), length, "hugetlb", page_size=page_size)

    @classmethod
    def _of_file(cls, fd: int, length: int, backing: str) -> Range:
        try:
            _check_length(length)
            if os.fstat(fd).st_size < length:
                if backing == "file":
                    os.posix_fallocate(fd, 0, length)
                else:
                    os.ftruncate(fd, length)
            return cls(_map(length, 0, _PROT_READ_WRITE, _MAP_SHARED, fd), length, backing, fd=fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def _whole(self) -> int:
        return round_up(self.length, self.page_size)

    @property
    def pages(self) -> int:
        """Number of pages of `PAGE_SIZE`."""
        return self._whole // PAGE_SIZE

    def populate(self, threads: int = 1) -> None:
        """Make every page present and writable, without changing a byte, by `threads` threads.

        Raises OSError: ENOMEM or EFAULT when a page could not be had.
        """
        self._check_open()
        populate(self.address, self.length, threads)

    def fill(self, seed: int) -> None:
        """Write a pattern that depends on the seed and, word by word, on the place."""
        self._check_open()
        lib.rr_fill(self.address, self.length, seed & (1 << 64) - 1)

    def checksum(self) -> int:
        """Return a 64-bit checksum of the bytes. Ranges that differ in one 8-byte word differ in it."""
        self._check_open()
        return int(lib.rr_checksum(self.address, self.length))

    def vma(self) -> str:
        """Return the line of /proc/self/maps that holds the first address ("" if there is none)."""
        return vma_line(self.address)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the range. Raises IndexError outside of it."""
        self._check_inside(offset, length)
        return bytes(ffi.buffer(ffi.cast("char *", self.address + offset), length))

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes into the range. Raises IndexError outside of it."""
        self._check_inside(offset, len(data))
        lib.rr_copy(self.address + offset, int(ffi.cast("uintptr_t", ffi.from_buffer(data))), len(data))

    def close(self) -> None:
        """Unmap, and close the file. Again does nothing."""
        if not self._mapped:
            return
        self._mapped = False
        status = lib.rr_unmap(self.address, self._whole)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if status:
            raise failure(status, "munmap")

    def _check_open(self) -> None:
        if not self._mapped:
            raise ValueError("the range is closed")

    def _check_inside(self, offset: int, length: int) -> None:
        self._check_open()
        if offset < 0 or length < 0 or offset + length > self.length:
            raise IndexError(f"{length} bytes at {offset} are outside of a range of {self.length}")

    def __repr__(self) -> str:
        return f"<Range {self.backing} {self.address:#x}+{self.length:#x}>"


def _check_length(length: int) -> None:
    if not 0 < length < 1 << 63:
        raise failure(errnos.EINVAL, f"a range of {length} bytes")


def _map(length: int, alignment: int, protection: int, flags: int, fd: int = -1) -> int:
    _check_length(length)
    cell = ffi.new("uintptr_t *")
    check(lib.rr_map(length, alignment, protection, flags, fd, 0, cell), f"mmap of {length} bytes")
    return int(cell[0])


def populate(address: int, length: int, threads: int = 1) -> None:
    """Make every page that the bytes touch present and writable, without changing a byte.

    By MADV_POPULATE_WRITE where the kernel has it (5.14), else by one atomic `or 0` a page. Raises OSError:
    ENOMEM where nothing is mapped or memory ran out, EFAULT where a page may not be written or could not be
    had.
    """
    check(lib.rr_populate(address, length, max(1, threads)), f"populating {length} bytes at {address:#x}")


def checksum(address: int, length: int) -> int:
    """Return the 64-bit checksum of readable memory, as `Range.checksum()`."""
    return int(lib.rr_checksum(address, length))


def vma_line(address: int) -> str:
    """Return the line of /proc/self/maps that holds the address, or "" if there is none or no /proc."""
    return next(iter(vma_lines(address, 1) or ()), "")


def vma_lines(address: int, length: int) -> list[str] | None:
    """Return the lines of /proc/self/maps that a range touches; None where there is no /proc.

    Neighbours of anonymous memory that differ in their offsets alone, as `gather()` leaves them, stand as
    one.
    """
    found: list[str] = []
    try:
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
            for line in maps:
                start, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
                if start >= address + max(length, 1):
                    break
                if end > address:
                    _add_vma(found, line.rstrip("\n"))
    except OSError:
        return None
    return found


def _add_vma(lines: list[str], line: str) -> None:
    """Add a line of /proc/self/maps, joined with the one before where both are of one anonymous memory."""
    span, protection, _, *rest = line.split(maxsplit=5)
    if lines:
        last, its_protection, its_offset, *its_rest = lines[-1].split(maxsplit=5)
        first, _, middle = last.partition("-")
        start, _, end = span.partition("-")
        anonymous = rest[1] == "0"  # the inode
        if anonymous and middle == start and (protection, rest) == (its_protection, its_rest):
            lines[-1] = " ".join([f"{first}-{end}", protection, its_offset, *rest])
            return
    lines.append(line)


class GatherError(OSError):
    """A gather that stopped; `moved` pages had moved and stay where they are."""

    moved: int = 0


def gather(sources: npt.NDArray[np.uint64] | Sequence[int] | Iterable[int], target_address: int) -> None:
    """Move pages, one after another, to consecutive addresses from `target_address` on.

    The physical pages stay the same.

    `sources`: page-aligned addresses. The target must be reserved (`Range.anonymous(…, reserve_only=True)`):
    whatever is mapped there goes. The sources stay mapped, empty (MREMAP_DONTUNMAP; before 5.7 without
    access). Raises GatherError (an OSError), with `moved`; ENOMEM is the limit vm.max_map_count: each run of
    pages that were not neighbours before needs a mapping of its own.
    """
    cells: Any
    if hasattr(sources, "dtype"):
        import numpy as np

        array = np.ascontiguousarray(sources, dtype=np.uint64)
        count = int(array.size)
        cells = ffi.cast("uint64_t *", array.ctypes.data)
    else:
        addresses = list(sources)
        count = len(addresses)
        cells = ffi.new("uint64_t[]", addresses)
    moved = ffi.new("size_t *")
    status = lib.rr_gather(cells, count, target_address, moved)
    if not status:
        return
    done = int(moved[0])
    text = f"moving page {done} of {count} by mremap: {os.strerror(-status)}"
    if status == -errnos.ENOMEM:
        text += f"; the process has {_map_count()} mappings, the limit is vm.max_map_count={_map_limit()}"
        text += " (sysctl vm.max_map_count=1048576 raises it)"
    error = GatherError(-status, text)
    error.moved = done
    raise error


def _map_limit() -> str:
    try:
        return Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _map_count() -> str:
    try:
        with Path("/proc/self/maps").open("rb") as maps:
            return str(sum(1 for _ in maps))
    except OSError:
        return "an unknown number of"
