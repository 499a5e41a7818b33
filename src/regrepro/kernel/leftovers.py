"""What a run changes on the node, written down before it changes it, and given back if the run is killed.

Each run that changes something keeps one journal, a JSON file under /run/regrepro (for an ordinary user
$XDG_RUNTIME_DIR/regrepro), mode 0600, replaced atomically. It names its owner by PID, start time, boot and
PID namespace. `reclaim()`, called at every start, gives back what owners that are gone have left, and touches
nothing of a live one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro.errors import EnvironmentProblem

SCHEMA = "regrepro.journal/1"
KINDS = (
    "memory-block",
    "netdev",
    "rdma-link",
    "tracefs-instance",
    "kprobe-group",
    "shm",
    "cgroup",
    "process",
    "directory",
)
PREFIX = "regrepro"  # of every name that we give to something outside this process

_LOCK_WAIT = 30.0  # seconds that a start waits for another's reclaim
_COMMAND_LIMIT = 10.0  # seconds for ip(8) and rdma(8)


class ReclaimFailed(Exception):
    """A leftover could not be given back now; the journal keeps it for the next start."""


@dataclass(frozen=True)
class Entry:
    """One thing to give back. `data` names it well enough to recognise it again."""

    id: int
    kind: str
    data: dict[str, Any] = field(hash=False)


def start_time(pid: int) -> int | None:
    """Return a process' start time in clock ticks since boot (field 22 of /proc/PID/stat), None if there is
    none.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()
    # A zombie holds nothing any more.
    return None if fields[0] in ("Z", "X") else int(fields[19])


def boot_id() -> str:
    """Return this boot's id, empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _places() -> list[Path]:
    """Where the journals of this user may lie, the best first."""
    places = [Path("/run/regrepro")] if os.geteuid() == 0 else []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.geteuid() != 0:
        places.append(Path(runtime) / "regrepro")
    return [*places, Path(f"/run/user/{os.geteuid()}/regrepro"), Path(f"/tmp/regrepro-{os.geteuid()}")]


def _is_ours(path: Path) -> bool:
    """Whether a directory is this user's alone: others could have us "give back" what is not ours."""
    facts = path.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022


def journal_directory() -> Path:
    """Return where journals lie; made with mode 0700 when it is missing. Raises EnvironmentProblem."""
    why = ""
    for path in _places():
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(path):
                return path
            why = f"{path} belongs to another user or others may write to it"
        except OSError as error:
            why = f"{path}: {error.strerror}"
    raise EnvironmentProblem(
        "no place for the journal of changes to this node", why=why, hint="make /run writable"
    )


class Journal:
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

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            raise ValueError(f"unknown kind of leftover {kind!r}; kinds are {', '.join(KINDS)}")
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
                "the journal of changes to this node cannot be written",
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
            "pid_namespace": _pid_namespace(),
        }
        _replace(path, owner, list(self._entries.values()))


def _replace(path: Path, owner: dict[str, Any], entries: list[Entry]) -> None:
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


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold the directory's lock, so that two starts at once do not both give the same thing back."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        deadline = time.monotonic() + _LOCK_WAIT
        held = False
        while not held:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        # The directory may have been removed and made again meanwhile; the lock then is on the old one.
        yield held and os.fstat(fd).st_ino == directory.lstat().st_ino
    finally:
        os.close(fd)


def _owner_is_gone(owner: dict[str, Any]) -> bool | None:
    """Whether the owner is gone; None where it cannot be told (another PID namespace of this boot)."""
    if owner.get("boot") != boot_id():
        return True
    if owner.get("pid_namespace") != _pid_namespace():
        return None
    started = start_time(int(owner["pid"]))
    return started is None or started != owner.get("starttime")


