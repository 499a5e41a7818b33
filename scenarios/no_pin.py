"""What the kernel does when nothing is in its way."""

from regrepro import Stage, instead, scenario


@scenario(
    shows="section 12: a page in CMA is no fault as long as it can be moved out",
    needs=("root", "unpinnable", "registrar"),
    expects={"none": "not-reproduced"},
    controls={"with-pin": instead("pin_then_register")},
    profiles=("default", "node"),
    timeout=180,
)
def no_pin(stage: Stage) -> None:
    """Register without any pin: the pages move out of unpinnable memory and it succeeds."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    stage.register(buffer).deregister()
