"""The one door through which the audit reads a machine: files below a root, whether live or captured.

On the machine itself the root is `/`; for `--from` it is the captured folder (or texts taken out of a
log), with the same relative paths (`proc/meminfo`, `sys/class/infiniband/mlx5_0/fw_ver`). All
fact-finding code is shared. A captured tree is foreign data: symbolic links in it are resolved inside
the root only, reads are capped, and only regular files are opened.
"""

# Descriptors, not paths: every step of a captured path is opened without following links.
# ruff: noqa: PTH110, PTH115, PTH123, PTH208

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

READ_LIMIT = 32 * 1024 * 1024
"""Bytes read of one file at most; a captured kallsyms or dmesg fits, an endless file does not."""

MAX_LINKS = 40
"""Symbolic links followed on one path at most, as in the kernel (`MAXSYMLINKS`)."""


@dataclass(frozen=True)
class Text:
    """What reading a file or command output gave: `text`, or None and the reason in `why`."""

    text: str | None
    source: str
    why: str = ""

    @property
    def lines(self) -> list[str]:
        """The lines, empty where nothing was read."""
        return self.text.splitlines() if self.text is not None else []

    @property
    def value(self) -> str | None:
        """The text without white space at its ends and without NULs, or None."""
        return self.text.replace("\0", " ").strip() if self.text is not None else None

    @property
    def number(self) -> int | None:
        """The count that the text is, or None."""
        return int(self.value) if self.value and re.fullmatch(r"\d{1,20}", self.value) else None

    @property
    def signed(self) -> int | None:
        """The small whole number that the text is, such as a NUMA node's, -1 for none; or None."""
        return int(self.value) if self.value and re.fullmatch(r"-?\d{1,6}", self.value) else None


