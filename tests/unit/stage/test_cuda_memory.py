"""CUDA's memory on the stage: what is recorded, and what is read of a mapping."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage_fakes import CMA, FakeBackend, FakePin

from regrepro.core.cuda import CudaError
from regrepro.core.cuda_properties import Properties
from regrepro.errors import Unmet, UsageError
from regrepro.options import RunOptions
from regrepro.record import RecordWriter, read_record
from regrepro.scenario import Change
from regrepro.stage import Stage, cuda_memory
from regrepro.stage.ports import PAGE_SIZE

MIGRATED = {
    "status": "complete",
    "events": [
        {
            "tracepoint": "mm_migrate_pages",
            "fields": {"nr_succeeded": 7, "nr_failed": 0, "reason": "longterm_pin"},
        },
        {"tracepoint": "mm_migrate_pages", "fields": {"nr_succeeded": 3, "reason": "numa_misplaced"}},
        {"fn": "migrate_pages", "ret": 0},
    ],
}


class FakeCuda:
    """Host memory of it lies in the machine made of numbers; `refuse` names what it answers instead."""

    stand_in: str | None = "standin:pin"
    owner = "standin:pin"
    offset = 0

    def __init__(self, machine: CudaBackend) -> None:
        self.machine = machine
        self.refuse: CudaError | None = None
        self.freed: list[int] = []

    def host_alloc(self, length: int, flags: tuple[str, ...]) -> int:
        if self.refuse is not None:
            raise self.refuse
        memory = self.machine.allocate(length, "anonymous")
        memory.address += self.offset
        memory.populate()
        self.machine.cuda_pins[memory.address] = (
            memory,
            FakePin(self.machine, "pin", memory.address, length),
        )
        return memory.address

    def free_host(self, address: int) -> None:
        _, pin = self.machine.cuda_pins.pop(address)
        pin.release()
        self.freed.append(address)

    def pin_alive(self, address: int) -> bool:
        return address in self.machine.cuda_pins

    def malloc(self, length: int) -> int:
        if self.refuse is not None:
            raise self.refuse
        return 0x7F00_0000_0000

    def free(self, address: int) -> None:
        self.freed.append(address)

    def pointer_attributes(self, address: int) -> Any:
        return SimpleNamespace(type="device", device=0, device_pointer=address, host_pointer=0)

    def properties(self, gpu: int) -> Properties:
        return Properties(
            {"runtime": None, "driver": None},
            {"name": "made of numbers"},
            {"standin:pin": ["runtime", "driver", "name"]},
        )

    def device_attribute(self, name: str, gpu: int) -> int:
        return 0

    def dmabuf_fd(self, address: int, length: int) -> int:
        raise CudaError("cuMemGetHandleForAddressRange", 801, "CUDA_ERROR_NOT_SUPPORTED")


class CudaBackend(FakeBackend):
    """A machine made of numbers with CUDA on it."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.cuda_pins: dict[int, Any] = {}
        self.the_cuda: FakeCuda | None = FakeCuda(self)

    def cuda(self) -> Any:
        return self.the_cuda

    def default_pin(self) -> tuple[str, str]:
        return "pin", "standin:pin"


class Range:
    """In the place of core.memory.Range: the addresses are no memory of this process."""

    def __init__(self, address: int, length: int, backing: str) -> None:
        self.address, self.length = address, length

    def fill(self, seed: int) -> None: ...

    def checksum(self) -> int:
        return 1

    def vma(self) -> str:
        return f"{self.address:x}-{self.address + self.length:x} rw-p 00000000 00:00 0"

    def close(self) -> None: ...


