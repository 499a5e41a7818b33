"""io_uring's fixed buffers: FOLL_LONGTERM where there is no RDMA device."""

from __future__ import annotations

import os

from regrepro._core import lib
from regrepro.core.calls import Closing, check


class FixedBuffers(Closing):
    """One ring that registers one range at a time, with FOLL_WRITE | FOLL_LONGTERM as `ib_umem_get()` does.

    A context manager. Raises OSError: ENOSYS without CONFIG_IO_URING, EPERM when `kernel.io_uring_disabled`
    or a seccomp profile forbids it.
    """

    __slots__ = ("_registered", "_ring")

    def __init__(self) -> None:
        ring = lib.rr_ring_open()
        if ring < 0:
            hint = " (see kernel.io_uring_disabled, the container's seccomp profile, CONFIG_IO_URING)"
            raise OSError(-ring, f"io_uring_setup: {os.strerror(-ring)}{hint}")
        self._ring: int = ring
        self._registered = False

    def register(self, address: int, length: int) -> None:
        """Pin a range of bytes (buffers of at most 1 GiB each).

        Raises OSError with the kernel's errno: ENOMEM when a page would not move or RLIMIT_MEMLOCK is too
        low, EBUSY when a range is registered already, EFAULT for length 0 or memory that may not be pinned.
        """
        check(lib.rr_ring_register(self._ring, address, length), "io_uring_register(IORING_REGISTER_BUFFERS)")
        self._registered = True

    def unregister(self) -> None:
        """Let go of the range; without one, do nothing. Raises OSError."""
        if not self._registered:
            return
        check(lib.rr_ring_unregister(self._ring), "io_uring_register(IORING_UNREGISTER_BUFFERS)")
        self._registered = False

    def registered(self) -> bool:
        """Return whether the kernel says that the ring holds a range."""
        return bool(lib.rr_ring_registered(self._ring) == 1)

    def close(self) -> None:
        """Unregister and close the ring. Again does nothing."""
        if self._ring < 0:
            return
        try:
            self.unregister()
        finally:
            os.close(self._ring)
            self._ring = -1
