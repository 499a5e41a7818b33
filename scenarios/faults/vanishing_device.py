"""A device that is taken away while it is in use."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a device removed while it is open: EIO, or a wait that nothing ends",
    needs=("root", "rdma", "lab"),
    expects={"none": {"verdict": "other-failure", "layer": "device"}},
    controls={"still-there": change(fault="none")},
    profiles=("faults",),
    timeout=45,
)
def vanishing_device(stage: Stage) -> None:
    """Register on a device that was removed after it was opened."""
    buffer = stage.buffer(pages=8)
    with stage.faults.device_removed():
        stage.register(buffer).deregister()
