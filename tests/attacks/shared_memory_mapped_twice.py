"""Attack on identity: NCCL's shared memory, pinned by one mapping, registered by one more."""

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
    shows="pages are the same if their frames are",
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
def shared_memory_mapped_twice(stage: Stage) -> None:
    """Pin a memfd by its first mapping, register its second."""
    first = stage.buffer(pages=8, place="unpinnable", backing="memfd")
    second = mapped_again(stage, first)
    pin = stage.pin(first, "pin")
    stage.register(second)
    pin.release()
    stage.register(second).deregister()
