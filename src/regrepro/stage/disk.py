"""A directory whose files the kernel writes back to a disk; in a guest of the lab, which has none, made."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from regrepro.errors import Unmet
from regrepro.kernel import procfs

# File systems that keep their pages in memory only, or do not let a file be written by a shared mapping: a
# page of theirs needs no dirty tracking, so it may be pinned for long. The files of an overlay may lie on it.
_NOT_WRITTEN_BACK = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs", "9p", "overlay", "proc", "sysfs")


def written_back(in_lab: bool) -> str:
    """Return a directory whose files the kernel writes back to a disk. Raises `Unmet`."""
    tried = []
    for directory in ("/var/tmp", tempfile.gettempdir(), str(Path.home())):
        kind = _file_system(directory)
        if kind not in _NOT_WRITTEN_BACK and os.access(directory, os.W_OK):
            return directory
        tried.append(f"{directory} is {kind}, or cannot be written to")
    if not in_lab:
        raise Unmet("file-system", "; ".join(tried), "set TMPDIR to a directory on a disk")
    return _loop_file_system()


def _file_system(directory: str) -> str:
    """Return the type of the file system that a directory lies on, as /proc/self/mounts calls it.

    statfs(2) would not do: 9p passes on the type of the host's file system (`v9fs_statfs`).
    """
    path = Path(directory).resolve()
    over = [mount for mount in procfs.mounts() if mount.place in (path, *path.parents)]
    # Of several at one place the last covers the others.
    deepest = max(reversed(over), key=lambda mount: len(mount.place.parts), default=None)
    return "unknown" if deepest is None else deepest.kind


def _loop_file_system() -> str:
    """Make an ext2 of 8 MiB on a loop device and mount it; it goes with the guest. Raises `Unmet`."""
    base = Path(tempfile.mkdtemp(prefix="regrepro-"))
    image, place = base / "image", base / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    make = shutil.which("mkfs.ext2", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if make is None:
        raise Unmet("file-system", "this guest has no disk, and there is no mkfs.ext2", "install e2fsprogs")
    for command in (
        [make, "-q", "-F", str(image)],
        ["modprobe", "-a", "loop", "ext4"],
        ["mount", "-o", "loop", str(image), str(place)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode and command[0] != "modprobe":
            why = f"{Path(command[0]).name}: {' '.join((done.stderr or done.stdout).split())}"
            raise Unmet("file-system", why, "use a kernel with loop devices and ext2")
    return str(place)
