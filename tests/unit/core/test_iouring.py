"""io_uring's fixed buffers, as far as this machine allows."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from regrepro.core.iouring import FixedBuffers
from regrepro.core.memory import PAGE_SIZE, Range


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_io_uring_registers_one_range_at_a_time() -> None:
    with Range.anonymous(4 * PAGE_SIZE, huge=False) as buffer:
        buffer.populate()
        before = descriptors()
        try:
            opened = FixedBuffers()
            opened.register(buffer.address, buffer.length)
            opened.unregister()
        except OSError as error:
            assert error.errno in (errno.EPERM, errno.ENOSYS, errno.ENOMEM), error  # ENOMEM: RLIMIT_MEMLOCK
            pytest.skip(str(error))
        with opened as ring:
            one_at_a_time(ring, buffer)
        ring.close()
        assert descriptors() == before


def one_at_a_time(ring: FixedBuffers, buffer: Range) -> None:
    assert not ring.registered()
    ring.unregister()
    for _ in range(3):
        ring.register(buffer.address, buffer.length)
        assert ring.registered()
        with pytest.raises(OSError) as caught:
            ring.register(buffer.address, PAGE_SIZE)
        assert caught.value.errno == errno.EBUSY
        ring.unregister()
        assert not ring.registered()
    for address, length in ((buffer.address, 0), (PAGE_SIZE, PAGE_SIZE), (buffer.address, 1 << 40)):
        with pytest.raises(OSError) as caught:
            ring.register(address, length)
        assert caught.value.errno in (errno.EFAULT, errno.EINVAL, errno.ENOMEM)
    ring.register(buffer.address, buffer.length)