class Run:
    def __init__(self, path: Path, backend: CudaBackend, change: Change | None = None) -> None:
        self.directory = path
        self.writer = RecordWriter(path / "record.jsonl", {"run": {}, "node": {}, "stand_ins": []})
        self.stage = Stage(backend, self.writer, scenario="s", change=change)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_record(self.directory).events if event["event"] == kind]


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Nothing of these tests is mapped; `kind` is what the mapping would be."""
    said: dict[str, Any] = {"vma": "", "vm_flags": [], "page_kind": "anonymous"}
    monkeypatch.setattr("regrepro.core.memory.Range", Range)
    monkeypatch.setattr(cuda_memory, "vma_facts", lambda address: dict(said))
    return said


def test_host_alloc_records_memory_pin_and_what_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, CudaBackend())
    pin = run.stage.cuda.host_alloc(pages=4, place="unpinnable")
    assert pin
    assert pin.errno is None
    [buffer], [taken] = run.events("buffer"), run.events("pin")
    assert (buffer["backing"], buffer["owner"], buffer["stand_in"]) == ("cuda-host", "cuda", "standin:pin")
    assert (taken["api"], taken["kind"], taken["owner"]) == ("cudaHostAlloc", "pin", "standin:pin")
    assert taken["before"] is None
    assert taken["pages_unknown"]
    assert taken["after"]["place"] == [[i, 1, "cma"] for i in range(4)]
    [step] = run.events("step")
    assert (step["name"], step["page_kind"], step["stand_in"]) == ("cuda-memory", "anonymous", "standin:pin")


def test_the_pages_outlive_the_release(tmp_path: Path) -> None:
    backend = CudaBackend()
    run = Run(tmp_path, backend)
    pin = run.stage.cuda.host_alloc(pages=4, place="unpinnable")
    was = [backend.pages[pin.buffer.address + i * PAGE_SIZE] for i in range(4)]
    assert not run.stage.register(pin.buffer)
    pin.release()
    assert backend.the_cuda is not None
    assert backend.the_cuda.freed == [pin.buffer.address]
    assert [backend.pages[pin.buffer.address + i * PAGE_SIZE] for i in range(4)] == was
    assert run.stage.register(pin.buffer), "nothing but the pin is gone, and it is refused still"
    [release] = run.events("release")
    assert (release["errno"], release["stand_in"]) == (None, "standin:pin")


def test_addresses_that_cuda_keeps_are_not_taken_from_it(tmp_path: Path, no_memory: dict[str, Any]) -> None:
    run = Run(tmp_path, CudaBackend())
    pin = run.stage.cuda.host_alloc(pages=4)
    no_memory["vma"] = "something is mapped there"
    pin.release()
    [release] = run.events("release")
    assert release["errno"] == "EEXIST"
    assert release["checksum_after"] is None


def test_pages_of_the_driver_s_own_go_with_the_release(tmp_path: Path, no_memory: dict[str, Any]) -> None:
    backend = CudaBackend()
    run = Run(tmp_path, backend)
    no_memory["page_kind"] = "pfn-map"
    pin = run.stage.cuda.host_alloc(pages=4)
    pin.release()
    assert backend.the_cuda is not None
    assert backend.the_cuda.freed == [pin.buffer.address]
    assert run.events("release")[0]["checksum_after"] is None


def test_a_refusal_is_recorded_with_cuda_s_own_name(tmp_path: Path) -> None:
    backend = CudaBackend()
    assert backend.the_cuda is not None
    backend.the_cuda.refuse = CudaError("cudaHostAlloc", 2, "cudaErrorMemoryAllocation", "out of memory")
    run = Run(tmp_path, backend)
    pin = run.stage.cuda.host_alloc(pages=4, place="unpinnable")
    assert not pin
    assert pin.errno == "ENOMEM"
    [taken] = run.events("pin")
    assert taken["cuda_error"] == "cudaErrorMemoryAllocation"
    assert run.events("buffer")[0]["address"] == 0
    run.stage.finish()
    assert run.events("free") == []


def test_draws_that_do_not_fit_are_given_back(tmp_path: Path) -> None:
    backend = CudaBackend(lambda n: CMA if n >= 1000 else 0)
    run = Run(tmp_path, backend)
    pin = run.stage.cuda.host_alloc(pages=4, place="unpinnable")
    search = run.events("buffer")[0]["search"]
    assert search["draws"] == 2, "what is handed out before the memory wanted is taken after a draw"
    assert search["touched"] >= 4 << 20
    assert backend.the_cuda is not None
    assert len(backend.the_cuda.freed) == 1
    assert pin.buffer.address not in backend.the_cuda.freed


def test_memory_of_a_pool_is_unmet(tmp_path: Path) -> None:
    backend = CudaBackend()
    assert backend.the_cuda is not None
    backend.the_cuda.offset = 512
    with pytest.raises(Unmet, match="within a page"):
        Run(tmp_path, backend).stage.cuda.host_alloc(pages=4)
    assert len(backend.the_cuda.freed) == 1


def test_memory_that_never_fits_is_unmet(tmp_path: Path) -> None:
    run = Run(tmp_path, CudaBackend(lambda n: 0))
    with pytest.raises(Unmet, match="unpinnable"):
        run.stage.cuda.host_alloc(pages=4, place="unpinnable")
    with pytest.raises(UsageError):
        run.stage.cuda.host_alloc(pages=4, place={"unpinnable": [1]})


def test_a_control_without_the_pin_is_memory_without_cuda(tmp_path: Path) -> None:
    run = Run(tmp_path, CudaBackend(), change=Change("pin", "none"))
    pin = run.stage.cuda.host_alloc(pages=4, place="unpinnable")
    assert (pin.kind, run.events("buffer")[0]["backing"]) == ("none", "anonymous")


def test_device_memory_has_no_pages_of_the_host(tmp_path: Path) -> None:
    backend = CudaBackend()
    run = Run(tmp_path, backend)
    buffer = run.stage.cuda.device_alloc(8192)
    [event] = run.events("buffer")
    assert event["pages"] is None
    assert "no page of this host" in event["pages_unknown"]
    assert buffer.checksum() is None
    assert run.stage.cuda.export_dmabuf(buffer) is None
    exported = run.events("step")[-1]
    assert (exported["errno"], exported["cuda_error"]) == ("EOPNOTSUPP", "CUDA_ERROR_NOT_SUPPORTED")
    buffer.free()
    assert run.events("free")[0]["stand_in"] == "standin:pin"


def test_device_memory_that_is_refused_is_unmet(tmp_path: Path) -> None:
    backend = CudaBackend()
    assert backend.the_cuda is not None
    backend.the_cuda.refuse = CudaError("cudaMalloc", 2, "cudaErrorMemoryAllocation")
    with pytest.raises(Unmet, match="cudaErrorMemoryAllocation"):
        Run(tmp_path, backend).stage.cuda.device_alloc(8192)


def test_without_cuda_it_is_unmet(tmp_path: Path) -> None:
    backend = CudaBackend()
    backend.the_cuda = None
    with pytest.raises(Unmet, match="there is none"):
        Run(tmp_path, backend).stage.cuda.host_alloc(pages=1)


def test_pages_that_the_pin_moved_out_are_counted() -> None:
    assert cuda_memory.moved_out(MIGRATED) == 7
    assert cuda_memory.moved_out({"status": "off"}) == 0
    assert cuda_memory.moved_out(None) == 0


SMAPS = """\
00400000-00401000 r--p 00000000 fe:00 12 /usr/bin/python3
Size:                  4 kB
VmFlags: rd mr mw me
7f0000000000-7f0000010000 {line}
Size:                 64 kB
VmFlags: {flags}
7f0000010000-7f0000020000 rw-p 00000000 00:00 0
VmFlags: rd wr
"""


REAL_VMA_FACTS = cuda_memory.vma_facts


@pytest.mark.parametrize(
    ("line", "flags", "kind"),
    [
        ("rw-p 00000000 00:00 0", "rd wr mr mw me ac", "anonymous"),
        ("rw-p 00000000 00:00 0 [heap]", "rd wr", "anonymous"),
        ("rw-s 00000000 00:1b 81 /dev/shm/nccl-Abc (deleted)", "rd wr sh", "shared-memory"),
        ("rw-s 00000000 00:01 5 /memfd:cuda (deleted)", "rd wr sh", "shared-memory"),
        ("rw-s 00000000 00:01 5 /dev/zero (deleted)", "rd wr sh", "shared-memory"),
        ("rw-s 00000000 fe:00 77 /var/tmp/a file", "rd wr sh", "file"),
        ("rw-s 00000000 00:05 9 /dev/nvidia0", "rd wr sh io de dd", "pfn-map"),
        ("rw-s 00000000 00:05 9 /dev/nvidiactl", "rd wr sh", "pfn-map"),
        ("rw-s 00000000 00:0e 3 anon_inode:[thing]", "rd wr pf", "pfn-map"),
    ],
)
def test_a_mapping_tells_whose_pages_it_has(tmp_path: Path, line: str, flags: str, kind: str) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(SMAPS.format(line=line, flags=flags))
    found = REAL_VMA_FACTS(0x7F0000000FFF, smaps)
    assert found["page_kind"] == kind
    assert found["vma"].endswith(line)
    assert found["vm_flags"] == flags.split()
    assert REAL_VMA_FACTS(0x5000, smaps) == {"vma": "", "vm_flags": [], "page_kind": "none"}
    assert REAL_VMA_FACTS(0x5000, tmp_path / "none")["page_kind"] == "unknown"


def test_why_no_dma_buf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = CudaBackend(options=RunOptions(rdma_device="none"))
    assert "--rdma-device none" in cuda_memory.no_dmabuf(backend)
    monkeypatch.setattr(cuda_memory, "find_device", lambda options: ("rxe0", ""))

    class Device:
        name, stand_in, verbs = "rxe0", "rdma_rxe", ("ibv_reg_dmabuf_mr",)
        answer = errno.EOPNOTSUPP

        def register(self, *_: Any, **__: Any) -> Any:
            raise OSError(self.answer, "no")

    device = Device()
    backend._device = device
    assert "rxe0 has no dma-buf support: rdma_rxe answers EOPNOTSUPP" in cuda_memory.no_dmabuf(backend)
    device.answer = errno.EBADF
    assert "no /dev/udmabuf" in cuda_memory.no_dmabuf(backend)
    backend.the_cuda.stand_in = None
    assert "DMA_BUF_SUPPORTED is 0" in cuda_memory.no_dmabuf(backend)
    backend.the_cuda.device_attribute = lambda name, gpu: 1
    assert not cuda_memory.no_dmabuf(backend)


def test_why_no_peer_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = CudaBackend()
    monkeypatch.setattr(cuda_memory, "_MODULES", tmp_path)
    assert "nvidia-peermem" in cuda_memory.no_peer_memory(backend)
    (tmp_path / "nvidia_peermem").mkdir()
    assert "host memory" in cuda_memory.no_peer_memory(backend)
    backend.the_cuda.stand_in = None
    assert not cuda_memory.no_peer_memory(backend)
