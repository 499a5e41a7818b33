"""Which RDMA devices processes have open."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from regrepro.watch.process import PROC

FILES_LIMIT = 16384  # open files of a process that are looked at: it may have a million


def processes_with_device(proc: Path = PROC) -> Iterator[int]:
    """Yield the processes that have /dev/infiniband/uverbs* open, as far as they can be looked into."""
    for entry in proc.iterdir():
        if entry.name.isdigit() and devices_of(int(entry.name), proc):
            yield int(entry.name)


def _open_devices(pid: int, proc: Path) -> Iterator[tuple[str, bool]]:
    """Yield (uverbsN, whether its file is gone) of each RDMA device that a process has open."""
    with suppress(OSError), os.scandir(proc / str(pid) / "fd") as links:
        for link in islice(links, FILES_LIMIT):
            with suppress(OSError):
                found = re.search(r"/infiniband/(uverbs\d+)( \(deleted\))?$", str(Path(link.path).readlink()))
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
