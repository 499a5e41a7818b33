"""Faults of the device: descriptors that are no dma-buf, MRs used up, no permission, a device that goes."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from regrepro.errors import RegreproError, Unmet, errno_name
from regrepro.kernel import netlink
from regrepro.stage.faults.base import Base, fault, libc
from regrepro.stage.ports import PAGE_SIZE, Backend, Device, MemoryRegion

_NOBODY = 65534
_PR_SET_DUMPABLE = 4
_UDMABUF_CREATE = 0x40187542  # _IOW('u', 0x42, struct udmabuf_create), include/uapi/linux/udmabuf.h
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 0x2  # include/uapi/linux/fcntl.h


class Devices(Base):
    """What a device refuses, and a device that is not there."""

    def _untraced(self) -> AbstractContextManager[None]:
        tracer: Any = self._stage._tracer
        return tracer.paused() if tracer is not None else nullcontext()

    def only_on(self, driver: str, why: str) -> None:
        """End the pass where the device is not of this software driver. Raises `Unmet`."""
        device = self._stage.backend.device()
        if device.stand_in != driver:
            raise Unmet(driver, f"{device.name} is another device: {why}", "run it in the lab")

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

    @fault(lab="exhausting a device")
    def mrs_exhausted(self) -> Iterator[None]:
        """Have another process register until the device has no MR left. Lab only."""
        name = self._stage.backend.device().name
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

    @fault(lab="changing a device node")
    def no_permission(self) -> Iterator[None]:
        """Let the next registrations open the device as a user who may not. Lab only: the device node's mode
        is changed meanwhile.
        """
        device = self._stage.backend.device()
        nodes = sorted(Path("/dev/infiniband").glob("uverbs*"))
        modes = [node.stat().st_mode & 0o7777 for node in nodes]
        kept = self._stage.backend
        self._stage.backend = _With(kept, _AsNobody(device))
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

    @fault(lab="removing an RDMA device")
    def device_removed(self) -> Iterator[None]:
        """Remove the soft-RoCE device, as `rdma link delete` does, while it is open here; make it again
        afterwards. Lab only: some kernels never return from the removal.
        """
        name = self._stage.backend.device().name
        index = netlink.rdma_index(name)
        netdev = Path(f"/sys/class/infiniband/{name}/parent").read_text(encoding="ascii").strip()
        self._step("remove-device", device=name, netdev=netdev)  # written before: it may not return
        netlink.delete_rdma(index)
        self._step("device-removed", device=name)
        try:
            yield
        finally:
            netlink.new_soft_roce(name, netdev)
            self._step("device-made", device=name)


class _With:
    """A backend with another device."""

    def __init__(self, backend: Backend, device: Device) -> None:
        self._backend = backend
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def device(self) -> Device:
        return self._device


class _AsNobody:
    """Opens the device anew for each registration, as nobody."""

    def __init__(self, device: Device) -> None:
        self.name, self.verb, self.verbs = device.name, device.verb, device.verbs
        self.stand_in, self.default_access = device.stand_in, device.default_access

    def register(
        self, verb: str, address: int, length: int, *, iova: int, access: tuple[str, ...], fd: int | None
    ) -> MemoryRegion:
        from regrepro.core import verbs

        with _file_system_user(_NOBODY):
            opened = verbs.Device(self.name)  # OSError: EACCES
        opened.close()
        raise RuntimeError(f"{self.name} could be opened by user {_NOBODY}")

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
    libc.setfsuid(user)
    try:
        yield
    finally:
        libc.setfsuid(0)
        # The kernel makes a process whose user changed unreadable to itself in /proc (commit_creds()).
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


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
