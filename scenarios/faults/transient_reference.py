"""The same failure, and nobody's bug: something held the pages for a moment."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a reference that is there only for a moment fails the call once; the retry succeeds",
    needs=("root", "unpinnable", "rdma"),
    expects={
        "none": {
            "kernel>=5.13": {"verdict": "other-failure", "layer": "page-migration", "errno": "ENOMEM"},
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        }
    },
    controls={"without-the-reference": change(fault="none")},
    profiles=("faults",),
    timeout=120,
)
def transient_reference(stage: Stage) -> None:
    """Register while the pages lie in a pipe as well, and once more when they have left it."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    with stage.faults.references(buffer):
        stage.register(buffer).deregister()
    stage.register(buffer).deregister()
