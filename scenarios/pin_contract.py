"""What a pin promises, measured by what it does: the question before a driver upgrade, in one line."""

from regrepro import Stage, change, scenario
from regrepro.stage import own_pin


@scenario(
    shows="sections 9 and 20: a pin that asks for FOLL_LONGTERM moves unpinnable pages out; any other leaves "
    "them where they are. The pages themselves tell; of a driver's own call the trace tells which pin stands",
    needs=("root", "unpinnable", "registrar", "io-uring"),
    expects={
        # What a driver's pin asks for is the question: both are an answer. Before 5.13 a page that would not
        # move was pinned in place (check_and_migrate_cma_pages, mm/gup.c), and ZONE_MOVABLE was not looked
        # at: there no pin tells.
        "pin": {
            "kernel>=5.13": {"verdict": ["reproduced", "not-reproduced"]},
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        },
        "longterm": {
            "kernel>=5.13": {"verdict": "not-reproduced", "basis": "pin"},
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        },
    },
    controls={"longterm-pin": change(pin="longterm"), "no-pin": change(pin="none")},
    profiles=("default", "node"),
    options={"by": ""},
    timeout=180,
)
def pin_contract(stage: Stage) -> None:
    """Pin unpinnable pages by CUDA, a stand-in or --option by=FILE.py:FUNCTION: does it move them out?"""
    buffer = stage.buffer(pages=16, place="unpinnable")
    inner = range(4, 12)  # the pages beside them are not pinned, and must not move
    offset, length = inner.start * stage.page_size, len(inner) * stage.page_size
    by = stage.option("by")
    pin = stage.pin(buffer, pages=inner, by=own_pin.load(by) if by else None)
    stage.register(buffer, offset=offset, length=length).deregister()
    pin.release()
    stage.register(buffer, offset=offset, length=length).deregister()
