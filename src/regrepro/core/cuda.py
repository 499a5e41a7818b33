"""CUDA as the host sees it, by libraries opened at run time.

Mapped host memory, device memory and dma-buf export. Three things can answer: NVIDIA's runtime and driver
(`real`), or the stand-in library that ships with regrepro and pins host memory without FOLL_LONGTERM
(`standin:pin`) or with it (`standin:longterm`). The C core opens all of them the same way (`csrc/cuda.c`); a
library that is a stand-in says so itself, and `Cuda.stand_in` carries that on.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from regrepro._core import ffi, lib
from regrepro.core.calls import Closing
from regrepro.core.cuda_errors import INSUFFICIENT_DRIVER
from regrepro.core.cuda_errors import CudaError as CudaError  # noqa: PLC0414 - who calls Cuda catches it
from regrepro.core.cuda_properties import PATH_ATTRIBUTES, Properties, gather
from regrepro.errors import EnvironmentProblem, UsageError, errno_name

HOST_ALLOC_FLAGS = {"portable": 1, "mapped": 2, "write_combined": 4}
"""Flags of `cudaHostAlloc` (driver_types.h of the CUDA toolkit)."""

HOST_REGISTER_FLAGS = {"portable": 1, "mapped": 2, "io_memory": 4, "read_only": 8}
"""Flags of `cudaHostRegister`."""

MEMORY_TYPES = {0: "unregistered", 1: "host", 2: "device", 3: "managed"}
"""enum cudaMemoryType."""

STAND_IN_MODES = ("standin:pin", "standin:longterm")
MODES = ("auto", "real", *STAND_IN_MODES, "none")


@dataclass(frozen=True)
class PointerAttributes:
    """What `cudaPointerGetAttributes` says of an address. `type` is one of `MEMORY_TYPES`' values."""

    type: str
    device: int
    device_pointer: int
    host_pointer: int


@dataclass(frozen=True)
class VmmAllocation:
    """Device memory of the virtual-memory-management calls, mapped and accessible. Lengths in bytes."""

    address: int
    length: int
    handle: int
    gpudirect_rdma: bool


def _text(pointer: object) -> str:
    if pointer == ffi.NULL:
        return ""
    value = ffi.string(pointer)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _flags(names: tuple[str, ...], table: dict[str, int], call: str) -> int:
    value = 0
    for name in names:
        if name not in table:
            raise UsageError(f"{call} has no flag {name!r}", hint="it has " + ", ".join(table))
        value |= table[name]
    return value


