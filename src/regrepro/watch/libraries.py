"""Copies of libibverbs on this node: which files processes have mapped, whatever container they live in.

A copy is a file, known by device and inode. It is reached by the mapping itself (/proc/PID/map_files), so
that a container's own copy is found, and one that was deleted or replaced while it runs; where that is not
allowed, by its path below /proc/PID/root. It is held open, so that it can still be attached to when that
process is gone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from regrepro.watch.elf import NotElf, dynamic_functions, file_offset
from regrepro.watch.open_devices import processes_with_device
from regrepro.watch.process import PROC

VERBS = ("ibv_reg_mr", "ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr")
# Bytes. A file of that name may be anybody's, in any container, and it is read as a whole.
SIZE_LIMIT = 16 << 20
_JUMP_BYTES = 32  # a function that is shorter does no more than jump into another
_MAPPING = re.compile(
    r"^(?P<range>[0-9a-f]+-[0-9a-f]+) ..x. [0-9a-f]+ (?P<device>[0-9a-f]+:[0-9a-f]+) (?P<inode>\d+)\s+"
    r"(?P<path>/\S*libibverbs[^/\s]*\.so[^/]*?)(?P<gone> \(deleted\))?$",
    re.MULTILINE,
)


@dataclass
class Copy:
    """One file that is libibverbs: how processes name it, and an open descriptor of it."""

    key: tuple[int, int]  # device, inode
    shown: str
    fd: int
    offsets: dict[str, int] = field(default_factory=dict)  # verbs → bytes of the file at which they begin
    users: set[int] = field(default_factory=set)  # processes that had it mapped; of the system's own: none

    @property
    def path(self) -> str:
        """A path that stays right while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Let the file go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def verbs_in(blob: bytes) -> dict[str, int]:
    """Return the verbs of a libibverbs that are to be followed, and where they begin in its file.

    ibv_reg_mr is left out where it is so short that it can only be a jump into ibv_reg_mr_iova2. Raises
    NotElf.
    """
    known = dynamic_functions(blob)
    found = {name: known[name] for name in VERBS if name in known}
    if "ibv_reg_mr_iova2" in found and found.get("ibv_reg_mr", (0, _JUMP_BYTES))[1] < _JUMP_BYTES:
        del found["ibv_reg_mr"]
    return {name: file_offset(blob, address) for name, (address, _) in found.items()}


@dataclass(frozen=True)
class Mapped:
    """A libibverbs that a process has mapped to be run. `path`: as the kernel shows it to us; `range`: as
    /proc/PID/map_files names the mapping.
    """

    path: str
    range: str
    deleted: bool = False


def mapped_copies(maps: str) -> Iterator[Mapped]:
    """Yield each libibverbs that is mapped to be run, in the text of /proc/PID/maps."""
    seen = set()
    for found in _MAPPING.finditer(maps):
        key = found["device"], found["inode"]
        if key not in seen:
            seen.add(key)
            yield Mapped(found["path"], found["range"], bool(found["gone"]))


def _without_zeros(span: str) -> str:
    """map_files names addresses without leading zeros; maps pads them to eight digits."""
    return "-".join(f"{int(part, 16):x}" for part in span.split("-"))


class Copies:
    """The copies that were found, each once. `problems`: why one is not followed, by how it is shown."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self.known: dict[tuple[int, int], Copy] = {}
        self.problems: dict[str, str] = {}

    def add_file(self, path: Path, shown: str, pid: int | None = None) -> bool:
        """Add a copy by its path, which process `pid` has mapped; return whether it is a new one."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.problems[shown] = error.strerror or str(error)
            return False
        facts = os.fstat(fd)
        key = facts.st_dev, facts.st_ino
        if key in self.known:
            os.close(fd)
            known = self.known[key]
            if pid is not None and known.users:
                known.users.add(pid)
            return False
        try:
            if facts.st_size > SIZE_LIMIT:
                raise NotElf(f"{facts.st_size} bytes are no libibverbs")
            offsets = verbs_in(Path(f"/proc/self/fd/{fd}").read_bytes())
        except (NotElf, OSError) as error:
            self.problems[shown] = str(error)
            os.close(fd)
            return False
        if not offsets:
            self.problems[shown] = "it has none of the functions that register memory"
            os.close(fd)
            return False
        users = {pid} if pid is not None else set()
        self.known[key] = Copy(key, shown, fd, offsets, users)
        return True

    def look_at(self, pid: int) -> bool:
        """Look for copies that a process has mapped; return whether there was a new one."""
        try:
            text = (self._proc / str(pid) / "maps").read_text(errors="replace")
        except OSError:
            return False  # it is gone, or it is a kernel thread
        new = False
        for mapped in mapped_copies(text):
            # A path is as it is seen from the root of its mount namespace, not from a chroot's.
            base = self._proc / str(pid)
            place = base / "map_files" / _without_zeros(mapped.range)
            try:
                place.stat()
            except OSError as error:
                if mapped.deleted:
                    why = (
                        f"process {pid} runs a copy that was deleted or replaced ({place}: {error.strerror})"
                    )
                    self.problems.setdefault(mapped.path, why)
                    continue
                place = base / "root" / mapped.path.lstrip("/")
            new = self.add_file(place, f"{mapped.path} of {pid}", pid) or new
        return new

    def look_everywhere(self) -> bool:
        """Look at every process that has an RDMA device open; return whether there was a new copy."""
        new = False
        for pid in processes_with_device(self._proc):
            new = self.look_at(pid) or new
        return new

    def forget_unused(self) -> list[tuple[int, int]]:
        """Let go of copies that were found with processes which are all gone: containers come and go. Return
        their keys.
        """
        gone = []
        for key, copy in list(self.known.items()):
            if copy.users and not any((self._proc / str(pid)).exists() for pid in copy.users):
                copy.close()
                del self.known[key]
                gone.append(key)
        return gone

    def close(self) -> None:
        """Let all files go."""
        for copy in self.known.values():
            copy.close()
        self.known.clear()


def system_copies() -> list[Path]:
    """Return the copies that this system's own linker would find, before any process has mapped one."""
    places = ("/usr/lib/*-linux-gnu", "/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/lib64")
    found = {}
    for place in places:
        for path in Path("/").glob(f"{place.lstrip('/')}/libibverbs.so.1"):
            with suppress(OSError):
                facts = path.stat()
                found[facts.st_dev, facts.st_ino] = path
    return list(found.values())
