"""The incident: a pin without FOLL_LONGTERM first, RDMA second."""

from regrepro import Stage, change, scenario


@scenario(
    shows="sections 9 to 13: the page is pinned without FOLL_LONGTERM, then registered",
    needs=("root", "unpinnable", "registrar"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "pin": {
            "kernel>=5.13": "reproduced",
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        },
        "longterm": "not-reproduced",
    },
    controls={"no-pin": change(pin="none"), "ordinary-memory": change(place="ordinary")},
    profiles=("default", "node", "faults"),
    timeout=180,
)
def pin_then_register(stage: Stage) -> None:
    """Pin pages that may not be pinned for long, then register them: ENOMEM, and out of memory is nobody."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer)  # CUDA's own where --cuda gives one
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()  # the same registration; nothing but the pin has changed
