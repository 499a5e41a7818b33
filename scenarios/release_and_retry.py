"""A-B-A on one buffer: the pin and the placement are both needed, and each alone is harmless."""

from regrepro import Stage, change, scenario


@scenario(
    shows="sections 17 and 18: take one link of the chain away and the same call on the same buffer succeeds",
    needs=("root", "unpinnable", "registrar"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "pin": {
            "kernel>=5.13": "reproduced",
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        },
        "longterm": "not-reproduced",
    },
    controls={"no-pin": change(pin="none")},
    profiles=("default", "node"),
    timeout=180,
)
def release_and_retry(stage: Stage) -> None:
    """Fail while pinned, succeed once released, succeed again pinned on the ordinary pages it moved to."""
    buffer = stage.buffer(pages=8, place="unpinnable")

    pin = stage.pin(buffer)
    stage.register(buffer)  # unpinnable and pinned: refused
    stage.register(buffer)  # and refused as long as the pin is held
    pin.release()

    stage.register(buffer).deregister()  # the same pages, released: they move out

    pin = stage.pin(buffer)
    stage.register(buffer).deregister()  # pinned again, on ordinary memory
    pin.release()
