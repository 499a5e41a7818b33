"""Uprobes that live on file descriptors: hits of one instruction of a file in every process of the node.

By perf_event_open(2) and bpf(2), without tracefs. When the process that holds them ends, by SIGKILL too, the
kernel takes its breakpoints out of every other process. An instruction that does not run costs nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrepro._core import ffi, lib
from regrepro.core import bpf
from regrepro.core.bpf import bpf_descriptor, descriptor

_PMU_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
_FUNCTIONS_PMU_TYPE = Path("/sys/bus/event_source/devices/kprobe/type")
_ONLINE = Path("/sys/devices/system/cpu/online")
_POSSIBLE = Path("/sys/devices/system/cpu/possible")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STACK_LIMIT = 65528  # the kernel's own, for a record's 16 bits of length
_LOG_BYTES = 16384  # of the verifier, which writes a line or two for each of the program's instructions
_HINTS = {
    errno.EACCES: "it takes CAP_PERFMON, or CAP_SYS_ADMIN",
    errno.EPERM: "it takes CAP_PERFMON, or a container's seccomp profile forbids perf_event_open, "
    "or rings are more memory than RLIMIT_MEMLOCK allows",
    errno.EMFILE: bpf.HINTS[errno.EMFILE],
    bpf.ENOTSUPP: "the kernel puts no probe on this instruction",
}


def _names() -> Iterator[str]:
    index = 0
    while name := lib.rr_uprobe_register(index):
        yield ffi.string(name).decode()
        index += 1


REGISTERS: tuple[str, ...] = tuple(_names())
"""Names of the registers that a hit has; empty on an architecture that is not known here."""


@dataclass(frozen=True)
class Hit:
    """One run of a probed instruction, before the instruction did anything.

    `probe`: what `UserProbes.add` returned. `pid`, `tid`: in the PID namespace of the reader. `ns`:
    CLOCK_BOOTTIME. `registers`: by canonical name, as `REGISTERS` has them. `stack`: bytes from the stack
    pointer upwards, as many as were asked for and could be read without a page fault.
    """

    probe: int
    pid: int
    tid: int
    ns: int
    registers: dict[str, int]
    stack: bytes


@dataclass(frozen=True)
class Zero:
    """What must be 0 for a hit to count: a register, or with "" memory at the stack pointer + `offset`.

    `size`: bytes that are looked at, 4 (the low ones of a register) or 8.
    """

    register: str = ""
    offset: int = 0
    size: int = 8


@dataclass
class _Ring:
    """The ring of a CPU: the event that it belongs to, and where it is mapped."""

    fd: int
    address: int


def _failure(code: int, what: str, on: str, hints: dict[int, str] = _HINTS) -> OSError:
    return bpf.failure(code, what, on, hints)


def _word(number: int) -> Any:
    """Return a pointer to a number of 4 bytes."""
    return ffi.new("uint32_t *", number)


def _read(file: Path) -> str:
    fd = descriptor(lambda: _open(str(file), os.O_RDONLY))
    if fd < 0:
        raise _failure(-fd, "what the kernel says of probes", str(file))
    try:
        return os.read(fd, _PAGE).decode("ascii").strip()
    finally:
        os.close(fd)


def _open(name: str, flags: int) -> int:
    """Return a descriptor, or a negative errno as C functions do."""
    try:
        return os.open(name, flags | os.O_CLOEXEC)
    except OSError as error:
        return -(error.errno or errno.EIO)


def _cpus(file: Path) -> list[int]:
    cpus: list[int] = []
    for part in _read(file).split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def online_cpus() -> list[int]:
    """Return the CPUs that are online, in order. Raises OSError."""
    return _cpus(_ONLINE)


def registers_in_context() -> dict[str, int]:
    """Return where the context of a program of PROG_KPROBE has each register, bytes."""
    return {name: int(lib.rr_uprobe_context(index)) for index, name in enumerate(REGISTERS)}


def attach_to_function(function: str, program: int, *, at_return: bool = False) -> int:
    """Run a program of PROG_KPROBE when a function of the kernel begins, or returns; on all CPUs, as long as
    the descriptor that this returns is open. Raises OSError; ENOENT too where this kernel has no kprobes.
    """
    return _attach(_FUNCTIONS_PMU_TYPE, function, 0, program, at_return=at_return)


def attach_to_code(path: str, offset: int, program: int, *, at_return: bool = False) -> int:
    """Run a program of PROG_KPROBE when a function begins, or returns, that lies at `offset` of a file, in
    every process; as long as the descriptor that this returns is open. Raises OSError.
    """
    return _attach(_PMU_TYPE, path, offset, program, at_return=at_return)


def _attach(
    pmu: Path, name: str, offset: int, program: int, *, at_return: bool = False, shown: str = ""
) -> int:
    """An event stays in force when its CPU goes offline, but can be opened only on one that is online."""
    kind, told = int(_read(pmu)), name.encode()
    fd = -errno.ENODEV
    for cpu in online_cpus():
        fd = descriptor(lambda cpu=cpu: int(lib.rr_uprobe_open(kind, at_return, told, offset, cpu)))  # type: ignore[misc]
        if fd != -errno.ENODEV:
            break
    if fd < 0:
        what = f"a uprobe at byte {offset:#x}" if pmu is _PMU_TYPE else "a kprobe"
        raise _failure(-fd, what, shown or name)
    status = lib.rr_uprobe_start(fd, program)
    if status:
        os.close(fd)
        raise _failure(-status, "giving a probe its BPF program", shown or name)
    return fd


class UserProbes:
    """Uprobes in every process of the node, and their hits.

    A context manager; not for several threads at once. `stack_bytes`: of the stack, with each hit; a multiple
    of 8 up to 65,528. `ring_pages`: pages of each CPU's ring, a power of two. Raises ValueError for other
    values, and where a hit is larger than a ring. The kernel counts the rings' memory for RLIMIT_MEMLOCK
    where they are larger than kernel.perf_event_mlock_kb.

    In a time namespace with offsets of its own `ns` is wrong by their difference.

    A child of a fork has the descriptors too, until it calls exec or ends: so long do probes stay.
    """

    __slots__ = (
        "_counter",
        "_events",
        "_hits",
        "_lost",
        "_next",
        "_ring_pages",
        "_rings",
        "_rings_map",
        "_room",
        "_stack_bytes",
        "_stacks",
        "_tally",
        "_waiting",
    )

    def __init__(self, *, stack_bytes: int = 256, ring_pages: int = 8) -> None:
        if not 0 <= stack_bytes <= _STACK_LIMIT or stack_bytes % 8:
            raise ValueError(f"stack_bytes={stack_bytes} is no multiple of 8 up to {_STACK_LIMIT}")
        if ring_pages < 1 or ring_pages & (ring_pages - 1):
            raise ValueError(f"ring_pages={ring_pages} is no power of two")
        record = lib.rr_uprobe_record_bytes(stack_bytes)
        if record >= ring_pages * _PAGE:
            raise ValueError(f"a hit of {record} bytes does not fit into ring_pages={ring_pages}")
        self._stack_bytes = stack_bytes
        self._ring_pages = ring_pages
        # A thread whose stack pointer is wild gives hits without a stack: of those a ring holds the most.
        self._room = ring_pages * _PAGE // lib.rr_uprobe_record_bytes(0) + 1
        self._hits = ffi.new("struct rr_uprobe_hit[]", self._room)
        self._stacks = ffi.new("uint8_t[]", ring_pages * _PAGE)
        self._tally = ffi.new("struct rr_uprobe_tally *")
        self._rings: dict[int, _Ring] = {}
        self._rings_map = -1
        self._counter: bpf.Counter | None = None
        self._lost = 0  # of counters that are closed
        self._events: dict[int, int] = {}  # probe → descriptor
        self._waiting: list[Hit] = []
        self._next = 0

    @staticmethod
    def supported() -> str:
        """Return why this machine has no such probes, "" if it has. Rights are not looked at: see `add`."""
        if not REGISTERS:
            return f"the registers of {os.uname().machine} are not known here"
        if not _PMU_TYPE.exists():
            return f"this kernel has no uprobes for perf (CONFIG_UPROBE_EVENTS: {_PMU_TYPE} is missing)"
        if lib.rr_bpf_answer() == -errno.ENOSYS:
            return "this kernel has no bpf(2) (CONFIG_BPF_SYSCALL)"
        return ""

    def add(self, path: str | Path, offset: int, *, zero: Zero | None = None) -> int:
        """Put a probe on the instruction at this offset of a file, in bytes, in every process now and later.

        `offset` must be that of an instruction's first byte: a breakpoint is written over it, and the kernel
        cannot know where instructions begin. It is the offset in the file, not an address. The file is the
        one that the path names now. Hits with anything but 0 in `zero` do not count; they cost as much.

        Returns the probe's number. Raises OSError, with nothing left behind: ENOENT and the like for the
        path; EINVAL for what is no regular file, or for an offset beyond its end; EACCES or EPERM without
        CAP_PERFMON and CAP_BPF, or where RLIMIT_MEMLOCK, which is raised as far as may be, is too low; EMFILE
        where RLIMIT_NOFILE, whose soft limit is raised to the hard one, is too low for a descriptor for each
        CPU, each probe and five more; 524 for an instruction that cannot be probed, where a process maps it
        now; ENOSYS where `supported` gives a reason. EINVAL or EACCES with the verifier's words is a BPF
        program that the kernel did not take.
        """
        name = os.fspath(path)
        why_not = self.supported()
        if why_not:
            raise OSError(errno.ENOSYS, why_not, name)
        number = self._next
        self._next += 1
        file = descriptor(lambda: _open(name, os.O_PATH))
        if file < 0:
            raise _failure(-file, "a uprobe's file", name)
        try:
            self._check_place(file, offset, name)
            self._open_rings(name)
            self._events[number] = self._open_event(number, file, offset, name, zero)
        except BaseException:
            if not self._events:
                self._close_rings()
            raise
        finally:
            os.close(file)
        return number

    @staticmethod
    def _check_place(file: int, offset: int, path: str) -> None:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "a uprobe goes into a regular file only", path)
        if not 0 <= offset < status.st_size:
            said = f"a uprobe at byte {offset:#x} of a file of {status.st_size:#x} bytes"
            raise OSError(errno.EINVAL, said, path)

    def _open_rings(self, path: str) -> None:
        """Open a ring for each online CPU if there are none yet; later ones are for `follow_cpus`."""
        if self._rings:
            return
        cpus = _cpus(_POSSIBLE)[-1] + 1
        # One after the other, so that an error leaves what there is to `_close_rings`.
        self._rings_map = bpf_descriptor(lambda: int(lib.rr_uprobe_rings_open(cpus)))
        if self._rings_map < 0:
            raise _failure(-self._rings_map, "bpf's map of the rings", path, bpf.HINTS)
        self._counter = bpf.Counter("regrepro_lost")
        for cpu in online_cpus():
            self._open_ring(cpu, path)

    def _open_ring(self, cpu: int, path: str) -> None:
        fd = descriptor(lambda: int(lib.rr_uprobe_ring_open(cpu, self._stack_bytes)))
        if fd == -errno.ENODEV:
            return  # it went offline just now
        if fd < 0:
            raise _failure(-fd, f"perf_event_open on CPU {cpu}", path)
        address = ffi.new("uintptr_t *")
        status = lib.rr_uprobe_ring_map(fd, self._ring_pages, address)
        if status:
            os.close(fd)
            raise _failure(-status, f"mapping the ring of CPU {cpu} ({self._ring_pages + 1} pages)", path)
        ring = _Ring(fd, int(address[0]))
        # Only now that it is mapped: what is sent to a ring without memory is counted by nobody.
        status = lib.rr_bpf_map_set(self._rings_map, _word(cpu), _word(fd))
        if status:
            self._close_ring(ring)
            raise _failure(-status, f"putting the ring of CPU {cpu} into bpf's map", path, bpf.HINTS)
        self._rings[cpu] = ring

    def _open_event(self, number: int, file: int, offset: int, path: str, zero: Zero | None) -> int:
        program = self._load(number, path, zero)
        try:
            return _attach(_PMU_TYPE, f"/proc/self/fd/{file}", offset, program, shown=path)
        finally:
            os.close(program)

    def _load(self, number: int, path: str, zero: Zero | None) -> int:
        log = ffi.new("char[]", _LOG_BYTES)
        condition = ffi.new("struct rr_uprobe_zero *")  # of size 0: none
        if zero is not None:
            condition.reg = REGISTERS.index(zero.register) if zero.register else -1
            condition.offset, condition.size = zero.offset, zero.size
        assert self._counter is not None
        maps = self._rings_map, self._counter.fd
        program = bpf_descriptor(
            lambda: int(lib.rr_uprobe_program(number, *maps, condition, log, _LOG_BYTES))
        )
        if program < 0:
            what = f"a uprobe's BPF program{bpf.verifier_says(ffi.string(log))}"
            raise _failure(-program, what, path, bpf.HINTS)
        return program

    def remove(self, probe: int) -> None:
        """Take a probe away; hits of it that were not read yet are still read. Raises KeyError.

        The kernel waits for grace periods of RCU: 25 to 170 ms where it was measured, however many CPUs there
        are. So it does for each probe in `close`, and when the process ends, one probe after the other.
        """
        os.close(self._events.pop(probe))

    def fds(self) -> list[int]:
        """Return file descriptors to poll, one for each CPU: readable after hits.

        A poll that says so says it once: call `read` after it. Others come with the first `add` and with
        `follow_cpus`.
        """
        return [ring.fd for ring in self._rings.values()]

    def read(self) -> list[Hit]:
        """Return all hits that are there, by time. Never waits.

        A hit on one CPU may be read later than a younger one of another CPU.
        """
        hits, self._waiting = self._waiting, []
        for ring in self._rings.values():
            hits += self._drain(ring)
        hits.sort(key=lambda hit: hit.ns)
        return hits

    def _drain(self, ring: _Ring) -> list[Hit]:
        count = lib.rr_uprobe_drain(
            ring.address,
            self._ring_pages,
            self._hits,
            self._room,
            self._stacks,
            self._tally,
        )
        hits = []
        for index in range(count):
            hit = self._hits[index]
            if hit.probe < self._next:
                hits.append(self._hit(hit))
            else:
                self._tally.unreadable += 1
        return hits

    def _hit(self, hit: Any) -> Hit:
        return Hit(
            hit.probe,
            hit.pid,
            hit.tid,
            hit.ns,
            dict(zip(REGISTERS, ffi.unpack(hit.registers, len(REGISTERS)), strict=True)),
            bytes(ffi.buffer(self._stacks + hit.stack, hit.stack_length)),
        )

    @property
    def lost(self) -> int:
        """Hits until now that no `read` gives: a ring had no room, or a CPU that came online has none yet.

        Before Linux 6.0 a hit is missed, and not counted, where it preempts a bpf(2) call at work on a map
        (bpf_prog_active: trace_call_bpf() in kernel/trace/bpf_trace.c); so it can only where such a call can
        be preempted, in kernels with CONFIG_PREEMPT since 5.11.
        """
        return self._lost + (self._counter.value if self._counter is not None else 0)

    @property
    def foreign(self) -> int:
        """Hits in 32-bit tasks. Their registers are other ones, so `read` leaves them out."""
        return int(self._tally.foreign)

    @property
    def throttled(self) -> int:
        """How often the kernel held a ring's event back; it does not, as far as known, what BPF sends."""
        return int(self._tally.throttled)

    @property
    def unreadable(self) -> int:
        """Records of a ring that were not understood and so left out; 0 unless something is wrong."""
        return int(self._tally.unreadable)

    def follow_cpus(self) -> None:
        """Open rings for CPUs that came online, and close those of CPUs that went offline.

        To be called now and then; what runs on a new CPU before that is only counted, as `lost`. It
        interrupts each CPU twice. Raises OSError as `add`: the CPUs before the one that failed are followed.
        """
        if not self._rings:
            return
        online = set(online_cpus())
        for cpu, ring in list(self._rings.items()):
            if cpu not in online or lib.rr_uprobe_ring_runs(ring.fd) == 0:
                self._leave_cpu(cpu)
        for cpu in sorted(online - self._rings.keys()):
            self._open_ring(cpu, str(_ONLINE))

    def _leave_cpu(self, cpu: int) -> None:
        ring = self._rings.pop(cpu)
        lib.rr_bpf_map_unset(self._rings_map, _word(cpu))
        self._waiting += self._drain(ring)
        self._close_ring(ring)

    def _close_ring(self, ring: _Ring) -> None:
        lib.rr_uprobe_ring_unmap(ring.address, self._ring_pages)
        os.close(ring.fd)

    def _close_rings(self) -> None:
        while self._rings:
            self._close_ring(self._rings.popitem()[1])
        if self._rings_map >= 0:
            os.close(self._rings_map)
        self._rings_map = -1
        if self._counter is not None:
            self._lost = self.lost
            self._counter.close()
        self._counter = None

    def close(self) -> None:
        """Take all probes away; hits that were not read are gone. Again does nothing."""
        while self._events:
            os.close(self._events.popitem()[1])
        self._close_rings()
        self._waiting.clear()

    def __enter__(self) -> UserProbes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
