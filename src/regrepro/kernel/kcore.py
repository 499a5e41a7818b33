"""The kernel's own memory, read through /proc/kcore (an ELF core file; fs/proc/kcore.c).

Its VMCOREINFO note (kernel/vmcore_info.c) carries the addresses and layouts that crash tools need, most of
what we need too. The kernel answers an address that no program header covers with zeroes; here it is an
error.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro.core.calls import Closing
from regrepro.core.pages import Segments

KCORE = Path("/proc/kcore")

_PT_LOAD, _PT_NOTE = 1, 4


class KcoreError(Exception):
    """Something in /proc/kcore is not as it should be; the message says what."""


class Kcore(Closing):
    """An open /proc/kcore. Raises OSError where it is closed (no root, lockdown, no CONFIG_PROC_KCORE)."""

    def __init__(self, path: Path | None = None) -> None:
        self.fd = os.open(KCORE if path is None else path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_headers()
        except (OSError, struct.error, KcoreError):
            os.close(self.fd)
            self.fd = -1
            raise

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _read_headers(self) -> None:
        header = os.pread(self.fd, 64, 0)
        if len(header) < 64 or header[:4] != b"\x7fELF" or header[4] != 2:
            raise KcoreError("not a 64-bit ELF file")
        (table,) = struct.unpack_from("=Q", header, 32)
        size, count = struct.unpack_from("=HH", header, 54)
        raw = os.pread(self.fd, size * count, table)
        segments = []
        self.vmcoreinfo: dict[str, str] = {}
        for i in range(len(raw) // size):
            kind, _, offset, address, _, file_size, memory_size, _ = struct.unpack_from(
                "=IIQQQQQQ", raw, i * size
            )
            if kind == _PT_LOAD and memory_size:
                segments.append((address, memory_size, offset))
            elif kind == _PT_NOTE:
                self.vmcoreinfo = parse_notes(os.pread(self.fd, file_size, offset))
        self.segments = Segments(segments)

    def refresh(self) -> None:
        """Read the program headers again: they follow memory that is onlined and offlined."""
        self._read_headers()

    def gather(self, addresses: NDArray[np.uint64], width: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Read `width` bytes at each address: (n, width) uint8, and which were read. Raises OSError."""
        return self.segments.gather(self.fd, addresses, width)

    def read(self, address: int, length: int) -> bytes:
        """Read kernel memory. Raises KcoreError for an address outside every segment, OSError."""
        out, ok = self.gather(np.array([address], dtype=np.uint64), length)
        if not ok[0]:
            raise KcoreError(f"kernel address {address:#x} is not in /proc/kcore")
        return out.tobytes()

    def u64(self, address: int) -> int:
        """Read one unsigned long."""
        return int.from_bytes(self.read(address, 8), "little")

    def u32(self, address: int) -> int:
        """Read one unsigned int."""
        return int.from_bytes(self.read(address, 4), "little")

    def number(self, name: str) -> int | None:
        """Return NUMBER, SIZE, LENGTH or OFFSET of vmcoreinfo, named as it stands there: `SIZE(page)`."""
        text = self.vmcoreinfo.get(name)
        return None if text is None else int(text, 0)

    def symbol(self, name: str) -> int | None:
        """Return SYMBOL(name) of vmcoreinfo: an address; for SYMBOL_ARRAY of a pointer, the pointer's
        value.
        """
        text = self.vmcoreinfo.get(f"SYMBOL({name})")
        return None if text is None else int(text, 16)


def parse_notes(notes: bytes) -> dict[str, str]:
    """Return the key-value lines of the VMCOREINFO note among ELF notes; empty where there is none."""
    at = 0
    while at + 12 <= len(notes):
        name_size, size, _ = struct.unpack_from("=III", notes, at)
        name_at = at + 12
        data_at = name_at + (name_size + 3 & ~3)
        if notes[name_at : name_at + name_size].rstrip(b"\0") == b"VMCOREINFO":
            text = notes[data_at : data_at + size].decode("ascii", "replace")
            return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        at = data_at + (size + 3 & ~3)
    return {}
