"""A memory block comes back in ZONE_MOVABLE after the map was drawn; its pages are pinned and registered."""

from regrepro import Stage, change, scenario
from regrepro.kernel.leftovers import Journal
from regrepro.kernel.memoryblocks import online_movable


@scenario(
    shows="the pages are unpinnable, though the map that the run began with has none there",
    needs=("root", "registrar", "kernel>=5.13"),
    expects={"pin": "reproduced", "get": "reproduced"},
    controls={"no-pin": change(pin="none")},
)
def block_onlined_before_pin(stage: Stage) -> None:
    """The kernel takes movable memory first, so that the buffer lies in the new block."""
    with online_movable(Journal(), memory_map=stage.backend.memory_map):
        buffer = stage.buffer(pages=8)
        pin = stage.pin(buffer)
        stage.register(buffer)
        pin.release()
        stage.register(buffer).deregister()
        buffer.free()
