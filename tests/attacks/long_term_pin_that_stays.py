"""Attack on the proof: an older FOLL_LONGTERM pin on half of the pages stands all the while."""

from regrepro import Stage, change, scenario


@scenario(
    shows="what stood at both tries did not change between them",
    needs=("root", "unpinnable", "registrar", "io-uring"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def long_term_pin_that_stays(stage: Stage) -> None:
    """Two pins overlap; only the one without FOLL_LONGTERM is let go."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    kept = stage.pin(buffer, "longterm", pages=range(4))
    pin = stage.pin(buffer, "pin", pages=range(2, 8))
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
    kept.release()
