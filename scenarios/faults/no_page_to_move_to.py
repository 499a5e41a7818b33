"""The same tracepoint line as the bug has, with no pin at all."""

from regrepro import Stage, change, scenario


@scenario(
    shows="a page that nothing holds cannot move either where there is no other page to move to",
    needs=("root", "movable-zone", "rdma", "lab"),
    expects={
        "none": {
            "kernel>=6.6": {"verdict": "other-failure", "layer": "migration-target", "errno": "ENOMEM"},
            # No huge page in ZONE_MOVABLE could be pinned for long, target or not (follow_hugetlb_page).
            "kernel>=5.18": {"verdict": "other-failure", "layer": "longterm-refused", "errno": "ENOMEM"},
            "kernel>=5.13": {"verdict": "other-failure", "layer": ["migration-target", "longterm-refused"]},
            # ZONE_MOVABLE was not looked at (check_and_migrate_cma_pages, mm/gup.c).
            "kernel<5.13": {"verdict": "not-reproduced", "basis": "kernel"},
        }
    },
    controls={"with-pages-to-move-to": change(fault="none")},
    profiles=("faults",),
    timeout=300,
)
def no_page_to_move_to(stage: Stage) -> None:
    """Register a huge page in ZONE_MOVABLE while every huge page outside is in use."""
    with stage.faults.no_huge_page_to_move_to() as buffer:
        stage.register(buffer).deregister()
        buffer.free()
