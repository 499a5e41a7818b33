"""What a CUDA call failed with, in CUDA's own words and ours."""

from __future__ import annotations

import os

INSUFFICIENT_DRIVER = 35
_NO_DEVICE = 100
_STUB_LIBRARY = 34
_DRIVER_MISMATCH = 803

_EXPLAINED = {
    INSUFFICIENT_DRIVER: "no NVIDIA driver is loaded, or it is older than this CUDA runtime; "
    "load the driver (nvidia-smi shows it) or install a runtime that is not newer than it",
    _NO_DEVICE: "the driver answers, but it shows no GPU to this process; "
    "look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's device list",
    _STUB_LIBRARY: "the libcuda that was found is the toolkit's stub; "
    "put the driver's own first on the library path",
    _DRIVER_MISMATCH: "the libcuda in user space and the loaded kernel module are of different versions; "
    "reload the module or reboot",
}


class CudaError(Exception):
    """A CUDA call failed. `code` is CUDA's own number, `name` its own name, `call` the entry point.

    `errno` is the system call's errno behind it where that is known (the stand-in tells it), else None.
    """

    def __init__(
        self, call: str, code: int, name: str, text: str = "", errno_value: int | None = None
    ) -> None:
        self.call = call
        self.code = code
        self.name = name
        self.text = text
        self.errno = errno_value
        explained = _EXPLAINED.get(code) if code > 0 else None
        line = f"{call}: {name}"
        if text:
            line += f", {text}"
        if errno_value:
            line += f" ({os.strerror(errno_value)})"
        if explained:
            line += f" ({explained})"
        super().__init__(line)
