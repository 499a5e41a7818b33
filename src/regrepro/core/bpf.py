"""Maps of bpf(2) and the ring that programs write into, by descriptors that somebody else has opened."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from regrepro._core import ffi, lib

_TAKE_BYTES = 65536


def _failure(code: int, what: str) -> OSError:
    return OSError(code, f"{what}: {os.strerror(code)}")


def read_map(map_fd: int, key_size: int, value_size: int) -> dict[bytes, bytes]:
    """Return what a map has; entries that come or go meanwhile may be there or not. Raises OSError."""
    found: dict[bytes, bytes] = {}
    key, following, value = (ffi.new("uint8_t[]", size) for size in (key_size, key_size, value_size))
    last = ffi.NULL
    while True:
        status = lib.rr_bpf_map_next(map_fd, last, following)
        taken = bytes(ffi.buffer(following))
        if status == -errno.ENOENT or taken in found:  # after the last, or begun again after one that went
            return found
        if status:
            raise _failure(-status, "reading a map of bpf(2)")
        if not lib.rr_bpf_map_get(map_fd, following, value):
            found[taken] = bytes(ffi.buffer(value))
        ffi.memmove(key, following, key_size)
        last = key


def remove_from_map(map_fd: int, key: bytes) -> None:
    """Take an entry out, if it is there."""
    lib.rr_bpf_map_unset(map_fd, ffi.from_buffer("uint8_t[]", key))


def missed_runs(program: int) -> tuple[int, int] | None:
    """Return a program's number, and how often the kernel passed over it, as one ran on that CPU already.

    None where it does not say: it does since 5.12 for BPF_PROG_TYPE_TRACING, since 6.7 for
    BPF_PROG_TYPE_KPROBE (recursion_misses, bpf_prog_show_fdinfo() in kernel/bpf/syscall.c).
    """
    try:
        text = Path(f"/proc/self/fdinfo/{program}").read_text()
    except OSError:
        return None
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        return int(rows["prog_id"]), int(rows["recursion_misses"])
    except (KeyError, ValueError):
        return None


class Counters:
    """Numbers that programs count up: their global variables, each of 8 bytes.

    It is memory of the reader too, so that reading takes no call of bpf(2), for which the reader would need
    its capabilities for good. Raises OSError.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)

    def value(self, index: int) -> int:
        """Return a number as it is now."""
        (value,) = struct.unpack_from("=Q", self._memory, 8 * index)
        return int(value)

    def close(self) -> None:
        """Let it go; programs keep the map as long as they need it."""
        self._memory.close()


class Ring:
    """What programs of all CPUs write, in the order in which they did (BPF_MAP_TYPE_RINGBUF, Linux 5.8).

    `size`: bytes, a power of two and a multiple of the page's. `fd`: of the map, and to be polled; it stays
    the caller's.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._mapped = ffi.new("struct rr_bpf_ring *")
        self._out = ffi.new("uint8_t[]", _TAKE_BYTES)
        self.fd = fd
        status = lib.rr_bpf_ring_map(self.fd, size, self._mapped)
        if status:
            raise _failure(-status, f"mapping a ring of {size} bytes")

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self) -> Iterator[bytes]:
        """Yield what there is, some 64 KiB at most. Raises OSError (EBADMSG) where it is no such ring."""
        used = lib.rr_bpf_ring_take(self._mapped, self._out, _TAKE_BYTES) if self.fd >= 0 else 0
        if used < 0:
            raise _failure(int(-used), "reading a ring of bpf(2)")
        data = bytes(ffi.buffer(self._out, used))
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from("=Q", data, at)
            yield data[at + 8 : at + 8 + length]
            at += 8 + (length + 7) // 8 * 8

    @property
    def empty(self) -> bool:
        """Whether all has been taken that was begun: else there is more, or it is being written just now."""
        return self.fd < 0 or bool(lib.rr_bpf_ring_empty(self._mapped))

    def close(self) -> None:
        """Let it go, with what nobody has taken."""
        if self.fd >= 0:
            lib.rr_bpf_ring_unmap(self._mapped)
            self.fd = -1
