"""soft-RoCE in the guest: `rdma_rxe` on a dummy network device."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from regrepro.kernel import netlink

NETDEV = "regrepro0"
DEVICE = "rxe_regrepro0"
ADDRESS = "10.99.0.1"
PREFIX_LENGTH = 24
MODULES = ("rdma_rxe", "dummy", "ib_uverbs")

_SYSFS = Path("/sys/class/infiniband")


def make() -> None:
    """Make the dummy network device, up and with an address, and the rxe device on it. Raises OSError."""
    netlink.new_dummy(NETDEV)
    netlink.new_address(NETDEV, ADDRESS, PREFIX_LENGTH)
    netlink.new_soft_roce(DEVICE, NETDEV)


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
