"""Pages of a file that the kernel writes back to a disk."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a writable shared mapping of a file is refused for long-term pins since 6.5: not this bug",
    needs=("root", "unpinnable", "registrar"),
    expects={
        # writable_file_mapping_allowed(), mm/gup.c
        "pin": {
            "kernel>=6.5": {"verdict": "other-failure", "layer": "longterm-refused", "errno": "EFAULT"},
            "kernel>=5.13": "reproduced",
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        },
        "longterm": {
            # The pin itself is refused.
            "kernel>=6.5": {"verdict": "other-failure", "layer": "cuda-pin"},
            # Nothing in GUP refuses it; io_uring, by which the stand-in pins, takes no file on any kernel.
            "kernel<6.5": {"verdict": ["other-failure", "not-reproduced"]},
        },
    },
    controls={"no-pin": change(pin="none")},
    profiles=(),
    timeout=300,
)
def file_on_disk(stage: Stage) -> None:
    """Pin pages of a file on a disk, then register them, release, register again."""
    buffer = stage.buffer(pages=8, place="unpinnable", backing="file")
    pin = stage.pin(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
