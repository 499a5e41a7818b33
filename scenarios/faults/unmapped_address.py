"""Addresses that have no page, or none that may be written."""

from regrepro import Stage, change, scenario

FAULT = {"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}}


@scenario(
    shows="an address at which nothing is mapped: EFAULT",
    needs=("root", "rdma"),
    expects=FAULT,
    controls={"mapped": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def unmapped_address(stage: Stage) -> None:
    """Register 8 pages at an address where nothing is mapped."""
    buffer = stage.buffer(pages=8)
    address = stage.faults.unmapped_address(buffer.length)
    stage.register(buffer, address=stage.faults.either(address, buffer.address))


@scenario(
    shows="a hole in the middle: the pages before it are pinned, then EFAULT",
    needs=("root", "rdma"),
    expects=FAULT,
    controls={"whole": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def hole_in_the_middle(stage: Stage) -> None:
    """Register 8 pages of which one in the middle is not mapped."""
    buffer = stage.buffer(pages=8)
    with stage.faults.hole(buffer, page=4):
        stage.register(buffer).deregister()


@scenario(
    shows="a mapping that may only be read, registered for remote writing: EFAULT",
    needs=("root", "rdma"),
    expects=FAULT,
    controls={"writable": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def read_only_mapping(stage: Stage) -> None:
    """Register for remote writing what this process may only read."""
    buffer = stage.buffer(pages=8)
    with stage.faults.read_only(buffer):
        stage.register(buffer, access=("LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ")).deregister()
