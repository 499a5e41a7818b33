"""What registers memory: an RDMA device by libibverbs, pyverbs as a second opinion, or io_uring where there
is no device.

Each asks the kernel for a `FOLL_LONGTERM` pin of the range, which is what an MR needs.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from regrepro.errors import RegreproError, Unmet
from regrepro.options import RunOptions
from regrepro.stage.ports import Device, MemoryRegion

VERBS = ("ibv_reg_mr_iova2", "ibv_reg_mr", "ibv_reg_dmabuf_mr", "pyverbs.MR")

# As NCCL 2.17 registers its host buffers (transport/net_ib.cc).
NCCL_ACCESS = ("LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ")

_SYSFS = Path("/sys/class/infiniband")


def software_driver(device: str) -> str | None:
    """Return `rdma_rxe` or `siw` where the device is software over a net device; None for hardware."""
    directory = _SYSFS / device
    if (directory / "device").exists():
        return None
    with suppress(OSError):
        description = (directory / "node_desc").read_text().strip().lower()
        if description.startswith("rxe"):
            return "rdma_rxe"
        if "iwarp" in description:
            return "siw"
    return "software-rdma"


def find_device(options: RunOptions) -> tuple[str | None, str]:
    """Return the RDMA device of this run, or None and why there is none."""
    if options.rdma_device == "none":
        return None, "--rdma-device none"
    from regrepro.core import verbs

    missing = verbs.available()
    if missing:
        return None, missing
    try:
        devices = list(verbs.devices())
    except (OSError, RegreproError) as error:
        return None, f"the RDMA devices cannot be listed: {getattr(error, 'strerror', None) or error}"
    if options.rdma_device != "auto":
        if options.rdma_device in devices:
            return options.rdma_device, ""
        present = ", ".join(devices) or "none"
        return None, f"there is no RDMA device {options.rdma_device} (present: {present})"
    if not devices:
        return None, "this machine has no RDMA device"
    # Hardware first: soft-RoCE beside a real card is there for something else.
    devices.sort(key=lambda name: (software_driver(name) is not None, not _active(name), name))
    return devices[0], ""


def _active(device: str) -> bool:
    with suppress(OSError):
        return any("ACTIVE" in state.read_text() for state in (_SYSFS / device).glob("ports/*/state"))
    return False


def open_device(options: RunOptions) -> Device:
    """Open what the options and the machine give to register with. Raises `Unmet`."""
    device, why = find_device(options)
    if device is not None:
        return VerbsDevice(device, options)
    if options.rdma_device not in ("auto", "none"):
        raise Unmet("rdma", why, "name a device that `ibv_devices` shows, or leave --rdma-device out")
    return IoUringDevice(why)


class _VerbsRegion:
    """An MR; `deregister` raises OSError."""

    def __init__(self, region: Any) -> None:
        self._region = region
        self.lkey: int | None = region.lkey
        self.rkey: int | None = region.rkey

    @property
    def region(self) -> Any:
        return self._region

    def deregister(self) -> None:
        self._region.dereg()


class VerbsDevice:
    """An RDMA device and one protection domain on it."""

    verb = "ibv_reg_mr_iova2"
    verbs: tuple[str, ...] = VERBS
    default_access: tuple[str, ...] = NCCL_ACCESS

    def __init__(self, device: str, options: RunOptions) -> None:
        from regrepro.core import verbs

        self.name = device
        self.stand_in = software_driver(device)
        self._options = options
        self._access_bits = verbs.access_bits
        self._kept_series = verbs.KeptSeries
        self._pyverbs: Any = None
        try:
            self._device = verbs.Device(device)
            self._pd = self._device.pd()
        except (OSError, RegreproError) as error:
            raise Unmet(
                "rdma",
                f"{device} cannot be opened: {getattr(error, 'strerror', None) or error}",
                "check the permissions of /dev/infiniband/uverbs*",
            ) from None

    def register(
        self, verb: str, address: int, length: int, *, iova: int, access: tuple[str, ...], fd: int | None
    ) -> MemoryRegion:
        bits = self._access_bits(access)
        if verb == "ibv_reg_mr_iova2":
            return _VerbsRegion(self._pd.reg_mr_iova2(address, length, iova, bits))
        if verb == "ibv_reg_mr":
            return _VerbsRegion(self._pd.reg_mr(address, length, bits))
        if verb == "ibv_reg_dmabuf_mr":
            return _VerbsRegion(self._pd.reg_dmabuf_mr(-1 if fd is None else fd, 0, length, iova, bits))
        return _VerbsRegion(self._second_opinion().reg_mr(address, length, bits))

    def register_series(
        self, address: int, length: int, *, access: tuple[str, ...], kept: Any, keep: bool, **rest: Any
    ) -> tuple[Any, Any]:
        """Register many times in C (`core.verbs.ProtectionDomain.register_series`).

        Returns what keeps the MRs (None without `keep`) and where the series ended.
        """
        if keep and kept is None:
            kept = self._kept_series(self._pd, rest["count"])
        bits = self._access_bits(access)
        return kept, self._pd.register_series(address, length, access=bits, kept=kept, **rest)

    def _second_opinion(self) -> Any:
        """Return pyverbs on this device: an errno that it gets, too, is not our core's own doing."""
        if self._pyverbs is None:
            from regrepro.core import pyverbs_device

            try:
                self._pyverbs = pyverbs_device.PyverbsDevice(self.name)
            except (OSError, RegreproError) as error:
                raise Unmet(
                    "pyverbs",
                    getattr(error, "why", "") or str(error),
                    "install the distribution's python3-pyverbs; the venv needs --system-site-packages",
                ) from None
        return self._pyverbs

    def transfer(self, source: MemoryRegion, target: MemoryRegion, length: int, opcode: str) -> None:
        from regrepro.core import verbs

        assert isinstance(source, _VerbsRegion)
        assert isinstance(target, _VerbsRegion)
        options = self._options
        verbs.loopback_transfer(
            self._device, options.port, options.gid_index, source.region, target.region, length, opcode
        )

    def close(self) -> None:
        if self._pyverbs is not None:
            self._pyverbs.close()
        self._device.close()


