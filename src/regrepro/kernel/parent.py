"""A process that ends together with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec is no time to load anything


def die_with_parent(parent: int) -> bool:
    """Let the kernel kill this process when its parent ends; return whether `parent` is still the parent.

    The parent may have ended before the call, and then no signal comes: on False the caller ends itself.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent
