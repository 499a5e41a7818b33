"""The RDMA device of the guest programs."""

from __future__ import annotations

import subprocess
import time

from regrepro.core import verbs


def device() -> str:
    """Return an RDMA device, made of soft-RoCE on a dummy interface where there is none."""
    for module in ("ib_uverbs", "rdma_rxe"):
        subprocess.run(["modprobe", module], check=False)
    if not verbs.devices():
        for command in (
            "ip link add regrepro0 type dummy",
            "ip addr add 10.99.0.1/24 dev regrepro0",
            "ip link set regrepro0 up",
            "rdma link add rxe0 type rxe netdev regrepro0",
        ):
            subprocess.run(command.split(), check=True)
        for _ in range(50):
            if verbs.devices():
                break
            time.sleep(0.1)
    return verbs.devices()[0]
