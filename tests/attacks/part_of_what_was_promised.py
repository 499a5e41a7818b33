"""Attack on the proof: a function pins half of the range that it is called with."""

from regrepro import Stage, change, scenario
from regrepro.core import pins


@scenario(
    shows="a partial pin is a failure that is not proven, and not another failure",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "unmet"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def part_of_what_was_promised(stage: Stage) -> None:
    """Four pages bear the pin, eight were said to."""
    buffer = stage.buffer(pages=8, place="unpinnable")

    def half(address: int, length: int) -> pins.HeldPin:
        return pins.pin_process_vm(address, length // 2)

    pin = stage.pin(buffer, "pin", by=half)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
