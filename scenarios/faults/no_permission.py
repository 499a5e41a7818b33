"""A user who may not open the RDMA device."""

from regrepro import Stage, change, scenario


@scenario(
    shows="the device node's permissions are asked when it is opened, before there is any registration",
    needs=("root", "rdma", "lab"),
    expects={"none": {"verdict": "other-failure", "layer": "device", "errno": ["EACCES", "EPERM"]}},
    controls={"with-permission": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def no_permission(stage: Stage) -> None:
    """Register as a user who may not open the device."""
    buffer = stage.buffer(pages=8)
    with stage.faults.no_permission():
        stage.register(buffer).deregister()
