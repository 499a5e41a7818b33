"""A file shorter than its mapping, registered for reading alone: beyond its end is a fault."""

import os

from regrepro import Stage, change, scenario


@scenario(
    shows="beyond the end of a file, no write asked for: page-fault, not a refusal of file mappings",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}},
    controls={"no-pin": change(pin="none")},
)
def file_shorter_than_mapping(stage: Stage) -> None:
    """Register 8 pages of a mapping whose file has 4."""
    buffer = stage.buffer(pages=8, backing="file")
    os.ftruncate(buffer._memory.fd, 4 * stage.page_size)
    stage.register(buffer, access=("REMOTE_READ",)).deregister()
