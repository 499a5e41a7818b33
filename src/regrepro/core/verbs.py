"""Verbs through libibverbs, opened at run time: devices, registrations, and one loopback transfer.

Nothing of a registration is checked or rounded here: length, iova and access flags reach libibverbs, and by
it the kernel, as they were given, and the errno that comes back is the one that is raised.
"""

from __future__ import annotations

import errno as errnos
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regrepro._core import ffi, lib
from regrepro.core.calls import Closing, check, failure
from regrepro.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

LIBRARY = "libibverbs.so.1"

ACCESS: dict[str, int] = {
    "LOCAL_WRITE": 1 << 0,
    "REMOTE_WRITE": 1 << 1,
    "REMOTE_READ": 1 << 2,
    "REMOTE_ATOMIC": 1 << 3,
    "MW_BIND": 1 << 4,
    "ZERO_BASED": 1 << 5,
    "ON_DEMAND": 1 << 6,
    "HUGETLB": 1 << 7,
    "FLUSH_GLOBAL": 1 << 8,
    "FLUSH_PERSISTENT": 1 << 9,
    "RELAXED_ORDERING": 1 << 20,
}
"""`enum ibv_access_flags` (include/uapi/rdma/ib_user_ioctl_verbs.h), without its prefix."""

PORT_STATES = {0: "nop", 1: "down", 2: "init", 3: "armed", 4: "active", 5: "active-defer"}
LINK_LAYERS = {0: "unspecified", 1: "infiniband", 2: "ethernet"}
MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}

SOFTWARE_VENDORS = {0xFFFFFF: "rdma_rxe", 0x626D74: "siw"}
"""vendor_id of drivers without hardware (drivers/infiniband/sw/rxe/rxe_param.h, sw/siw/siw.h)."""

OPCODES = ("RDMA_WRITE", "RDMA_READ")

_INFINIBAND = Path("/sys/class/infiniband")
_loaded: dict[str, Any] = {}
_MR_CELL = ffi.typeof("struct rr_mr **")


def access_bits(names: Iterable[str]) -> int:
    """Return the bits of access flags named as in `ACCESS`. Raises UsageError for a name that is none."""
    bits = 0
    for name in names:
        key = name.upper().removeprefix("IBV_ACCESS_")
        if key not in ACCESS:
            raise UsageError(f"no access flag is called {name!r}", hint=f"there are {', '.join(ACCESS)}")
        bits |= ACCESS[key]
    return bits


def access_names(bits: int) -> list[str]:
    """Return the names of access flags; a bit without a name comes as `0x…`."""
    names = [name for name, bit in ACCESS.items() if bits & bit]
    rest = bits & ~sum(ACCESS.values())
    return [*names, hex(rest)] if rest else names


def _library() -> Any:
    """Return the loaded library. Raises EnvironmentProblem with a sentence when there is none."""
    if LIBRARY in _loaded:
        return _loaded[LIBRARY]
    cell = ffi.new("struct rr_verbs **")
    why = ffi.new("char[256]")
    if lib.rr_verbs_load(LIBRARY.encode(), cell, why, 256):
        raise EnvironmentProblem(
            "libibverbs cannot be opened",
            why=ffi.string(why).decode(errors="replace"),
            hint="install rdma-core's library: libibverbs1 and ibverbs-providers on Debian and Ubuntu, "
            "libibverbs elsewhere",
        )
    _loaded[LIBRARY] = cell[0]  # for the life of the process: its providers cannot be unloaded safely
    return cell[0]


def available() -> str | None:
    """Return None if libibverbs can be opened, else a sentence that says why not."""
    try:
        _library()
    except EnvironmentProblem as problem:
        return str(problem)
    return None


