"""A near miss: the pin lies across the border of two calls of GUP, of 512 pages each."""

from regrepro import Stage, change, scenario


@scenario(
    shows="pages of a batch that was never tried say nothing",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "reproduced", "get": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def pin_across_batches(stage: Stage) -> None:
    """Two of five unpinnable pages among 1,030 are pinned, in the second batch and the third."""
    buffer = stage.buffer(pages=1030, place={"unpinnable": [3, 511, 512, 700, 1029]})
    pin = stage.pin(buffer, pages=[512, 1029])
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
