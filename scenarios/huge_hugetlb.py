"""Huge pages of the hugetlb pool: they move only to another huge page."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a page of hugetlbfs in unpinnable memory, pinned, then registered",
    needs=("root", "unpinnable", "registrar", "lab"),
    expects={
        "pin": {
            "kernel>=6.6": "reproduced",
            # Refused wherever it is unpinnable, pinned or not: no move was tried (follow_hugetlb_page).
            "kernel>=5.18": {"verdict": "other-failure", "layer": "longterm-refused", "errno": "ENOMEM"},
            "kernel>=5.13": {"verdict": ["reproduced", "other-failure"]},
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        },
        "longterm": {
            "kernel>=6.6": "not-reproduced",
            # The pin itself is refused.
            "kernel>=5.18": {"verdict": "other-failure", "layer": "cuda-pin"},
            "kernel>=5.13": {"verdict": ["other-failure", "not-reproduced"]},
            "kernel<5.13": "not-reproduced",
        },
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
