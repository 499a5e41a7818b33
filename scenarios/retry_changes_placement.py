"""Why a retry of the same job often works: the same virtual address, other physical pages."""

from regrepro import Stage, change, scenario


@scenario(
    shows="section 15: the same virtual address may receive different physical backing",
    needs=("root", "unpinnable", "registrar"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "pin": {"kernel>=5.13": "reproduced", "kernel<5.13": "not-reproduced"},
        "longterm": "not-reproduced",
    },
    controls={"no-pin": change(pin="none"), "ordinary-memory": change(place="ordinary")},
    profiles=("node",),
    timeout=300,
)
def retry_changes_placement(stage: Stage) -> None:
    """Fail, fail on new unpinnable pages, succeed on new ordinary ones: the address never changes."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()  # the proof: released, the same pages register
    for place in ("unpinnable", "ordinary"):
        stage.renew(buffer, place)
        pin = stage.pin(buffer)
        stage.register(buffer).deregister()
        pin.release()
