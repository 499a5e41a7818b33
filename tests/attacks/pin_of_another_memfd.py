"""Attack on identity: the pin is on another file of the same kind and size."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a pin on other frames proves nothing of these",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "unmet"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def pin_of_another_memfd(stage: Stage) -> None:
    """Pin one memfd, register another."""
    pinned = stage.buffer(pages=8, place="unpinnable", backing="memfd")
    buffer = stage.buffer(pages=8, place="unpinnable", backing="memfd")
    pin = stage.pin(pinned, "pin")
    stage.register(buffer).deregister()
    pin.release()
    stage.register(buffer).deregister()