def devices() -> list[str]:
    """Return the RDMA devices' names, sorted.

    Raises EnvironmentProblem without libibverbs, OSError when it cannot list devices (ENOSYS: the kernel has
    no ib_uverbs loaded).
    """
    library = _library()
    size = 4096
    while True:
        names = ffi.new("char[]", size)
        count = lib.rr_verbs_devices(library, names, size)
        if count != -errnos.ERANGE:
            break
        size *= 4
    if count == -errnos.ENOSYS:
        return []  # ib_uverbs is not loaded: there is no device to open
    if count < 0:
        raise failure(count, "ibv_get_device_list")
    return sorted(bytes(ffi.buffer(names, size)).decode().split("\0")[:count])


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table.

    `kind` is `IB/RoCE v1` or `RoCE v2` (sysfs), "" where the kernel says none.
    """

    index: int
    address: ipaddress.IPv6Address
    kind: str
    netdev: str

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """The IPv4 address that the GID maps, or None."""
        return self.address.ipv4_mapped


def gids(device: str, port: int = 1) -> list[Gid]:
    """Return the GIDs in use at a port, from /sys/class/infiniband/DEVICE/ports/PORT/gids."""
    table = _INFINIBAND / device / "ports" / str(port)
    found: list[Gid] = []
    try:
        entries = sorted((table / "gids").iterdir(), key=lambda entry: int(entry.name))
    except (OSError, ValueError):
        return found
    for entry in entries:
        try:
            text = entry.read_text(encoding="ascii").strip()
            if not text.strip("0:"):
                continue  # an empty entry; most of a table of hundreds
            address = ipaddress.IPv6Address(text)
        except (OSError, ValueError):
            continue
        kind = _read(table / "gid_attrs" / "types" / entry.name)
        netdev = _read(table / "gid_attrs" / "ndevs" / entry.name)
        found.append(Gid(int(entry.name), address, kind, netdev))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # the kernel answers EINVAL for an entry that has none
        return ""


def loopback_gid_index(device: str, port: int = 1) -> int | None:
    """Return the index of the GID to reach the port itself by.

    RoCE v2 with an IPv4 address is preferred, then an IPv4 address, then RoCE v2. None when the table is
    empty (an InfiniBand port can do without).
    """
    table = gids(device, port)

    def rank(gid: Gid) -> tuple[bool, bool, int]:
        return gid.ipv4 is None, "v2" not in gid.kind, gid.index

    return min(table, key=rank).index if table else None


class MemoryRegion:
    """A registered MR.

    `lkey`, `rkey`, and what it was registered with (`address`, `length`, `iova`, in bytes).
    """

    __slots__ = ("_mr", "_pd", "address", "iova", "length", "lkey", "rkey")

    def __init__(self, pd: ProtectionDomain, mr: Any, address: int, length: int, iova: int) -> None:
        self._pd = pd
        self._mr = mr
        self.lkey: int = mr.lkey
        self.rkey: int = mr.rkey
        self.address = address
        self.length = length
        self.iova = iova
        pd._regions.add(self)

    def dereg(self) -> None:
        """Deregister; again does nothing.

        Raises OSError with the kernel's errno; the MR then still stands.
        """
        mr = self._mr
        if mr is None:
            return
        check(lib.rr_dereg_mr(self._pd._pd, mr), "ibv_dereg_mr")
        self._mr = None
        self._pd._regions.discard(self)

    def __enter__(self) -> MemoryRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self.dereg()


class SeriesEnd(NamedTuple):
    """Where a series of registrations ended: `number` of the one that ended it, and what failed.

    `where`: `done`, `register`, `deregister`, `record` (the line could not be written) or `repair` (a writer
    of the record was killed in the middle of a line). `errno` is 0 only with `done`; `seconds` is the time
    that the refused registration took.
    """

    number: int
    where: str
    errno: int
    seconds: float


class KeptSeries:
    """The MRs that a series keeps."""

    def __init__(self, pd: ProtectionDomain, count: int) -> None:
        self._pd = pd
        self._count = count
        self._cells = ffi.new("struct rr_mr *[]", count)
        pd._regions.add(self)

    def dereg(self) -> None:
        """Deregister all; raises OSError with the kernel's errno at the first that is refused."""
        check(lib.rr_deregister_series(self._pd._pd, self._cells, self._count), "ibv_dereg_mr")
        self._pd._regions.discard(self)


_WHERE = ("done", "register", "deregister", "record", "repair")


