"""Pages of a memfd: page cache without a disk behind it."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a shared mapping of a memfd in unpinnable memory may be pinned for long, so it must move",
    needs=("root", "unpinnable", "registrar"),
    expects={
        "pin": {
            "kernel>=5.13": "reproduced",
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        },
        "longterm": "not-reproduced",
    },
    controls={"no-pin": change(pin="none")},
    profiles=(),
    timeout=300,
)
def file_memfd(stage: Stage) -> None:
    """Pin pages of a memfd, then register them, release, register again."""
    buffer = stage.buffer(pages=8, place="unpinnable", backing="memfd")
    pin = stage.pin(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
