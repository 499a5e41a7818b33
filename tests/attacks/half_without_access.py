"""A range of two mappings, of which the second may not be touched at all."""

from regrepro import Stage, change, scenario
from regrepro.stage.faults.base import checked, libc


@scenario(
    shows="half PROT_NONE: page-fault",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}},
    controls={"no-pin": change(pin="none")},
    variants={
        "anonymous": {},
        "file": {"shows": "half PROT_NONE, no write asked for: page-fault"},
    },
)
def half_without_access(stage: Stage) -> None:
    """Register 8 pages, anonymous or of a file, of which the last 4 are PROT_NONE."""
    buffer = stage.buffer(pages=8, backing=stage.variant)
    half = buffer.length // 2
    checked(libc.mprotect(buffer.address + half, half, 0), "mprotect")
    stage.register(buffer, access=("REMOTE_READ",) if stage.variant == "file" else None).deregister()
    checked(libc.mprotect(buffer.address + half, half, 3), "mprotect")
