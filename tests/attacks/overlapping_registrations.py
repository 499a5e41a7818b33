"""A near miss: an MR on half of the pages is kept while all of them are registered."""

from regrepro import Stage, change, scenario


@scenario(
    shows="the pins of an MR are no pins of the scenario, and its pages are ordinary",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def overlapping_registrations(stage: Stage) -> None:
    """The registration of the other half fails under the pin."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    kept = stage.register(buffer, length=4 * stage.page_size)
    pin = stage.pin(buffer, "pin", pages=range(4, 8))
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
    kept.deregister()
