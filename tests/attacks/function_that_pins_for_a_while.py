"""No attack, but what the defence must not lose: code of one's own that pins without FOLL_LONGTERM."""

from regrepro import Stage, change, scenario
from regrepro.core import pins


@scenario(
    shows="its references rose when it was called",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def function_that_pins_for_a_while(stage: Stage) -> None:
    """The pin of by= is the cause, and is named."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, "pin", by=pins.pin_process_vm)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
