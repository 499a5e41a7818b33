"""Pins of user pages that are held until released: FOLL_PIN, FOLL_GET and FOLL_LONGTERM, on a stock kernel.

Each pin lives on threads of its own that block every signal, so that nothing but `release()` or the end of
the process lets go of the pages; the kernel frees everything when the process ends, however it ends. While a
pin is held the process must not change its credentials (setuid() and its like wait for every thread).
"""

from __future__ import annotations

import errno as errnos
import os
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regrepro._core import ffi, lib
from regrepro.core.calls import check
from regrepro.core.memory import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["pin", "get", "longterm"]

_live: weakref.WeakSet[HeldPin] = weakref.WeakSet()


class HeldPin:
    """A pin that was really held when this was made.

    `kind`: `pin` (FOLL_PIN | FOLL_WRITE without FOLL_LONGTERM), `get` (FOLL_GET), `longterm` (FOLL_PIN |
    FOLL_WRITE | FOLL_LONGTERM). `owner` and `api` are the record's words. `address`, `length`: bytes; every
    page they touch is held.
    """

    __slots__ = ("__weakref__", "_pin", "address", "api", "kind", "length", "owner", "released")

    def __init__(self, pin: Any, *, kind: Kind, owner: str, api: str, address: int, length: int) -> None:
        self._pin = pin
        self.kind = kind
        self.owner = owner
        self.api = api
        self.address = address
        self.length = length
        self.released = False
        _live.add(self)

    def alive(self) -> bool:
        """Return whether every page is still held, as far as the kernel tells at this moment.

        process-vm: every thread is inside process_vm_writev, its fault unanswered
        (/proc/self/task/*/syscall); vmsplice: all bytes are still in the pipe; io-uring: the ring still has
        its buffers. Always False in a forked child, whose pages are copies or whose parent holds them.
        """
        return not self.released and bool(lib.rr_pin_alive(self._pin))

    def release(self) -> None:
        """Let go of the pages without changing a byte of them. Again does nothing.

        Raises OSError EIO if the kernel did write into the target or did not let go.
        """
        if self.released:
            return
        self.released = True
        _live.discard(self)
        check(lib.rr_pin_release(self._pin), f"releasing the {self.owner} pin")

    def thread_ids(self) -> list[int]:
        """Return the kernel's ids of the threads that hold the pin."""
        return [lib.rr_pin_thread_id(self._pin, index) for index in range(lib.rr_pin_threads(self._pin))]

    def thread_results(self) -> list[int | None]:
        """Return what each thread's call returned (a negative errno, or bytes), None while it has not."""
        results = (
            lib.rr_pin_thread_result(self._pin, index) for index in range(lib.rr_pin_threads(self._pin))
        )
        return [None if result == 1 else int(result) for result in results]

    def __enter__(self) -> HeldPin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if getattr(self, "released", True):
            return
        warnings.warn(f"{self!r} was dropped without release()", ResourceWarning, stacklevel=2, source=self)
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.released else "held"
        return f"<HeldPin {self.kind} by {self.owner} {self.address:#x}+{self.length:#x} {state}>"


def _forget_in_child() -> None:
    # A forked child would otherwise keep the pipes and rings open, and with them their pages, past the
    # parent's end.
    for pin in list(_live):
        pin.released = True
        lib.rr_pin_release(pin._pin)
    _live.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def pin_process_vm(address: int, length: int) -> HeldPin:
    """Hold a FOLL_PIN | FOLL_WRITE pin without FOLL_LONGTERM, by process_vm_writev and userfaultfd.

    Takes one thread for each `2 * PAGE_SIZE / sizeof(void *)` pages. Kernels before 5.6 take a FOLL_GET here.
    Raises OSError with the errno of the step that failed; its text says what would help.
    """
    api = "process_vm_writev+userfaultfd"
    return _take(lib.rr_pin_process_vm, address, length, kind="pin", owner="process-vm", api=api)


