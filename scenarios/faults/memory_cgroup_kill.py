"""Memory that a control group does not grant."""

from regrepro import Stage, change, scenario


@scenario(
    shows="the pages that a registration makes present count against the memory cgroup, which may kill",
    needs=("root", "rdma", "lab"),
    expects={"none": {"verdict": "other-failure", "layer": "memory-cgroup"}},
    controls={"without-the-limit": change(fault="none")},
    profiles=("faults",),
    timeout=180,
)
def memory_cgroup_kill(stage: Stage) -> None:
    """Register 64 MiB that were never touched, in a memory cgroup of 16 MiB."""
    buffer = stage.faults.untouched_buffer(64 << 20)
    with stage.faults.memory_cgroup(16 << 20):
        stage.register(buffer).deregister()
