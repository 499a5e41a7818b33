"""GPU memory by dma-buf: the path that has no host page, and so not this bug."""

from __future__ import annotations

import os

from regrepro import Size, Stage, instead, scenario


@scenario(
    shows="section 4: the exporter supplies the DMA mapping, ibv_reg_dmabuf_mr takes it",
    needs=("root", "cuda", "rdma", "dmabuf"),
    expects={"none": "not-reproduced"},
    controls={"host-memory": instead("no_pin")},
    profiles=("node",),
    timeout=120,
    options={"length": Size(4 << 20), "vmm": False},
)
def gpu_buffer_dmabuf(stage: Stage) -> None:
    """Export GPU memory as a dma-buf and register it."""
    buffer = stage.cuda.device_alloc(stage.option("length"), vmm=stage.option("vmm"))
    fd = stage.cuda.export_dmabuf(buffer)
    if fd is None:
        stage.unmet("dma-buf", "CUDA exported none: the record has its own words", "see docs/gpu-node.md")
    try:
        stage.register(buffer, "ibv_reg_dmabuf_mr", fd=fd).deregister()
    finally:
        os.close(fd)
