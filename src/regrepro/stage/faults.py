"""Planted faults: what makes a registration fail, or look as if it should, for a cause that is not this bug.

`stage.faults` has them. Each is planted for the length of a `with` block, or of the pass, and recorded as a
`step` that says what was planted. In the control `change(fault="none")` none is: the same steps, without it.
Those that could hurt a node refuse to work outside of a guest of the lab; their scenarios declare the need
`lab`, too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regrepro.errors import RegreproError, Unmet, errno_name
from regrepro.stage.backend import (
    ORDINARY,
    PAGE_SIZE,
    UNPINNABLE,
    Backend,
    HeldPin,
    MemoryRegion,
    Range,
    Registrar,
    default_huge_page_size,
    readable,
)

if TYPE_CHECKING:
    from regrepro.stage import Stage
    from regrepro.stage.buffers import Buffer, Place

_T = TypeVar("_T")

_CAP_IPC_LOCK = 14  # include/uapi/linux/capability.h
_CAPABILITY_VERSION_3 = 0x20080522
_NOBODY = 65534
_MAP_FIXED_NOREPLACE = 0x100000  # include/uapi/asm-generic/mman-common.h, since 4.17; a hint before
_PR_SET_DUMPABLE = 4
# File systems that keep their pages in memory only, or do not let a file be written by a shared mapping: a
# page of theirs needs no dirty tracking, so it may be pinned for long. The files of an overlay may lie on it.
_NOT_WRITTEN_BACK = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs", "9p", "overlay", "proc", "sysfs")
# Of the memory, while huge pages are made of all the rest: for small pages, and for the guest to live on.
_LEAVE_SMALL, _KEEP_FREE = 512 << 20, 128 << 20
_UDMABUF_CREATE = 0x40187542  # _IOW('u', 0x42, struct udmabuf_create), include/uapi/linux/udmabuf.h
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 0x2  # include/uapi/linux/fcntl.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mount.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p]


def _checked(result: int | None, call: str) -> None:
    if result == -1 or result == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


class Faults:
    """The faults of one pass. Made by the stage."""

    def __init__(self, stage: Stage, *, planted: bool) -> None:
        self._stage = stage
        self.planted = planted
        """Whether faults are planted in this pass: not in the control that leaves them out."""

    def either(self, fault: _T, sound: _T) -> _T:
        """Return what is wrong, or in the control what would be right."""
        return fault if self.planted else sound

    def _step(self, name: str, **keys: Any) -> None:
        self._stage.step(name, **keys)

    def _in_lab(self, what: str) -> None:
        if not self._stage.backend.in_lab:
            raise Unmet("lab", f"{what} could hurt a node", "run it in a virtual machine: regrepro lab run")

    def _untraced(self) -> AbstractContextManager[None]:
        tracer: Any = self._stage._tracer
        return tracer.paused() if tracer is not None else nullcontext()

    def only_on(self, driver: str, why: str) -> None:
        """End the pass where the device is not of this software driver. Raises `Unmet`."""
        registrar = self._stage.backend.registrar()
        if registrar.stand_in != driver:
            raise Unmet(driver, f"{registrar.device} is another device: {why}", "run it in the lab")

    # Limits

    @contextmanager
    def memlock(self, limit: int, *, capable: bool) -> Iterator[None]:
        """Lower the soft RLIMIT_MEMLOCK to `limit` bytes; take CAP_IPC_LOCK from this thread unless
        `capable`.
        """
        if not self.planted:
            yield
            return
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

    @contextmanager
    def memory_cgroup(self, limit: int) -> Iterator[None]:
        """Put this process into a memory cgroup of its own with a hard limit of `limit` bytes, no swap.

        The kernel kills the process when it goes beyond. Lab only.
        """
        self._in_lab("a memory cgroup that kills")
        if not self.planted:
            yield
            return
        root = _cgroup2()
        group = root / f"regrepro-{os.getpid()}"
        with suppress(OSError):
            (root / "cgroup.subtree_control").write_text("+memory")
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("::")[2].strip().lstrip("/")
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

    # Addresses and mappings

    def unmapped_address(self, length: int) -> int:
        """Return an address at which `length` bytes are not mapped."""
        reserved = self._stage.backend.reserve(length)
        address = reserved.address
        reserved.close()
        self._step("unmapped", address=address, length=length)
        return address

    @contextmanager
    def hole(self, buffer: Buffer, page: int) -> Iterator[None]:
        """Unmap one page in the middle of a buffer. Afterwards it holds an empty page."""
        if not self.planted:
            yield
            return
        address = buffer.address + page * PAGE_SIZE
        _checked(_libc.munmap(address, PAGE_SIZE), "munmap")
        try:
            self._step("unmapped", buffer=buffer.id, page=page, vma=_vma(buffer))
            yield
        finally:
            # Not to leave the place to somebody else's mapping, which the buffer's end would then take away.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            _checked(_libc.mmap(address, PAGE_SIZE, protection, flags, -1, 0), "mmap")
            self._step("mapped", buffer=buffer.id, page=page, vma=_vma(buffer))

    @contextmanager
    def read_only(self, buffer: Buffer) -> Iterator[None]:
        """Take the right to write from a buffer's mapping (mprotect)."""
        if not self.planted:
            yield
            return
        _checked(_libc.mprotect(buffer.address, buffer.length, mmap.PROT_READ), "mprotect")
        try:
            self._step("read-only", buffer=buffer.id, vma=_vma(buffer))
            yield
        finally:
            _libc.mprotect(buffer.address, buffer.length, mmap.PROT_READ | mmap.PROT_WRITE)
            self._step("writable", buffer=buffer.id, vma=_vma(buffer))

    def untouched_buffer(self, length: int) -> Buffer:
        """Make a buffer of which no page is present."""
        return self._stage.adopt(self._stage.backend.allocate(length, "anonymous"), "anonymous")

    def buffer_of_zero_page(self, pages: int) -> Buffer:
        """Make a buffer that was only read: each page of it is the kernel's one page of zeros."""
        memory = self._stage.backend.allocate(pages * PAGE_SIZE, "anonymous")
        if self.planted:
            view = self._stage.backend.view(memory.address, memory.length)
            if any(view[:: PAGE_SIZE // 2]):
                raise AssertionError("fresh anonymous memory is not zero")
        else:
            memory.populate()
        return self._stage.adopt(memory, "anonymous")

    def buffer_of_file(self, pages: int, place: Place = "any") -> Buffer:
        """Make a buffer that is a shared, writable mapping of a file which the kernel writes back to a disk.

        In a guest of the lab, which has no disk, the file lies in an ext2 on a loop device. In the control
        it is a memfd, which is never written back.
        """
        return self._stage.buffer(pages=pages, place=place, backing="file" if self.planted else "memfd")

    # References

    @contextmanager
    def references(self, buffer: Buffer) -> Iterator[None]:
        """Hold two references to each page that are no pin of the scenario's: as of pages that lie in a pipe,
        or of I/O in flight.

        Two, for a single one can also be a per-CPU LRU batch, and would prove nothing.
        """
        if not self.planted:
            yield
            return
        held: list[HeldPin] = []
        try:
            for _ in range(2):
                held.append(self._stage.backend.hold("get", buffer.address, buffer.length))
            self._step("references-taken", buffer=buffer.id, api=held[0].api, references=len(held))
            yield
        finally:
            while held:
                held.pop().release()
            self._step("references-gone", buffer=buffer.id)

    @contextmanager
    def child(self) -> Iterator[None]:
        """Fork a child that shares this process' memory and does nothing, and end it afterwards."""
        if not self.planted:
            yield
            return
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                # No file of ours stays open in it: a pipe or a ring that holds pages must go with us.
                os.closerange(0, os.sysconf("SC_OPEN_MAX"))
                while True:
                    signal.pause()
            finally:
                os._exit(0)
        os.close(told)
        os.read(ready, 1)  # the end of file: the child has closed everything
        os.close(ready)
        self._step("forked", pid=pid)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._step("child-ended", pid=pid)

    # Memory to move to

    @contextmanager
    def no_huge_page_to_move_to(self) -> Iterator[Buffer]:
        """Make a buffer of one huge page in ZONE_MOVABLE while there is none outside, and none to be made.

        First most of the memory is made into huge pages. Of what is left, one page in each stretch of a huge
        page's size is pinned for long, so that no huge page can be made of it any more. Then the last ones
        are made, and all of them are mapped. In the control the others are given back first, and nothing is
        pinned. Lab only.
        """
        self._in_lab("taking all memory as huge pages")
        size = default_huge_page_size()
        pool = _HugePages(self._stage.backend, size)
        scattered: list[Range] = []
        pins: list[HeldPin] = []
        try:
            pool.grow(max(0, self._stage.backend.available_memory() - _LEAVE_SMALL) // size)
            chosen = next((memory for memory in pool.mapped if self._is_movable_zone(memory)), None)
            if chosen is None:
                why = f"none of {len(pool.mapped)} huge pages lies in ZONE_MOVABLE"
                raise Unmet("movable-zone", why, "boot with movablecore=512M on a kernel with hugetlbfs")
            pool.mapped.remove(chosen)
            if self.planted:
                scattered = self._scatter(size)
                pins += [self._stage.backend.hold("longterm", one.address, one.length) for one in scattered]
                pool.exhaust()
                self._move_out_in_vain(pool)
            else:
                pool.give_back()
            self._step("huge-pages", size=size, mapped=len(pool.mapped) + 1, free=pool.free())
            yield self._stage.adopt(chosen, "hugetlb", place="unpinnable", placed="gather")
        finally:
            for pin in pins:
                pin.release()
            for one in scattered:
                one.close()
            pool.close()

    def _move_out_in_vain(self, pool: _HugePages) -> None:
        """Have the kernel move huge pages out of ZONE_MOVABLE, by long-term pins, until it can no more.

        It gets memory for that which it has no other huge page of: of blocks that are not for movable pages.
        """
        refused = 0
        for memory in pool.mapped:
            if refused < 3 and self._is_movable_zone(memory):
                try:
                    self._stage.backend.hold("longterm", memory.address, PAGE_SIZE).release()
                except OSError:
                    refused += 1

    def _scatter(self, size: int) -> list[Range]:
        """Return pages of which one lies in each stretch of `size` bytes of ordinary memory, gathered."""
        import numpy

        backend = self._stage.backend
        pages = max(0, backend.available_memory() - _KEEP_FREE) // PAGE_SIZE
        memory = backend.allocate(pages * PAGE_SIZE, "anonymous")
        try:
            memory.populate()
            state: Any = backend.snapshot(memory.address, memory.length, counts=False)
            if state is None or not readable(state):
                raise Unmet("page-state", "where pages lie cannot be read here", "run as root")
            ordinary = numpy.flatnonzero((state.place == ORDINARY) & (state.pfn != 0))
            _, first = numpy.unique(state.pfn[ordinary] // (size // PAGE_SIZE), return_index=True)
            chosen = memory.address + ordinary[first].astype(numpy.uint64) * PAGE_SIZE
            target = backend.reserve(max(1, len(chosen)) * PAGE_SIZE)
            backend.gather(chosen.astype(numpy.uint64), target.address)
            return [target]
        finally:
            memory.close()

    def _is_movable_zone(self, memory: Range) -> bool:
        state = self._stage.backend.snapshot(memory.address, PAGE_SIZE, counts=False)
        return state is not None and readable(state) and bool((state.place == UNPINNABLE[-1]).all())

    # dma-buf

    def bad_fd(self) -> int:
        """Return a number that no open file has."""
        self._step("dma-buf", fd="never opened")
        return 1 << 20

    def closed_fd(self) -> int:
        """Return the number of a file that was closed."""
        fd = os.dup(0)
        os.close(fd)
        self._step("dma-buf", fd="closed")
        return fd

    @contextmanager
    def memfd(self) -> Iterator[int]:
        """Yield a descriptor that is no dma-buf."""
        fd = os.memfd_create("regrepro", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, PAGE_SIZE)
            self._step("dma-buf", fd="a memfd")
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def udmabuf(self, pages: int) -> Iterator[int]:
        """Yield a dma-buf of memory pages (/dev/udmabuf). Raises `Unmet` where the kernel makes none."""
        memory = os.memfd_create("regrepro", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        made = -1
        try:
            os.ftruncate(memory, pages * PAGE_SIZE)
            fcntl.fcntl(memory, _F_ADD_SEALS, _F_SEAL_SHRINK)
            try:
                with open("/dev/udmabuf", "rb", buffering=0) as device:  # noqa: PTH123
                    # struct udmabuf_create: memfd, flags (UDMABUF_FLAGS_CLOEXEC), offset, size
                    request = bytearray(24)
                    request[0:4] = memory.to_bytes(4, "little")
                    request[4:8] = (1).to_bytes(4, "little")
                    request[16:24] = (pages * PAGE_SIZE).to_bytes(8, "little")
                    made = fcntl.ioctl(device, _UDMABUF_CREATE, request)
            except OSError as error:
                why = f"/dev/udmabuf: {error.strerror or error}"
                raise Unmet("udmabuf", why, "use a kernel with CONFIG_UDMABUF") from None
            self._step("dma-buf", fd="a udmabuf", pages=pages)
            yield made
        finally:
            os.close(memory)
            if made >= 0:
                os.close(made)

    # The device

    @contextmanager
    def mrs_exhausted(self) -> Iterator[None]:
        """Have another process register until the device has no MR left. Lab only."""
        self._in_lab("exhausting a device")
        if not self.planted:
            yield
            return
        name = self._stage.backend.registrar().device
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _exhaust(name, writing)
        os.close(writing)
        said = b""
        try:
            with self._untraced():  # half a million registrations
                while not said.endswith(b"\n") and (chunk := os.read(reading, 100)):
                    said += chunk
            words = said.decode("ascii", "replace").split()
            if len(words) != 2:
                raise RuntimeError(f"the process that was to register all MRs said {said!r}")
            self._step("mrs-exhausted", registered=int(words[0]), refused_with=words[1])
            yield
        finally:
            os.close(reading)
            with self._untraced():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # the kernel has deregistered them all then

    @contextmanager
    def no_permission(self) -> Iterator[None]:
        """Let the next registrations open the device as a user who may not. Lab only: the device node's mode
        is changed meanwhile.
        """
        self._in_lab("changing a device node")
        registrar = self._stage.backend.registrar()
        if not self.planted:
            yield
            return
        nodes = sorted(Path("/dev/infiniband").glob("uverbs*"))
        modes = [node.stat().st_mode & 0o7777 for node in nodes]
        kept = self._stage.backend
        self._stage.backend = _With(kept, _AsNobody(registrar))
        try:
            for node in nodes:
                node.chmod(0o600)
                _link_by_number(node)
            self._step("no-permission", nodes=[str(node) for node in nodes], user=_NOBODY)
            yield
        finally:
            self._stage.backend = kept
            for node, mode in zip(nodes, modes, strict=True):
                node.chmod(mode)

    @contextmanager
    def device_removed(self) -> Iterator[None]:
        """Remove the soft-RoCE device, as `rdma link delete` does, while it is open here; make it again
        afterwards. Lab only: some kernels never return from the removal.
        """
        self._in_lab("removing an RDMA device")
        name = self._stage.backend.registrar().device
        if not self.planted:
            yield
            return
        index = _device_index(name)
        netdev = Path(f"/sys/class/infiniband/{name}/parent").read_text(encoding="ascii").strip()
        self._step("remove-device", device=name, netdev=netdev)  # written before: it may not return
        _delete_link(index)
        self._step("device-removed", device=name)
        try:
            yield
        finally:
            _new_link(name, netdev)
            self._step("device-made", device=name)


class _HugePages:
    """The kernel's pool of huge pages, and those of it that are mapped here."""

    _COUNT = Path("/proc/sys/vm/nr_hugepages")

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend = backend
        self._size = size
        self._before = int(self._COUNT.read_text(encoding="ascii"))
        self.mapped: list[Range] = []

    def grow(self, pages: int) -> None:
        """Have the kernel make so many more, as far as it can, and map every one that is free."""
        have = int(self._COUNT.read_text(encoding="ascii"))
        self._COUNT.write_text(str(have + pages), encoding="ascii")
        for _ in range(self.free()):
            memory = self._backend.allocate(self._size, "hugetlb")
            self.mapped.append(memory)
            memory.populate()

    def exhaust(self) -> None:
        """Make and map huge pages until the kernel, its memory compacted, can make none three times over.

        It stops at the first that it cannot have at once, while compaction goes on by itself and makes more.
        """
        in_vain = 0
        while in_vain < 3:
            before = len(self.mapped)
            for name, what in (("drop_caches", "3"), ("compact_memory", "1")):
                with suppress(OSError):
                    Path("/proc/sys/vm", name).write_text(what, encoding="ascii")
            self.grow(self._backend.available_memory() // self._size)
            in_vain = in_vain + 1 if len(self.mapped) == before else 0

    @staticmethod
    def free() -> int:
        """Return how many huge pages are in the pool, and not in use."""
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return int(text.partition("HugePages_Free:")[2].split()[0])

    def give_back(self) -> None:
        """Unmap all that are mapped here; they stay in the pool."""
        while self.mapped:
            self.mapped.pop().close()

    def close(self) -> None:
        """Unmap, and have the pool as it was. What is still in use goes when it is unmapped."""
        self.give_back()
        self._COUNT.write_text(str(self._before), encoding="ascii")


class _With:
    """A backend with another registrar."""

    def __init__(self, backend: Backend, registrar: Registrar) -> None:
        self._backend = backend
        self._registrar = registrar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def registrar(self) -> Registrar:
        return self._registrar


class _AsNobody:
    """Opens the device anew for each registration, as nobody."""

    def __init__(self, registrar: Registrar) -> None:
        self.device, self.verb, self.verbs = registrar.device, registrar.verb, registrar.verbs
        self.stand_in, self.default_access = registrar.stand_in, registrar.default_access

    def register(
        self, verb: str, address: int, length: int, *, iova: int, access: tuple[str, ...], fd: int | None
    ) -> MemoryRegion:
        from regrepro.core import verbs

        with _file_system_user(_NOBODY):
            device = verbs.Device(self.device)  # OSError: EACCES
        device.close()
        raise RuntimeError(f"{self.device} could be opened by user {_NOBODY}")

    def transfer(self, source: MemoryRegion, target: MemoryRegion, length: int, opcode: str) -> None:
        raise RuntimeError("nothing is registered here")

    def close(self) -> None: ...


def _link_by_number(node: Path) -> None:
    """Make the link /dev/char/MAJOR:MINOR that udev makes, where there is no udev.

    libibverbs opens the device by it when it could not by its name (open_cdev_robust(), util/open_cdev.c),
    and gives back the errno of that.
    """
    number = node.stat().st_rdev
    link = Path(f"/dev/char/{os.major(number)}:{os.minor(number)}")
    with suppress(FileExistsError):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(node)


@contextmanager
def _file_system_user(user: int) -> Iterator[None]:
    """Have this thread open files as another user: setfsuid(2) takes the capabilities over files, too."""
    _libc.setfsuid(user)
    try:
        yield
    finally:
        _libc.setfsuid(0)
        # The kernel makes a process whose user changed unreadable to itself in /proc (commit_creds()).
        _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _exhaust(name: str, writing: int) -> None:
    """Register one page until the device refuses, tell how many there are and the errno, and wait."""
    answer = "0 unknown"
    try:
        from regrepro.core.memory import Range as Memory
        from regrepro.core.verbs import Device, access_bits

        memory = Memory.anonymous(PAGE_SIZE, huge=False)
        memory.populate()
        pd = Device(name).pd()
        bits = access_bits(("LOCAL_WRITE",))
        count, number = pd.register_until_refused(memory.address, PAGE_SIZE, bits)
        answer = f"{count} {errno_name(number)}"
    except (OSError, RegreproError) as error:
        answer = f"0 {type(error).__name__}"
    finally:
        os.write(writing, f"{answer}\n".encode())
        while True:
            signal.pause()


def _effective_capabilities() -> int:
    text = Path("/proc/thread-self/status").read_text(encoding="ascii", errors="replace")
    return int(text.partition("CapEff:")[2].split()[0], 16)


def _capability_names() -> list[str]:
    from regrepro.kernel.node import decode_capabilities

    return decode_capabilities(_effective_capabilities())


def _set_effective(mask: int) -> None:
    """Set this thread's effective capabilities; permitted and inheritable stay (capset(2))."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    _checked(_libc.capget(header, data), "capget")
    data[0], data[3] = mask & 0xFFFFFFFF, mask >> 32
    _checked(_libc.capset(header, data), "capset")


def _vma(buffer: Buffer) -> str:
    return buffer._memory.vma()


def _cgroup2() -> Path:
    """Return where the cgroup v2 hierarchy is mounted; mount it where it is not. Raises `Unmet`."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if len(words) > 2 and words[2] == "cgroup2":
            return Path(words[1])
    place = Path("/sys/fs/cgroup")
    try:
        _checked(_libc.mount(b"cgroup2", str(place).encode(), b"cgroup2", 0, None), "mount of cgroup2")
    except OSError as error:
        raise Unmet("memory-cgroup", str(error.strerror or error), "use a kernel with cgroup v2") from None
    return place


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
    path = os.path.realpath(directory)
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        place, its_kind = line.split()[1:3]
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, its_kind
    return kind


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


# RDMA netlink, as `rdma link delete` speaks it (include/uapi/rdma/rdma_netlink.h).
_NETLINK_RDMA = 20
_NLDEV = 5 << 10
_GET, _NEWLINK, _DELLINK = 1, 3, 4
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ATTR_DEV_INDEX, _ATTR_DEV_NAME, _ATTR_NDEV_NAME, _ATTR_LINK_TYPE = 1, 2, 51, 65


def _netlink(command: int, flags: int, payload: bytes) -> bytes:
    import socket
    import struct

    request = struct.pack("=IHHII", 16 + len(payload), _NLDEV + command, flags | _REQUEST, 1, 0) + payload
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_RDMA) as channel:
        channel.bind((0, 0))
        channel.send(request)
        return channel.recv(1 << 16)


def _device_index(name: str) -> int:
    """Return the index of an RDMA device. Raises OSError (ENODEV)."""
    import struct

    answer = _netlink(_GET, _DUMP, b"")
    while len(answer) >= 16:
        length, kind = struct.unpack_from("=IH", answer)
        if kind == _NLDEV + _GET:
            found: dict[int, bytes] = {}
            at = 16
            while at + 4 <= length:
                size, attribute = struct.unpack_from("=HH", answer, at)
                if size < 4:
                    break
                found[attribute & 0x3FFF] = answer[at + 4 : at + size]
                at += (size + 3) & ~3
            if found.get(_ATTR_DEV_NAME, b"").rstrip(b"\0") == name.encode():
                return int(struct.unpack("=I", found[_ATTR_DEV_INDEX])[0])
        answer = answer[(length + 3) & ~3 :] if length >= 16 else b""
    raise OSError(errno.ENODEV, f"{name}: {os.strerror(errno.ENODEV)}")


def _delete_link(index: int) -> None:
    """Delete an RDMA link. Raises OSError with the kernel's errno."""
    import struct

    _acknowledged(_netlink(_DELLINK, _ACK, struct.pack("=HHI", 8, _ATTR_DEV_INDEX, index)), "delete")


def _new_link(name: str, netdev: str) -> None:
    """Make a soft-RoCE link on a net device. Raises OSError with the kernel's errno."""
    import struct

    payload = b""
    for attribute, text in ((_ATTR_DEV_NAME, name), (_ATTR_LINK_TYPE, "rxe"), (_ATTR_NDEV_NAME, netdev)):
        word = text.encode() + b"\0"
        payload += struct.pack("=HH", 4 + len(word), attribute) + word + bytes(-len(word) % 4)
    _acknowledged(_netlink(_NEWLINK, _ACK, payload), "add")


def _acknowledged(answer: bytes, what: str) -> None:
    import struct

    number = -int(struct.unpack_from("=i", answer, 16)[0])
    if number:
        raise OSError(number, f"rdma link {what}: {os.strerror(number)}")
