"""Attack on the selection: a success by a long-term pin hides the failure of a later round."""

from regrepro import Stage, change, scenario


@scenario(
    shows="the verdict is the worst that is proven, not the first round's",
    needs=("root", "unpinnable", "registrar", "io-uring"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def longterm_round_then_short_term(stage: Stage) -> None:
    """The bug happens in the second round, after the first pin was released."""
    for kind in ("longterm", "pin"):
        buffer = stage.buffer(pages=8, place="unpinnable")
        pin = stage.pin(buffer, kind)
        stage.register(buffer).deregister()
        pin.release()
        stage.register(buffer).deregister()
