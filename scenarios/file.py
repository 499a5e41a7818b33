"""Pages of files: page cache, with a disk behind it or none."""

from regrepro import Stage, change, scenario

REFUSED = {"verdict": "other-failure", "layer": "longterm-refused", "errno": "EFAULT"}
ALLOWED_IN_PLACE = {"verdict": "not-reproduced", "basis": "kernel"}


@scenario(
    shows="a shared mapping of memory without a disk behind it may be pinned for long, so it must move",
    needs=("root", "unpinnable", "registrar"),
    expects={
        "pin": {
            "kernel>=5.13": "reproduced",
            "kernel<5.13": ALLOWED_IN_PLACE,
        },
        "longterm": "not-reproduced",
    },
    controls={"no-pin": change(pin="none")},
    profiles=(),
    timeout=300,
    variants={
        "memfd": {"tags": ("shared-memory",)},
        "shm": {"tags": ("shared-memory",)},
        "on_disk": {
            "shows": "a shared, writable mapping of a file is refused for long-term pins since 6.5",
            "expects": {
                # writable_file_mapping_allowed(), mm/gup.c
                "pin": {
                    "kernel>=6.5": REFUSED,
                    "kernel>=5.13": "reproduced",
                    "kernel<5.13": ALLOWED_IN_PLACE,
                },
                "longterm": {
                    # The pin itself is refused.
                    "kernel>=6.5": {"verdict": "other-failure", "layer": "cuda-pin"},
                    # Nothing in GUP refuses it; io_uring, by which the stand-in pins, takes no file at all.
                    "kernel<6.5": {"verdict": ["other-failure", "not-reproduced"]},
                },
            },
        },
    },
)
def file(stage: Stage) -> None:
    """Pin pages of a memfd, of POSIX shared memory or of a file, then register, release, register again."""
    backing = "file" if stage.variant == "on_disk" else stage.variant
    buffer = stage.buffer(pages=8, place="unpinnable", backing=backing)
    pin = stage.pin(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
