"""KSM merged the buffer's pages: a registration for writing copies them, and no page is migrated."""

import ctypes
import time
from pathlib import Path

from regrepro import Stage, change, scenario
from regrepro.stage.faults.base import libc

KSM, MADV_MERGEABLE = Path("/sys/kernel/mm/ksm"), 12


@scenario(
    shows="pages moved by copy-on-write: told as copied, never as migrated",
    needs=("root", "unpinnable", "rdma", "lab"),
    expects={"none": {"verdict": "not-reproduced", "basis": "kernel"}},
    controls={"no-pin": change(pin="none")},
)
def merged_pages(stage: Stage) -> None:
    """Register 8 unpinnable pages that KSM has made one."""
    if not KSM.exists():
        stage.unmet("ksm", "this kernel has none", "use a kernel with CONFIG_KSM")
    buffer = stage.buffer(pages=8, place="unpinnable")
    buffer.write(b"\x5a" * buffer.length)
    libc.madvise(ctypes.c_void_p(buffer.address), ctypes.c_size_t(buffer.length), MADV_MERGEABLE)
    (KSM / "run").write_text("1")
    end = time.monotonic() + 20
    while int((KSM / "pages_sharing").read_text()) < 7 and time.monotonic() < end:
        time.sleep(0.2)
    (KSM / "run").write_text("0")
    stage.look(buffer)
    stage.register(buffer).deregister()
