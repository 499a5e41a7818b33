"""Attack on the proof: after the release somebody else still holds the pages."""

from regrepro import Stage, change, scenario
from regrepro.core import pins


@scenario(
    shows="without a retry that succeeds nothing is proven, and nothing is refuted",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "unmet"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def release_that_frees_nothing(stage: Stage) -> None:
    """The retry fails as well: another pin came before the first one went."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, "pin")
    stage.register(buffer)
    stranger = pins.pin_process_vm(buffer.address, buffer.length)
    pin.release()
    stage.register(buffer).deregister()
    stranger.release()
