"""A shared mapping of /dev/zero: its path is a device's, its pages are shared memory."""

import mmap
import os

from regrepro import Stage, change, scenario
from regrepro.core.memory import Range
from regrepro.stage.faults.base import checked, libc

MAP_FIXED = 0x10


@scenario(
    shows="half of it PROT_NONE is a page-fault, and no BAR",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}},
    controls={"no-pin": change(pin="none")},
)
def shared_zero_device(stage: Stage) -> None:
    """Register a shared mapping of /dev/zero whose second half may not be touched."""
    size = 8 * stage.page_size
    fd = os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC)
    memory = Range.anonymous(size, huge=False)
    flags, protection = mmap.MAP_SHARED | MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    checked(libc.mmap(memory.address, size, protection, flags, fd, 0), "mmap")
    os.close(fd)
    memory.fill(1)
    buffer = stage.adopt(memory, "shm")
    checked(libc.mprotect(buffer.address + size // 2, size // 2, 0), "mprotect")
    stage.register(buffer).deregister()
