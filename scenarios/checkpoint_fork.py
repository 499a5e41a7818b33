"""Checkpointing as an amplifier: rates of failure with each part of it, and then the proof of one."""

from regrepro import Size, Stage, change, scenario
from regrepro.stage import checkpoint


@scenario(
    shows="sections 2 and 16: forked workers, page cache and writeback; registered before, during and after",
    needs=("root", "cma", "registrar"),
    expects={
        # Before 5.13 a page that would not move was pinned in place (check_and_migrate_cma_pages, mm/gup.c).
        "pin": {"kernel>=5.13": "reproduced", "kernel<5.13": "not-reproduced"},
        "longterm": "not-reproduced",
    },
    controls={"no-pin": change(pin="none"), "ordinary-memory": change(place="ordinary")},
    profiles=(),
    timeout=3600,
    options={
        "rounds": 100,
        "length": Size(32 << 10),
        "fill_percent": 20,
        "spread": Size(16 << 20),
        "workers": 2,
        "written": Size(2 << 20),
        "page_cache": Size(5 << 20),
    },
)
def checkpoint_fork(stage: Stage) -> None:
    """Count failures of ROUNDS registrations beside a checkpoint, part by part; then prove one."""
    checkpoint.measure(
        stage,
        checkpoint.settings(stage.option("workers"), stage.option("written"), stage.option("page_cache")),
        rounds=stage.option("rounds"),
        length=stage.option("length"),
        fill=stage.option("fill_percent") / 100,
        spread=stage.option("spread"),
    )
    buffer = stage.buffer(length=stage.option("length"), place="unpinnable")
    pin = stage.pin(buffer)
    stage.register(buffer)
    pin.release()
    stage.register(buffer).deregister()
