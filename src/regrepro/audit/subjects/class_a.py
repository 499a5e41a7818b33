"""Class A: GPU buffers registered through peer memory without the persistent API."""

from __future__ import annotations

from regrepro.audit.catalogue import Property
from regrepro.audit.finding import Condition, Exposure, Finding
from regrepro.audit.sheet import Sheet


def exposure(sheet: Sheet, peermem: Property | None) -> Exposure:
    """Peer memory is loaded, and what serves registrations is the API without persistent pages."""
    used, loaded = "peer memory (nvidia-peermem) is loaded", sheet.value("nvidia", "peermem")
    if sheet.value("nvidia", "state") == "absent":
        return Exposure("A", [Condition(used, False, "there is no NVIDIA driver on this node")])
    if loaded is None:
        return Exposure("A", [Condition(used, None, "the loaded modules were not captured")])
    if not loaded:
        return Exposure("A", [Condition(used, False, "nvidia-peermem is not loaded")])
    holds, why = _old_api(sheet, loaded, peermem)
    api = Condition("it uses the API without persistent pages", holds, why)
    return Exposure("A", [Condition(used, True, f"{', '.join(loaded)} is loaded"), api])


def _old_api(sheet: Sheet, loaded: list[str], peermem: Property | None) -> tuple[bool | None, str]:
    """Return whether the old API serves, and why one thinks so."""
    if "nv_peer_mem" in loaded:
        return True, "nv_peer_mem has the old API only"
    if peermem is None or peermem.value is None:
        why = peermem.why if peermem else "the driver's version is not known"
        return None, f"which API nvidia-peermem uses is not known: {why}"
    told = f"{peermem.how}: {peermem.why}"
    if peermem.value == "legacy":
        return True, f"this release has the old API only ({told})"
    if peermem.value == "persistent":
        if sheet.value("nvidia", "peermem-persistent-api-support") == "0":
            return True, "persistent_api_support=0 forces the old API"
        return False, f"this release uses the persistent API ({told})"
    clients = sheet.value("nvidia", "peer-memory-clients", {})
    legacy, persistent = (clients.get(name, {}).get("num_alloc_mrs") for name in ("nv_mem", "nv_mem_nc"))
    if legacy:
        return True, f"the old client nv_mem has served {legacy} registrations (/sys/kernel/mm/memory_peers)"
    if legacy == 0 and persistent:
        return False, f"only the persistent client nv_mem_nc serves ({persistent} registrations)"
    return None, (
        "this release registers a client of the old API and one of the persistent API, and which of them "
        f"serves is the RDMA stack's choice ({told}); the counters in /sys/kernel/mm/memory_peers tell once "
        "GPU buffers are registered"
    )


def finding(a: Exposure) -> Finding:
    """Say whether the teardown race can happen, and what ends it."""
    return a.finding(
        "Not exposed to the peer-memory teardown race",
        (
            "Cannot tell whether the peer-memory teardown race can happen here",
            "look at /sys/kernel/mm/memory_peers on the node, or move GPU buffers to DMA-BUF",
        ),
        (
            "Exposed: peer memory without the persistent API can race with the teardown of a GPU allocation",
            "The driver's invalidation callback and the RDMA stack's release of the pages can meet, and "
            "registration of GPU buffers then fails or goes stale. "
            f"{a.reason[:1].upper()}{a.reason[1:]}.",
            "move to 525.105.17, 535.43.02 or later, or register GPU buffers by DMA-BUF and unload "
            "nvidia-peermem",
        ),
    )
