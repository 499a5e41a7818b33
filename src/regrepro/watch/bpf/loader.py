"""The program that loads and attaches by libbpf (csrc/libbpf/follow.c), spoken to.

It is a process of its own, which ends when all is attached: maps, programs and links live on descriptors that
it hands over, so that nothing stays attached once this process is dead, by SIGKILL too.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_REQUEST = struct.Struct("=IIQQ32s64s4096s")  # struct request of follow.c
_ANSWER = struct.Struct("=i2044s")  # struct answer
_OPEN, _CONFIG, _SHARE, _TARGET, _LOAD, _MAP, _TRAMPOLINE, _KPROBE, _UPROBE = range(1, 10)
_DESCRIPTORS = 2


@dataclass(frozen=True)
class Attached:
    """A program that is attached as long as both descriptors are open."""

    link: int
    program: int

    def close(self) -> None:
        """Take it away."""
        os.close(self.link)
        os.close(self.program)


class Loader:
    """A running loader with the object that it has opened. Each call raises OSError with what libbpf said."""

    def __init__(self, program: Path, bpf_object: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # In a session of its own: an interrupt of the terminal would end the verifier's work.
            self._process = subprocess.Popen(
                [program], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        try:
            self._ask(_OPEN, text=os.fsencode(bpf_object))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def configure(self, config: bytes) -> None:
        """Set what the programs read: struct config of registrations.bpf.c."""
        self._ask(_CONFIG, number=len(config), text=config)

    def share(self, name: str, fd: int) -> None:
        """Use a map of an object that was loaded before."""
        self._ask(_SHARE, text=name.encode(), give=fd)

    def load(self, target: str = "") -> None:
        """Load the programs; those for trampolines only with `target`, a function that takes them."""
        if target:
            self._ask(_TARGET, text=target.encode())
        self._ask(_LOAD)

    def map(self, name: str) -> int:
        """Return a map's descriptor."""
        (fd,) = self._ask(_MAP, text=name.encode())
        return fd

    def trampoline(self, program: str, function: str, module: str, cookie: int) -> Attached:
        """Attach to a function of a module ("": of the kernel itself) that BTF describes."""
        name = function.encode()
        return Attached(*self._ask(_TRAMPOLINE, program, text=name, module=module, cookie=cookie))

    def kprobe(self, program: str, function: str, cookie: int, *, at_return: bool) -> Attached:
        """Attach to a function of the kernel or of a module."""
        name = function.encode()
        return Attached(*self._ask(_KPROBE, program, text=name, cookie=cookie, at_return=at_return))

    def uprobe(self, program: str, path: str, offset: int, cookie: int, *, at_return: bool) -> Attached:
        """Attach to what lies at an offset (bytes) of a file."""
        text = os.fsencode(path)
        return Attached(
            *self._ask(_UPROBE, program, number=offset, text=text, cookie=cookie, at_return=at_return)
        )

    def close(self) -> None:
        """Let the process end. What is attached stays."""
        self._socket.close()
        self._process.wait()

    def _ask(
        self,
        what: int,
        program: str = "",
        *,
        module: str = "",
        number: int = 0,
        cookie: int = 0,
        text: bytes = b"",
        at_return: bool = False,
        give: int | None = None,
    ) -> Sequence[int]:
        packet = _REQUEST.pack(what, at_return, number, cookie, program.encode(), module.encode(), text)
        socket.send_fds(self._socket, [packet], [] if give is None else [give])
        data, fds, _, _ = socket.recv_fds(self._socket, _ANSWER.size, _DESCRIPTORS)
        if len(data) != _ANSWER.size:
            raise OSError(0, f"the loader ended with {self._process.wait()}", program)
        status, said = _ANSWER.unpack(data)
        if status:
            words = " ".join(said.partition(b"\0")[0].decode("utf-8", "replace").split())
            code = -status
            known = os.strerror(code) if code != 524 else "Operation not supported"
            raise OSError(code, f"{known}{f' ({words[-500:]})' if words else ''}", program)
        return fds
