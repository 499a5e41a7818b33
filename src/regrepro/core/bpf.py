"""bpf(2): programs, what they are attached to, and the ring that they write into.

All of it lives on file descriptors: it is gone when the process ends that holds them, by SIGKILL too.
"""

from __future__ import annotations

import errno
import os
import resource
import struct
from collections.abc import Callable, Iterator
from types import TracebackType

from regrepro._core import ffi, lib

# enum bpf_prog_type, bpf_attach_type, bpf_map_type and bpf_func_id, include/uapi/linux/bpf.h
PROG_KPROBE, PROG_TRACING = 2, 26
TRACE_FENTRY, TRACE_FEXIT = 24, 25
MAP_HASH, MAP_ARRAY, MAP_LRU_HASH = 1, 2, 9
BPF_NOEXIST = 1
MAP_LOOKUP, MAP_UPDATE = 1, 2
GET_CURRENT_PID_TGID, GET_CURRENT_UID_GID, GET_CURRENT_COMM, GET_CURRENT_TASK = 14, 15, 16, 35
GET_STACK, PROBE_READ_USER, PROBE_READ_KERNEL, KTIME_GET_BOOT_NS, RINGBUF_OUTPUT = 67, 112, 113, 125, 130

_LOG_BYTES = 65536  # of the verifier, which writes a line or two for each of the program's instructions
_TAKE_BYTES = 65536
_MISSES = b"recursion_misses:"
ENOTSUPP = 524  # the kernel's own, unknown to errno(3)
_DESCRIPTORS = "RLIMIT_NOFILE allows no more file descriptors"
HINTS = {
    errno.EPERM: "bpf(2) takes CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN, or a container's seccomp profile "
    "or the kernel's lockdown forbids it, or before Linux 5.11 RLIMIT_MEMLOCK allows no more memory",
    errno.EMFILE: _DESCRIPTORS,
}


def failure(code: int, what: str, on: str, hints: dict[int, str]) -> OSError:
    """Return an OSError that says what failed, on what, and what would help."""
    hint = f" ({hints[code]})" if code in hints else ""
    said = "Operation not supported" if code == ENOTSUPP else os.strerror(code)
    return OSError(code, f"{what}: {said}{hint}", on)


def _raise_limit(limit: int, hard: int) -> bool:
    """Raise this process's soft limit to its hard one, or both to `hard`. Return whether it is any more."""
    before = resource.getrlimit(limit)
    for wanted in (hard, before[1]):
        try:
            resource.setrlimit(limit, (wanted, wanted))
        except (OSError, ValueError):
            continue
        break
    return resource.getrlimit(limit) != before


def descriptor(call: Callable[[], int]) -> int:
    """Return what a function that opens a file descriptor does, with as many as the hard limit allows."""
    fd = call()
    if fd == -errno.EMFILE and _raise_limit(
        resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ):
        fd = call()
    return fd


def bpf_descriptor(call: Callable[[], int]) -> int:
    """`descriptor` for maps and programs.

    Before Linux 5.11 they count for RLIMIT_MEMLOCK, as do all the rings of this user (user->locked_vm in
    bpf_map_charge_init(), kernel/bpf/syscall.c, and in perf_mmap(), kernel/events/core.c): on a large node
    more than a hard limit of 64 KiB, so it goes too where CAP_SYS_RESOURCE allows that.
    """
    fd = descriptor(call)
    if fd == -errno.EPERM and _raise_limit(resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY):
        fd = descriptor(call)
    return fd


def open_map(
    kind: int, name: str, *, key_size: int = 4, value_size: int = 8, entries: int = 1, flags: int = 0
) -> int:
    """Return the descriptor of a new map. Raises OSError."""
    fd = bpf_descriptor(
        lambda: int(lib.rr_bpf_map(kind, key_size, value_size, entries, flags, name.encode()))
    )
    if fd < 0:
        raise failure(-fd, "a map of bpf(2)", name, HINTS)
    return fd


def read_map(map_fd: int, key_size: int, value_size: int) -> dict[bytes, bytes]:
    """Return what a map has; entries that come or go meanwhile may be there or not. Raises OSError."""
    found: dict[bytes, bytes] = {}
    key, following, value = (ffi.new("uint8_t[]", size) for size in (key_size, key_size, value_size))
    last = ffi.NULL
    while True:
        status = lib.rr_bpf_map_next(map_fd, last, following)
        taken = bytes(ffi.buffer(following))
        if status == -errno.ENOENT or taken in found:  # after the last, or begun again after one that went
            return found
        if status:
            raise failure(-status, "reading a map of bpf(2)", "", HINTS)
        if not lib.rr_bpf_map_get(map_fd, following, value):
            found[taken] = bytes(ffi.buffer(value))
        ffi.memmove(key, following, key_size)
        last = key


def remove_from_map(map_fd: int, key: bytes) -> None:
    """Take an entry out, if it is there."""
    lib.rr_bpf_map_unset(map_fd, ffi.from_buffer("uint8_t[]", key))


def open_btf(module: str) -> int:
    """Return a descriptor of a module's types. Raises OSError."""
    fd = bpf_descriptor(lambda: int(lib.rr_bpf_btf(module.encode())))
    if fd < 0:
        hints = {errno.EPERM: "it takes CAP_SYS_ADMIN"}
        raise failure(-fd, "the types (BTF) of a module", module, hints)
    return fd