class Reader:
    """Base class: reads from nothing. `where` names the place for people; `live` is True on the machine
    itself.
    """

    live = False
    where = "nowhere"

    def content(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes | None, str]:
        """Return (content, "") or (None, why); `path` is relative to the root, without a leading slash."""
        return None, "not captured"

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder, or nothing."""
        return []

    def link(self, path: str) -> str | None:
        """Return where a symbolic link leads, as written, or None."""
        return None

    def exists(self, path: str) -> bool:
        """Tell whether there is a file or folder."""
        return self.content(path, 1)[0] is not None or bool(self.names(path))

    def command(self, name: str) -> Text:
        """Return the output of a command of `COMMANDS`, run here or captured."""
        return Text(None, name, "not captured")

    def known(self, name: str) -> Text:
        """Return something that the place states outright and that is no file (a run's header), or
        nothing.
        """
        return Text(None, name, "not stated")

    def memory_map(self) -> tuple[dict[str, object] | None, str, str]:
        """Return (memory map of docs/record.md, its source, why there is none)."""
        return None, "", "no memory map was captured"

    def read(self, path: str, limit: int = READ_LIMIT) -> Text:
        """Read a text file; undecodable bytes are replaced."""
        content, why = self.content(path, limit)
        source = f"/{path}" if self.live else path
        if content is None:
            return Text(None, source, why)
        return Text(content.decode("utf-8", "replace"), source)

    def first(self, paths: Iterable[str]) -> Text:
        """Return the first of several files that can be read, else the last failure."""
        last = Text(None, "", "not captured")
        for path in paths:
            last = self.read(path)
            if last.text is not None:
                break
        return last


def _why(error: OSError, live: bool) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "no such file" if live else "not captured"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "permission denied (root can read it)"
    return os.strerror(error.errno) if error.errno else str(error)


COMMANDS: dict[str, tuple[str, ...]] = {
    # Only what no file tells.
    "nvidia-smi": ("nvidia-smi", "-q"),
    "ofed_info": ("ofed_info", "-s"),
    "ibv_devinfo": ("ibv_devinfo", "-v"),
}
COMMAND_SECONDS = 10


class LiveReader(Reader):
    """This machine."""

    live = True
    where = "this machine"

    def __init__(self) -> None:
        self._outputs: dict[str, Text] = {}

    def content(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes | None, str]:
        try:
            with open(f"/{path}", "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return None, "not a regular file"
                parts = []
                size = 0
                while size < limit:
                    part = file.read(min(1 << 20, limit - size))
                    if not part:
                        break
                    parts.append(part)
                    size += len(part)
                return b"".join(parts), ""
        except OSError as error:
            return None, _why(error, True)
        except ValueError:  # a NUL in the path
            return None, "no such file"

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(f"/{path}"))
        except (OSError, ValueError):
            return []

    def link(self, path: str) -> str | None:
        try:
            return os.readlink(f"/{path}")
        except (OSError, ValueError):
            return None

    def exists(self, path: str) -> bool:
        return os.path.exists(f"/{path}")

    def command(self, name: str) -> Text:
        """Run a command of `COMMANDS` once; a missing tool is a reason, not an error."""
        if name not in self._outputs:
            self._outputs[name] = self._run(name)
        return self._outputs[name]

    @staticmethod
    def _run(name: str) -> Text:
        argv = COMMANDS.get(name)
        if argv is None:
            return Text(None, name, "read from files instead")
        source = " ".join(argv)
        if shutil.which(argv[0]) is None:
            return Text(None, source, f"{argv[0]} is not installed")
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_SECONDS,
                check=False,
                env={**os.environ, "LC_ALL": "C"},
            )
        except subprocess.TimeoutExpired:
            return Text(None, source, f"{argv[0]} did not answer within {COMMAND_SECONDS} s")
        except OSError as error:
            return Text(None, source, _why(error, True))
        if done.returncode != 0:
            return Text(None, source, f"{argv[0]} failed with status {done.returncode}")
        return Text(done.stdout.decode("utf-8", "replace"), source)

    def memory_map(self) -> tuple[dict[str, object] | None, str, str]:
        """Read the pageblock map through the kernel room; without root there is none."""
        if os.geteuid() != 0:
            return None, "", "the pageblock map needs root (/proc/kcore)"
        try:
            from regrepro.kernel.memorymap import read_memory_map
        except ImportError as error:
            return None, "", f"the memory map reader cannot be loaded: {error}"
        try:
            record = read_memory_map().as_record()
        except Exception as error:  # whatever fails there, the files below /proc still answer
            return None, "", f"the memory map could not be read: {error}"
        return dict(record), "pageblock map", ""


@dataclass
class FolderReader(Reader):
    """A folder in the shape of a machine's root.

    `links` adds symbolic links that the folder states in a list instead of holding them; `outputs` maps
    a command's name to patterns of the files (relative to the root) that may hold its output.
    """

    root: Path
    where: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    denied: frozenset[str] = frozenset()
    prefix: str = ""

    def __post_init__(self) -> None:
        self.where = self.where or str(self.root)

    def _resolve(self, path: str) -> str | None:
        """Return the real path below the root with every link followed inside it, or None."""
        pending = [part for part in path.split("/") if part not in ("", ".")][::-1]
        done: list[str] = []
        hops = 0
        while pending:
            part = pending.pop()
            if part == "..":
                if not done:
                    return None
                done.pop()
                continue
            if "\0" in part:
                return None
            done.append(part)
            here = "/".join(done)
            target = self.links.get(here)
            if target is None:
                try:
                    target = os.readlink(self.root / here)
                except OSError:
                    continue
            hops += 1
            if hops > MAX_LINKS:
                return None
            done = [] if target.startswith("/") else done[:-1]
            pending.extend(part for part in reversed(target.split("/")) if part not in ("", "."))
        return "/".join(done)

    def content(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes | None, str]:
        # A file that was reached through a link lies in the folder under the name by which it was read.
        for candidate in dict.fromkeys((path, self._resolve(path))):
            if candidate is None:
                continue
            content, why = self._open(candidate, limit)
            if content is not None:
                return content, why
        if f"/{path}" in self.denied:
            return None, "permission denied when it was captured (root can read it)"
        return None, "not captured"

    def _folder(self, parts: list[str]) -> int:
        """Open a folder below the root, no step of it through a link; the caller closes it. Raises
        OSError.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        descriptor = os.open(self.root, flags)
        for part in parts:
            try:
                deeper = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = deeper
        return descriptor

    def _open(self, path: str, limit: int) -> tuple[bytes | None, str]:
        """Read a file without following any link: the caller has resolved them."""
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts or not parts or "\0" in path:
            return None, "not captured"
        try:
            folder = self._folder(parts[:-1])
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(parts[-1], flags, dir_fd=folder)
            finally:
                os.close(folder)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return None, "not a regular file"
                return file.read(limit), ""
        except OSError as error:
            return None, _why(error, False)

    def names(self, path: str) -> list[str]:
        found: set[str] = set()
        for candidate in dict.fromkeys((path, self._resolve(path))):
            if candidate is None or "\0" in candidate:
                continue
            parts = [part for part in candidate.split("/") if part not in ("", ".")]
            if ".." in parts:
                continue
            try:
                folder = self._folder(parts)
                try:
                    found.update(os.listdir(folder))
                finally:
                    os.close(folder)
            except OSError:
                pass
            inside = "/".join(parts) + "/" if parts else ""
            found.update(
                link[len(inside) :].split("/", 1)[0] for link in self.links if link.startswith(inside)
            )
        return sorted(name for name in found if name)

    def link(self, path: str) -> str | None:
        if path in self.links:
            return self.links[path]
        try:
            return os.readlink(self.root / path)
        except (OSError, ValueError):
            return None

    def command(self, name: str) -> Text:
        for pattern in self.outputs.get(name, ()):
            for match in self._match(pattern):
                text = self.read(match)
                if text.text is not None and text.text.strip():
                    return text
        return Text(None, name, "not captured")

    def _match(self, pattern: str) -> list[str]:
        """Expand one pattern of literal folders and a last part with `*`."""
        from fnmatch import fnmatchcase

        folder, _, last = pattern.rpartition("/")
        if "*" not in pattern:
            return [pattern]
        return [
            f"{folder}/{name}" if folder else name for name in self.names(folder) if fnmatchcase(name, last)
        ]


@dataclass
class TextReader(Reader):
    """Files and outputs that were taken out of one text, such as an nvidia-bug-report.log."""

    files: Mapping[str, str]
    where: str
    outputs: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    map: dict[str, object] | None = None

    def content(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes | None, str]:
        text = self.files.get(path)
        if text is None:
            return None, "not captured"
        return text.encode("utf-8", "replace")[:limit], ""

    def names(self, path: str) -> list[str]:
        inside = f"{path}/" if path else ""
        return sorted(
            {name[len(inside) :].split("/", 1)[0] for name in self.files if name.startswith(inside)} - {""}
        )

    def command(self, name: str) -> Text:
        text = self.outputs.get(name)
        return Text(text, name) if text is not None else Text(None, name, "not captured")

    def known(self, name: str) -> Text:
        if name in self.stated:
            value, source = self.stated[name]
            return Text(value, source)
        return Text(None, name, "not stated")

    def memory_map(self) -> tuple[dict[str, object] | None, str, str]:
        if self.map is None:
            return None, "", "no memory map was captured"
        return self.map, "event memory-map of record.jsonl", ""


@dataclass
class FirstOf(Reader):
    """Several readers as one: the first that has something answers."""

    readers: list[Reader]
    where: str

    def content(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes | None, str]:
        why = "not captured"
        for reader in self.readers:
            content, why = reader.content(path, limit)
            if content is not None:
                return content, ""
        return None, why

    def names(self, path: str) -> list[str]:
        return sorted({name for reader in self.readers for name in reader.names(path)})

    def link(self, path: str) -> str | None:
        return next((target for reader in self.readers if (target := reader.link(path)) is not None), None)

    def command(self, name: str) -> Text:
        for reader in self.readers:
            text = reader.command(name)
            if text.text is not None:
                return text
        return Text(None, name, "not captured")

    def known(self, name: str) -> Text:
        for reader in self.readers:
            text = reader.known(name)
            if text.text is not None:
                return text
        return Text(None, name, "not stated")

    def memory_map(self) -> tuple[dict[str, object] | None, str, str]:
        for reader in self.readers:
            found, source, _ = reader.memory_map()
            if found is not None:
                return found, source, ""
        return None, "", "no memory map was captured"
