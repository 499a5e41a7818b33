"""The rooms against real kernels: each guest program on each kernel that it is for, one boot a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from regrepro.lab.run import LabOptions

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3600)]

MIB, GIB = 1 << 20, 1 << 30
UNEVEN = (1001 * MIB, 999 * MIB)
KERNEL, CUDA = ("guest_kernel.py",), ("guest_cuda.py",)
REFUSES, REGISTERS = ("--expect-refusal", "yes"), ("--expect-refusal", "no")
TRACE = ("guest_trace.py", *REFUSES)
WATCH = ("guest_watch.py", *REFUSES)
UNTYPED = ("guest_watch_untyped.py",)
CPROGRAM = ("guest_cprogram.py",)


@dataclass(frozen=True)
class Row:
    """One boot, and the programs that run in it with their arguments."""

    name: str
    options: LabOptions
    programs: tuple[tuple[str, ...], ...]


# guest_kernel.py comes first: it takes memory blocks offline, which a used guest may not give.
ROWS = [
    Row(
        "7.3 hugetlb_cma=2G, two nodes",
        LabOptions("7.3", ("hugetlb_cma=2G",), numa=2),
        (KERNEL, ("guest_audit.py", "hugetlb_cma"), CUDA),
    ),
    Row(
        "7.3 hugetlb_cma=2G, nodes too small",
        LabOptions("7.3", ("hugetlb_cma=2G",), memory=6 * GIB, numa=2),
        (("guest_audit.py", "failed"),),
    ),
    Row(
        "7.3 cma=512M",
        LabOptions("7.3", ("cma=512M",)),
        (KERNEL, ("guest_audit.py", "cma"), ("guest_core.py", *REFUSES), CPROGRAM),
    ),
    Row(
        "7.3 cma=512M, placement",
        LabOptions("7.3", ("cma=512M",)),
        # Without arguments it makes 20 runs and 50 presses: ten minutes.
        (("guest_place.py", "--runs", "3", "--presses", "5"),),
    ),
    Row(
        "7.3 numa_cma, uneven nodes",
        LabOptions("7.3", ("numa_cma=0:256M,1:256M",), numa=UNEVEN),
        (
            ("guest_kernel.py", "--only", "churn"),
            ("guest_place.py", "--runs", "1", "--only", "gather", "pressure", "blocks", "impossible"),
        ),
    ),
    Row(
        "7.3 movablecore=512M",
        LabOptions("7.3", ("movablecore=512M",)),
        (
            ("guest_audit.py", "movablecore"),
            TRACE,
            WATCH,
            ("guest_hostile.py",),
            ("guest_kills.py", "--kills", "20"),
        ),
    ),
    Row(
        "7.3 movablecore=512M, CUDA",
        LabOptions("7.3", ("movablecore=512M",)),
        (
            ("guest_cuda.py", "--options"),
            ("guest_cuda.py", "--place", "online-movable", "cuda_host_alloc_then_register"),
        ),
    ),
    Row(
        "5.10 movablecore=512M, CUDA",
        LabOptions("5.10", ("movablecore=512M",)),
        (("guest_cuda.py", "--refuses", "no"),),
    ),
    # A boot of its own, as it takes the RDMA modules out.
    Row("6.12, RDMA modules without types", LabOptions("6.12", ("movablecore=512M",)), (UNTYPED,)),
    Row("7.3", LabOptions("7.3"), (("guest_audit.py", "none"), ("guest_container.py",))),
    *(
        Row(f"{series} movablecore=512M", LabOptions(series, ("movablecore=512M",)), programs)
        for series, programs in (
            (
                "6.12",
                (
                    KERNEL,
                    ("guest_audit.py", "movablecore"),
                    ("guest_core.py", *REFUSES),
                    TRACE,
                    CUDA,
                    WATCH,
                ),
            ),
            (
                "6.1",
                (
                    KERNEL,
                    ("guest_audit.py", "movablecore"),
                    ("guest_core.py", *REFUSES),
                    TRACE,
                    CUDA,
                    WATCH,
                    CPROGRAM,
                ),
            ),
            ("5.10", (KERNEL, ("guest_core.py", *REGISTERS), ("guest_trace.py", *REGISTERS))),
        )
    ),
]


@pytest.mark.parametrize(
    ("row", "number"),
    [
        pytest.param(row, number, id=f"{row.name}: {' '.join(program)}")
        for row in ROWS
        for number, program in enumerate(row.programs)
    ],
)
def test_a_guest_program_finds_nothing_wrong(row: Row, number: int, lab: Lab) -> None:
    from conftest import failures

    boot = lab.boot(row.options, [lab.program(*program) for program in row.programs])
    assert boot.ending.what == "finished", f"{boot.ending.why}\n" + "\n".join(boot.ending.console)
    code, tap = boot.results[number]
    assert failures(tap) == [], tap
    assert code == 0, tap
