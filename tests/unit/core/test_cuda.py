"""CUDA's error paths on a machine without a device: NVIDIA's own runtimes from PyPI, Debian's libcuda."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvidia_files
import pytest
from c_programs import C_TESTS, compiler, library

from regrepro.core import cuda as room
from regrepro.core.cuda_properties import PATH_ATTRIBUTES
from regrepro.errors import EnvironmentProblem, UsageError

RUNTIMES = pytest.mark.parametrize("wheel", nvidia_files.RUNTIMES, ids=" ".join)


@pytest.fixture(scope="module", params=nvidia_files.RUNTIMES, ids=" ".join)
def runtime(request: pytest.FixtureRequest) -> room.Cuda:
    nvidia_files.without_a_driver()
    return room.Cuda(str(nvidia_files.runtime(*request.param)), None, "real")


@pytest.fixture
def chosen(runtime: room.Cuda, monkeypatch: pytest.MonkeyPatch) -> room.Cuda:
    """The runtime, as the user chooses it."""
    monkeypatch.setenv("REGREPRO_LIBCUDART", runtime.runtime_path)
    return runtime


def test_the_runtime_tells_its_version(runtime: room.Cuda) -> None:
    [wheel] = Path(runtime.runtime_path).parents[3].glob("*.dist-info")
    told = runtime.versions()["runtime"]
    if "_cu11-" in wheel.name:
        assert told is None, "runtimes of CUDA 11 were seen to refuse cudaRuntimeGetVersion without a driver"
    else:
        assert told is not None
        assert f"-{told}." in wheel.name
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


def test_real_without_a_driver_is_one_clear_line(chosen: room.Cuda) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        room.open_cuda("real")
    text = str(caught.value)
    assert "cudaErrorInsufficientDriver" in text
    assert "libcuda" in text
    assert "\n" not in text


def test_auto_without_a_driver_is_no_cuda(chosen: room.Cuda) -> None:
    assert room.open_cuda("auto") is None


# In a process of its own: a libcuda that is loaded once is there for every runtime of a process.
ASK = """
import json, sys
from regrepro.core import cuda as room
from regrepro.errors import EnvironmentProblem

cuda = room.Cuda(sys.argv[1], sys.argv[2], "real")
said = {}
for call, use in (
    ("cudaGetDeviceCount", lambda: cuda.device_count()),
    ("cudaSetDevice", lambda: cuda.set_device(0)),
    ("cudaHostAlloc", lambda: cuda.host_alloc(4096)),
    ("cudaHostRegister", lambda: cuda.host_register(0x10000, 4096)),
    ("cudaMalloc", lambda: cuda.malloc(4096)),
    ("cuDeviceGetName", lambda: cuda.device_name()),
    ("cuDeviceTotalMem", lambda: cuda.device_memory()),
    ("cuDeviceGetAttribute", lambda: cuda.device_attribute("dma_buf_supported")),
    ("cuMemCreate", lambda: cuda.vmm_alloc(4096)),
    ("cuMemGetHandleForAddressRange", lambda: cuda.dmabuf_fd(0x10000, 4096)),
):
    try:
        said[call] = [use(), ""]
    except room.CudaError as error:
        said[call] = [error.name, str(error)]
try:
    room.open_cuda("real")
    said["open"] = ["", ""]
except EnvironmentProblem as problem:
    said["open"] = ["", str(problem)]
said["versions"] = cuda.versions()
print(json.dumps(said))
"""


def in_a_process(program: str, *arguments: str, **environment: str) -> dict[str, Any]:
    paths = [str(nvidia_files.ROOT / "src"), environment.pop("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@RUNTIMES
def test_a_driver_without_a_device_is_told_in_cuda_s_own_words(wheel: tuple[str, str]) -> None:
    nvidia_files.without_a_driver()
    library, driver = str(nvidia_files.runtime(*wheel)), str(nvidia_files.driver() / "libcuda.so.1")
    said = in_a_process(ASK, library, driver, REGREPRO_LIBCUDART=library, REGREPRO_LIBCUDA=driver)
    versions = said.pop("versions")
    newer = int(wheel[1].split(".")[0]) > int(versions["driver"].split(".")[0])
    wanted = "cudaErrorInsufficientDriver" if newer else "cudaErrorNoDevice"
    text = said.pop("open")[1]
    assert wanted in text
    assert "no libcuda" not in text
    assert "\n" not in text
    for call, (name, line) in said.items():
        if call.startswith("cuda"):
            assert name == wanted, line
        else:
            assert name.startswith("CUDA_ERROR_"), line
        assert line.startswith(f"{call}: {name}")


PROPERTIES = """
import json, sys
from regrepro.core import cuda as room

