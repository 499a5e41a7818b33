"""Memory of memfd_secret(), which the kernel's own mapping does not have: no pin of any kind is allowed."""

import mmap
import os

from regrepro import Stage, change, scenario
from regrepro.core.memory import Range
from regrepro.stage.faults.base import checked, libc

SYS_MEMFD_SECRET, MAP_FIXED = 447, 0x10


@scenario(
    # It is a kernel's default since 6.5; before, the boot argument secretmem.enable=1 asks for it.
    shows="memory that may not be pinned at all is a fault of the address, not of a long-term pin",
    needs=("root", "rdma"),
    expects={
        "none": {"kernel>=6.5": {"verdict": "other-failure", "layer": "page-fault"}, "kernel<6.5": "unmet"}
    },
    controls={"no-pin": change(pin="none")},
)
def secret_memory(stage: Stage) -> None:
    """Register 8 pages of secret memory."""
    size = 8 * stage.page_size
    fd = libc.syscall(SYS_MEMFD_SECRET, os.O_CLOEXEC)
    if fd < 0:
        stage.unmet("memfd_secret", "this kernel offers none", "boot with secretmem.enable=1")
    os.ftruncate(fd, size)
    memory = Range.anonymous(size, huge=False)
    flags, protection = mmap.MAP_SHARED | MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    checked(libc.mmap(memory.address, size, protection, flags, fd, 0), "mmap")
    memory.fill(1)
    stage.register(stage.adopt(memory, "memfd")).deregister()
    os.close(fd)
