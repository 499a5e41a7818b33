"""Attack on the selection: another buffer registers first, pinned and without fault."""

from regrepro import Stage, change, scenario


@scenario(
    shows="the second buffer fails, and that is the verdict",
    needs=("root", "unpinnable", "registrar"),
    expects={"pin": "reproduced"},
    controls={"no-pin": change(pin="none")},
    timeout=180,
)
def first_buffer_without_fault(stage: Stage) -> None:
    """A pinned buffer of ordinary pages succeeds; one of unpinnable pages fails after it."""
    sound = stage.buffer(pages=8, place="ordinary")
    first = stage.pin(sound, "pin")
    stage.register(sound).deregister()
    first.release()
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer, "pin")
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
