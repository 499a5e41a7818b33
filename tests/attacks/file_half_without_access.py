"""A shared file mapping whose second half may not be touched at all, registered for reading alone."""

from regrepro import Stage, change, scenario
from regrepro.stage.faults.base import checked, libc


@scenario(
    shows="half PROT_NONE, no write asked for: page-fault",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}},
    controls={"no-pin": change(pin="none")},
)
def file_half_without_access(stage: Stage) -> None:
    """Register 8 pages of a file of which the last 4 are PROT_NONE."""
    buffer = stage.buffer(pages=8, backing="file")
    half = buffer.length // 2
    checked(libc.mprotect(buffer.address + half, half, 0), "mprotect")
    stage.register(buffer, access=("REMOTE_READ",)).deregister()
    checked(libc.mprotect(buffer.address + half, half, 3), "mprotect")
