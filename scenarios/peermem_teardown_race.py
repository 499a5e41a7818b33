"""Bug class A: GPU memory that goes while the RDMA card still has it."""

from __future__ import annotations

import threading

from regrepro import Size, Stage, instead, scenario

_WHY = (
    "it frees GPU memory while it is registered; a vulnerable nvidia-peermem answers with a use after free, "
    "which can corrupt or crash the kernel of this node"
)


@scenario(
    shows="sections 3 and 14: the GPU driver's invalidation callback against nvidia_p2p_put_pages",
    needs=("root", "cuda", "rdma", "peer-memory"),
    expects={"none": "not-reproduced"},
    controls={"host-memory": instead("no_pin")},
    profiles=(),
    timeout=300,
    options={"may_corrupt_the_kernel": False, "rounds": 100, "length": Size(4 << 20)},
)
def peermem_teardown_race(stage: Stage) -> None:
    """Free GPU memory and deregister it at the same moment, again and again; only with its flag."""
    if not stage.option("may_corrupt_the_kernel"):
        stage.unmet(
            "consent",
            _WHY,
            "on a drained node that may crash: --option may_corrupt_the_kernel=true; watch dmesg meanwhile",
        )
    for number in range(stage.option("rounds")):
        buffer = stage.cuda.device_alloc(stage.option("length"))
        registration = stage.register(buffer)
        if not registration:
            return  # refused before there was anything to race: the layer says by whom
        barrier = threading.Barrier(2)

        def free(buffer=buffer, barrier=barrier) -> None:  # type: ignore[no-untyped-def]
            barrier.wait()
            buffer.free()

        racing = threading.Thread(target=free)
        racing.start()
        barrier.wait()
        registration.deregister()
        racing.join()
        stage.step("teardown-raced", round=number + 1)
