"""A page that userfaultfd answers with SIGBUS: no page may be had, and nothing waits."""

import ctypes
import fcntl
import os
import struct

from regrepro import Stage, change, scenario
from regrepro.stage.faults.base import libc

SYS_USERFAULTFD, UFFDIO_API, UFFDIO_REGISTER = 323, 0xC018AA3F, 0xC020AA00  # x86-64
UFFD_API, FEATURE_SIGBUS, MODE_MISSING = 0xAA, 1 << 7, 1


@scenario(
    shows="a missing page under userfaultfd with SIGBUS: page-fault",
    needs=("root", "rdma", "userfaultfd"),
    expects={"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}},
    controls={"no-pin": change(pin="none")},
)
def userfault_sigbus(stage: Stage) -> None:
    """Register 8 pages that are not there, in a range where userfaultfd raises SIGBUS."""
    buffer = stage.faults.untouched_buffer(8 * stage.page_size)
    fd = libc.syscall(SYS_USERFAULTFD, os.O_CLOEXEC)
    if fd < 0:
        stage.unmet("userfaultfd", os.strerror(ctypes.get_errno()), "run as root on x86-64")
    fcntl.ioctl(fd, UFFDIO_API, bytearray(struct.pack("QQQ", UFFD_API, FEATURE_SIGBUS, 0)))
    range_ = struct.pack("QQQQ", buffer.address, buffer.length, MODE_MISSING, 0)
    fcntl.ioctl(fd, UFFDIO_REGISTER, bytearray(range_))
    stage.register(buffer).deregister()
    os.close(fd)
