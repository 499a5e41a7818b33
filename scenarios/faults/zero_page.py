"""Memory that was only read has the kernel's one page of zeros for all its pages."""

from regrepro import Stage, change, scenario


@scenario(
    shows="the page of zeros is replaced when it is pinned for writing, so it fails no registration",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "not-reproduced", "basis": "kernel"}},
    controls={"written-before": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def zero_page(stage: Stage) -> None:
    """Register memory that was only read, never written: it succeeds by right."""
    buffer = stage.faults.buffer_of_zero_page(pages=8)
    stage.register(buffer).deregister()
