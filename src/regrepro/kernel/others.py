"""What other processes name and show: opened without waiting for anybody, read within bounds.

A path that a process chose may name a FIFO, a device or a link to anywhere, and texts of /proc that a process
shapes (its environment, its mappings) are as large as it likes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

_OPENAT2 = 437  # on every architecture (include/uapi/asm-generic/unistd.h, since Linux 5.6)
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10  # include/uapi/linux/openat2.h
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    """`struct open_how` (include/uapi/linux/openat2.h)."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def read_at_most(path: str | Path, limit: int) -> tuple[bytes, bool]:
    """Return the first `limit` bytes of a file, and whether there are more. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        parts, size = [], 0
        while size <= limit:
            part = os.read(fd, min(limit + 1 - size, 1 << 16))
            if not part:
                break
            parts.append(part)
            size += len(part)
    finally:
        os.close(fd)
    content = b"".join(parts)
    return content[:limit], len(content) > limit


def open_mapped(process: Path, span: str, path: str) -> int:
    """Open the file behind a mapping of a process (/proc/PID): by the mapping itself, `span` as map_files
    names it, or where that is refused for want of rights, by its `path` within the process' own root.

    Returns a descriptor to read a regular file by. Raises OSError, for what is no regular file, too.
    """
    try:
        fd = os.open(process / "map_files" / span, os.O_PATH | os.O_CLOEXEC)
    except PermissionError:
        fd = _open_in_root(process / "root", path)
    try:
        return reopened(fd)
    finally:
        os.close(fd)


def open_regular(path: str | Path) -> int:
    """Open a regular file to be read. Raises OSError, for what is no regular file, too."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return reopened(fd)
    finally:
        os.close(fd)


def _open_in_root(root: Path, path: str) -> int:
    """Return an O_PATH descriptor; links lead nowhere out of the root, and none of /proc's is followed."""
    base = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = _OpenHow(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        name = os.fsencode(path)
        fd = _libc.syscall(_OPENAT2, base, name, ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how)))
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return int(fd)
    finally:
        os.close(base)


def reopened(fd: int) -> int:
    """Return a descriptor to read what an O_PATH descriptor names by, if it is a regular file: to open
    anything else might wait, or do something.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "no regular file")
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
