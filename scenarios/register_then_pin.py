"""The same two calls in the other order."""

from regrepro import Stage, instead, scenario


@scenario(
    shows="section 15: the order decides; registered first, the page moves out while nothing holds it",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "not-reproduced", "longterm": "not-reproduced"},
    controls={"other-order": instead("pin_then_register")},
    profiles=("default", "node"),
    timeout=180,
)
def register_then_pin(stage: Stage) -> None:
    """Register first, pin second: both succeed, for the registration has moved the pages out."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    registration = stage.register(buffer)
    pin = stage.pin(buffer)
    pin.release()
    registration.deregister()