def pin_vmsplice(address: int, length: int) -> HeldPin:
    """Hold a FOLL_GET reference, by vmsplice into a pipe of one slot a page.

    Raises OSError as `pin_process_vm()`; EPERM past what the pipe may hold (fs.pipe-max-size, without
    CAP_SYS_RESOURCE), EINVAL past 2 GiB.
    """
    return _take(lib.rr_pin_vmsplice, address, length, kind="get", owner="vmsplice", api="vmsplice")


def pin_io_uring(address: int, length: int) -> HeldPin:
    """Hold a FOLL_LONGTERM pin, by io_uring fixed buffers of at most 1 GiB each.

    Raises OSError as `pin_process_vm()`; ENOMEM also when a page would not move.
    """
    api = "io_uring_register"
    return _take(lib.rr_pin_io_uring, address, length, kind="longterm", owner="io-uring", api=api)


def _take(
    function: Callable[..., int], address: int, length: int, *, kind: Kind, owner: str, api: str
) -> HeldPin:
    if not (0 <= address < 1 << 64 and 0 < length < 1 << 63):
        raise OSError(errnos.EINVAL, f"{owner} pin: {length} bytes at {address:#x} are no range of memory")
    cell = ffi.new("struct rr_pin **")
    step = ffi.new("const char **")
    status = function(address, length, cell, step)
    if status:
        name = ffi.string(step[0]).decode() if step[0] else api
        raise OSError(-status, f"{owner} pin: {name}: {os.strerror(-status)}{_advice(name, -status, length)}")
    pin = ffi.gc(cell[0], lib.rr_pin_destroy)
    return HeldPin(pin, kind=kind, owner=owner, api=api, address=address, length=length)


def _advice(step: str, number: int, length: int) -> str:
    """Return what a person can do about a failed step, as " (…)", or ""."""
    pages = -(-length // PAGE_SIZE)
    advice = {
        (
            "userfaultfd",
            errnos.EPERM,
        ): "needs root, vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd; "
        "a container's seccomp profile may forbid it too",
        ("userfaultfd", errnos.ENOSYS): "this kernel is built without CONFIG_USERFAULTFD",
        ("process_vm_writev", errnos.ENOSYS): "this kernel is built without CONFIG_CROSS_MEMORY_ATTACH",
        ("process_vm_writev", errnos.EPERM): "a container's seccomp profile forbids process_vm_writev; "
        "it needs CAP_SYS_PTRACE there",
        ("process_vm_writev", errnos.EFAULT): "a page of the range cannot be pinned for writing",
        ("populate", errnos.ENOMEM): "part of the range is not mapped, or memory ran out",
        ("populate", errnos.EFAULT): "part of the range may not be written, or a page could not be had",
        ("pthread_create", errnos.EAGAIN): "too many threads: one for each "
        f"{2 * PAGE_SIZE // ffi.sizeof('void *')} pages; see ulimit -u, pids.max, kernel.threads-max",
        ("F_SETPIPE_SZ", errnos.EPERM): f"{pages} pages need a pipe of {pages * PAGE_SIZE} bytes; "
        f"fs.pipe-max-size is {_read_number('/proc/sys/fs/pipe-max-size')} without CAP_SYS_RESOURCE",
        ("F_SETPIPE_SZ", errnos.EINVAL): f"no pipe holds {length} bytes; the kernel's limit is 2 GiB",
        ("F_SETPIPE_SZ", errnos.ENOMEM): f"the kernel has no memory for a pipe of {pages} slots",
        ("vmsplice", errnos.EAGAIN): "the pipe is full: it holds fewer pages than it promised",
        (
            "io_uring_setup",
            errnos.EPERM,
        ): "kernel.io_uring_disabled, or a container's seccomp profile, forbids it",
        ("io_uring_setup", errnos.ENOSYS): "this kernel is built without CONFIG_IO_URING, or older than 5.1",
        (
            "IORING_REGISTER_BUFFERS",
            errnos.ENOMEM,
        ): "a page would not move (it is held by another pin), or, without "
        "CAP_IPC_LOCK, RLIMIT_MEMLOCK is too low",
    }.get((step, number))
    return f" ({advice})" if advice else ""


def _read_number(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
