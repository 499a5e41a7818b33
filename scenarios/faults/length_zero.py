"""Lengths that are none."""

from regrepro import Stage, change, scenario

ARGUMENTS = {"none": {"verdict": "other-failure", "layer": "arguments", "errno": "EINVAL"}}


@scenario(
    shows="no byte at an address within a page: the page counts, and it succeeds",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "not-reproduced", "basis": "kernel"}},
    controls={"a-sound-length": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def length_zero(stage: Stage) -> None:
    """Register 0 bytes at an address within a page: it succeeds by right."""
    buffer = stage.buffer(pages=8)
    stage.register(buffer, offset=8, length=stage.faults.either(0, stage.page_size)).deregister()


@scenario(
    shows="no byte at the begin of a page is no page: EINVAL",
    needs=("root", "rdma"),
    expects=ARGUMENTS,
    controls={"a-sound-length": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def length_zero_aligned(stage: Stage) -> None:
    """Register 0 bytes at the begin of a page."""
    buffer = stage.buffer(pages=8)
    stage.register(buffer, length=stage.faults.either(0, buffer.length)).deregister()


@scenario(
    shows="2^43 bytes (with 4 KiB pages) go beyond what is mapped: EFAULT",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}},
    controls={"a-sound-length": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def length_beyond_the_mapping(stage: Stage) -> None:
    """Register 2^31 pages."""
    buffer = stage.buffer(pages=8)
    length = stage.faults.either(stage.page_size << 31, buffer.length)
    stage.register(buffer, length=length).deregister()


@scenario(
    shows="2^46 bytes (with 4 KiB pages) are more pages than an int can count: EINVAL",
    needs=("root", "rdma"),
    expects=ARGUMENTS,
    controls={"a-sound-length": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def length_beyond_counting(stage: Stage) -> None:
    """Register 2^34 pages."""
    buffer = stage.buffer(pages=8)
    length = stage.faults.either(stage.page_size << 34, buffer.length)
    stage.register(buffer, length=length).deregister()
