"""GPU memory by peer memory: the older path, through nvidia-peermem."""

from regrepro import Size, Stage, instead, scenario


@scenario(
    shows="sections 1 and 4: ibv_reg_mr of a CUDA address, RDMA's peer-memory lookup, nvidia_p2p_get_pages",
    needs=("root", "cuda", "rdma", "peer-memory"),
    expects={"none": "not-reproduced"},
    controls={"host-memory": instead("no_pin")},
    profiles=("node",),
    timeout=120,
    options={"length": Size(4 << 20)},
)
def gpu_buffer_peermem(stage: Stage) -> None:
    """Register a GPU address as if it were memory; nvidia-peermem answers for its pages."""
    buffer = stage.cuda.device_alloc(stage.option("length"))
    stage.register(buffer).deregister()
