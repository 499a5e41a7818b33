"""What /proc tells of another process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from regrepro.watch import process


def test_rank_variables_are_kept_and_nothing_else_of_an_environment() -> None:
    environ = "HOME=/root\0RANK=3\0SLURM_JOB_ID=77\0SECRET=x\0OMPI_COMM_WORLD_RANK=3\0SLURM_TOKEN=y\0"
    assert process.rank_variables(environ) == {"RANK": "3", "SLURM_JOB_ID": "77", "OMPI_COMM_WORLD_RANK": "3"}


def test_a_container_is_told_by_its_control_group() -> None:
    name = "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + "ab" * 32 + ".scope"
    assert process.container_of(name) == {"runtime": "kubepods", "id": "ab" * 32}
    assert process.container_of("0::/user.slice/session-1.scope") is None


def test_the_mapping_of_an_address_and_what_backs_it() -> None:
    maps = (
        "10000-20000 rw-p 00000000 00:00 0 \n20000-30000 rw-s 00000000 00:01 5 /memfd:x (deleted)\n"
        "30000-40000 rw-s 00000000 08:01 6 /data/file\n40000-50000 rw-s 00000000 00:05 7 /dev/nvidia0\n"
    )
    first, lines = process.vma_of(maps, 0x1F000, 0x2000)
    assert first.startswith("10000-20000") and len(lines) == 2
    backings = [process.backing_of(text) for text in maps.splitlines()]
    assert backings == ["anonymous", "memfd", "file", "device"]
    assert process.vma_of(maps, 0x90000, 1) == ("", []) and process.backing_of("") == "unknown"


def test_texts_of_any_size_are_read_within_bounds_and_the_record_says_so(tmp_path: Path) -> None:
    (tmp_path / "4").mkdir()
    with (tmp_path / "4" / "environ").open("wb") as environ:
        environ.write(b"RANK=3\0")
        environ.truncate(4 << 30)  # a hole: to read it all would take minutes and all memory
    with (tmp_path / "4" / "cmdline").open("wb") as command:
        command.write(b"python\0train.py\0")
        command.truncate(4 << 30)
    read = process.read_process(4, tmp_path)
    assert read.facts["rank"] == {"RANK": "3"}
    assert str(read.facts["cmdline"]).startswith("python train.py") and len(read.facts["cmdline"]) <= 512
    assert f"{tmp_path}/4/environ: only its first {process.TEXT_LIMIT} bytes were read" in read.problems


def test_a_process_that_is_gone_leaves_names_of_what_was_not_read(tmp_path: Path) -> None:
    gone = process.read_process(4, tmp_path)
    assert gone.facts["pid"] == 4 and gone.capabilities is None
    assert any("status" in text for text in gone.problems)


def test_this_process_is_read() -> None:
    own = process.read_process(os.getpid())
    assert own.facts["comm"] and own.capabilities is not None
    # Only root may look at the first process, which has the node's namespaces.
    assert not [text for text in own.problems if not text.startswith("/proc/1/ns/")]
    assert "memlock_soft" in own.limits


@pytest.mark.parametrize(
    ("offsets", "added"),
    [
        (
            "monotonic           0         0\nboottime       -86400 250000000\n",
            -86_400_000_000_000 + 250_000_000,
        ),
        ("monotonic           5         0\nboottime            7         3\n", 7_000_000_003),
        ("monotonic           5         0\n", 0),
        (None, 0),
    ],
)
def test_the_kernels_clock_is_known_in_a_time_namespace(
    offsets: str | None, added: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if offsets is not None:
        (tmp_path / "timens_offsets").write_text(offsets)
    real = Path

    def path(given: str) -> Path:
        return tmp_path / "timens_offsets" if given == "/proc/self/timens_offsets" else real(given)

    monkeypatch.setattr(process, "Path", path)
    process._boottime_offset.cache_clear()
    try:
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        kernel = process.kernel_boottime()
        assert before <= kernel + added <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        assert process.start_ticks(90_000 * 10**9) == (90_000 * 10**9 + added) // tick
    finally:
        process._boottime_offset.cache_clear()