class Cuda(Closing):
    """One opened CUDA: a runtime library and, where there is one, a driver library. Use in one process only.

    CUDA does not survive `fork()` once it has been used: open it in the process that uses it.
    """

    def __init__(self, runtime: str, driver: str | None, mode: str) -> None:
        """Open the libraries. Raises EnvironmentProblem with the loader's words when one cannot be opened."""
        why = ffi.new("char[]", 512)
        handle = lib.rr_cuda_open(runtime.encode(), driver.encode() if driver else ffi.NULL, why, len(why))
        if handle == ffi.NULL:
            raise EnvironmentProblem("CUDA's libraries could not be opened", why=_text(why))
        self._handle = ffi.gc(handle, lib.rr_cuda_close)
        self.runtime_path = runtime
        self.driver_path = driver
        self.mode = mode
        self.stand_in: str | None = None
        self._properties: dict[int, Properties] = {}
        if lib.rr_cuda_stand_in(self._handle) != ffi.NULL:
            longterm = mode == "standin:longterm"
            self._check(lib.rr_cuda_stand_in_contract(self._handle, longterm), "regrepro_standin_contract")
            self.stand_in = "standin:longterm" if longterm else "standin:pin"

    def close(self) -> None:
        """Give the libraries back (NVIDIA's stay loaded to the end: unloading them is not safe)."""
        if self._handle is not None:
            ffi.release(self._handle)
            self._handle = None

    @property
    def owner(self) -> str:
        """`pin_owner` of the pins that this CUDA makes."""
        return self.stand_in or "cuda"

    def _check(self, result: int, call: str) -> None:
        """Raise CudaError for a result that is not 0: CUDA's own error, or a negative errno of the C core."""
        if result == 0:
            return
        of_driver = call.startswith("cu") and call[2].isupper()
        if result == -errno.ENOSYS:
            library = (self.driver_path or "no driver library") if of_driver else self.runtime_path
            raise CudaError(
                call, result, "ENOSYS", f"{library} has no such entry point; it is too old or missing"
            )
        if result < 0:
            raise CudaError(call, result, errno_name(-result), os.strerror(-result), -result)
        cause = int(lib.rr_cuda_stand_in_errno(self._handle))
        known = cause if cause > 0 else None
        if of_driver:
            name = _text(lib.rr_cu_error_name(self._handle, result))
            raise CudaError(call, result, name or f"CUresult {result}", errno_value=known)
        name = _text(lib.rr_cuda_error_name(self._handle, result))
        text = _text(lib.rr_cuda_error_string(self._handle, result))
        raise CudaError(call, result, name or f"cudaError {result}", text, known)

    def _told(self, kind: str, call: str, function: Callable[..., int], *arguments: int) -> int:
        """Make a call that gives one number, by a pointer that comes last. Raises CudaError."""
        value = ffi.new(f"{kind} *")
        self._check(function(self._handle, *arguments, value), call)
        return int(value[0])

    def versions(self) -> dict[str, str | None]:
        """Return `{"runtime": "12.4", "driver": "12.2"}`: CUDA's, not the driver's release."""
        result: dict[str, str | None] = {}
        for key, function, call in (
            ("runtime", lib.rr_cuda_runtime_version, "cudaRuntimeGetVersion"),
            ("driver", lib.rr_cuda_driver_version, "cudaDriverGetVersion"),
        ):
            try:
                value = self._told("int", call, function)
            except CudaError:
                result[key] = None
                continue
            result[key] = f"{value // 1000}.{value % 1000 // 10}" if value else None
        return result

    def device_count(self) -> int:
        """Number of GPUs that this process may use. Raises CudaError (no driver, no device, …)."""
        return self._told("int", "cudaGetDeviceCount", lib.rr_cuda_device_count)

    def set_device(self, device: int) -> None:
        """Make `device` current for this thread."""
        self._check(lib.rr_cuda_set_device(self._handle, device), "cudaSetDevice")

    def device_name(self, device: int = 0) -> str:
        """`cuDeviceGetName`."""
        buffer = ffi.new("char[]", 256)
        self._check(lib.rr_cu_device_name(self._handle, device, buffer, 256), "cuDeviceGetName")
        return _text(buffer)

    def device_memory(self, device: int = 0) -> int:
        """`cuDeviceTotalMem`: bytes of memory on the GPU."""
        return self._told("uint64_t", "cuDeviceTotalMem", lib.rr_cu_device_memory, device)

    def device_attribute(self, name: str, device: int = 0) -> int:
        """Value of a device attribute by its name in `PATH_ATTRIBUTES`."""
        return self.attribute(PATH_ATTRIBUTES[name], device)

    def attribute(self, number: int, device: int = 0) -> int:
        """`cuDeviceGetAttribute`: a device attribute by its number in enum CUdevice_attribute."""
        return self._told("int", "cuDeviceGetAttribute", lib.rr_cu_device_attribute, device, number)

    def properties(self, device: int = 0) -> Properties:
        """What the GPU and the driver say of themselves, and who told it; asked once and kept."""
        if device not in self._properties:
            self._properties[device] = gather(self, device)
        return self._properties[device]

    def host_alloc(self, length: int, flags: tuple[str, ...] = ("mapped",)) -> int:
        """`cudaHostAlloc`: return the host address of `length` bytes that CUDA allocated and mapped."""
        number = _flags(flags, HOST_ALLOC_FLAGS, "cudaHostAlloc")
        return self._told("uint64_t", "cudaHostAlloc", lib.rr_cuda_host_alloc, length, number)

    def free_host(self, address: int) -> None:
        """`cudaFreeHost`."""
        self._check(lib.rr_cuda_free_host(self._handle, address), "cudaFreeHost")

    def host_register(
        self, address: int, length: int, flags: tuple[str, ...] = ("portable", "mapped")
    ) -> None:
        """`cudaHostRegister`: pin and map a range that this process already has."""
        number = _flags(flags, HOST_REGISTER_FLAGS, "cudaHostRegister")
        self._check(lib.rr_cuda_host_register(self._handle, address, length, number), "cudaHostRegister")

    def host_unregister(self, address: int) -> None:
        """`cudaHostUnregister`."""
        self._check(lib.rr_cuda_host_unregister(self._handle, address), "cudaHostUnregister")

    def host_device_pointer(self, address: int) -> int:
        """`cudaHostGetDevicePointer`: the address by which the GPU reaches a mapped host address."""
        return self._told("uint64_t", "cudaHostGetDevicePointer", lib.rr_cuda_host_device_pointer, address)

    def pointer_attributes(self, address: int) -> PointerAttributes:
        """`cudaPointerGetAttributes`."""
        out = ffi.new("struct rr_cuda_pointer *")
        self._check(lib.rr_cuda_pointer_attributes(self._handle, address, out), "cudaPointerGetAttributes")
        kind = MEMORY_TYPES.get(out.type, f"cudaMemoryType {out.type}")
        return PointerAttributes(kind, int(out.device), int(out.device_pointer), int(out.host_pointer))

    def malloc(self, length: int) -> int:
        """`cudaMalloc`: the device address of `length` bytes."""
        return self._told("uint64_t", "cudaMalloc", lib.rr_cuda_malloc, length)

    def free(self, address: int) -> None:
        """`cudaFree`."""
        self._check(lib.rr_cuda_free(self._handle, address), "cudaFree")

    def vmm_alloc(self, length: int, device: int = 0, *, gpudirect_rdma: bool = True) -> VmmAllocation:
        """Reserve, create, map and enable device memory by the virtual-memory-management calls."""
        out = ffi.new("struct rr_cuda_vmm *")
        self._check(lib.rr_cu_vmm_alloc(self._handle, device, length, gpudirect_rdma, out), "cuMemCreate")
        return VmmAllocation(int(out.address), int(out.length), int(out.handle), bool(out.gpudirect_rdma))

    def vmm_free(self, allocation: VmmAllocation) -> None:
        """Undo `vmm_alloc`."""
        value = ffi.new("struct rr_cuda_vmm *")
        value.address, value.length, value.handle = allocation.address, allocation.length, allocation.handle
        self._check(lib.rr_cu_vmm_free(self._handle, value), "cuMemUnmap")

    def dmabuf_fd(self, address: int, length: int) -> int:
        """`cuMemGetHandleForAddressRange(DMA_BUF_FD)`: a dma-buf file descriptor; the caller closes it."""
        return self._told("int", "cuMemGetHandleForAddressRange", lib.rr_cu_dmabuf_fd, address, length, 0)

    def pin_alive(self, address: int) -> bool | None:
        """Is the pin of this host range held? The stand-in knows; NVIDIA's cannot be asked (None)."""
        answer = int(lib.rr_cuda_stand_in_alive(self._handle, address))
        return None if answer < 0 else bool(answer)


