"""Attack on the basis: a function pins for long, lets go, and pins again without FOLL_LONGTERM."""

from regrepro import Stage, change, scenario
from regrepro.core import pins


@scenario(
    shows="that the pages moved says nothing of the pin that stands",
    needs=("root", "unpinnable", "registrar", "io-uring"),
    expects={"pin": "unmet"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def pinned_twice_by_one_function(stage: Stage) -> None:
    """Moved out by the first pin, held by the second."""
    buffer = stage.buffer(pages=8, place="unpinnable")

    def twice(address: int, length: int) -> pins.HeldPin:
        pins.pin_io_uring(address, length).release()
        return pins.pin_process_vm(address, length)

    pin = stage.pin(buffer, "pin", by=twice)
    stage.register(buffer).deregister()
    pin.release()
