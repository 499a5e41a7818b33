"""What the GPU and its driver say of themselves, and who told it: cuda-python, else the C core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regrepro.core.cuda_errors import CudaError
from regrepro.core.cuda_python import CudaPython, Refused

if TYPE_CHECKING:
    from regrepro.core.cuda import Cuda

_Question = Callable[[], "int | str | None"]

PATH_ATTRIBUTES = {
    "gpu_direct_rdma_supported": 116,
    "dma_buf_supported": 124,
    "virtual_memory_management_supported": 102,
    "gpu_direct_rdma_with_cuda_vmm_supported": 110,
    "host_register_supported": 99,
}
"""enum CUdevice_attribute: the values that decide which registration path a buffer can take."""

OTHER_ATTRIBUTES = {
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "pci_domain_id": 50,
    "pci_bus_id": 33,
    "pci_device_id": 34,
    "integrated": 18,
    "unified_addressing": 41,
    "pageable_memory_access": 88,
    "pageable_memory_access_uses_host_page_tables": 100,
    "can_use_host_pointer_for_registered_mem": 91,
    "read_only_host_register_supported": 113,
}
"""enum CUdevice_attribute: which GPU it is, how it shares memory with the host. A stand-in is not asked."""


@dataclass
class Properties:
    """What was told of one GPU.

    `versions`: of CUDA, the `runtime` that this run calls and the `driver`; None where not known. `device`:
    `name`, `memory` in bytes, attributes; where a value was refused, CUDA's error. `sources`: who told, and
    what. `cuda_python`: why it did not tell something, None where it told all.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    device: dict[str, int | str] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    cuda_python: str | None = None


def gather(cuda: Cuda, device: int) -> Properties:
    """Ask for the properties of GPU number `device`. Never raises for what is refused.

    A stand-in answers for itself: cuda-python would ask NVIDIA's driver. The runtime's version is that of the
    libcudart that this run calls, which is not the one that cuda-python is built with.
    """
    made = Properties()
    attributes = PATH_ATTRIBUTES if cuda.stand_in else PATH_ATTRIBUTES | OTHER_ATTRIBUTES
    python: dict[str, _Question] = {}
    told_by = ""
    if cuda.stand_in is None:
        try:
            bindings = CudaPython(device)
            told_by = bindings.source
            python = {
                "driver": bindings.driver_version,
                "name": bindings.device_name,
                "memory": bindings.device_memory,
                **{fact: partial(bindings.device_attribute, number) for fact, number in attributes.items()},
            }
        except Refused as reason:
            made.cuda_python = str(reason)
    core: dict[str, _Question] = {
        "driver": lambda: cuda.versions()["driver"],
        "name": partial(cuda.device_name, device),
        **({} if cuda.stand_in else {"memory": partial(cuda.device_memory, device)}),
        **{fact: partial(cuda.attribute, number, device) for fact, number in attributes.items()},
    }
    made.versions = {"runtime": cuda.versions()["runtime"], "driver": None}
    made.sources = {_named(cuda, cuda.runtime_path): ["runtime"]}
    for fact, ask_core in core.items():
        source = _named(cuda, cuda.runtime_path if fact == "driver" else cuda.driver_path)
        answered = False
        if fact in python:
            try:
                value, source, answered = python[fact](), told_by, True
            except Refused as refusal:
                made.cuda_python = made.cuda_python or str(refusal)
        if not answered:
            try:
                value = ask_core()
            except CudaError as error:
                value = error.name
        made.sources.setdefault(source, []).append(fact)
        if fact == "driver":
            made.versions["driver"] = None if value is None else str(value)
        elif value is not None:
            made.device[fact] = value
    return made


def _named(cuda: Cuda, path: str | None) -> str:
    """Return a library as a source of facts."""
    if cuda.stand_in is not None:
        return cuda.stand_in
    return f"{Path(path).name}, by the C core" if path else "the C core, without a libcuda"


__all__ = ["OTHER_ATTRIBUTES", "PATH_ATTRIBUTES", "Properties", "gather"]