def load_program(
    insns: bytes, kind: int, name: str, *, attach: int = 0, btf_id: int = 0, btf_fd: int = 0
) -> int:
    """Return the descriptor of a program. `attach`, `btf_id`, `btf_fd`: for one of PROG_TRACING what it is
    attached to later, and where the id counts, 0 for the kernel itself.

    Raises OSError; EINVAL or EACCES with the verifier's words is a program that the kernel did not take.
    """
    log = ffi.new("char[]", _LOG_BYTES)
    buffer, told = ffi.from_buffer("uint8_t[]", insns), ffi.new("char[]", name.encode())
    program = ffi.new("struct rr_bpf_program *")
    program.name, program.type, program.attach = told, kind, attach
    program.btf_id, program.btf = btf_id, btf_fd
    program.insns, program.count = buffer, len(insns) // 8
    fd = bpf_descriptor(lambda: int(lib.rr_bpf_load(program, log, _LOG_BYTES)))
    if fd < 0:
        raise failure(-fd, f"a BPF program{verifier_says(ffi.string(log))}", name, HINTS)
    return fd


def verifier_says(log: bytes) -> str:
    """Return the last words of the verifier, for a sentence; "" if it said nothing."""
    words = " ".join(log.decode("utf-8", "replace").split())
    return f", of which the verifier says {words[-500:]!r}" if words else ""


def attach_program(program: int, on: str) -> int:
    """Attach a program of PROG_TRACING as long as the descriptor is open that is returned. Raises OSError."""
    fd = bpf_descriptor(lambda: int(lib.rr_bpf_attach(program)))
    if fd < 0:
        raise failure(-fd, "attaching a BPF program", on, HINTS)
    return fd


def missed_runs(program: int) -> int | None:
    """Return how often the kernel passed over a program, because it or another ran on that CPU already.

    None where it does not say: it does since 5.12 for PROG_TRACING, since 6.7 for PROG_KPROBE
    (recursion_misses, bpf_prog_show_fdinfo() in kernel/bpf/syscall.c).
    """
    try:
        fd = os.open(f"/proc/self/fdinfo/{program}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _, found, rest = os.read(fd, 4096).partition(_MISSES)
    except OSError:
        return None
    finally:
        os.close(fd)
    return int(rest.split()[0]) if found else None


class Counter:
    """A number that programs count up. `fd`: of its map, an array of one entry of 8 bytes."""

    def __init__(self, name: str) -> None:
        self.fd = bpf_descriptor(lambda: int(lib.rr_bpf_counter_open(name.encode())))
        if self.fd < 0:
            raise failure(-self.fd, "a map of bpf(2)", name, HINTS)
        address = ffi.new("uintptr_t *")
        status = lib.rr_bpf_counter_map(self.fd, address)
        if status:
            os.close(self.fd)
            raise failure(-status, "mapping a map of bpf(2)", name, HINTS)
        self._address = int(address[0])
        self._last = 0

    @property
    def value(self) -> int:
        """The number now, or when it was closed."""
        return int(lib.rr_bpf_counter(self._address)) if self._address else self._last

    def close(self) -> None:
        """Let it go; programs keep the map as long as they need it."""
        if self._address:
            self._last = self.value
            lib.rr_bpf_counter_unmap(self._address)
            self._address = 0
            os.close(self.fd)
            self.fd = -1


class Ring:
    """What programs of all CPUs write, in the order in which they did (BPF_MAP_TYPE_RINGBUF, Linux 5.8).

    `size`: bytes, a power of two and a multiple of the page's. `fd`: of the map, and to be polled.
    """

    def __init__(self, size: int) -> None:
        self._mapped = ffi.new("struct rr_bpf_ring *")
        self._out = ffi.new("uint8_t[]", _TAKE_BYTES)
        self.fd = bpf_descriptor(lambda: int(lib.rr_bpf_ring_open(size)))
        if self.fd < 0:
            raise failure(-self.fd, "a ring of bpf(2)", f"{size} bytes", HINTS)
        status = lib.rr_bpf_ring_map(self.fd, size, self._mapped)
        if status:
            os.close(self.fd)
            raise failure(-status, "mapping a ring of bpf(2)", f"{size} bytes", HINTS)

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self) -> Iterator[bytes]:
        """Yield what there is, some 64 KiB at most. Raises OSError (EBADMSG) where it is no such ring."""
        used = lib.rr_bpf_ring_take(self._mapped, self._out, _TAKE_BYTES) if self.fd >= 0 else 0
        if used < 0:
            raise failure(int(-used), "reading a ring of bpf(2)", "", HINTS)
        data = bytes(ffi.buffer(self._out, used))
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from("=Q", data, at)
            yield data[at + 8 : at + 8 + length]
            at += 8 + (length + 7) // 8 * 8

    @property
    def empty(self) -> bool:
        """Whether all has been taken that was begun: else there is more, or it is being written just now."""
        return self.fd < 0 or bool(lib.rr_bpf_ring_empty(self._mapped))

    def close(self) -> None:
        """Let it go, with what nobody has taken."""
        if self.fd >= 0:
            lib.rr_bpf_ring_unmap(self._mapped)
            os.close(self.fd)
            self.fd = -1
