"""The path of the write-up: memory that CUDA itself allocated and pinned, registered with the RDMA card."""

from regrepro import Size, Stage, change, scenario


@scenario(
    shows="sections 8, 9 and 13: cudaHostAlloc maps, pins and hands out host memory; NCCL registers it",
    needs=("root", "unpinnable", "registrar", "cuda"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "pin": {"kernel>=5.13": "reproduced", "kernel<5.13": "not-reproduced"},
        "longterm": "not-reproduced",
    },
    controls={"no-cuda": change(pin="none"), "ordinary-memory": change(place="ordinary")},
    profiles=("node",),
    timeout=240,
    options={"length": Size(512 << 10)},
)
def cuda_host_alloc_then_register(stage: Stage) -> None:
    """Register memory of cudaHostAlloc; then cudaFreeHost, the pages kept, and register them again."""
    pin = stage.cuda.host_alloc(length=stage.option("length"), place="unpinnable")
    if pin.errno:
        return  # CUDA itself refused: that is the verdict
    stage.register(pin.buffer)
    pin.release()
    stage.register(pin.buffer).deregister()  # the same pages at the same address; nothing but the pin is gone
