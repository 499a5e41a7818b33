"""Attack on identity: a long-term pin by one mapping, a registration by the other."""

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
    shows="the pin moved the frames of both mappings out first",
    needs=(
        "root",
        "unpinnable",
        "registrar",
        "io-uring",
    ),
    expects={"longterm": {"verdict": "not-reproduced", "basis": "pin"}},
    controls={"short-term": change(pin="pin")},
    profiles=(),
    timeout=180,
)
def long_term_pin_by_another_mapping(stage: Stage) -> None:
    """Mapped twice is no copy-on-write: a shared mapping is never copied."""
    first = stage.buffer(pages=8, place="unpinnable", backing="memfd")
    second = mapped_again(stage, first)
    pin = stage.pin(first, "longterm")
    stage.register(second).deregister()
    pin.release()
    stage.register(second).deregister()
