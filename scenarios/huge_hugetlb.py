"""Huge pages of the hugetlb pool: they move only to another huge page."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a page of hugetlbfs in unpinnable memory, pinned, then registered",
    needs=("root", "unpinnable", "registrar", "lab"),
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
def huge_hugetlb(stage: Stage) -> None:
    """Pin a huge page of the pool, then register it, release, register again."""
    buffer = stage.buffer(length=2 << 20, place="unpinnable", backing="hugetlb")
    pin = stage.pin(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
