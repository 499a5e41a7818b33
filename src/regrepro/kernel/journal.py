"""The cleanup journal: what a run changes on the node, written down before it changes it.

Each run that changes something keeps one journal, a JSON file under /run/regrepro (for an ordinary user
$XDG_RUNTIME_DIR/regrepro), mode 0600, replaced atomically. It names its owner by PID, start time, boot and
PID namespace. `reclaim` gives back by it what a killed run has left.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro.core.calls import Closing
from regrepro.errors import EnvironmentProblem
from regrepro.kernel.procfs import boot_id, pid_namespace, start_time

SCHEMA = "regrepro.journal/1"
KINDS = ("memory-block", "tracefs-instance", "kprobe-group", "cgroup", "process", "directory")
PREFIX = "regrepro"  # of every name that we give to something outside this process


class ReclaimFailed(Exception):
    """Something could not be given back now; the journal keeps it for the next start."""


@dataclass(frozen=True)
class Entry:
    """One thing to give back. `data` names it well enough to recognise it again."""

    id: int
    kind: str
    data: dict[str, Any] = field(hash=False)


def places() -> list[Path]:
    """Where the journals of this user may lie, the best first."""
    places = [Path("/run/regrepro")] if os.geteuid() == 0 else []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.geteuid() != 0:
        places.append(Path(runtime) / "regrepro")
    return [*places, Path(f"/run/user/{os.geteuid()}/regrepro"), Path(f"/tmp/regrepro-{os.geteuid()}")]


def is_ours(path: Path) -> bool:
    """Whether a directory is this user's alone: others could have us "give back" what is not ours."""
    facts = path.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def journal_directory() -> Path:
    """Return where journals lie; made with mode 0700 when it is missing. Raises EnvironmentProblem."""
    why = ""
    for path in places():
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            if is_ours(path):
                # Who may open it could hold its lock, and with it up every reclaim; Kubernetes makes it 0755.
                path.chmod(0o700)
                return path
            why = f"{path} belongs to another user or others may write to it"
        except OSError as error:
            why = f"{path}: {error.strerror}"
    raise EnvironmentProblem(
        "no place for the cleanup journal of this node", why=why, hint="make /run writable"
    )


class Journal(Closing):
    """The journal of this process. The file exists while there is something to give back.

    A forked child that adds an entry gets a journal of its own, since it can die by itself; what it inherited
    stays its parent's. `add` raises EnvironmentProblem when the file cannot be written: nothing may be
    changed then.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._given = directory
        self._directory = directory
        self._entries: dict[int, Entry] = {}
        self._next = 1
        self._pid = os.getpid()

    @property
    def entries(self) -> list[Entry]:
        """What is still to be given back by this process, oldest first."""
        self._notice_fork()
        return list(self._entries.values())

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._entries = {}

    def add(self, kind: str, **data: Any) -> Entry:
        """Write down something that is about to be changed. Call it before the change; the file is on disk
        after.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown kind of change {kind!r}; kinds are {', '.join(KINDS)}")
        self._notice_fork()
        if kind == "process" and "starttime" not in data:
            data["starttime"] = start_time(int(data["pid"]))
        entry = Entry(self._next, kind, data)
        self._next += 1
        self._entries[entry.id] = entry
        try:
            try:
                self._write()
            except FileNotFoundError:  # another run has just removed the empty directory
                self._find_directory()
                self._write()
        except OSError as error:
            del self._entries[entry.id]
            raise EnvironmentProblem(
                "the cleanup journal of this node cannot be written",
                why=error.strerror or str(error),
                hint="nothing was changed; free some space under /run",
            ) from None
        return entry

    def remove(self, entry: Entry) -> None:
        """Strike out what was given back. An entry that a forked child inherited stays with its parent."""
        self._notice_fork()
        if self._entries.get(entry.id) is entry:
            del self._entries[entry.id]
            with suppress(OSError):
                self._write()

    def close(self) -> None:
        """Forget the file if nothing is left in it; what is left stays for the next start."""
        self._notice_fork()
        if not self._entries and self._directory is not None:
            with suppress(OSError):
                self._write()

    def _find_directory(self) -> None:
        if self._given is None:
            self._directory = journal_directory()

    def _write(self) -> None:
        if self._directory is None:
            self._find_directory()
        assert self._directory is not None
        path = self._directory / f"{self._pid}-{start_time(self._pid)}.json"
        if not self._entries:
            path.unlink(missing_ok=True)
            if self._given is None:
                with suppress(OSError):  # other runs have theirs in it
                    self._directory.rmdir()
            return
        owner = {
            "pid": self._pid,
            "starttime": start_time(self._pid),
            "boot": boot_id(),
            "pid_namespace": pid_namespace(),
        }
        replace_file(path, owner, list(self._entries.values()))


def replace_file(path: Path, owner: dict[str, Any], entries: list[Entry]) -> None:
    """Write a journal anew, whole or not at all. Raises OSError."""
    content = {
        "schema": SCHEMA,
        "owner": owner,
        "entries": [{"id": entry.id, "kind": entry.kind, "data": entry.data} for entry in entries],
    }
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
