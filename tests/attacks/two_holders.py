"""Attack on the proof: the scenario pins one page, a stranger another. The bug is there twice."""

from regrepro import Stage, change, scenario
from regrepro.core import pins


@scenario(
    shows="what the pin does not explain is missing, and refutes nothing",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "unmet"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def two_holders(stage: Stage) -> None:
    """Page 3 is ours, page 5 a stranger's."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    stranger = pins.pin_process_vm(buffer.address + 5 * stage.page_size, stage.page_size)
    pin = stage.pin(buffer, "pin", pages=[3])
    stage.register(buffer)
    pin.release()
    stranger.release()
    stage.register(buffer).deregister()
