"""The distribution's pyverbs as a second, independent way to register.

An errno that it sees too is not our C core's own doing.

Optional. pyverbs is bound to one rdma-core: only the distribution's own `python3-pyverbs`, under the
distribution's interpreter (a venv made with --system-site-packages), fits its libibverbs.
"""

from __future__ import annotations

import errno as errnos
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrepro.core.calls import Closing
from regrepro.errors import EnvironmentProblem

if TYPE_CHECKING:
    from collections.abc import Callable


def available() -> str | None:
    """Return None if pyverbs can be imported, else a sentence that says why not."""
    try:
        import pyverbs.device
        import pyverbs.mr
        import pyverbs.pd  # noqa: F401
    except ImportError as error:
        return str(
            EnvironmentProblem(
                "pyverbs cannot be imported",
                why=str(error),
                hint="install the distribution's python3-pyverbs and use a venv that /usr/bin/python3 made "
                "with --system-site-packages",
            )
        )
    return None


def _require() -> None:
    why = available()
    if why:
        raise EnvironmentProblem(why)


def _call(step: str, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call pyverbs; its errors come out as OSError with rdma-core's errno (EIO where it kept none)."""
    from pyverbs.pyverbs_error import PyverbsError

    try:
        return function(*arguments, **named)
    except PyverbsError as error:
        number = getattr(error, "error_code", -1)
        known = isinstance(number, int) and number > 0
        text = os.strerror(number) if known else str(error)
        raise OSError(number if known else errnos.EIO, f"{step}: {text}") from None


def devices() -> list[str]:
    """Return the RDMA devices' names, sorted. Raises EnvironmentProblem without pyverbs, OSError."""
    _require()
    if not Path("/sys/class/infiniband_verbs").is_dir():
        return []  # ib_uverbs is not loaded; pyverbs would say "failed", without an errno
    import pyverbs.device

    return sorted(device.name.decode() for device in _call("get_device_list", pyverbs.device.get_device_list))


class PyverbsMemoryRegion:
    """An MR that pyverbs made: `lkey`, `rkey`, `dereg()`."""

    __slots__ = ("_mr", "lkey", "rkey")

    def __init__(self, mr: Any) -> None:
        self._mr = mr
        self.lkey: int = mr.lkey
        self.rkey: int = mr.rkey

    def dereg(self) -> None:
        """Deregister; again does nothing. Raises OSError."""
        if self._mr is None:
            return
        _call("pyverbs.MR.close", self._mr.close)
        self._mr = None


class PyverbsDevice(Closing):
    """A device and one PD, both of pyverbs. A context manager.

    Raises EnvironmentProblem without pyverbs or without a device of this name, OSError when opening fails.
    """

    __slots__ = ("_context", "_pd", "name")

    def __init__(self, name: str) -> None:
        _require()
        import pyverbs.device
        import pyverbs.pd

        present = devices()
        if name not in present:
            raise EnvironmentProblem(
                f"pyverbs sees no RDMA device {name!r}", why=f"devices: {', '.join(present) or 'none'}"
            )
        self.name = name
        self._context: Any = _call("Context", pyverbs.device.Context, name=name)
        self._pd: Any = _call("PD", pyverbs.pd.PD, self._context)

    def reg_mr(self, address: int, length: int, access: int) -> PyverbsMemoryRegion:
        """Register by `pyverbs.mr.MR`. Raises OSError with rdma-core's errno."""
        import pyverbs.mr

        mr = _call("pyverbs.MR", pyverbs.mr.MR, self._pd, length, access, address=address)
        return PyverbsMemoryRegion(mr)

    def close(self) -> None:
        """Close the device with everything on it; again does nothing. Raises OSError."""
        context, self._context = self._context, None
        if context is not None:
            _call("Context.close", context.close)
