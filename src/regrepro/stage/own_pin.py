"""A pin that the user's own code takes: `stage.pin(buffer, by=…)`, or `--option by=FILE.py:FUNCTION`.

The code is called with address and length in bytes. What it returns lets go: an object with `release()` or
`close()`, or a function. If that object has `alive()`, it is asked whether the pin still holds.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regrepro.errors import UsageError

OWNER = "own-code"
Take = Callable[[int, int], Any]


class OwnPin:
    """A pin held by the user's own code. Raises OSError as that code does."""

    owner = OWNER

    def __init__(self, take: Take, address: int, length: int) -> None:
        self.api = f"{getattr(take, '__module__', '')}.{getattr(take, '__qualname__', repr(take))}"
        self._made = take(address, length)
        self._let_go: Callable[[], Any] | None = None
        for candidate in (
            getattr(self._made, "release", None),
            getattr(self._made, "close", None),
            self._made,
        ):
            if callable(candidate):
                self._let_go = candidate
                break
        if self._let_go is None:
            raise UsageError(
                f"{self.api} returned {type(self._made).__name__}, by which its pin cannot be released",
                hint="return a function that releases it, or an object with release() or close()",
            )

    def alive(self) -> bool | None:
        """Return what the object's own `alive()` says; None where it has none."""
        ask = getattr(self._made, "alive", None)
        return bool(ask()) if callable(ask) else None

    def release(self) -> None:
        """Let go."""
        assert self._let_go is not None
        self._let_go()


def load(where: str) -> Take:
    """Return the function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names. Raises `UsageError`."""
    place, _, name = where.rpartition(":")
    if not place or not name:
        raise UsageError(f"by={where} names no function", hint="write by=FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        found = getattr(module, name, None)
    except Exception as error:  # the user's own program
        raise UsageError(
            f"by={where}: {type(error).__name__}: {error}", hint="mend it, or its path"
        ) from None
    if not callable(found):
        raise UsageError(f"by={where}: there is no function {name}", hint="name a function(address, length)")
    take: Take = found
    return take
