"""CUDA's error paths on a machine without a device, against NVIDIA's own runtime libraries from PyPI."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regrepro.core import cuda as room
from regrepro.errors import EnvironmentProblem, UsageError


def real_runtimes() -> list[str]:
    """Every libcudart that is installed here."""
    return list(room._openable(room.runtime_candidates(), []))


@pytest.fixture(scope="module", params=range(2))
def runtime(request: pytest.FixtureRequest) -> room.Cuda:
    found = real_runtimes()
    if request.param >= len(found):
        pytest.skip(
            f"only {len(found)} libcudart here (pip install nvidia-cuda-runtime nvidia-cuda-runtime-cu12)"
        )
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return room.Cuda(found[request.param], None, "real")
    pytest.skip("this machine has an NVIDIA driver; these tests are about its absence")


def test_the_runtime_tells_its_version(runtime: room.Cuda) -> None:
    version = runtime.versions()["runtime"]
    assert version is not None
    assert int(version.split(".")[0]) >= 11
    assert runtime.stand_in is None
    assert runtime.owner == "cuda"


CALLS: list[tuple[str, Callable[[room.Cuda], Any]]] = [
    ("cudaGetDeviceCount", lambda cuda: cuda.device_count()),
    ("cudaSetDevice", lambda cuda: cuda.set_device(0)),
    ("cudaHostAlloc", lambda cuda: cuda.host_alloc(4096)),
    ("cudaHostRegister", lambda cuda: cuda.host_register(0x10000, 4096)),
    ("cudaHostUnregister", lambda cuda: cuda.host_unregister(0x10000)),
    ("cudaHostGetDevicePointer", lambda cuda: cuda.host_device_pointer(0x10000)),
    ("cudaPointerGetAttributes", lambda cuda: cuda.pointer_attributes(0x10000)),
    ("cudaMalloc", lambda cuda: cuda.malloc(4096)),
]


@pytest.mark.parametrize(("call", "use"), CALLS, ids=[call for call, _ in CALLS])
def test_every_runtime_call_without_a_driver_names_cuda_s_own_error(
    runtime: room.Cuda, call: str, use: Callable[[room.Cuda], Any]
) -> None:
    with pytest.raises(room.CudaError) as caught:
        use(runtime)
    assert caught.value.call == call
    assert caught.value.name == "cudaErrorInsufficientDriver"
    assert "driver" in str(caught.value)
    assert "\n" not in str(caught.value)


DRIVER_CALLS: list[tuple[str, Callable[[room.Cuda], Any]]] = [
    ("cuMemCreate", lambda cuda: cuda.vmm_alloc(4096)),
    ("cuMemGetHandleForAddressRange", lambda cuda: cuda.dmabuf_fd(0x10000, 4096)),
    ("cuDeviceGetAttribute", lambda cuda: cuda.device_attribute("dma_buf_supported")),
]


@pytest.mark.parametrize(("call", "use"), DRIVER_CALLS, ids=[call for call, _ in DRIVER_CALLS])
def test_driver_calls_without_libcuda_say_what_is_missing(
    runtime: room.Cuda, call: str, use: Callable[[room.Cuda], Any]
) -> None:
    with pytest.raises(room.CudaError) as caught:
        use(runtime)
    assert caught.value.call == call
    assert "driver library" in str(caught.value)


def test_real_without_a_driver_is_one_clear_line(runtime: room.Cuda) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        room.open_cuda("real")
    text = str(caught.value)
    assert "cudaErrorInsufficientDriver" in text
    assert "libcuda" in text
    assert "\n" not in text


def test_auto_without_a_driver_is_no_cuda(runtime: room.Cuda) -> None:
    assert room.open_cuda("auto") is None


def test_real_without_a_runtime_says_where_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REGREPRO_LIBCUDART", str(tmp_path / "libcudart.so.12"))
    with pytest.raises(EnvironmentProblem, match=r"no CUDA runtime.*nvidia-cuda-runtime"):
        room.open_cuda("real")


def test_a_file_that_is_no_library_is_reported_with_the_loader_s_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libcudart.so.12"
    broken.write_bytes(b"\x7fELF, but not really")
    monkeypatch.setenv("REGREPRO_LIBCUDART", str(broken))
    with pytest.raises(EnvironmentProblem) as caught:
        room.open_cuda("real")
    assert str(broken) in str(caught.value)


def test_unknown_mode_and_flag_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="standin:pin"):
        room.open_cuda("standin")
    with pytest.raises(UsageError, match="mapped"):
        room._flags(("maped",), room.HOST_ALLOC_FLAGS, "cudaHostAlloc")


def test_none_is_none() -> None:
    assert room.open_cuda("none") is None


@pytest.fixture
def stand_in() -> Any:
    if room.stand_in_library() is None:
        pytest.fail("the stand-in library was not built with the package")
    with room.open_cuda("standin:longterm") or pytest.fail("no stand-in") as opened:
        yield opened


def test_the_stand_in_says_what_it_is(stand_in: room.Cuda) -> None:
    assert stand_in.stand_in == "standin:longterm"
    assert stand_in.owner == "standin:longterm"
    assert stand_in.versions() == {"runtime": None, "driver": None}


def test_the_stand_in_knows_device_memory_from_host_memory(stand_in: room.Cuda) -> None:
    device = stand_in.malloc(10000)
    assert stand_in.pointer_attributes(device + 5000).type == "device"
    assert stand_in.pointer_attributes(id(stand_in)).type == "unregistered"
    with pytest.raises(room.CudaError, match="cudaErrorHostMemoryNotRegistered"):
        stand_in.host_unregister(device)
    stand_in.free(device)
    assert stand_in.pointer_attributes(device).type == "unregistered"
    with pytest.raises(room.CudaError, match="cudaErrorInvalidValue"):
        stand_in.free(device)


@pytest.mark.parametrize("length", [0, 2**64 - 1])
def test_the_stand_in_refuses_absurd_lengths(stand_in: room.Cuda, length: int) -> None:
    with pytest.raises(room.CudaError, match="cudaErrorInvalidValue"):
        stand_in.host_alloc(length)
    with pytest.raises(room.CudaError, match="cudaErrorInvalidValue"):
        stand_in.malloc(length)


def test_the_stand_in_refuses_what_is_not_mapped_and_tells_the_errno(stand_in: room.Cuda) -> None:
    with pytest.raises(room.CudaError, match="cudaErrorOperatingSystem") as caught:
        stand_in.host_register(0x1000, 4096)
    assert caught.value.errno is not None


def test_what_the_stand_in_says_of_its_device(stand_in: room.Cuda) -> None:
    facts = stand_in.device_facts()
    assert facts["name"] == "regrepro CUDA stand-in"
    assert set(facts) == {"name", *room.DEVICE_ATTRIBUTES}
    assert stand_in.device_facts(3)["name"] == "CUresult 101"
