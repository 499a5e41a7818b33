"""A range of two mappings, of which the second may not be touched."""

from regrepro import Stage, change, scenario
from regrepro.stage.faults.base import checked, libc


@scenario(
    shows="half PROT_NONE: page-fault",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}},
    controls={"no-pin": change(pin="none")},
)
def no_access_behind_anonymous(stage: Stage) -> None:
    """Register 8 anonymous pages of which the last 4 are PROT_NONE."""
    buffer = stage.buffer(pages=8)
    half = buffer.length // 2
    checked(libc.mprotect(buffer.address + half, half, 0), "mprotect")
    stage.register(buffer).deregister()
    checked(libc.mprotect(buffer.address + half, half, 3), "mprotect")
