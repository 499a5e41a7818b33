"""tracefs: where it is, an instance and a kprobe group of our own, and what killed runs of ours have left.

Names carry the owner's PID and start time (`regrepro-PID-START`, kprobe group `regrepro_PID_START`; inside a
PID namespace the namespace's number follows), so that what is ours is known by its name alone; nothing of
another name is ever touched.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

from regrepro.kernel import procfs
from regrepro.kernel.busy import when_free
from regrepro.kernel.procfs import INITIAL_PID_NAMESPACE, pid_namespace, start_time

PLACES = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
_INSTANCE = re.compile(r"^regrepro-(\d+)-(\d+)(?:-(\d+))?$")
_GROUP = re.compile(r"^regrepro_(\d+)_(\d+)(?:_(\d+))?$")
_PROBE = re.compile(r"^[pr]\d*:(?P<group>[^/\s]+)/(?P<event>\S+)")

_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _FSCONFIG_CMD_CREATE, _AT_FDCWD = 1, 1, 6, -100
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432  # same on every architecture


def own_names(pid: int) -> tuple[str, str]:
    """Return the names of the trace instance and of the kprobe group of process `pid` of this namespace."""
    parts = [str(pid), str(start_time(pid))]
    if pid_namespace() != INITIAL_PID_NAMESPACE:
        parts.append(str(pid_namespace()))
    return "-".join(["regrepro", *parts]), "_".join(["regrepro", *parts])


def _owner_is_gone(name: re.Match[str]) -> bool:
    """Whether the process that made something of this name is gone; False for another PID namespace's."""
    if int(name[3] or INITIAL_PID_NAMESPACE) != pid_namespace():
        return False
    return start_time(int(name[1])) != int(name[2])


def mounted() -> Path | None:
    """Return where tracefs is mounted, None where it is not at its usual places."""
    for place in PLACES:
        # `trace` is there with any tracer; kprobe_events only with CONFIG_KPROBE_EVENTS.
        with suppress(OSError):
            if (place / "trace_clock").exists():
                return place
    return None


class OwnMount:
    """tracefs mounted nowhere but at a file descriptor of ours, for a node (or container) without it.

    Needs CAP_SYS_ADMIN and Linux 5.2. Nothing is left behind: it ends with its last descriptor. Raises
    OSError.
    """

    def __init__(self) -> None:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)

        def call(*arguments: object) -> int:
            result = int(libc.syscall(*arguments))
            if result < 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            return result

        context = call(_SYS_FSOPEN, b"tracefs", _FSOPEN_CLOEXEC)
        try:
            call(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
            self.fd = call(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0)
        finally:
            os.close(context)

    @property
    def path(self) -> Path:
        """A path into it, for this process and its forked children."""
        return Path(f"/proc/self/fd/{self.fd}")

    def close(self) -> None:
        """Let it go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def write(path: Path, text: str, flags: int = 0) -> None:
    """Write to a control file with one write(2). Raises OSError with the kernel's errno.

    `flags`: os.O_TRUNC for a file that otherwise keeps what it had (set_event_pid).
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def append(path: Path, text: str) -> None:
    """Write to a control file without truncating it (truncating kprobe_events removes every probe).

    Not by open("a"): that seeks to the end, which the kernel's seq_file refuses with EINVAL.
    """
    write(path, text, os.O_APPEND)


def remove_instance(tracefs: Path, name: str) -> bool:
    """Remove a trace instance of ours; return whether there was one. Raises OSError (EBUSY: in use)."""
    if not _INSTANCE.match(name):
        raise ValueError(f"{name!r} is not an instance of ours")
    path = tracefs / "instances" / name
    if not path.is_dir():
        return False
    with suppress(OSError):
        write(path / "tracing_on", "0")
        write(path / "events" / "enable", "0")
    when_free(path.rmdir)
    return True


def remove_group(tracefs: Path, group: str) -> int:
    """Remove the probes of a group of ours; return how many. Raises OSError (EBUSY: someone uses them).

    A reading of kprobe_events skips lines when another run removes its own meanwhile: the kernel gives the
    text by the page, and goes on by line number (seq_list_start(), kernel/trace/trace_dynevent.c). So the
    file is read until it has none of the group.
    """
    if not _GROUP.match(group):
        raise ValueError(f"{group!r} is not a kprobe group of ours")
    file = tracefs / "kprobe_events"
    for place in (tracefs, *(tracefs / "instances").glob("*")):
        with suppress(OSError):
            write(place / "events" / group / "enable", "0")
    tried: set[str] = set()
    removed = 0
    while True:
        probes = map(_PROBE.match, file.read_text().splitlines())
        events = {probe["event"]: None for probe in probes if probe and probe["group"] == group}
        if not events.keys() - tried:
            return removed
        for event in events:
            with suppress(FileNotFoundError):  # another start was faster
                when_free(partial(append, file, f"-:{group}/{event}\n"))
                removed += 1
        tried |= events.keys()


def reclaim(tracefs: Path) -> list[str]:
    """Remove instances and probes of runs of ours that are gone; return a sentence for each.

    Beside `reclaim`, which goes by the cleanup journal: this knows them by their
    names, so that nothing stays where the journal was lost. Never raises.
    """
    said: list[str] = []
    with suppress(OSError):
        for path in sorted((tracefs / "instances").iterdir()):
            found = _INSTANCE.match(path.name)
            if found and _owner_is_gone(found):
                with suppress(OSError):
                    if remove_instance(tracefs, path.name):
                        said.append(f"removed the trace instance {path.name} of a run that was killed")
    with suppress(OSError):
        groups = {
            probe["group"]
            for line in (tracefs / "kprobe_events").read_text().splitlines()
            if (probe := _PROBE.match(line))
        }
        for group in sorted(groups):
            found = _GROUP.match(group)
            if found and _owner_is_gone(found):
                with suppress(OSError):
                    count = remove_group(tracefs, group)
                    said.append(f"removed {count} kprobe events of a run that was killed ({group})")
    return said


def kernel_has_tracefs() -> bool:
    """Return whether the running kernel knows the file system at all."""
    return "tracefs" in (procfs.text("/proc/filesystems") or "").split()


def return_probes_have_arguments(tracefs: Path) -> bool:
    """Return whether a return probe can record its function's arguments, by the kernel's own README."""
    text = procfs.text(tracefs / "README") or ""
    return any("return probes support:" in line and "$arg<N>" in line for line in text.splitlines())
