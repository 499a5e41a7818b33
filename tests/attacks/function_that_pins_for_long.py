"""No attack, but what the defence must not lose: code of one's own that asks for FOLL_LONGTERM."""

from regrepro import Stage, change, scenario
from regrepro.core import pins


@scenario(
    shows="the trace shows one call, and what it asked for",
    needs=("root", "unpinnable", "registrar", "io-uring"),
    expects={"longterm": {"verdict": "not-reproduced", "basis": "pin"}},
    controls={"short-term": change(pin="pin")},
    timeout=180,
)
def function_that_pins_for_long(stage: Stage) -> None:
    """A long-term pin by by= is the basis of a success."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, "longterm", by=pins.pin_io_uring)
    stage.register(buffer).deregister()
    pin.release()
