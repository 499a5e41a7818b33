"""Files: Linux refuses a long-term pin for writing of a page that it must write back to a disk."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a shared, writable mapping of a file on a disk may not be pinned for long since 6.5",
    needs=("root", "rdma"),
    expects={
        "none": {
            "kernel>=6.5": {"verdict": "other-failure", "layer": "longterm-refused", "errno": "EFAULT"},
            "kernel<6.5": {"verdict": "not-reproduced", "basis": "kernel"},
        }
    },
    controls={"of-a-memfd": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def file_mapping(stage: Stage) -> None:
    """Register a shared mapping of a file for remote writing."""
    buffer = stage.faults.buffer_of_file(pages=8)
    stage.register(buffer).deregister()
