"""A memory block comes back in ZONE_MOVABLE after the run's map was drawn; nothing is pinned."""

from regrepro import Stage, change, scenario
from regrepro.kernel.leftovers import Journal
from regrepro.kernel.memoryblocks import online_movable


@scenario(
    shows="the kernel moved the pages: that is no node without unpinnable memory",
    needs=("root", "registrar", "kernel>=5.13"),
    expects={"none": {"verdict": "not-reproduced", "basis": "kernel"}},
    controls={"no-pin": change(pin="none")},
)
def block_onlined_without_pin(stage: Stage) -> None:
    """Register 8 pages of the new block."""
    with online_movable(Journal(), memory_map=stage.backend.memory_map):
        buffer = stage.buffer(pages=8)
        stage.register(buffer).deregister()
        buffer.free()
