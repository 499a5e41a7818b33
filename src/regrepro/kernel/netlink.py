"""Requests to the kernel by netlink: RDMA devices, network devices.

Raw messages rather than ip(8) and rdma(8): neither need be installed, and under emulation each process
costs more than all of this. Layout and numbers: include/uapi/linux/{netlink,rtnetlink,if_link,if_addr,if}.h,
include/uapi/rdma/rdma_netlink.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

_REQUEST, _ACK, _EXCL, _CREATE, _DUMP = 0x1, 0x4, 0x200, 0x400, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_RTM_NEWLINK, _RTM_NEWADDR = 16, 20
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFF_UP = 1
_RDMA = 20  # NETLINK_RDMA
_NLDEV = 5 << 10  # RDMA_NL_NLDEV
_GET, _NEWLINK, _DELLINK, _RES_GET = 1, 3, 4, 9
_DEV_INDEX, _DEV_NAME, _NDEV_NAME, _LINK_TYPE = 1, 2, 51, 65
_RES_SUMMARY, _RES_ENTRY, _RES_NAME, _RES_COUNT = 15, 16, 17, 18
_SECONDS = 30  # that an answer may take


def attribute(kind: int, payload: bytes) -> bytes:
    """Return one attribute, padded."""
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + bytes(-length % 4)


def _string(kind: int, text: str) -> bytes:
    return attribute(kind, text.encode() + b"\0")


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and payload of each attribute; what is cut short ends it."""
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if not 4 <= length <= len(data):
            return
        yield kind & 0x3FFF, data[4:length]
        data = data[(length + 3) & ~3 :]


def message(kind: int, flags: int, payload: bytes) -> bytes:
    """Return one request."""
    return struct.pack("=IHHII", 16 + len(payload), kind, flags | _REQUEST, 1, 0) + payload


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and payload of each message of an answer; what is cut short ends it."""
    while len(data) >= 16:
        length, kind = struct.unpack_from("=IH", data)
        if not 16 <= length <= len(data):
            return
        yield kind, data[16:length]
        data = data[(length + 3) & ~3 :]


def _ask(family: int, kind: int, flags: int, payload: bytes, what: str) -> None:
    """Send a request and wait for the acknowledgement. Raises OSError with the kernel's errno."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family) as channel:
        channel.bind((0, 0))
        channel.settimeout(_SECONDS)
        channel.send(message(kind, flags | _ACK, payload))
        answer = channel.recv(1 << 16)
    for its_kind, body in messages(answer):
        number = -int(struct.unpack_from("=i", body)[0]) if its_kind == _NLMSG_ERROR else 0
        if number:
            raise OSError(number, f"{what}: {os.strerror(number)}")


def new_dummy(name: str) -> None:
    """Make a dummy network device, and turn it on. Raises OSError."""
    link = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, 0, _IFF_UP, _IFF_UP)
    link += _string(_IFLA_IFNAME, name) + attribute(_IFLA_LINKINFO, _string(_IFLA_INFO_KIND, "dummy"))
    _ask(socket.NETLINK_ROUTE, _RTM_NEWLINK, _CREATE | _EXCL, link, f"dummy device {name}")


def new_address(name: str, address: str, prefix_length: int) -> None:
    """Give a network device an IPv4 address. Raises OSError."""
    packed = socket.inet_aton(address)
    index = socket.if_nametoindex(name)
    request = struct.pack("=BBBBi", socket.AF_INET, prefix_length, 0, 0, index)
    request += attribute(_IFA_LOCAL, packed) + attribute(_IFA_ADDRESS, packed)
    _ask(socket.NETLINK_ROUTE, _RTM_NEWADDR, _CREATE | _EXCL, request, f"address {address} on {name}")


def new_soft_roce(name: str, netdev: str) -> None:
    """Make a soft-RoCE device on a network device, as `rdma link add` does. Raises OSError."""
    link = _string(_DEV_NAME, name) + _string(_LINK_TYPE, "rxe") + _string(_NDEV_NAME, netdev)
    _ask(_RDMA, _NLDEV + _NEWLINK, 0, link, f"soft-RoCE device {name}")


def _dump(kind: int) -> Iterator[dict[int, bytes]]:
    """Yield the attributes of each RDMA device that the kernel answers a dump with. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _RDMA) as channel:
        channel.bind((0, 0))
        channel.settimeout(_SECONDS)
        channel.send(message(_NLDEV + kind, _DUMP, b""))
        while True:
            answer = channel.recv(1 << 18)
            for its_kind, body in messages(answer):
                if its_kind == _NLMSG_ERROR:
                    number = -int(struct.unpack_from("=i", body)[0]) if len(body) >= 4 else errno.EIO
                    raise OSError(number, os.strerror(number))
                if its_kind == _NLDEV + kind:
                    yield dict(attributes(body))
            if not answer or any(its_kind == _NLMSG_DONE for its_kind, _ in messages(answer)):
                return


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


def rdma_index(name: str) -> int:
    """Return the index of an RDMA device. Raises OSError (ENODEV)."""
    for found in _dump(_GET):
        if _text(found.get(_DEV_NAME, b"")) == name:
            return int(struct.unpack("=I", found[_DEV_INDEX])[0])
    raise OSError(errno.ENODEV, f"{name}: {os.strerror(errno.ENODEV)}")


def rdma_resources() -> dict[str, dict[str, int]]:
    """Return what each RDMA device has in use, as `rdma resource show` prints it: {mr, qp, pd, …}. No
    privilege is needed. Raises OSError.
    """
    return {
        _text(found[_DEV_NAME]): _resources(found.get(_RES_SUMMARY, b""))
        for found in _dump(_RES_GET)
        if _DEV_NAME in found
    }


def _resources(summary: bytes) -> dict[str, int]:
    entries = (dict(attributes(entry)) for kind, entry in attributes(summary) if kind == _RES_ENTRY)
    return {
        _text(entry[_RES_NAME]): struct.unpack_from("=Q", entry[_RES_COUNT])[0]
        for entry in entries
        if _RES_NAME in entry and len(entry.get(_RES_COUNT, b"")) >= 8
    }


def delete_rdma(index: int) -> None:
    """Delete a software RDMA device, as `rdma link delete` does. Raises OSError."""
    link = attribute(_DEV_INDEX, struct.pack("=I", index))
    _ask(_RDMA, _NLDEV + _DELLINK, 0, link, f"RDMA device {index}")
