"""A near miss: the pinned pages are replaced by others at the same address (MAP_FIXED)."""

import ctypes
import mmap

from regrepro import Stage, change, scenario
from regrepro.stage.faults.base import libc

MAP_FIXED = 0x10


@scenario(
    shows="a pin is no longer held on an address that has another frame",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "unmet", "get": "unmet"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def mapped_anew_after_the_pin(stage: Stage) -> None:
    """The registration succeeds on pages that nobody pinned."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    address, length = ctypes.c_void_p(buffer.address), ctypes.c_size_t(buffer.length)
    libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    ctypes.memset(buffer.address, 1, buffer.length)
    stage.register(buffer).deregister()
    pin.release()
