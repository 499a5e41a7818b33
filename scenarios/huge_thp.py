"""Transparent huge pages: one count of pins for 512 pages."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a transparent huge page in unpinnable memory moves as a whole, or not at all",
    needs=("root", "unpinnable", "registrar"),
    expects={
        # Before 5.13 GUP pinned in place when migration failed.
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
def huge_thp(stage: Stage) -> None:
    """Pin a transparent huge page, then register it, release, register again."""
    buffer = stage.buffer(length=2 << 20, place="unpinnable", backing="thp")
    pin = stage.pin(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