class ProtectionDomain(Closing):
    """A PD of a device; registers memory. A context manager that deregisters what is left and deallocates."""

    __slots__ = ("_pd", "_regions", "device")

    def __init__(self, device: Device, pd: Any) -> None:
        self.device = device
        self._pd = pd
        self._regions: set[MemoryRegion | KeptSeries] = set()

    def reg_mr(self, address: int, length: int, access: int) -> MemoryRegion:
        """Register by the function `ibv_reg_mr` itself; raises OSError with its errno."""
        cell = ffi.new(_MR_CELL)
        check(lib.rr_reg_mr(self._pd, address, length, access, cell), "ibv_reg_mr")
        return MemoryRegion(self, cell[0], address, length, address)

    def reg_mr_iova2(self, address: int, length: int, iova: int, access: int) -> MemoryRegion:
        """Register by `ibv_reg_mr_iova2`.

        Raises OSError with its errno (ENOSYS: a libibverbs older than its symbol version 1.8).
        """
        cell = ffi.new(_MR_CELL)
        check(lib.rr_reg_mr_iova2(self._pd, address, length, iova, access, cell), "ibv_reg_mr_iova2")
        return MemoryRegion(self, cell[0], address, length, iova)

    def reg_dmabuf_mr(self, fd: int, offset: int, length: int, iova: int, access: int) -> MemoryRegion:
        """Register a dma-buf by `ibv_reg_dmabuf_mr`.

        Raises OSError with its errno (ENOSYS: a libibverbs older than its symbol version 1.12).
        """
        cell = ffi.new(_MR_CELL)
        check(lib.rr_reg_dmabuf_mr(self._pd, offset, length, iova, fd, access, cell), "ibv_reg_dmabuf_mr")
        return MemoryRegion(self, cell[0], 0, length, iova)

    def register_series(
        self,
        address: int,
        length: int,
        *,
        ranges: int,
        access: int,
        first: int,
        count: int,
        labels: str,
        record: tuple[int, int, int, int],
        kept: KeptSeries | None,
    ) -> SeriesEnd:
        """Register number `first` to `count` by `ibv_reg_mr_iova2`, each with its line in the record.

        `ranges` ranges of `length` bytes lie from `address` on and are taken by turns. `labels` is JSON: the
        keys that all lines have. `record` is what `RecordWriter.handle` gives. Without `kept` each is
        deregistered before the next.
        """
        text = ffi.new("char[]", labels.encode("ascii"))
        series = ffi.new("struct rr_series *")
        series.address, series.length, series.ranges, series.access = address, length, ranges, access
        series.first, series.count, series.labels = first, count, text
        series.kept = kept._cells if kept is not None else ffi.NULL
        into = ffi.new("struct rr_record *")
        into.fd, into.lock_fd, into.start_ns = record[0], record[1], record[3]
        into.shared = ffi.cast("uint64_t *", record[2])
        end = ffi.new("struct rr_series_end *")
        status = lib.rr_register_series(self._pd, series, into, end)
        if end.left != ffi.NULL:  # closing the PD tries again
            MemoryRegion(self, end.left, address, length, address)
        return SeriesEnd(int(end.number), _WHERE[end.where], -int(status), float(end.seconds))

    def register_loop(self, address: int, length: int, access: int, count: int) -> None:
        """Register and deregister `count` times in C, recording nothing: the baseline of the benchmark."""
        check(lib.rr_reg_mr_loop(self._pd, address, length, access, count), "ibv_reg_mr_iova2")

    def register_until_refused(self, address: int, length: int, access: int) -> tuple[int, int]:
        """Register the same bytes again and again until it is refused: (registrations, the errno).

        What was registered stays so until the process ends.
        """
        cell = ffi.new(_MR_CELL)
        count = -1
        status = 0
        while not status:
            status = lib.rr_reg_mr(self._pd, address, length, access, cell)
            count += 1
        return count, abs(status)

    def close(self) -> None:
        """Deregister what is left and deallocate; again does nothing. Raises OSError."""
        if self._pd is None:
            return
        problem: OSError | None = None
        for region in list(self._regions):
            try:
                region.dereg()
            except OSError as error:
                problem = problem or error
        status = lib.rr_pd_dealloc(self._pd)
        if status:
            raise problem or failure(status, "ibv_dealloc_pd")
        self._pd = None
        self._regions.clear()
        self.device._pds.discard(self)


