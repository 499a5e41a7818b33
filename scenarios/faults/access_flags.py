"""Access flags: refused before a page is looked at."""

from regrepro import Stage, change, scenario

SOUND = ("LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ")


@scenario(
    shows="remote write without local write makes no sense: EINVAL",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "arguments", "errno": "EINVAL"}},
    controls={"with-local-write": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def access_flags(stage: Stage) -> None:
    """Register for remote writing, but not for local writing."""
    buffer = stage.buffer(pages=8)
    stage.register(buffer, access=stage.faults.either(("REMOTE_WRITE",), SOUND)).deregister()


@scenario(
    # Old kernels let soft-RoCE take any flag but on-demand paging; new ones have that, and refuse the other.
    shows="a flag that the device does not know: EOPNOTSUPP from its driver, or EINVAL from uverbs",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "arguments", "errno": ["EOPNOTSUPP", "EINVAL"]}},
    controls={"without-the-flag": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def access_flag_of_another_device(stage: Stage) -> None:
    """Register with flags of which soft-RoCE refuses one: huge pages, on-demand paging."""
    stage.faults.only_on("rdma_rxe", "it may know both flags")
    buffer = stage.buffer(pages=8)
    stage.register(buffer, access=stage.faults.either((*SOUND, "HUGETLB", "ON_DEMAND"), SOUND)).deregister()
