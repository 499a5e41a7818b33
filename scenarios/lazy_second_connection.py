"""A connection that is made late: the first one works, the second one meets other memory."""

from regrepro import Stage, change, scenario
from regrepro.stage import nccl


@scenario(
    shows="sections 5 and 15: a lazy connection or a new communicator initializes at an unlucky time",
    needs=("root", "unpinnable", "registrar", "cuda"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "pin": {"kernel>=5.13": "reproduced", "kernel<5.13": "not-reproduced"},
        "longterm": "not-reproduced",
    },
    controls={"no-cuda": change(pin="none"), "ordinary-memory": change(place="ordinary")},
    profiles=("node",),
    timeout=300,
    options=nccl.OPTIONS,
)
def lazy_second_connection(stage: Stage) -> None:
    """Connect while memory is plentiful, and once more when the kernel hands out unpinnable memory."""
    cache = nccl.MrCache()  # one for the device, as in NCCL
    nccl.connect(stage, nccl.Settings.of(stage, place="ordinary"), cache=cache)
    second = nccl.connect(stage, nccl.Settings.of(stage), cache=cache, name="second")
    second.release_and_retry()