told = room.Cuda(sys.argv[1], sys.argv[2] or None, "real").properties(0)
print(json.dumps(vars(told)))
"""
BINDINGS = pytest.mark.parametrize("bindings", nvidia_files.CUDA_PYTHON, ids=" ".join)


@pytest.fixture(scope="module")
def some_runtime() -> str:
    """Any runtime that a driver of CUDA 12 serves."""
    nvidia_files.without_a_driver()
    return str(nvidia_files.runtime("nvidia-cuda-runtime-cu12", "12.0.107"))


@BINDINGS
def test_cuda_python_without_libcuda_leaves_it_to_the_c_core(
    bindings: tuple[str, str], some_runtime: str
) -> None:
    told = in_a_process(PROPERTIES, some_runtime, "", PYTHONPATH=str(nvidia_files.wheel(*bindings)))
    assert told["cuda_python"].startswith(" ".join(bindings))
    assert "cuInit" in told["cuda_python"]
    assert "\n" not in told["cuda_python"]
    assert told["versions"] == {"runtime": "12.0", "driver": None}
    assert set(told["device"].values()) == {"ENOSYS"}
    assert set(told["sources"]) == {"libcudart.so.12, by the C core", "the C core, without a libcuda"}


@BINDINGS
def test_cuda_python_on_a_driver_without_a_device_says_so(
    bindings: tuple[str, str], some_runtime: str
) -> None:
    folder = nvidia_files.driver()
    told = in_a_process(
        PROPERTIES,
        some_runtime,
        str(folder / "libcuda.so.1"),
        PYTHONPATH=str(nvidia_files.wheel(*bindings)),
        LD_LIBRARY_PATH=str(folder),
    )
    module = "cuda.cuda" if bindings[0] == "cuda-python" else "cuda.bindings.driver"
    assert told["cuda_python"] == f"{' '.join(bindings)}, {module}: cuInit: CUDA_ERROR_NO_DEVICE"
    assert told["device"]["name"] == "CUDA_ERROR_NO_DEVICE"
    assert told["versions"]["driver"] is not None
    assert not any(source.startswith("cuda-") for source in told["sources"])


@BINDINGS
def test_cuda_python_tells_the_properties_and_the_c_core_what_it_lacks(
    bindings: tuple[str, str], some_runtime: str, fake_driver: Path
) -> None:
    told = in_a_process(
        PROPERTIES,
        some_runtime,
        str(fake_driver / "libcuda.so.1"),
        PYTHONPATH=str(nvidia_files.wheel(*bindings)),
        LD_LIBRARY_PATH=str(fake_driver),
    )
    assert told["versions"] == {"runtime": "12.0", "driver": "12.4"}
    device = told["device"]
    assert (device["name"], device["memory"]) == ("Fake GPU", 80 << 30)
    assert (device["gpu_direct_rdma_supported"], device["compute_capability_major"]) == (1116, 1075)
    assert device["dma_buf_supported"] == "CUDA_ERROR_INVALID_VALUE"
    [by_python] = [facts for source, facts in told["sources"].items() if source.startswith("cuda-")]
    assert by_python[:3] == ["driver", "name", "memory"]
    assert told["sources"]["libcuda.so.1, by the C core"] == ["dma_buf_supported"]
    assert told["sources"]["libcudart.so.12, by the C core"] == ["runtime"]
    assert set(device) | {"driver"} == {*by_python, "dma_buf_supported"}
    assert told["cuda_python"].endswith("cuDeviceGetAttribute: CUDA_ERROR_INVALID_VALUE")


@BINDINGS
def test_cuda_python_is_not_believed_of_another_libcuda(
    bindings: tuple[str, str], some_runtime: str, fake_driver: Path, tmp_path: Path
) -> None:
    """The C core was told to open one libcuda, and the loader gives the bindings another one."""
    other = tmp_path / "libcuda.so.mine"
    other.write_bytes((fake_driver / "libcuda-unnamed.so").read_bytes())
    told = in_a_process(
        PROPERTIES,
        some_runtime,
        str(other),
        PYTHONPATH=str(nvidia_files.wheel(*bindings)),
        LD_LIBRARY_PATH=str(fake_driver),
    )
    assert "another libcuda" in told["cuda_python"]
    assert str(other) in told["cuda_python"]
    assert told["device"]["name"] == "Fake GPU"
    assert "name" in told["sources"]["libcuda.so.mine, by the C core"]


def test_without_cuda_python_the_c_core_tells_all(some_runtime: str, fake_driver: Path) -> None:
    told = in_a_process(PROPERTIES, some_runtime, str(fake_driver / "libcuda.so.1"))
    if not told["cuda_python"]:
        pytest.skip("cuda-python is installed here; this test is about its absence")
    assert "pip install" in told["cuda_python"]
    assert told["device"]["memory"] == 80 << 30
    assert {"name", "memory"} <= set(told["sources"]["libcuda.so.1, by the C core"])


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda of one device, also under no name of its own."""
    folder = tmp_path_factory.mktemp("driver")
    source = str(C_TESTS / "fake_libcuda.c")
    for name, more in (("libcuda.so.1", ["-Wl,-soname,libcuda.so.1"]), ("libcuda-unnamed.so", [])):
        library(compiler("gcc"), folder / name, source, "-ldl", *more)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # the name that the oldest bindings ask for
    return folder


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
    told = stand_in.properties()
    assert told.device["name"] == "regrepro CUDA stand-in"
    assert set(told.device) == {"name", *PATH_ATTRIBUTES}
    assert list(told.sources) == ["standin:longterm"]
    assert told.cuda_python is None, "cuda-python would have asked NVIDIA's driver"
    assert stand_in.properties(3).device["name"] == "CUresult 101"
