"""Many registrations that stay: each takes its pages out of unpinnable memory, while there is other."""

from regrepro import Size, Stage, change, scenario


@scenario(
    shows="section 15, and a public report of 2026: 4,096 registrations of 1 MiB kept, under CUDA pressure",
    needs=("root", "unpinnable", "registrar"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "pin": {"kernel>=5.13": "reproduced", "kernel<5.13": "not-reproduced"},
        "longterm": "not-reproduced",
    },
    controls={"no-pin": change(pin="none"), "ordinary-memory": change(place="ordinary")},
    profiles=(),
    timeout=900,
    options={"count": 32, "length": Size(1 << 20), "cuda_pressure": Size(0)},
)
def retained_registrations(stage: Stage) -> None:
    """Register COUNT ranges of LENGTH bytes and keep them: pinned by CUDA, then released."""
    if stage.option("cuda_pressure"):
        stage.cuda.host_alloc(length=stage.option("cuda_pressure"))
    count, length = stage.option("count"), stage.option("length")
    buffer = stage.buffer(length=count * length, place="unpinnable")
    pin = stage.pin(buffer)
    if pin.errno:
        return
    stage.register_many(buffer, count, length=length, keep=True).deregister()
    pin.release()
    stage.register_many(buffer, count, length=length, keep=True)
