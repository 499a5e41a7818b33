"""A range of two mappings: anonymous memory first, then registers of a PCI device, which have no pages."""

import mmap
import os
from pathlib import Path

from regrepro import Stage, change, scenario
from regrepro.stage.faults.base import checked, libc

MAP_FIXED = 0x10
IORESOURCE_MEM = 0x200


def _resource() -> int:
    """Open a BAR of memory that can be mapped, of at least one page; -1 where there is none."""
    for device in sorted(Path("/sys/bus/pci/devices").iterdir()):
        for number, line in enumerate((device / "resource").read_text().splitlines()[:6]):
            first, last, flags = (int(word, 16) for word in line.split())
            path = device / f"resource{number}"
            if flags & IORESOURCE_MEM and last - first + 1 >= mmap.PAGESIZE and path.exists():
                try:
                    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
                except OSError:
                    continue
    return -1


@scenario(
    shows="a mapping of device registers behind ordinary pages: bar-map",
    needs=("root", "rdma", "lab"),
    expects={"none": {"verdict": "other-failure", "layer": "bar-map", "errno": "EFAULT"}},
    controls={"no-pin": change(pin="none")},
)
def device_behind_anonymous(stage: Stage) -> None:
    """Register 8 pages, over the last of which a BAR is mapped."""
    buffer = stage.buffer(pages=8)
    fd = _resource()
    if fd < 0:
        stage.unmet("pci", "no PCI device has a BAR that can be mapped", "run it in a guest with PCI")
    last = buffer.address + buffer.length - stage.page_size
    flags, protection = mmap.MAP_SHARED | MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
    checked(libc.mmap(last, stage.page_size, protection, flags, fd, 0), "mmap")
    os.close(fd)
    stage.register(buffer).deregister()
