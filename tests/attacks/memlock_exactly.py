"""The limit allows exactly what is asked for: one more page than that is refused, that many are not."""

from regrepro import Stage, change, scenario


@scenario(
    shows="the page that goes over the limit, after MRs that fill it",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "memlock-accounting", "errno": "ENOMEM"}},
    controls={"no-pin": change(pin="none")},
)
def memlock_exactly(stage: Stage) -> None:
    """Fill the limit of 16 pages with two MRs; the first page more is refused."""
    first, second = stage.buffer(pages=16), stage.buffer(pages=1)
    with stage.faults.memlock(16 * stage.page_size, capable=False):
        kept = stage.register(first)
        if not kept:
            stage.unmet("limit", "16 pages did not fit into 16", "look at the kernel")
        stage.register(second).deregister()
        kept.deregister()
