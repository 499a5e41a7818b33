"""A memory block goes in and out of ZONE_MOVABLE all the time, and is an ordinary one whenever the run looks.

Run it on a node without unpinnable memory: elsewhere the pages may lie in it from the start.
"""

from threading import Event, Thread

from regrepro import Stage, change, scenario
from regrepro.kernel.leftovers import Journal
from regrepro.kernel.memoryblocks import online_movable


@scenario(
    shows="the node had unpinnable memory in between, so that `placement` is not proven",
    needs=("root", "registrar"),
    expects={"pin": "unmet", "get": "unmet", "longterm": "unmet"},
    controls={"no-pin": change(pin="none")},
)
def block_flaps(stage: Stage) -> None:
    """Pin and register 8 ordinary pages while a thread turns a block."""
    buffer = stage.buffer(pages=8)
    turned, end = Event(), Event()

    def flap() -> None:
        while not end.is_set():
            with online_movable(Journal(), memory_map=stage.backend.memory_map):
                pass
            turned.set()

    thread = Thread(target=flap)
    thread.start()
    try:
        turned.wait(60)
        pin = stage.pin(buffer)
        stage.register(buffer).deregister()
        pin.release()
    finally:
        end.set()
        thread.join()
