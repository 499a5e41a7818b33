"""Pins of a scenario: which bytes, of which kind, by whom, and whether they still hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regrepro.errors import UsageError
from regrepro.stage.ports import PAGE_SIZE, HeldPin

if TYPE_CHECKING:
    from regrepro.stage.buffers import Buffer
    from regrepro.stage.stage import Stage

KINDS = ("pin", "get", "longterm", "none")


class Pin:
    """A pin, or the attempt at one: true while it is held. `errno` names why it could not be taken."""

    def __init__(self, stage: Stage, number: int, buffer: Buffer, kind: str, owner: str) -> None:
        self._stage = stage
        self._held: list[HeldPin] = []
        self.id = number
        self.buffer = buffer
        self.kind = kind
        self.owner = owner
        self.errno: str | None = None

    def __bool__(self) -> bool:
        return bool(self._held)

    def alive(self) -> bool | None:
        """Return whether every part of it is held at this moment; None where its owner cannot be asked."""
        answers = [held.alive() for held in self._held]
        if not answers or False in answers:
            return False
        return None if None in answers else True

    def release(self) -> None:
        """Let the pages go; the bytes of the buffer stay as they are. Nothing to do if it is not held."""
        self._stage.release(self)


def ranges_of(pages: Sequence[int] | None, buffer: Buffer) -> list[tuple[int, int]]:
    """Return (offset, length) in bytes for page indexes, neighbours joined; the whole buffer for None."""
    if pages is None:
        return [(0, buffer.length)]
    ranges: list[tuple[int, int]] = []
    for index in sorted(set(pages)):
        if not 0 <= index < buffer.pages:
            raise UsageError(
                f"page {index} is not in buffer {buffer.id}", why=f"it has pages 0 to {buffer.pages - 1}"
            )
        offset = index * PAGE_SIZE
        if ranges and ranges[-1][0] + ranges[-1][1] == offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + PAGE_SIZE)
        else:
            ranges.append((offset, PAGE_SIZE))
    if not ranges:
        raise UsageError("pin(pages=[]) pins nothing", hint="leave pages out to pin the whole buffer")
    return ranges


def refusal_facts(error: OSError | None) -> dict[str, Any]:
    """Return what an event says of a refused call beside its errno: words, and CUDA's name of its error."""
    if error is None:
        return {}
    facts: dict[str, Any] = {"message": error.strerror or str(error)}
    name = getattr(error, "cuda_error", None)
    return facts | ({"cuda_error": name} if name else {})


def let_go(held: list[HeldPin]) -> OSError | None:
    """Release every part, whatever the others say; return the first error."""
    first: OSError | None = None
    while held:
        try:
            held.pop().release()
        except OSError as error:
            first = first or error
    return first


def abandon(held: list[HeldPin]) -> None:
    """Release parts of a pin that did not come together."""
    with suppress(OSError):
        let_go(held)