def reclaim(directory: Path | None = None) -> list[str]:
    """Give back what runs that are gone have left. Call it at every start; it never raises for a leftover.

    Returns a sentence for each thing that was given back or could not be; the latter stays in its journal.
    """
    said: list[str] = []
    for where in _places() if directory is None else [directory]:
        try:
            if not _is_ours(where) or not any(where.glob("*.json")):
                continue
            with _locked(where) as held:
                if not held:
                    said.append(
                        "another start is giving back what was left behind; this one did not wait any longer"
                    )
                    continue
                for path in sorted(where.glob("*.json")):
                    said += _reclaim_file(path)
            if directory is None:
                where.rmdir()
        except OSError:  # no such directory, or others have their journals in it
            continue
    return said


def _reclaim_file(path: Path) -> list[str]:
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            return [f"{path} is not a journal of this user and was left alone"]
        content = json.loads(path.read_text())
        owner = content["owner"]
        entries = [Entry(item["id"], item["kind"], item["data"]) for item in content["entries"]]
        if content["schema"] != SCHEMA:
            return [f"{path} was written by another version of regrepro and was left alone"]
        gone = _owner_is_gone(owner)
    except FileNotFoundError:
        return []  # its owner finished, or another start was faster
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{path} cannot be read and was left alone: {error}"]
    if not gone:
        return []
    same_boot = owner.get("boot") == boot_id()
    said, left = [], []
    for entry in reversed(entries):  # what was made last goes first
        if not same_boot and entry.kind != "directory":
            continue  # it ended with that boot
        try:
            sentence = _HANDLERS[entry.kind](entry.data)
        except KeyError:
            said.append(f"a leftover of unknown kind {entry.kind!r} was left alone ({path})")
            left.append(entry)
        except (ReclaimFailed, OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
            said.append(f"{entry.kind} of a run that was killed could not be given back: {error}")
            left.append(entry)
        else:
            if sentence:
                said.append(sentence)
    try:
        if left:
            _replace(path, owner, list(reversed(left)))
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        said.append(f"{path} could not be rewritten: {error.strerror}")
    return said


# The handlers. Each returns a sentence if it gave something back, None if nothing was left, and raises
# otherwise. None touches a thing whose name is not ours.


def _ours(name: str) -> str:
    if not name.startswith(PREFIX) or "/" in name:
        raise ReclaimFailed(f"{name!r} does not look like one of ours")
    return name


def _reclaim_memory_block(data: dict[str, Any]) -> str | None:
    from regrepro.kernel.memoryblocks import MemoryBlock

    block = MemoryBlock(int(data["block"]))
    return block.restore(str(data["restore"]), limit=float(data.get("limit", 20.0)))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT,
            check=False,
        )
    except FileNotFoundError:
        raise ReclaimFailed(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ReclaimFailed(f"{' '.join(command)} did not end in {_COMMAND_LIMIT:.0f} s") from None
    if done.returncode:
        raise ReclaimFailed(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _reclaim_netdev(data: dict[str, Any]) -> str | None:
    name = _ours(str(data["name"]))
    if not Path(f"/sys/class/net/{name}").exists():
        return None
    if not Path(f"/sys/devices/virtual/net/{name}").exists():
        raise ReclaimFailed(f"{name} is a real network device")
    _run("ip", "link", "delete", "dev", name)
    return f"removed the network device {name} of a run that was killed"


def _reclaim_rdma_link(data: dict[str, Any]) -> str | None:
    name = str(data["name"])
    device = Path(f"/sys/class/infiniband/{name}")
    if not device.exists():
        return None
    # Only software devices lie on a network device that we made ourselves.
    parent = device / "parent"
    if not parent.exists() or not parent.read_text().strip().startswith(PREFIX):
        raise ReclaimFailed(f"{name} is not a software device on one of our network devices")
    _run("rdma", "link", "delete", name)
    return f"removed the RDMA link {name} of a run that was killed"


def _tracefs() -> Path:
    for path in (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing")):
        if (path / "kprobe_events").exists():
            return path
    raise ReclaimFailed("tracefs is not mounted")


def _reclaim_tracefs_instance(data: dict[str, Any]) -> str | None:
    path = Path(str(data.get("path") or _tracefs() / "instances" / str(data["name"])))
    _ours(path.name)
    if path.parent.name != "instances" or "tracing" not in path.parts:
        raise ReclaimFailed(f"{path} is not a trace instance")
    if not path.is_dir():
        return None
    with suppress(OSError):
        (path / "tracing_on").write_text("0")
        (path / "events" / "enable").write_text("0")
    path.rmdir()
    return f"removed the trace instance {path.name} of a run that was killed"


def _reclaim_kprobe_group(data: dict[str, Any]) -> str | None:
    group = _ours(str(data.get("group") or data["name"]))
    tracefs = _tracefs()
    lines = (tracefs / "kprobe_events").read_text().splitlines()
    events = [found[1] for line in lines if (found := re.match(rf"[pr]\d*:{group}/(\S+)", line))]
    if not events:
        return None
    enables = [tracefs, *(tracefs / "instances").glob("*")]
    for place in enables:
        with suppress(OSError):
            (place / "events" / group / "enable").write_text("0")
    # Not open("a"): it seeks to the end, which the kernel's seq_file refuses with EINVAL.
    fd = os.open(tracefs / "kprobe_events", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        for event in events:
            os.write(fd, f"-:{group}/{event}\n".encode())
    finally:
        os.close(fd)
    return f"removed {len(events)} kprobe events of a run that was killed"


def _reclaim_shm(data: dict[str, Any]) -> str | None:
    name = _ours(str(data["name"]).lstrip("/"))
    path = Path("/dev/shm") / name
    if not path.exists():
        return None
    path.unlink()
    return f"removed the shared memory {name} of a run that was killed"


def _reclaim_cgroup(data: dict[str, Any]) -> str | None:
    path = Path(str(data["path"]))
    _ours(path.name)
    if Path("/sys/fs/cgroup") not in path.parents or ".." in path.parts:
        raise ReclaimFailed(f"{path} is not a control group")
    if not path.is_dir():
        _disable_memory_control(data)
        return None
    if str(os.getpid()) in (path / "cgroup.procs").read_text().split():
        raise ReclaimFailed(f"{path.name} holds this process itself")
    kill = path / "cgroup.kill"
    if kill.exists():
        kill.write_text("1")
    else:
        for pid in (path / "cgroup.procs").read_text().split():
            with suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while True:
        try:
            path.rmdir()
            _disable_memory_control(data)
            return f"removed the control group {path.name} of a run that was killed"
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _disable_memory_control(data: dict[str, Any]) -> None:
    """Turn off the memory controller that the run had turned on; others that use it by now keep it."""
    switch = data.get("enabled")
    if switch and Path(switch).name == "cgroup.subtree_control":
        with suppress(OSError):
            Path(switch).write_text("-memory")


def _reclaim_process(data: dict[str, Any]) -> str | None:
    pid = int(data["pid"])
    started = start_time(pid)
    if started is None or started != data.get("starttime") or pid in (0, 1, os.getpid()):
        return None
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    deadline = time.monotonic() + 5
    while start_time(pid) == started:
        if time.monotonic() > deadline:
            raise ReclaimFailed(f"process {pid} does not die; it hangs in the kernel")
        time.sleep(0.02)
    return f"ended process {pid} of a run that was killed"


def _reclaim_directory(data: dict[str, Any]) -> str | None:
    path = Path(str(data["path"]))
    _ours(path.name.lstrip("."))
    if not path.is_absolute() or ".." in path.parts:
        raise ReclaimFailed(f"{path} is not an absolute path")
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise ReclaimFailed(f"{path} is not a directory of this user")
    shutil.rmtree(path)
    return f"removed the directory {path} of a run that was killed"


_HANDLERS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "memory-block": _reclaim_memory_block,
    "netdev": _reclaim_netdev,
    "rdma-link": _reclaim_rdma_link,
    "tracefs-instance": _reclaim_tracefs_instance,
    "kprobe-group": _reclaim_kprobe_group,
    "shm": _reclaim_shm,
    "cgroup": _reclaim_cgroup,
    "process": _reclaim_process,
    "directory": _reclaim_directory,
}
