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

from regrepro.kernel.others import open_mapped, open_regular, read_at_most
from regrepro.watch.elf import NotElf, dynamic_functions, file_offset
from regrepro.watch.open_devices import processes_with_device
from regrepro.watch.process import MAPS_LIMIT, PROC

VERBS = ("ibv_reg_mr", "ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr")
# Bytes. A file of that name may be anybody's, in any container, and it is read as a whole.
SIZE_LIMIT = 16 << 20
PROBLEMS_LIMIT = 64  # copies that are told as not followed, at most; each may be a stranger's
_JUMP_BYTES = 32  # a function that is shorter does no more than jump into another
_NAME = re.compile(r"libibverbs[^\s]*\.so")
_DELETED = " (deleted)"


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
    for line in maps.splitlines():
        # Address range, rights, offset, device, inode, path (show_map_vma(), fs/proc/task_mmu.c).
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or fields[1][2:3] != "x" or not fields[5].startswith("/"):
            continue
        path, key = fields[5], (fields[3], fields[4])
        if key in seen or not _NAME.match(path, path.find("libibverbs", path.rfind("/"))):
            continue
        seen.add(key)
        yield Mapped(path.removesuffix(_DELETED), fields[0], path.endswith(_DELETED))


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
        """Add a copy by a path of this system's own; return whether it is a new one."""
        try:
            return self._add(open_regular(path), shown, pid)
        except OSError as error:
            self._problem(shown, error.strerror or str(error))
            return False

    def _add(self, fd: int, shown: str, pid: int | None = None) -> bool:
        """Add the copy that process `pid` has mapped; return whether it is a new one."""
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
            offsets = verbs_in(read_at_most(f"/proc/self/fd/{fd}", SIZE_LIMIT)[0])
        except (NotElf, OSError) as error:
            self._problem(shown, str(error))
            os.close(fd)
            return False
        if not offsets:
            self._problem(shown, "it has none of the functions that register memory")
            os.close(fd)
            return False
        users = {pid} if pid is not None else set()
        self.known[key] = Copy(key, shown, fd, offsets, users)
        return True

    def _problem(self, shown: str, why: str) -> None:
        if len(self.problems) < PROBLEMS_LIMIT or shown in self.problems:
            self.problems[shown] = why

    def look_at(self, pid: int) -> bool:
        """Look for copies that a process has mapped; return whether there was a new one."""
        base = self._proc / str(pid)
        try:
            text, _ = read_at_most(base / "maps", MAPS_LIMIT)
        except OSError:
            return False  # it is gone, or it is a kernel thread
        new = False
        for mapped in mapped_copies(text.decode(errors="replace")):
            shown = f"{mapped.path} of {pid}"
            try:
                # A path is as it is seen from the root of its mount namespace, not from a chroot's.
                fd = open_mapped(base, _without_zeros(mapped.range), mapped.path)
            except OSError as error:
                deleted = "it was deleted or replaced, and " if mapped.deleted else ""
                self._problem(shown, f"{deleted}it cannot be opened: {error.strerror or error}")
                continue
            new = self._add(fd, shown, pid) or new
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
