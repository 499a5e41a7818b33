"""A range of two mappings: anonymous memory first, then a writable shared file."""

import mmap

from regrepro import Stage, change, scenario
from regrepro.stage.faults.base import checked, libc

MAP_FIXED = 0x10


@scenario(
    shows="the second mapping is the refused one: its first page is where the call stopped",
    needs=("root", "rdma"),
    expects={
        "none": {
            "kernel>=6.5": {"verdict": "other-failure", "layer": "longterm-refused", "errno": "EFAULT"},
            "kernel<6.5": {"verdict": "not-reproduced", "basis": "kernel"},
        }
    },
    controls={"no-pin": change(pin="none")},
)
def file_behind_anonymous(stage: Stage) -> None:
    """Register 8 pages, of which a file is mapped over the last 4, for writing."""
    buffer, file = stage.buffer(pages=8), stage.buffer(pages=8, backing="file")
    half = buffer.length // 2
    flags, protection = mmap.MAP_SHARED | MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    checked(libc.mmap(buffer.address + half, half, protection, flags, file._memory.fd, 0), "mmap")
    buffer.fill(7)
    stage.register(buffer).deregister()
