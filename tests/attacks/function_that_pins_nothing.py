"""Attack on the owner: a function that pins nothing, and a stranger's pin that stood before."""

from collections.abc import Callable

from regrepro import Stage, change, scenario
from regrepro.core import pins


@scenario(
    shows="only what raised the references is blamed",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "unmet"},
    controls={"ordinary-memory": change(place="ordinary")},
    timeout=180,
)
def function_that_pins_nothing(stage: Stage) -> None:
    """Blame by= for a pin that it did not take?"""
    buffer = stage.buffer(pages=8, place="unpinnable")
    stranger = pins.pin_process_vm(buffer.address, buffer.length)

    def innocent(address: int, length: int) -> Callable[[], None]:
        return stranger.release

    pin = stage.pin(buffer, "pin", by=innocent)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
