"""Attack on identity: one page of a memfd is pinned by the one mapping, all are registered by the other."""

import os

from regrepro import Stage, change, scenario
from regrepro.core.memory import Range
from regrepro.stage import Buffer


def mapped_again(stage: Stage, buffer: Buffer) -> Buffer:
    """Map a memfd's pages once more."""
    second = Range._of_file(os.dup(buffer._memory.fd), buffer.length, "memfd")  # type: ignore[attr-defined]
    second.populate()
    return stage.adopt(second, "memfd", place="unpinnable")


@scenario(
    shows="exactly the pinned frame stays, whatever mapping it was pinned by",
    needs=(
        "root",
        "unpinnable",
        "registrar",
    ),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    profiles=(),
    timeout=180,
)
def one_page_of_shared_memory(stage: Stage) -> None:
    """Seven pages of the second mapping move, the fourth does not."""
    first = stage.buffer(pages=8, place="unpinnable", backing="memfd")
    second = mapped_again(stage, first)
    pin = stage.pin(first, "pin", pages=[3])
    stage.register(second)
    pin.release()
    stage.register(second).deregister()
