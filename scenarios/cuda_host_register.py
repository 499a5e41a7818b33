"""Memory that CUDA pins by cudaHostRegister: shared memory, much of it at once, and a file."""

from regrepro import Size, Stage, change, scenario

FILE_IS_REFUSED = {"verdict": "other-failure", "layer": ["longterm-refused", "unknown"]}


@scenario(
    shows="section 8: other shared-memory paths use cudaHostRegister over a mapped host range",
    needs=("root", "unpinnable", "registrar", "cuda"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "pin": {"kernel>=5.13": "reproduced", "kernel<5.13": "not-reproduced"},
        "longterm": "not-reproduced",
    },
    controls={"no-pin": change(pin="none"), "ordinary-memory": change(place="ordinary")},
    profiles=("node",),
    timeout=240,
    options={"length": Size(32 << 10)},
    variants={
        # NCCL's path between processes.
        "shm": {"tags": ("shared-memory",)},
        "memfd": {
            "shows": "sections 7 and 8: anonymous, shmem or memfd-like, the mapping label is no longer known",
            "tags": ("shared-memory",),
        },
        # More pages than one call of an old kernel takes.
        "large": {
            "shows": "section 9: more pages at once; older kernels fail a large long-term pin by itself",
            "options": {"length": Size(64 << 20)},
        },
        # What a driver that pins for long must refuse by itself.
        "file": {
            "shows": "section 9: registration of pre-existing file-backed memory; a long-term pin is refused",
            "needs": ("root", "registrar", "cuda"),
            "expects": {
                "pin": {"kernel>=6.5": FILE_IS_REFUSED, "kernel<6.5": "not-reproduced"},
                "longterm": {"verdict": "other-failure", "layer": "cuda-pin"},
            },
            "controls": {"of-a-memfd": change(fault="none")},
            "options": {"pages": 8},
            "tags": ("file",),
        },
    },
)
def cuda_host_register(stage: Stage) -> None:
    """Register memory that cudaHostRegister has pinned; then release the pin, and register it again."""
    if stage.variant == "file":
        # Where Linux lets anything be pinned: of the file, not of the place of its pages, is what happens.
        buffer = stage.faults.buffer_of_file(pages=stage.option("pages"), place="ordinary")
    else:
        backing = "anonymous" if stage.variant == "large" else stage.variant
        buffer = stage.buffer(length=stage.option("length"), place="unpinnable", backing=backing)
    pin = stage.pin(buffer)
    if pin.errno:
        return  # CUDA itself refused: that is the verdict
    stage.cuda.describe(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
