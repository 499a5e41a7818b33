"""Planted faults on this machine: what each does, that it is undone, and what refuses to run."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stage_fakes import RealMemory, steps

from regrepro.core.memory import vma_line
from regrepro.errors import Unmet
from regrepro.record import FILE_NAME, RecordWriter, read_record
from regrepro.scenario import Change
from regrepro.stage import Stage
from regrepro.stage.ports import PAGE_SIZE

ROOT = os.geteuid() == 0


@pytest.fixture
def sound(tmp_path: Path) -> Stage:
    """The stage of the control that leaves the fault out."""
    writer = RecordWriter(tmp_path / FILE_NAME, {})
    return Stage(RealMemory(), writer, scenario="s", control="c", change=Change("fault", "none"))


def capable() -> bool:
    text = Path("/proc/thread-self/status").read_text()
    return bool(int(text.partition("CapEff:")[2].split()[0], 16) >> 14 & 1)


def test_the_locked_memory_limit_is_lowered_and_given_back(stage: Stage) -> None:
    before, had = resource.getrlimit(resource.RLIMIT_MEMLOCK), capable()
    with stage.faults.memlock(4 * PAGE_SIZE, capable=False):
        assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == 4 * PAGE_SIZE
        assert not capable()
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before
    assert capable() is had
    lowered, restored = steps(stage)
    assert lowered["memlock_soft"] == 4 * PAGE_SIZE
    assert "CAP_IPC_LOCK" not in lowered["capabilities"]
    assert ("CAP_IPC_LOCK" in restored["capabilities"]) is had


@pytest.mark.skipif(not capable(), reason="needs CAP_IPC_LOCK to keep")
def test_the_capability_can_be_kept(stage: Stage) -> None:
    with stage.faults.memlock(0, capable=True):
        assert capable()
        assert "CAP_IPC_LOCK" in steps(stage)[-1]["capabilities"]


def test_a_hole_is_there_for_as_long_as_it_is_planted(stage: Stage) -> None:
    buffer = stage.buffer(pages=8)
    address = buffer.address + 4 * PAGE_SIZE
    with stage.faults.hole(buffer, page=4):
        assert vma_line(address) == ""
        assert steps(stage)[-1]["vma"].startswith(f"{buffer.address:x}-{address:x} rw")
    assert vma_line(address) != ""
    buffer.free()


def test_a_mapping_is_read_only_for_as_long_as_it_is_planted(stage: Stage) -> None:
    buffer = stage.buffer(pages=8)
    with stage.faults.read_only(buffer):
        assert " r--p " in steps(stage)[-1]["vma"]
    assert " rw-p " in steps(stage)[-1]["vma"]
    buffer.write(b"again")
    buffer.free()


def test_nothing_is_mapped_at_an_unmapped_address(stage: Stage) -> None:
    assert vma_line(stage.faults.unmapped_address(1 << 30)) == ""


def test_descriptors_that_are_no_dma_buf(stage: Stage) -> None:
    for fd in (stage.faults.bad_fd(), stage.faults.closed_fd()):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with stage.faults.memfd() as fd:
        assert os.fstat(fd).st_size == PAGE_SIZE


def test_a_child_keeps_no_file_of_ours_open_and_ends(stage: Stage) -> None:
    reading, writing = os.pipe()
    with stage.faults.child():
        pid = steps(stage)[-1]["pid"]
        assert list(Path(f"/proc/{pid}/fd").iterdir()) == []
        os.close(writing)
        assert os.read(reading, 1) == b""  # the end of file: the child does not hold the pipe open
    os.close(reading)
    assert not Path(f"/proc/{pid}").exists()


def test_two_references_are_held_and_dropped(stage: Stage) -> None:
    buffer = stage.buffer(pages=2)
    backend: Any = stage.backend
    with stage.faults.references(buffer):
        assert [backend.pins[buffer.address + n * PAGE_SIZE] for n in range(2)] == [2, 2]
    assert set(backend.pins.values()) == {0}
    assert [step["name"] for step in steps(stage)] == ["references-taken", "references-gone"]


def test_memory_that_was_only_read_is_zero(stage: Stage) -> None:
    buffer = stage.faults.buffer_of_zero_page(pages=4)
    assert buffer.read(4 * PAGE_SIZE) == bytes(4 * PAGE_SIZE)
    buffer.free()


DANGEROUS: dict[str, Callable[[Stage], Any]] = {
    "exhaustion": lambda stage: stage.faults.mrs_exhausted().__enter__(),
    "the vanishing device": lambda stage: stage.faults.device_removed().__enter__(),
    "no page to move to": lambda stage: stage.faults.no_huge_page_to_move_to().__enter__(),
    "the memory cgroup": lambda stage: stage.faults.memory_cgroup(1 << 24).__enter__(),
    "the device node": lambda stage: stage.faults.no_permission().__enter__(),
}


@pytest.mark.parametrize("name", DANGEROUS)
def test_what_could_hurt_a_node_refuses_outside_of_the_lab(name: str, stage: Stage) -> None:
    with pytest.raises(Unmet, match="regrepro lab run"):
        DANGEROUS[name](stage)


def test_a_fault_of_one_driver_is_planted_on_no_other(stage: Stage) -> None:
    stage.faults.only_on("fake", "it is the one")
    with pytest.raises(Unmet, match="fake0 is another device: it knows more"):
        stage.faults.only_on("rdma_rxe", "it knows more")


def test_in_the_control_nothing_is_planted(sound: Stage) -> None:
    assert sound.faults.either("fault", "sound") == "sound"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    buffer = sound.buffer(pages=8)
    whole = vma_line(buffer.address)
    with (
        sound.faults.memlock(0, capable=False),
        sound.faults.hole(buffer, page=4),
        sound.faults.read_only(buffer),
        sound.faults.references(buffer),
        sound.faults.child(),
    ):
        assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == limit
        assert vma_line(buffer.address) == whole
    assert steps(sound) == []
    assert sound.faults.buffer_of_file(pages=1).backing == "memfd"
    assert [event["backing"] for event in read_record(sound._writer.path).events][-1] == "memfd"
