"""RLIMIT_MEMLOCK is used up by io_uring's fixed buffers, which count in mm->pinned_vm as MRs do."""

from regrepro import Stage, change, scenario


@scenario(
    shows="what io_uring pinned leaves no room for an MR: memlock-accounting",
    needs=("root", "rdma", "io-uring"),
    expects={"pin": {"verdict": "other-failure", "layer": "memlock-accounting", "errno": "ENOMEM"}},
    controls={"no-pin": change(pin="none")},
)
def memlock_used_by_io_uring(stage: Stage) -> None:
    """Pin 40 pages by io_uring and register 40 others where 64 are allowed."""
    pinned, other = stage.buffer(pages=40, place="ordinary"), stage.buffer(pages=40, place="ordinary")
    with stage.faults.memlock(64 * stage.page_size, capable=False):
        pin = stage.pin(pinned, "longterm")
        stage.register(other).deregister()
    pin.release()