def stand_in_library() -> Path | None:
    """Path of the stand-in shared library that was built with this package, or None."""
    found = sorted((Path(__file__).parent.parent).glob("_standin*.so"))
    return found[0] if found else None


def _version_key(path: str) -> tuple[int, ...]:
    match = re.search(r"\.so\.([0-9.]+)$", path)
    return tuple(int(part) for part in match.group(1).split(".") if part) if match else (0,)


def runtime_candidates() -> Iterator[str]:
    """Where libcudart may lie: the user's word, wheels of this Python, toolkits, the loader's search."""
    chosen = os.environ.get("REGREPRO_LIBCUDART")
    if chosen:
        yield chosen
        return
    folders: list[Path] = []
    for entry in sys.path:
        base = Path(entry or ".") / "nvidia"
        folders += [base / "cu13" / "lib", base / "cuda_runtime" / "lib"]
    for home in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(home):
            folders.append(Path(os.environ[home]) / "lib64")
    folders += sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True)
    folders += sorted(Path("/usr/local").glob("cuda*/targets/*/lib"), reverse=True)
    folders += [Path("/usr/lib64"), *sorted(Path("/usr/lib").glob("*-linux-gnu"))]
    seen: set[str] = set()
    for folder in folders:
        files = sorted((str(file) for file in folder.glob("libcudart.so.*")), key=_version_key, reverse=True)
        for file in files:
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file
    yield from ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")


