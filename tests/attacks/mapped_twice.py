"""Attack on identity: NCCL's shared memory, pinned by one mapping, registered by one more."""

import os

from regrepro import Stage, change, scenario
from regrepro.core.memory import Range


@scenario(
    shows="pages are the same if their frames are, whatever mapping they were pinned by",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
    variants={
        "whole": {},
        "one_page": {},  # exactly the pinned frame stays: seven pages of the second mapping move
        "long_term": {  # mapped twice is no copy-on-write: a shared mapping is never copied
            "shows": "the pin moved the frames of both mappings out first",
            "needs": ("root", "unpinnable", "registrar", "io-uring"),
            "expects": {"longterm": {"verdict": "not-reproduced", "basis": "pin"}},
            "controls": {"short-term": change(pin="pin")},
        },
    },
)
def mapped_twice(stage: Stage) -> None:
    """Pin a memfd by its first mapping, register its second."""
    first = stage.buffer(pages=8, place="unpinnable", backing="memfd")
    again = Range._of_file(os.dup(first._memory.fd), first.length, "memfd")  # type: ignore[attr-defined]
    again.populate()
    second = stage.adopt(again, "memfd", place="unpinnable")
    kind = "longterm" if stage.variant == "long_term" else "pin"
    pin = stage.pin(first, kind, pages=[3] if stage.variant == "one_page" else None)
    stage.register(second)
    pin.release()
    stage.register(second).deregister()
