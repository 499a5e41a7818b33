"""A file of no byte under a mapping for writing: no page is there that could tell the layers apart."""

import os

from regrepro import Stage, change, scenario

REFUSED = {"verdict": "other-failure", "layer": "longterm-refused", "errno": "EFAULT"}
FAULT = {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}


@scenario(
    shows="whether this kernel refuses writable file mappings decides, not the pages",
    needs=("root", "rdma"),
    expects={"none": {"kernel>=6.5": REFUSED, "kernel<6.5": FAULT}},
    controls={"no-pin": change(pin="none")},
)
def file_emptied(stage: Stage) -> None:
    """Register 8 pages of a mapping whose file has none, for writing."""
    buffer = stage.buffer(pages=8, backing="file")
    os.ftruncate(buffer._memory.fd, 0)
    stage.register(buffer).deregister()
