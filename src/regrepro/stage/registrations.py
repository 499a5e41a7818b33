"""Registrations of a scenario: an MR, or the kernel's refusal of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrepro.stage.ports import MemoryRegion

if TYPE_CHECKING:
    from regrepro.stage.buffers import Buffer
    from regrepro.stage.stage import Stage


class Registration:
    """A registration, or the attempt at one: true while registered. `errno` names why it was refused."""

    def __init__(
        self, stage: Stage, number: int, buffer: Buffer, *, verb: str, address: int, length: int
    ) -> None:
        self._stage = stage
        self._region: MemoryRegion | None = None
        self.id = number
        self.buffer = buffer
        self.verb = verb
        self.address = address
        self.length = length
        self.errno: str | None = None

    def __bool__(self) -> bool:
        return self._region is not None

    @property
    def lkey(self) -> int | None:
        """The local key, where the device has keys."""
        return self._region.lkey if self._region is not None else None

    @property
    def rkey(self) -> int | None:
        """The remote key, where the device has keys."""
        return self._region.rkey if self._region is not None else None

    def deregister(self) -> None:
        """Deregister; nothing to do where the registration had failed."""
        self._stage.deregister(self)
