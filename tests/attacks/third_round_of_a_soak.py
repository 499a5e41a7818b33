"""Attack on the selection: a soak loop of which the third round alone fails."""

from regrepro import Stage, change, scenario


@scenario(
    shows="every round is judged",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def third_round_of_a_soak(stage: Stage) -> None:
    """Register again and again; a pin stands in the third round."""
    for number in range(4):
        buffer = stage.buffer(pages=8, place="unpinnable")
        pin = stage.pin(buffer, "pin") if number == 2 else None
        stage.register(buffer).deregister()
        if pin is not None:
            pin.release()
        stage.register(buffer).deregister()
