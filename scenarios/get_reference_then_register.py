"""A plain reference does what a pin does."""

from regrepro import Stage, change, scenario


@scenario(
    shows="section 15: whatever holds a page in place stops the move, an older driver's FOLL_GET too",
    needs=("root", "unpinnable", "registrar"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "get": {
            "kernel>=5.13": "reproduced",
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        },
    },
    controls={"no-pin": change(pin="none"), "ordinary-memory": change(place="ordinary")},
    profiles=("default", "node", "faults"),
    timeout=180,
)
def get_reference_then_register(stage: Stage) -> None:
    """Hold a FOLL_GET reference (vmsplice) to the pages, then register them: ENOMEM until it is dropped."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    reference = stage.pin(buffer, kind="get")
    stage.register(buffer)
    reference.release()
    stage.register(buffer).deregister()
