"""What the GPU and its driver say of themselves, and who told it: cuda-python, else the C core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from regrepro.core.cuda_errors import CudaError
from regrepro.core.cuda_python import CudaPython, Refused

if TYPE_CHECKING:
    from regrepro.core.cuda import Cuda

_Value = TypeVar("_Value", int, str)

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


class Teller(Protocol):
    """Who answers for one GPU. Each call raises `Refused`."""

    source: str

    def driver_version(self) -> str: ...

    def device_name(self) -> str: ...

    def device_memory(self) -> int: ...

    def device_attribute(self, number: int) -> int: ...


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
    bindings: list[Teller] = []
    if cuda.stand_in is None:
        try:
            bindings.append(CudaPython(device))
        except Refused as reason:
            made.cuda_python = str(reason)
    made.versions = {"runtime": cuda.versions()["runtime"], "driver": None}
    made.sources = {_named(cuda, cuda.runtime_path): ["runtime"]}
    runtime = _Core(cuda, device, cuda.runtime_path)
    version = _ask(made, [*bindings, runtime], "driver", lambda it: it.driver_version())
    made.versions["driver"] = version if isinstance(version, str) else None
    questions: dict[str, Callable[[Teller], int | str]] = {"name": lambda it: it.device_name()}
    attributes = PATH_ATTRIBUTES
    if cuda.stand_in is None:
        questions["memory"] = lambda it: it.device_memory()
        attributes = PATH_ATTRIBUTES | OTHER_ATTRIBUTES
    for fact, number in attributes.items():
        questions[fact] = partial(_attribute, number)
    tellers = [*bindings, _Core(cuda, device, cuda.driver_path)]
    for fact, question in questions.items():
        value = _ask(made, tellers, fact, question)
        made.device[fact] = value.error if isinstance(value, Refused) else value
    return made


def _attribute(number: int, teller: Teller) -> int:
    return teller.device_attribute(number)


def _ask(
    made: Properties, tellers: Sequence[Teller], fact: str, question: Callable[[Teller], int | str]
) -> int | str | Refused:
    """Return the first answer, else the last refusal; note who gave it, and what cuda-python refused."""
    answer: int | str | Refused = Refused("nobody was asked")
    for teller in tellers:
        try:
            answer = question(teller)
        except Refused as refusal:
            answer = refusal
            if isinstance(teller, CudaPython):
                made.cuda_python = made.cuda_python or str(refusal)
        else:
            break
    made.sources.setdefault(teller.source, []).append(fact)
    return answer


class _Core:
    """The C core, for one GPU; of a stand-in, too. `path`: of the library that it asks."""

    def __init__(self, cuda: Cuda, device: int, path: str | None) -> None:
        self.source = _named(cuda, path)
        self._cuda = cuda
        self._device = device

    def driver_version(self) -> str:
        """As the runtime tells it (`cudaDriverGetVersion`)."""
        version = self._cuda.versions()["driver"]
        if version is None:
            raise Refused("cudaDriverGetVersion tells of no driver")
        return version

    def device_name(self) -> str:
        return self._told(self._cuda.device_name)

    def device_memory(self) -> int:
        return self._told(self._cuda.device_memory)

    def device_attribute(self, number: int) -> int:
        return self._told(partial(self._cuda.attribute, number))

    def _told(self, call: Callable[[int], _Value]) -> _Value:
        try:
            return call(self._device)
        except CudaError as error:
            raise Refused(str(error), error.name) from None


def _named(cuda: Cuda, path: str | None) -> str:
    """Return a library as a source of facts."""
    if cuda.stand_in is not None:
        return cuda.stand_in
    return f"{Path(path).name}, by the C core" if path else "the C core, without a libcuda"


__all__ = ["OTHER_ATTRIBUTES", "PATH_ATTRIBUTES", "Properties", "gather"]
