"""More pages than one call of an old kernel takes."""

from regrepro import Size, Stage, change, scenario


@scenario(
    shows="section 9: more pages at once; older kernels fail a large pin with FOLL_LONGTERM by itself",
    needs=("root", "unpinnable", "registrar", "cuda"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "pin": {"kernel>=5.13": "reproduced", "kernel<5.13": "not-reproduced"},
        "longterm": "not-reproduced",
    },
    controls={"no-pin": change(pin="none"), "ordinary-memory": change(place="ordinary")},
    profiles=("node",),
    timeout=240,
    options={"length": Size(64 << 20)},
)
def cuda_host_register_large(stage: Stage) -> None:
    """Register a large buffer that cudaHostRegister has pinned."""
    buffer = stage.buffer(length=stage.option("length"), place="unpinnable", backing="anonymous")
    pin = stage.pin(buffer)
    if pin.errno:
        return  # CUDA itself refused: that is the verdict
    stage.cuda.describe(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
