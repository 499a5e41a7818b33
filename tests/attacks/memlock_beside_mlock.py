"""Pages that mlock() locked do not count for an MR: mm->locked_vm is another account than mm->pinned_vm."""

from regrepro import Stage, change, scenario
from regrepro.stage.faults.base import checked, libc


@scenario(
    shows="40 pages of mlock and 40 of an MR fit in a limit of 64",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "not-reproduced", "basis": "kernel"}},
    controls={"no-pin": change(pin="none")},
)
def memlock_beside_mlock(stage: Stage) -> None:
    """Lock 40 pages by mlock() and register 40 others where 64 are allowed."""
    import ctypes

    locked, other = stage.buffer(pages=40), stage.buffer(pages=40)
    with stage.faults.memlock(64 * stage.page_size, capable=False):
        checked(libc.mlock(ctypes.c_void_p(locked.address), ctypes.c_size_t(locked.length)), "mlock")
        stage.register(other).deregister()