class _FixedBuffer:
    lkey: int | None = None
    rkey: int | None = None

    def __init__(self, ring: Any, idle: list[Any]) -> None:
        self._ring = ring
        self._idle = idle

    def deregister(self) -> None:
        self._ring.unregister()
        self._idle.append(self._ring)


class IoUringDevice:
    """io_uring's fixed buffers: the kernel takes the same `FOLL_WRITE|FOLL_LONGTERM` pin as for an MR."""

    name = "io_uring"
    verb = "io_uring_register_buffers"
    verbs: tuple[str, ...] = ("io_uring_register_buffers",)
    stand_in: str | None = "io-uring"
    default_access: tuple[str, ...] = ()

    def __init__(self, why: str) -> None:
        self.why = why
        # A ring has one table of buffers: as many rings as registrations at a time, kept for the next ones.
        self._idle: list[Any] = []

    def register(
        self, verb: str, address: int, length: int, *, iova: int, access: tuple[str, ...], fd: int | None
    ) -> MemoryRegion:
        from regrepro.core import iouring

        ring = self._idle.pop() if self._idle else iouring.FixedBuffers()
        try:
            ring.register(address, length)
        except OSError:
            self._idle.append(ring)
            raise
        return _FixedBuffer(ring, self._idle)

    def transfer(self, source: MemoryRegion, target: MemoryRegion, length: int, opcode: str) -> None:
        raise Unmet("rdma", "io_uring moves no bytes over a queue pair", "run where there is an RDMA device")

    def close(self) -> None:
        for ring in self._idle:
            with suppress(AttributeError, OSError):
                ring.close()
        self._idle.clear()
