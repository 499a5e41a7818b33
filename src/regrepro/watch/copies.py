"""Copies of libibverbs on this node: which files processes have mapped, whatever container they live in.

A copy is a file, known by device and inode. It is reached by the mapping itself (/proc/PID/map_files), so
that a container's own copy is found, and one that was deleted or replaced while it runs; where that is not
allowed, by its path below /proc/PID/root. It is held open, so that it can still be attached to when that
process is gone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from regrepro.watch.elf import NotElf, dynamic_functions
from regrepro.watch.program import VERBS, Library, is_jump

PROC = Path("/proc")
# Bytes. A file of that name may be anybody's, in any container, and it is read as a whole.
SIZE_LIMIT = 16 << 20
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
    functions: dict[str, int] = field(default_factory=dict)  # as `verbs_in` has them
    at_failure: set[str] = field(default_factory=set)  # verbs that are followed where they fail
    offsets: dict[str, int] = field(default_factory=dict)  # bytes of the file at which the others begin
    users: set[int] = field(default_factory=set)  # processes that had it mapped; of the system's own: none

    @property
    def library(self) -> Library:
        """For the program; the path stays right while this process lives."""
        rest = {name: value for name, value in self.functions.items() if name not in self.at_failure}
        return Library(f"/proc/{os.getpid()}/fd/{self.fd}", rest)

    def verbs(self) -> list[str]:
        """Return the verbs of it that are to be followed: not those that only jump into another one."""
        functions = self.functions
        return [verb for verb in VERBS.values() if verb in functions and not is_jump(verb, functions)]

    def close(self) -> None:
        """Let the file go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def verbs_in(blob: bytes) -> dict[str, int]:
    """Return where a libibverbs' verbs begin, and as `NAME:size` their sizes. Raises NotElf."""
    known = dynamic_functions(blob)
    found = {name: known[name][0] for name in VERBS.values() if name in known}
    return found | {f"{name}:size": known[name][1] for name in found}


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
        self.on_new: Callable[[Copy, bytes], None] = lambda _copy, _blob: None

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
            blob = Path(f"/proc/self/fd/{fd}").read_bytes()
            functions = verbs_in(blob)
        except (NotElf, OSError) as error:
            self.problems[shown] = str(error)
            os.close(fd)
            return False
        if not any(name in functions for name in VERBS.values()):
            self.problems[shown] = "it has none of the functions that register memory"
            os.close(fd)
            return False
        users = {pid} if pid is not None else set()
        copy = self.known[key] = Copy(key, shown, fd, functions, users=users)
        self.on_new(copy, blob)
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

    def libraries(self) -> list[Library]:
        """All copies, for the program."""
        return [copy.library for copy in self.known.values()]

    def close(self) -> None:
        """Let all files go."""
        for copy in self.known.values():
            copy.close()
        self.known.clear()


def processes_with_device(proc: Path = PROC) -> Iterator[int]:
    """Yield the processes that have /dev/infiniband/uverbs* open, as far as they can be looked into."""
    for entry in proc.iterdir():
        if entry.name.isdigit() and devices_of(int(entry.name), proc):
            yield int(entry.name)


def _open_devices(pid: int, proc: Path) -> Iterator[tuple[str, bool]]:
    """Yield (uverbsN, whether its file is gone) of each RDMA device that a process has open."""
    with suppress(OSError):
        for link in (proc / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found = re.search(r"/infiniband/(uverbs\d+)( \(deleted\))?$", str(link.readlink()))
                if found:
                    yield found[1], bool(found[2])


def devices_of(pid: int, proc: Path = PROC) -> list[str]:
    """Return the names uverbsN of the RDMA devices that a process has open."""
    return sorted({name for name, gone in _open_devices(pid, proc) if not gone})


def devices_are_gone(pid: int, proc: Path = PROC, sysfs: Path = Path("/sys/class/infiniband_verbs")) -> bool:
    """Return whether a process has RDMA devices open, and all of them are gone from this node."""
    gone = [deleted or not (sysfs / name).exists() for name, deleted in _open_devices(pid, proc)]
    return bool(gone) and all(gone)


def device_names(uverbs: Iterable[str]) -> list[str]:
    """Return the RDMA devices' names of uverbsN, those that sysfs knows."""
    names = []
    for item in uverbs:
        with suppress(OSError):
            names.append(Path(f"/sys/class/infiniband_verbs/{item}/ibdev").read_text().strip())
    return names


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
