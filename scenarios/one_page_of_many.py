"""One wrong page is enough."""

from regrepro import Stage, change, scenario


@scenario(
    shows="section 15: at least one page that cannot be moved fails the whole registration",
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
def one_page_of_many(stage: Stage) -> None:
    """One unpinnable, pinned page among 64 ordinary ones fails the registration of all."""
    buffer = stage.buffer(pages=64, place={"unpinnable": [41]})
    pin = stage.pin(buffer, pages=[41])
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
