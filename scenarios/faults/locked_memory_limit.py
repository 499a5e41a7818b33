"""The most common cause of the same words: the limit of locked memory."""

from regrepro import Stage, change, scenario

CONTROLS = {"without-the-limit": change(fault="none")}


@scenario(
    shows="the locked-memory limit is checked before any page is looked at: ENOMEM",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "memlock-accounting", "errno": "ENOMEM"}},
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def locked_memory_limit(stage: Stage) -> None:
    """Register 8 pages where RLIMIT_MEMLOCK allows 4 and CAP_IPC_LOCK is missing."""
    buffer = stage.buffer(pages=8)
    with stage.faults.memlock(4 * stage.page_size, capable=False):
        stage.register(buffer)


@scenario(
    shows="a limit of 0 without the capability is EPERM, not ENOMEM",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "other-failure", "layer": "memlock-accounting", "errno": "EPERM"}},
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def locked_memory_limit_zero(stage: Stage) -> None:
    """Register where RLIMIT_MEMLOCK is 0 and CAP_IPC_LOCK is missing."""
    buffer = stage.buffer(pages=8)
    with stage.faults.memlock(0, capable=False):
        stage.register(buffer)


@scenario(
    shows="the limit does not bind a process that has CAP_IPC_LOCK",
    needs=("root", "rdma"),
    expects={"none": {"verdict": "not-reproduced", "basis": "kernel"}},
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def locked_memory_limit_capable(stage: Stage) -> None:
    """Register 8 pages where RLIMIT_MEMLOCK is 0, with CAP_IPC_LOCK: it succeeds by right."""
    buffer = stage.buffer(pages=8)
    with stage.faults.memlock(0, capable=True):
        stage.register(buffer).deregister()
