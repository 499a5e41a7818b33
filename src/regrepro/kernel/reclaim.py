"""Gives back what killed runs have left on the node, by the cleanup journals that they kept (`journal`).

Called at every start. Touches nothing of a run that lives.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from regrepro.kernel import journal, trace_fs
from regrepro.kernel.busy import when_free
from regrepro.kernel.journal import PREFIX, SCHEMA, Entry, ReclaimFailed, is_ours, replace_file
from regrepro.kernel.memoryblocks import MemoryBlock
from regrepro.kernel.procfs import boot_id, pid_namespace, start_time

_LOCK_WAIT = 30.0  # seconds that a start waits for another's reclaim


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
    if owner.get("pid_namespace") != pid_namespace():
        return None
    started = start_time(int(owner["pid"]))
    return started is None or started != owner.get("starttime")


def reclaim(directory: Path | None = None) -> list[str]:
    """Give back what runs that are gone have left. Call it at every start; it never raises for what was left.

    Returns a sentence for each thing that was given back or could not be; the latter stays in its journal.
    """
    said: list[str] = []
    for where in journal.places() if directory is None else [directory]:
        try:
            if not is_ours(where) or not any(where.glob("*.json")):
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
            said.append(f"something of unknown kind {entry.kind!r} was left alone ({path})")
            left.append(entry)
        except (ReclaimFailed, OSError, ValueError, TypeError) as error:
            said.append(f"{entry.kind} of a run that was killed could not be given back: {error}")
            left.append(entry)
        else:
            if sentence:
                said.append(sentence)
    try:
        if left:
            replace_file(path, owner, list(reversed(left)))
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
    block = MemoryBlock(int(data["block"]))
    return block.restore(str(data["restore"]), limit=float(data.get("limit", 20.0)))


def _tracefs() -> Path:
    path = trace_fs.mounted()
    if path is None:
        raise ReclaimFailed("tracefs is not mounted")
    return path


def _reclaim_tracefs_instance(data: dict[str, Any]) -> str | None:
    path = Path(str(data.get("path") or _tracefs() / "instances" / str(data["name"])))
    if path.parent.name != "instances" or "tracing" not in path.parts:
        raise ReclaimFailed(f"{path} is not a trace instance")
    removed = trace_fs.remove_instance(path.parent.parent, path.name)
    return f"removed the trace instance {path.name} of a run that was killed" if removed else None


def _reclaim_kprobe_group(data: dict[str, Any]) -> str | None:
    count = trace_fs.remove_group(_tracefs(), str(data.get("group") or data["name"]))
    return f"removed {count} kprobe events of a run that was killed" if count else None


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
    when_free(path.rmdir, 5)
    _disable_memory_control(data)
    return f"removed the control group {path.name} of a run that was killed"


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
    "tracefs-instance": _reclaim_tracefs_instance,
    "kprobe-group": _reclaim_kprobe_group,
    "cgroup": _reclaim_cgroup,
    "process": _reclaim_process,
    "directory": _reclaim_directory,
}
