"""A memory block that held nothing of the buffer goes offline between pin and registration, and stays so.

Run it on a node without unpinnable memory: elsewhere the pages may lie in it from the start.
"""

from regrepro import Stage, change, scenario
from regrepro.kernel.memoryblocks import candidates


@scenario(
    shows="the block was isolated for a while, so that `placement` is not proven",
    needs=("root", "registrar"),
    expects={"pin": "unmet", "get": "unmet", "longterm": "unmet"},
    controls={"no-pin": change(pin="none")},
)
def block_offline_empty(stage: Stage) -> None:
    """Pin 8 pages, take a block offline, register them, bring the block back."""
    buffer = stage.buffer(pages=8)
    pin = stage.pin(buffer)
    mine = {int(pfn) for pfn in stage.look(buffer).pfn}
    block = next(
        (
            block
            for block in candidates(stage.backend.memory_map)
            if not mine & set(range(*block.range)) and block.change("offline", 10) == 0
        ),
        None,
    )
    if block is None:
        stage.unmet("block", "none could be taken offline", "boot with more memory")
    try:
        stage.register(buffer).deregister()
    finally:
        block.restore("online_kernel", limit=20)
    pin.release()
