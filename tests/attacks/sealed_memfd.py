"""A memfd sealed against writing, mapped shared and registered for writing."""

import fcntl
import mmap
import os

from regrepro import Stage, change, scenario
from regrepro.core.memory import Range
from regrepro.stage.faults.base import checked, libc

F_ADD_SEALS, F_SEAL_WRITE, MAP_FIXED = 1033, 0x8, 0x10


@scenario(
    shows="shared memory that nobody may write: page-fault, not a refusal of file mappings",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}},
    controls={"no-pin": change(pin="none")},
)
def sealed_memfd(stage: Stage) -> None:
    """Register a sealed memfd for remote writing."""
    size = 8 * stage.page_size
    fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, b"x" * size)
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE)
    memory = Range.anonymous(size, huge=False)
    flags = mmap.MAP_SHARED | MAP_FIXED
    checked(libc.mmap(memory.address, size, mmap.PROT_READ, flags, fd, 0), "mmap")
    os.close(fd)
    stage.register(stage.adopt(memory, "memfd")).deregister()
