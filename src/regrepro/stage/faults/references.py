"""Faults of references: others that hold the pages, and a child that shares the memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

from regrepro.stage.faults.base import Base, fault

if TYPE_CHECKING:
    from regrepro.stage.buffers import Buffer
    from regrepro.stage.ports import HeldPin


class References(Base):
    """References to the pages that are no pin of the scenario's."""

    @fault()
    def references(self, buffer: Buffer) -> Iterator[None]:
        """Hold two references to each page that are no pin of the scenario's: as of pages that lie in a pipe,
        or of I/O in flight.

        Two, for a single one can also be a per-CPU LRU batch, and would prove nothing.
        """
        held: list[HeldPin] = []
        try:
            for _ in range(2):
                held.append(self._stage.backend.hold("get", buffer.address, buffer.length))
            self._step("references-taken", buffer=buffer.id, api=held[0].api, references=len(held))
            yield
        finally:
            while held:
                held.pop().release()
            self._step("references-gone", buffer=buffer.id)

    @fault()
    def child(self) -> Iterator[None]:
        """Fork a child that shares this process' memory and does nothing, and end it afterwards."""
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                # No file of ours stays open in it: a pipe or a ring that holds pages must go with us.
                os.closerange(0, os.sysconf("SC_OPEN_MAX"))
                while True:
                    signal.pause()
            finally:
                os._exit(0)
        os.close(told)
        os.read(ready, 1)  # the end of file: the child has closed everything
        os.close(ready)
        self._step("forked", pid=pid)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._step("child-ended", pid=pid)
