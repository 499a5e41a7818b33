"""Attack on the selection: the bug happens within a series of registrations."""

from regrepro import Stage, change, scenario


@scenario(
    shows="what a series could not register is judged like any registration",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def series_that_fails_in_the_middle(stage: Stage) -> None:
    """Two ranges register, the third is pinned; released, it registers too."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, "pin", pages=[4, 5])
    length = 2 * stage.page_size
    stage.register_many(buffer, 4, length=length)
    pin.release()
    stage.register(buffer, offset=2 * length, length=length).deregister()
