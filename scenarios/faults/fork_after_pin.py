"""A fork between pin and registration: what it changes depends on how the pages are held."""

from regrepro import Stage, change, scenario

CONTROLS = {"no-pin": change(pin="none")}


@scenario(
    shows="fork copies pages that bear a FOLL_PIN for the child, so they stay where they are: ENOMEM",
    needs=("root", "unpinnable", "rdma"),
    expects={
        "pin": {
            "kernel>=5.13": "reproduced",
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        }
    },
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def fork_after_pin(stage: Stage) -> None:
    """Hold a FOLL_PIN, fork, and register."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, kind="pin")
    with stage.faults.child():
        stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()


@scenario(
    shows="fork shares pages that bear a FOLL_GET; the registration copies them, and nothing must move",
    needs=("root", "unpinnable", "rdma"),
    expects={"get": {"verdict": "not-reproduced", "basis": "kernel"}},
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def fork_after_get(stage: Stage) -> None:
    """Hold a FOLL_GET, fork, and register: it succeeds by right, on copies."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, kind="get")
    with stage.faults.child():
        stage.register(buffer).deregister()
    pin.release()


@scenario(
    shows="a FOLL_LONGTERM pin has moved the pages out before the fork",
    needs=("root", "unpinnable", "rdma", "io-uring"),
    expects={
        "longterm": {
            "kernel>=5.13": {"verdict": "not-reproduced", "basis": "pin"},
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        }
    },
    controls=CONTROLS,
    profiles=("faults",),
    timeout=120,
)
def fork_after_longterm_pin(stage: Stage) -> None:
    """Hold a FOLL_LONGTERM pin, fork, and register: it succeeds."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, kind="longterm")
    with stage.faults.child():
        stage.register(buffer).deregister()
    pin.release()
