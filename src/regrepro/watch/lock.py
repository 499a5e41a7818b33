"""One watch on a node: a lock that says who holds it, and goes with its holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path

from regrepro.errors import EXIT_UNDECIDED, EnvironmentProblem

# Not in the journals' directory, which comes and goes.
PATH = Path("/run/regrepro-watch.lock")


class WatchedAlready(EnvironmentProblem):
    """Another watch holds this node now: it may be tried again, as a node that cannot be watched may not."""

    exit_code = EXIT_UNDECIDED


class Lock:
    """The lock of the node's watch. Raises WatchedAlready, naming the holder, where another has it."""

    def __init__(self, out: Path, path: Path = PATH) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.fchmod(self._fd, 0o600)  # who may open it can hold it
        except OSError as error:
            raise EnvironmentProblem(f"cannot make {path}", why=error.strerror or str(error)) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            told = os.pread(self._fd, 4096, 0)
            os.close(self._fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise EnvironmentProblem(f"cannot lock {path}", why=error.strerror or str(error)) from None
            raise WatchedAlready(
                "this node is being watched already", why=_holder(told), hint="stop that one first"
            ) from None
        os.ftruncate(self._fd, 0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        text = json.dumps({"pid": os.getpid(), "started": started, "out": str(out)})
        os.pwrite(self._fd, text.encode(), 0)

    def release(self) -> None:
        """Let it go; the file stays, since another may wait on it."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def _holder(text: bytes) -> str:
    try:
        holder = json.loads(text)
        return f"process {holder['pid']} since {holder['started']}, writing to {holder['out']}"
    except (ValueError, KeyError, TypeError):
        return "by a process that has not yet said its name"
