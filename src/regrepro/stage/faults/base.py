"""What every kind of fault stands on: the pass, whether it plants anything, and the C library."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from regrepro.errors import Unmet

if TYPE_CHECKING:
    from regrepro.stage.stage import Stage

_T = TypeVar("_T")
_Plant = ParamSpec("_Plant")

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]


def checked(result: int | None, call: str) -> None:
    """Raise OSError with the errno where a call of the C library returned -1 (or MAP_FAILED)."""
    if result == -1 or result == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


class Base:
    """The faults of one pass."""

    def __init__(self, stage: Stage, *, planted: bool) -> None:
        self._stage = stage
        self.planted = planted
        """Whether faults are planted in this pass: not in the control that leaves them out."""

    def either(self, fault: _T, sound: _T) -> _T:
        """Return what is wrong, or in the control what would be right."""
        return fault if self.planted else sound

    def _step(self, name: str, **keys: Any) -> None:
        self._stage.step(name, **keys)

    def _in_lab(self, what: str) -> None:
        if not self._stage.backend.in_lab:
            raise Unmet("lab", f"{what} could hurt a node", "run it in a virtual machine: regrepro lab run")


def fault(
    lab: str = "",
) -> Callable[[Callable[_Plant, Iterator[None]]], Callable[_Plant, AbstractContextManager[None]]]:
    """Make a context manager of a method that plants a fault; in the control it plants nothing.

    `lab`: what could hurt a node, so that it refuses to work outside of a guest of the lab.
    """

    def declare(plant: Callable[_Plant, Iterator[None]]) -> Callable[_Plant, AbstractContextManager[None]]:
        planting = contextmanager(plant)

        @wraps(plant)
        def begin(*arguments: _Plant.args, **keys: _Plant.kwargs) -> AbstractContextManager[None]:
            faults: Any = arguments[0]
            if lab:
                faults._in_lab(lab)
            return planting(*arguments, **keys) if faults.planted else nullcontext()

        return begin

    return declare
