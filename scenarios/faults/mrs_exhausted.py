"""A device has only so many memory regions to give."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a device whose MRs are used up refuses a sound registration before any page is looked at",
    needs=("root", "rdma", "lab"),
    expects={"none": {"verdict": "other-failure", "layer": "mkey", "errno": ["EINVAL", "ENOMEM"]}},
    controls={"with-some-left": change(fault="none")},
    profiles=("faults",),
    timeout=1200,
)
def mrs_exhausted(stage: Stage) -> None:
    """Register while another process holds every MR that the device can give."""
    buffer = stage.buffer(pages=8)
    with stage.faults.mrs_exhausted():
        stage.register(buffer).deregister()
