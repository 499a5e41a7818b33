"""Ordinary pages are pinned; then a memory block comes back in ZONE_MOVABLE; then the pages are registered.

Run it on a node without unpinnable memory: elsewhere the pages may lie in it from the start.
"""

from regrepro import Stage, change, scenario
from regrepro.kernel.leftovers import Journal
from regrepro.kernel.memoryblocks import online_movable


@scenario(
    shows="the node had unpinnable memory for a while, so that `placement` is not proven",
    needs=("root", "registrar"),
    expects={"pin": "unmet", "get": "unmet", "longterm": "unmet"},
    controls={"no-pin": change(pin="none")},
)
def block_onlined_between(stage: Stage) -> None:
    """Pin 8 pages, online a block, register them, give the block back."""
    buffer = stage.buffer(pages=8)
    pin = stage.pin(buffer)
    with online_movable(Journal(), memory_map=stage.backend.memory_map):
        stage.register(buffer).deregister()
    pin.release()
