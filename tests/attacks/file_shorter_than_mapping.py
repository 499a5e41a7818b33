"""A file shorter than its mapping: kernels that refuse writable file mappings refuse at its first page."""

import os

from regrepro import Stage, change, scenario

REFUSED = {"verdict": "other-failure", "layer": "longterm-refused", "errno": "EFAULT"}
FAULT = {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}


@scenario(
    shows="beyond the end of a file, no write asked for: page-fault, not a refusal of file mappings",
    needs=("root", "rdma"),
    expects={"none": FAULT},
    controls={"no-pin": change(pin="none")},
    variants={
        "read": {},
        "written": {
            "shows": "the kernel looks at the mapping before it looks for a page",
            "expects": {"none": {"kernel>=6.5": REFUSED, "kernel<6.5": FAULT}},
        },
    },
)
def file_shorter_than_mapping(stage: Stage) -> None:
    """Register 8 pages of a mapping whose file has 4, for reading alone or for writing."""
    buffer = stage.buffer(pages=8, backing="file")
    os.ftruncate(buffer._memory.fd, 4 * stage.page_size)
    stage.register(buffer, access=("REMOTE_READ",) if stage.variant == "read" else None).deregister()
