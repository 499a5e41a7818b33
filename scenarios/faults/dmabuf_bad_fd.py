"""dma-buf: what ibv_reg_dmabuf_mr says of descriptors that are none, and of a device without support."""

from regrepro import Stage, change, scenario

# A provider without dma-buf support answers before it looks at the descriptor; one with it says which.
REFUSED = {
    "none": {
        "verdict": "other-failure",
        "layer": "dma-buf",
        "errno": ["EOPNOTSUPP", "EBADF", "EINVAL"],
    }
}
CONTROLS = {"no-dma-buf": change(fault="none")}
VERB = "ibv_reg_dmabuf_mr"


@scenario(
    shows="a descriptor that was never opened",
    needs=("root", "rdma"),
    expects=REFUSED,
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def dmabuf_bad_fd(stage: Stage) -> None:
    """Register a dma-buf by a number that no file has."""
    buffer = stage.buffer(pages=8)
    stage.register(buffer, stage.faults.either(VERB, None), fd=stage.faults.bad_fd()).deregister()


@scenario(
    shows="a descriptor that was closed too early",
    needs=("root", "rdma"),
    expects=REFUSED,
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def dmabuf_closed_fd(stage: Stage) -> None:
    """Register a dma-buf whose descriptor is closed already."""
    buffer = stage.buffer(pages=8)
    stage.register(buffer, stage.faults.either(VERB, None), fd=stage.faults.closed_fd()).deregister()


@scenario(
    shows="a descriptor of another kind",
    needs=("root", "rdma"),
    expects=REFUSED,
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def dmabuf_wrong_kind(stage: Stage) -> None:
    """Register as a dma-buf what is a memfd."""
    buffer = stage.buffer(pages=8)
    with stage.faults.memfd() as fd:
        stage.register(buffer, stage.faults.either(VERB, None), fd=fd).deregister()


@scenario(
    shows="a sound dma-buf, and a device whose driver cannot register one (soft-RoCE)",
    needs=("root", "rdma", "lab"),
    expects={
        "none": {
            "kernel>=6.12": {"verdict": "other-failure", "layer": "dma-buf", "errno": "EOPNOTSUPP"},
            # Debian's kernels before have no udmabuf to plant it with.
            "kernel<6.12": {"verdict": ["other-failure", "unmet"]},
        }
    },
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def dmabuf_without_support(stage: Stage) -> None:
    """Register a dma-buf of memory pages on a device without dma-buf support."""
    buffer = stage.buffer(pages=8)
    with stage.faults.udmabuf(pages=8) as fd:
        stage.register(buffer, stage.faults.either(VERB, None), fd=fd).deregister()