class Device(Closing):
    """An opened RDMA device. A context manager that closes it, its PDs and their MRs.

    Raises EnvironmentProblem without libibverbs or without a device of this name, OSError when opening fails
    (EACCES or EPERM: /dev/infiniband/uverbs* may not be opened).
    """

    __slots__ = ("_device", "_pds", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._pds: set[ProtectionDomain] = set()
        cell = ffi.new("struct rr_device **")
        status = lib.rr_device_open(_library(), name.encode(), cell)
        if status in (-errnos.ENODEV, -errnos.ENOSYS):
            present = ", ".join(devices()) or "none"
            raise EnvironmentProblem(
                f"there is no RDMA device {name!r}",
                why=f"devices: {present}",
                hint="see `ibv_devices` and `rdma link`; a container needs /dev/infiniband",
            )
        if status:
            raise failure(status, f"ibv_open_device of {name}")
        self._device = cell[0]

    def query(self, port: int = 1) -> dict[str, Any]:
        """Return what `ibv_query_device` and `ibv_query_port` say, under the verbs' own names.

        Sizes in bytes; `port_state`, `link_layer` in words; `active_mtu` in bytes. Raises OSError.
        """
        attributes = ffi.new("struct rr_device_attributes *")
        check(lib.rr_device_query(self._device, attributes), "ibv_query_device")
        numbers = (
            *("vendor_id", "vendor_part_id", "hw_ver", "max_mr", "max_mr_size", "page_size_cap"),
            *("device_cap_flags", "max_pd", "max_qp", "max_cq"),
        )
        answer: dict[str, Any] = {
            "device": self.name,
            "fw_ver": ffi.string(attributes.fw_ver).decode(errors="replace"),
            "node_guid": f"{attributes.node_guid:016x}",
            **{name: getattr(attributes, name) for name in numbers},
            "phys_port_cnt": attributes.ports,
            "driver": self.driver(),
        }
        return {**answer, **self.query_port(port)}

    def query_port(self, port: int = 1) -> dict[str, Any]:
        """Return what `ibv_query_port` says of one port. Raises OSError (EINVAL: there is no such port)."""
        attributes = ffi.new("struct rr_port_attributes *")
        status = lib.rr_port_query(self._device, port, attributes) if 0 < port < 256 else -errnos.EINVAL
        if status:
            raise failure(status, f"ibv_query_port {port} of {self.name}")
        return {
            "port": port,
            "port_state": PORT_STATES.get(attributes.state, f"unknown ({attributes.state})"),
            "link_layer": LINK_LAYERS.get(attributes.link_layer, f"unknown ({attributes.link_layer})"),
            "active_mtu": MTU_BYTES.get(attributes.active_mtu, attributes.active_mtu),
            "max_msg_sz": attributes.max_msg_size,
            "gid_tbl_len": attributes.gid_table_length,
            "lid": attributes.lid,
        }

    def driver(self) -> str | None:
        """Return the kernel driver's name (`mlx5_core`, `rdma_rxe`, …), or None where nothing tells."""
        try:
            return (_INFINIBAND / self.name / "device" / "driver").resolve(strict=True).name
        except OSError:
            pass
        # A software device has no bus device; it is known by the vendor that its driver made up.
        attributes = ffi.new("struct rr_device_attributes *")
        if lib.rr_device_query(self._device, attributes):
            return None
        return SOFTWARE_VENDORS.get(attributes.vendor_id)

    def pd(self) -> ProtectionDomain:
        """Allocate a PD. Raises OSError."""
        cell = ffi.new("struct rr_pd **")
        check(lib.rr_pd_alloc(self._device, cell), "ibv_alloc_pd")
        pd = ProtectionDomain(self, cell[0])
        self._pds.add(pd)
        return pd

    def close(self) -> None:
        """Close the device and all that was opened on it; again does nothing. Raises OSError."""
        if self._device is None:
            return
        for pd in list(self._pds):
            pd.close()
        device, self._device = self._device, None
        check(lib.rr_device_close(device), f"ibv_close_device of {self.name}")


def loopback_transfer(  # noqa: PLR0917
    device: Device,
    port: int,
    gid_index: int | None,
    mr_src: MemoryRegion,
    mr_dst: MemoryRegion,
    length: int,
    opcode: str,
    *,
    timeout: float = 10.0,
    src_offset: int = 0,
    dst_offset: int = 0,
) -> None:
    """Move `length` bytes from one MR to another, over two RC queue pairs connected to each other.

    Both MRs must be of one PD of this device. RDMA_WRITE needs REMOTE_WRITE on the target, RDMA_READ needs
    REMOTE_READ on the source and LOCAL_WRITE on the target. `gid_index` None: `loopback_gid_index()`, and by
    LID on InfiniBand. Raises OSError: ETIMEDOUT after `timeout` seconds, EREMOTEIO with the work completion's
    own words when the device refused, or the errno of the step that failed. Whether the bytes arrived is for
    the caller to compare.
    """
    if opcode not in OPCODES:
        raise UsageError(f"no opcode is called {opcode!r}", hint=f"there are {' and '.join(OPCODES)}")
    pd = mr_dst._pd
    if mr_src._pd is not pd or pd.device is not device:
        raise UsageError("the MRs of a transfer must be of one PD of the device")
    if gid_index is None:
        infiniband = device.query_port(port)["link_layer"] == "infiniband"
        gid_index = None if infiniband else loopback_gid_index(device.name, port)
        if gid_index is None and not infiniband:
            raise OSError(
                errnos.EADDRNOTAVAIL, f"port {port} of {device.name} has no GID: its netdev has no address"
            )
    transfer = ffi.new("struct rr_transfer *")
    transfer.port = port
    transfer.gid_index = -1 if gid_index is None else gid_index
    transfer.read = opcode == "RDMA_READ"
    transfer.source = mr_src.iova + src_offset
    transfer.target = mr_dst.iova + dst_offset
    transfer.source_lkey = mr_src.lkey
    transfer.source_rkey = mr_src.rkey
    transfer.target_lkey = mr_dst.lkey
    transfer.target_rkey = mr_dst.rkey
    transfer.length = length
    transfer.timeout_ms = max(1, int(timeout * 1000))
    why = ffi.new("char[256]")
    status = lib.rr_loopback(pd._pd, transfer, why, 256)
    if status:
        text = ffi.string(why).decode(errors="replace") or os.strerror(-status)
        raise OSError(-status, f"loopback {opcode} of {length} bytes on {device.name}: {text}")
