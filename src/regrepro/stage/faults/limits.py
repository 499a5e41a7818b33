"""Faults of limits: locked memory and capabilities, and a memory cgroup."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from regrepro.errors import Unmet
from regrepro.kernel import procfs
from regrepro.kernel.node import decode_capabilities
from regrepro.stage.faults.base import Base, checked, fault, libc

_CAP_IPC_LOCK = 14  # include/uapi/linux/capability.h
_CAPABILITY_VERSION_3 = 0x20080522


class Limits(Base):
    """Limits that a registration runs into."""

    @fault()
    def memlock(self, limit: int, *, capable: bool) -> Iterator[None]:
        """Lower the soft RLIMIT_MEMLOCK to `limit` bytes; take CAP_IPC_LOCK from this thread unless
        `capable`.
        """
        before, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, hard))
        effective = _effective_capabilities()
        try:
            if not capable:
                _set_effective(effective & ~(1 << _CAP_IPC_LOCK))
            self._step("memlock", memlock_soft=limit, capabilities=_capability_names())
            yield
        finally:
            _set_effective(effective)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (before, hard))
            soft = None if before == resource.RLIM_INFINITY else before
            self._step("memlock", memlock_soft=soft, capabilities=_capability_names())

    @fault(lab="a memory cgroup that kills")
    def memory_cgroup(self, limit: int) -> Iterator[None]:
        """Put this process into a memory cgroup of its own with a hard limit of `limit` bytes, no swap.

        The kernel kills the process when it goes beyond. Lab only.
        """
        root = _cgroup2()
        group = root / f"regrepro-{os.getpid()}"
        with suppress(OSError):
            (root / "cgroup.subtree_control").write_text("+memory")
        own = (procfs.cgroup2_of() or "").lstrip("/")
        try:
            group.mkdir()
            (group / "memory.max").write_text(str(limit))
        except OSError as error:
            why = f"a memory cgroup below {root}: {error.strerror or error}"
            raise Unmet("memory-cgroup", why, "use a kernel with CONFIG_MEMCG and cgroup v2") from None
        with suppress(OSError):
            (group / "memory.swap.max").write_text("0")
        self._step("memory-cgroup", path=str(group), limit=limit)
        try:
            (group / "cgroup.procs").write_text("0")
            yield
        finally:
            with suppress(OSError):
                (root / own / "cgroup.procs").write_text("0")
                group.rmdir()


def _effective_capabilities() -> int:
    text = Path("/proc/thread-self/status").read_text(encoding="ascii", errors="replace")
    return int(text.partition("CapEff:")[2].split()[0], 16)


def _capability_names() -> list[str]:
    return decode_capabilities(_effective_capabilities())


def _set_effective(mask: int) -> None:
    """Set this thread's effective capabilities; permitted and inheritable stay (capset(2))."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    checked(libc.capget(header, data), "capget")
    data[0], data[3] = mask & 0xFFFFFFFF, mask >> 32
    checked(libc.capset(header, data), "capset")


def _cgroup2() -> Path:
    """Return where the cgroup v2 hierarchy is mounted; mount it where it is not. Raises `Unmet`."""
    mounted = procfs.cgroup2_root()
    if mounted is not None:
        return mounted
    place = Path("/sys/fs/cgroup")
    try:
        checked(libc.mount(b"cgroup2", str(place).encode(), b"cgroup2", 0, None), "mount of cgroup2")
    except OSError as error:
        raise Unmet("memory-cgroup", str(error.strerror or error), "use a kernel with cgroup v2") from None
    return place
