"""The fixed driver's contract."""

from regrepro import Stage, change, scenario


@scenario(
    shows="sections 9 and 20: a pin that asks for FOLL_LONGTERM moves the page out first, as R555 does",
    needs=("root", "unpinnable", "registrar", "io-uring"),
    expects={"longterm": "not-reproduced"},
    controls={"pin-without-longterm": change(pin="pin")},
    profiles=("default", "node"),
    timeout=180,
)
def longterm_pin_then_register(stage: Stage) -> None:
    """Pin with FOLL_LONGTERM, then register: the pin has moved the pages out, so it succeeds."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, kind="longterm")
    stage.register(buffer).deregister()
    pin.release()
