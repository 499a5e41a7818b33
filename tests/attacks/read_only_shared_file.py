"""A shared file mapping that may only be read, registered for reading alone."""

from regrepro import Stage, change, scenario

FAULT = {"verdict": "other-failure", "layer": "page-fault", "errno": "EFAULT"}


@scenario(
    # __ib_umem_get asked for writing in any case before 6.2 (drivers/infiniband/core/umem.c).
    shows="no write is asked for, so new kernels allow it; old ones always ask for it: page-fault",
    needs=("root", "rdma"),
    expects={"none": {"kernel>=6.2": {"verdict": "not-reproduced", "basis": "kernel"}, "kernel<6.2": FAULT}},
    controls={"no-pin": change(pin="none")},
)
def read_only_shared_file(stage: Stage) -> None:
    """Register a shared, read-only mapping of a file for remote reading."""
    buffer = stage.buffer(pages=8, backing="file")
    with stage.faults.read_only(buffer):
        stage.register(buffer, access=("REMOTE_READ",)).deregister()
