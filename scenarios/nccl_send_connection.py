"""A network connection as NCCL 2.17 builds it, with every registration in a log."""

from regrepro import Stage, change, scenario
from regrepro.stage import nccl


@scenario(
    shows="sections 8, 13, 19: with GPUDirect the LL buffer stays in host memory, and is registered first",
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
def nccl_send_connection(stage: Stage) -> None:
    """Allocate a connection's banks, register each protocol's part in NCCL's order; stop at a failure."""
    connection = nccl.connect(stage, nccl.Settings.of(stage))
    connection.release_and_retry()
