"""soft-RoCE in the guest: `rdma_rxe` on a dummy network device, by netlink.

Spoken in raw netlink rather than by ip(8) and rdma(8): neither need be installed, and under emulation each
process costs more than all of this.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

NETDEV = "regrepro0"
DEVICE = "rxe_regrepro0"
ADDRESS = "10.99.0.1"
PREFIX_LENGTH = 24
MODULES = ("rdma_rxe", "dummy", "ib_uverbs")

_SYSFS = Path("/sys/class/infiniband")

# linux/netlink.h, linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h, linux/if.h
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_EXCL, _NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
_NLMSG_ERROR = 2
_RTM_NEWLINK, _RTM_NEWADDR = 16, 20
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFF_UP = 1
# rdma/rdma_netlink.h
_NETLINK_RDMA = 20
_RDMA_NL_NLDEV, _RDMA_NLDEV_CMD_NEWLINK = 5, 3
_ATTR_DEV_NAME, _ATTR_NDEV_NAME, _ATTR_LINK_TYPE = 2, 51, 65


def _attribute(kind: int, payload: bytes) -> bytes:
    length = 4 + len(payload)
    return struct.pack("=HH", length, kind) + payload + b"\0" * (-length % 4)


def _string(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def message(kind: int, flags: int, payload: bytes) -> bytes:
    """Return one netlink message that asks for an acknowledgement."""
    return struct.pack("=IHHII", 16 + len(payload), kind, flags | _NLM_F_REQUEST | _NLM_F_ACK, 1, 0) + payload


def _ask(family: int, request: bytes, what: str) -> None:
    """Send a request and wait for the acknowledgement. Raises OSError with the kernel's errno."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family) as channel:
        channel.bind((0, 0))
        channel.settimeout(30)
        channel.send(request)
        answer = channel.recv(65536)
    kind = struct.unpack_from("=H", answer, 4)[0]
    error = -struct.unpack_from("=i", answer, 16)[0] if kind == _NLMSG_ERROR else 0
    if error:
        raise OSError(error, f"{what}: {os.strerror(error)}")


def make_netdev() -> None:
    """Make the dummy network device, up and with an address. Raises OSError."""
    info = _attribute(_IFLA_LINKINFO, _string(_IFLA_INFO_KIND, "dummy"))
    link = (
        struct.pack("=BxHiII", socket.AF_UNSPEC, 0, 0, _IFF_UP, _IFF_UP)
        + _string(_IFLA_IFNAME, NETDEV)
        + info
    )
    _ask(
        socket.NETLINK_ROUTE,
        message(_RTM_NEWLINK, _NLM_F_CREATE | _NLM_F_EXCL, link),
        f"dummy device {NETDEV}",
    )
    packed = socket.inet_aton(ADDRESS)
    index = socket.if_nametoindex(NETDEV)
    address = struct.pack("=BBBBi", socket.AF_INET, PREFIX_LENGTH, 0, 0, index)
    address += _attribute(_IFA_LOCAL, packed) + _attribute(_IFA_ADDRESS, packed)
    _ask(
        socket.NETLINK_ROUTE,
        message(_RTM_NEWADDR, _NLM_F_CREATE | _NLM_F_EXCL, address),
        f"address {ADDRESS} on {NETDEV}",
    )


def make_rxe() -> None:
    """Make the rxe device on the dummy network device. Raises OSError."""
    payload = (
        _string(_ATTR_DEV_NAME, DEVICE) + _string(_ATTR_LINK_TYPE, "rxe") + _string(_ATTR_NDEV_NAME, NETDEV)
    )
    kind = (_RDMA_NL_NLDEV << 10) + _RDMA_NLDEV_CMD_NEWLINK
    _ask(_NETLINK_RDMA, message(kind, 0, payload), f"soft-RoCE device {DEVICE}")


def wait_for_gid(seconds: float = 20.0) -> bool:
    """Wait until the device has the GID of our address: the kernel adds it from a work queue."""
    wanted = "ffff:" + ":".join(
        part.hex() for part in (socket.inet_aton(ADDRESS)[:2], socket.inet_aton(ADDRESS)[2:])
    )
    deadline = time.monotonic() + seconds
    while True:
        for path in (_SYSFS / DEVICE / "ports/1/gids").glob("*"):
            try:
                if path.read_text().strip().endswith(wanted):
                    return True
            except OSError:
                continue
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
