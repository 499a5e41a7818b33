"""Faults of mappings: memory that is not there, may not be written, was never touched, or is a file's."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from regrepro.stage.faults.base import Base, checked, fault, libc
from regrepro.stage.ports import PAGE_SIZE

if TYPE_CHECKING:
    from regrepro.stage.buffers import Buffer, Place

_MAP_FIXED_NOREPLACE = 0x100000  # include/uapi/asm-generic/mman-common.h, since 4.17; a hint before


class Mappings(Base):
    """Mappings that a registration cannot have, or that look as if it could not."""

    def unmapped_address(self, length: int) -> int:
        """Return an address at which `length` bytes are not mapped."""
        reserved = self._stage.backend.reserve(length)
        address = reserved.address
        reserved.close()
        self._step("unmapped", address=address, length=length)
        return address

    @fault()
    def hole(self, buffer: Buffer, page: int) -> Iterator[None]:
        """Unmap one page in the middle of a buffer. Afterwards it holds an empty page."""
        address = buffer.address + page * PAGE_SIZE
        checked(libc.munmap(address, PAGE_SIZE), "munmap")
        try:
            self._step("unmapped", buffer=buffer.id, page=page, vma=buffer._memory.vma())
            yield
        finally:
            # Not to leave the place to somebody else's mapping, which the buffer's end would then take away.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            checked(libc.mmap(address, PAGE_SIZE, protection, flags, -1, 0), "mmap")
            self._step("mapped", buffer=buffer.id, page=page, vma=buffer._memory.vma())

    @fault()
    def read_only(self, buffer: Buffer) -> Iterator[None]:
        """Take the right to write from a buffer's mapping (mprotect)."""
        checked(libc.mprotect(buffer.address, buffer.length, mmap.PROT_READ), "mprotect")
        try:
            self._step("read-only", buffer=buffer.id, vma=buffer._memory.vma())
            yield
        finally:
            libc.mprotect(buffer.address, buffer.length, mmap.PROT_READ | mmap.PROT_WRITE)
            self._step("writable", buffer=buffer.id, vma=buffer._memory.vma())

    def untouched_buffer(self, length: int) -> Buffer:
        """Make a buffer of which no page is present."""
        return self._stage.adopt(self._stage.backend.allocate(length, "anonymous"), "anonymous")

    def buffer_of_zero_page(self, pages: int) -> Buffer:
        """Make a buffer that was only read: each page of it is the kernel's one page of zeros."""
        memory = self._stage.backend.allocate(pages * PAGE_SIZE, "anonymous")
        if self.planted:
            view = self._stage.backend.view(memory.address, memory.length)
            if any(view[:: PAGE_SIZE // 2]):
                raise AssertionError("fresh anonymous memory is not zero")
        else:
            memory.populate()
        return self._stage.adopt(memory, "anonymous")

    def buffer_of_file(self, pages: int, place: Place = "any") -> Buffer:
        """Make a buffer that is a shared, writable mapping of a file which the kernel writes back to a disk.

        In a guest of the lab, which has no disk, the file lies in an ext2 on a loop device. In the control
        it is a memfd, which is never written back.
        """
        return self._stage.buffer(pages=pages, place=place, backing="file" if self.planted else "memfd")
