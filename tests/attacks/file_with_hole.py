"""A shared file mapping with a page unmapped in its middle, registered for reading alone."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a hole in a file mapping: page-fault",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}},
    controls={"no-pin": change(pin="none")},
)
def file_with_hole(stage: Stage) -> None:
    """Register 8 pages of a file of which one is unmapped."""
    buffer = stage.buffer(pages=8, backing="file")
    with stage.faults.hole(buffer, page=4):
        stage.register(buffer, access=("REMOTE_READ",)).deregister()
