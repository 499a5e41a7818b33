"""Why the incident came and went: when the kernel hands out CMA."""

from regrepro import Stage, instead, scenario
from regrepro.stage.policy import measure


@scenario(
    shows="sections 8 and 12: movable memory comes out of CMA once CMA is more than half of what is free",
    needs=("root", "cma", "registrar", "lab"),
    expects={"none": "not-reproduced"},
    controls={"with-pin": instead("pin_then_register")},
    profiles=(),
    timeout=600,
)
def placement_policy(stage: Stage) -> None:
    """Measure the share of CMA in what is handed out, by its share in what is free; then register some."""
    measure(stage)
    buffer = stage.buffer(pages=8, place="cma")
    stage.register(buffer).deregister()
