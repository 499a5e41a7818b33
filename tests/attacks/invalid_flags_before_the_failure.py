"""Attack on the selection: a mistake of the body's own fails first, with another errno."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a refusal of the arguments does not hide the bug that comes after it",
    needs=("root", "unpinnable", "rdma"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def invalid_flags_before_the_failure(stage: Stage) -> None:
    """EINVAL for its flags, then ENOMEM with the whole proof."""
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, "pin")
    stage.register(buffer, access=("REMOTE_WRITE",))  # EINVAL: remote write without local write
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
