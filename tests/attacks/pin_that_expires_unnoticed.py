"""Attack on the pin: it says that it is alive, and lets go at the same moment."""

from regrepro import Stage, change, scenario
from regrepro.core import pins


class Liar:
    """A pin that ends when it is asked whether it is alive."""

    def __init__(self, address: int, length: int) -> None:
        self._pin = pins.pin_process_vm(address, length)

    def alive(self) -> bool:
        """Let go, and say that it holds."""
        self._pin.release()
        return True

    def release(self) -> None:
        """Let go, if it has not."""
        self._pin.release()


@scenario(
    shows="what the references say overrules what a pin says of itself",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "unmet"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def pin_that_expires_unnoticed(stage: Stage) -> None:
    """The registration succeeds, since nothing holds the pages any more."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, "pin", by=Liar)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
