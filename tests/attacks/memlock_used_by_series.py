"""RLIMIT_MEMLOCK is used up by a series of kept MRs, of which the record has no page state."""

from regrepro import Stage, change, scenario


@scenario(
    shows="the seventeenth MR of a loop does not fit: memlock-accounting",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "memlock-accounting", "errno": "ENOMEM"}},
    controls={"no-pin": change(pin="none")},
)
def memlock_used_by_series(stage: Stage) -> None:
    """Keep MRs of 4 pages where 64 pages are allowed, until one is refused."""
    buffer = stage.buffer(pages=4)
    with stage.faults.memlock(64 * stage.page_size, capable=False):
        stage.register_many(buffer, 40, keep=True)