def driver_candidates() -> Iterator[str]:
    """Places where libcuda lies: what the user says, the loader's own search, the distributions' folders."""
    chosen = os.environ.get("REGREPRO_LIBCUDA")
    if chosen:
        yield chosen
        return
    yield "libcuda.so.1"
    for pattern in ("*-linux-gnu/libcuda.so.1", "*-linux-gnu/nvidia/current/libcuda.so.1"):
        yield from (str(file) for file in sorted(Path("/usr/lib").glob(pattern)))
    yield from (
        str(file)
        for file in (Path("/usr/lib64/libcuda.so.1"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
        if file.exists()
    )


def _openable(candidates: Iterator[str], complaints: list[str]) -> Iterator[str]:
    """Those of `candidates` that the loader opens; what it said of the others goes to `complaints`."""
    for candidate in candidates:
        why = ffi.new("char[]", 512)
        handle = lib.rr_cuda_open(candidate.encode(), ffi.NULL, why, len(why))
        if handle == ffi.NULL:
            complaints.append(_text(why))
            continue
        lib.rr_cuda_close(handle)
        yield candidate


def open_cuda(mode: str, gpu: int = 0) -> Cuda | None:
    """Open what `--cuda MODE` asks for.

    `none` gives None. `auto` gives NVIDIA's CUDA where it works with a device, and else None. `real` raises
    EnvironmentProblem with CUDA's own error name where it does not work. `standin:…` gives the stand-in.
    """
    if mode not in MODES:
        raise UsageError(f"--cuda has no mode {mode!r}", hint="it has " + ", ".join(MODES))
    if mode == "none":
        return None
    if mode in STAND_IN_MODES:
        path = stand_in_library()
        if path is None:
            raise EnvironmentProblem(
                "the CUDA stand-in was not built", hint="pip install . builds it with the C core"
            )
        return Cuda(str(path), str(path), mode)
    try:
        return _open_real(gpu)
    except EnvironmentProblem:
        if mode == "real":
            raise
        return None


def _open_real(gpu: int) -> Cuda:
    """Open the newest runtime that works: one that is newer than the driver refuses every call."""
    driver = next(_openable(driver_candidates(), []), None)
    complaints: list[str] = []
    first_error: CudaError | None = None
    for runtime in _openable(runtime_candidates(), complaints):
        cuda = Cuda(runtime, driver, "real")
        try:
            count = cuda.device_count()
            if gpu >= count:
                raise EnvironmentProblem(
                    f"there is no GPU {gpu}", why=f"CUDA shows {count}", hint="--gpu counts from 0"
                )
            cuda.set_device(gpu)
            return cuda
        except CudaError as error:
            first_error = first_error or error
            if error.code != INSUFFICIENT_DRIVER:
                break
    if first_error is None:
        raise EnvironmentProblem(
            "no CUDA runtime (libcudart) was found",
            why=next(
                (text for text in complaints if "No such file" not in text),
                complaints[-1] if complaints else "",
            ),
            hint="pip install nvidia-cuda-runtime, or set REGREPRO_LIBCUDART to the toolkit's libcudart.so",
        )
    no_driver = "" if driver else "; no libcuda (the driver's user-space part) was found either"
    raise EnvironmentProblem(
        "CUDA does not work on this machine", why=f"{first_error}{no_driver}"
    ) from first_error
