"""What the reserve is for: its promise, and what a pin does to it."""

from regrepro import Stage, change, scenario
from regrepro.stage import hugepages


@scenario(
    shows="section 11: hugetlb_cma promises gigantic pages later; a pin without FOLL_LONGTERM breaks it",
    needs=("root", "cma", "registrar", "lab"),
    expects={"pin": "reproduced", "longterm": "not-reproduced"},
    controls={"no-pin": change(pin="none")},
    profiles=(),
    timeout=600,
)
def gigantic_page_while_pinned(stage: Stage) -> None:
    """Ask for all gigantic pages of the reserve beside a pin and after its release; then the registration."""
    reserve = hugepages.reserve(stage)
    lent = stage.buffer(pages=8, place="cma")
    hugepages.require_inside(stage, lent, reserve)
    pin = stage.pin(lent)
    hugepages.ask(stage, reserve, "pinned")
    pin.release()
    hugepages.ask(stage, reserve, "released")
    lent.free()

    buffer = stage.buffer(pages=8, place="cma")
    pin = stage.pin(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
