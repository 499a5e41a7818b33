"""What the wrappers of the C core have in common: errnos as exceptions, an end to what was opened."""

from __future__ import annotations

import os
from typing import TypeVar

_Self = TypeVar("_Self", bound="Closing")


class Closing:
    """A context manager that closes at the end of its block."""

    __slots__ = ()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what is held; again does nothing. Raises OSError."""
        raise NotImplementedError


def failure(number: int, text: str) -> OSError:
    """Return an OSError (of the subclass that fits) for a negative errno, as the C core returns them."""
    return OSError(abs(number), f"{text}: {os.strerror(abs(number))}")


def check(status: int, text: str) -> None:
    """Raise the OSError of a call of the C core that did not return 0."""
    if status:
        raise failure(status, text)
