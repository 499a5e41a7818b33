"""Attack on the pin: a function pins, and then says that it could not."""

import errno
import os

from regrepro import Stage, change, scenario
from regrepro.core import pins


@scenario(
    shows="a pin that failed bears no reference: the record contradicts itself",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "unmet"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def function_that_fails_and_keeps_its_pin(stage: Stage) -> None:
    """The failure is not blamed on the code that says it has no pin."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    kept: list[pins.HeldPin] = []

    def fails(address: int, length: int) -> None:
        kept.append(pins.pin_process_vm(address, length))
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    stage.pin(buffer, "pin", by=fails)
    stage.register(buffer)
    for held in kept:
        held.release()
    stage.register(buffer).deregister()
