"""The same for writing: kernels that refuse writable file mappings refuse at its first page, others fault."""

import os

from regrepro import Stage, change, scenario

REFUSED = {"verdict": "other-failure", "layer": "longterm-refused", "errno": "EFAULT"}
FAULT = {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}


@scenario(
    shows="the kernel looks at the mapping before it looks for a page",
    needs=("root", "rdma"),
    expects={"none": {"kernel>=6.5": REFUSED, "kernel<6.5": FAULT}},
    controls={"no-pin": change(pin="none")},
)
def file_shorter_than_mapping_written(stage: Stage) -> None:
    """Register 8 pages of a mapping whose file has 4, for writing."""
    buffer = stage.buffer(pages=8, backing="file")
    os.ftruncate(buffer._memory.fd, 4 * stage.page_size)
    stage.register(buffer).deregister()
