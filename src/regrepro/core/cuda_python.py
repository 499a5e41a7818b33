"""Properties of the GPU and its driver, asked through NVIDIA's own Python bindings (cuda-python).

The bindings are optional (`pip install 'regrepro[cuda]'`). Since 12.8 they are the package cuda-bindings,
with the module `cuda.bindings.driver`; before that, cuda-python's `cuda.cuda`. Both have the driver's calls
under their own names, and each returns a tuple that begins with a CUresult. Where the bindings are missing,
open another libcuda than the C core did, or refuse, the C core answers (`core/cuda_properties.py`).
"""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path
from typing import Any

_MODULES = ("cuda.bindings.driver", "cuda.cuda")
_DISTRIBUTIONS = ("cuda-bindings", "cuda-python")
_MAPS = Path("/proc/self/maps")


class Refused(Exception):
    """A question that was not answered: `str()` says which and why."""


class CudaPython:
    """The bindings, opened and asked for one device. Raises `Refused` where they are of no use here."""

    def __init__(self, device: int) -> None:
        """Open the bindings for GPU number `device`, after the C core has opened libcuda."""
        self._driver, module = _load()
        self.source = f"{_version()}, {module}"
        """Who answers, as a record names it: `cuda-bindings 13.5.0, cuda.bindings.driver`."""
        self._call("cuInit", 0)
        opened = _libraries()
        if len(opened) > 1:
            raise Refused(f"{self.source}: it opened another libcuda than the C core: {' and '.join(opened)}")
        self._device = self._call("cuDeviceGet", device)

    def driver_version(self) -> str:
        """`cuDriverGetVersion`: the newest CUDA that the driver serves, such as `12.2`."""
        value = int(self._call("cuDriverGetVersion"))
        return f"{value // 1000}.{value % 1000 // 10}"

    def device_name(self) -> str:
        """`cuDeviceGetName`."""
        name = self._call("cuDeviceGetName", 256, self._device)
        return bytes(name).split(b"\0")[0].decode("utf-8", "replace").strip()

    def device_memory(self) -> int:
        """`cuDeviceTotalMem`: bytes of memory on the GPU."""
        return int(self._call("cuDeviceTotalMem", self._device))

    def device_attribute(self, number: int) -> int:
        """`cuDeviceGetAttribute` of an attribute by its number in enum CUdevice_attribute."""
        try:
            attribute = self._driver.CUdevice_attribute(number)
        except ValueError:
            raise Refused(f"{self.source}: it is older than device attribute {number}") from None
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _call(self, name: str, *arguments: Any) -> Any:
        """Make a call of the driver; return what comes after its CUresult."""
        function = getattr(self._driver, name, None)
        if function is None:
            raise Refused(f"{self.source}: it has no {name}")
        try:
            result, *values = function(*arguments)
        except Exception as error:
            # No libcuda, or one that lacks this call: RuntimeError, and subclasses of the bindings' own.
            text = " ".join(str(error).split()) or type(error).__name__
            raise Refused(f"{self.source}: {name}: {text}") from None
        if int(result):
            known = getattr(result, "name", f"CUresult {int(result)}")
            raise Refused(f"{self.source}: {name}: {known}")
        return values[0] if values else None


def _load() -> tuple[Any, str]:
    """Return the bindings of the driver and their name. Raises `Refused`."""
    why = "not installed"
    for name in _MODULES:
        try:
            return importlib.import_module(name), name
        except ImportError as error:
            # A package `cuda` without this module is no news; bindings that do not load are.
            if not isinstance(error, ModuleNotFoundError):
                why = f"{name}: {error}"
    raise Refused(f"cuda-python: {why} (pip install 'regrepro[cuda]')")


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "cuda-python of unknown version"


def _libraries() -> list[str]:
    """Return the files that this process has mapped as libcuda."""
    found: dict[str, str] = {}
    for line in _MAPS.read_text(errors="replace").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and Path(words[5]).name.startswith("libcuda.so"):
            found.setdefault(f"{words[3]} {words[4]}", words[5])  # device and inode
    return sorted(found.values())
