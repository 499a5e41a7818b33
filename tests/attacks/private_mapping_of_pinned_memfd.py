"""Attack on words and identity: one memfd, pinned by its shared mapping, registered by a private one."""

import ctypes
import mmap

from regrepro import Stage, change, scenario
from regrepro.core.memory import PAGE_SIZE, Range
from regrepro.stage import Buffer
from regrepro.stage.faults.base import libc

MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2


def private(buffer: Buffer) -> Range:
    """Map a memfd's pages privately, and read each so that it is there."""
    mapped = mmap.mmap(buffer._memory.fd, buffer.length, mmap.MAP_PRIVATE)  # type: ignore[attr-defined]
    assert all(mapped[at : at + 1] for at in range(0, buffer.length, PAGE_SIZE))
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    made = Range.anonymous(buffer.length, huge=False)
    length, flags = ctypes.c_size_t(buffer.length), MREMAP_MAYMOVE | MREMAP_FIXED
    to = ctypes.c_void_p(made.address)
    libc.mremap(ctypes.c_void_p(address), length, length, flags, to)
    return made


@scenario(
    shows="the private pages are copied by the registration: told as copied, and not as the work of a fork",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": {"verdict": "not-reproduced", "basis": "kernel"}},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def private_mapping_of_pinned_memfd(stage: Stage) -> None:
    """The pin stays on what the registered pages were copied from."""
    buffer = stage.buffer(pages=8, place="unpinnable", backing="memfd")
    second = stage.adopt(private(buffer), "memfd", place="unpinnable")
    pin = stage.pin(buffer, "pin")
    stage.register(second).deregister()
    pin.release()
