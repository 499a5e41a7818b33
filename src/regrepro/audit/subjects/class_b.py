"""Class B: host pages in unpinnable memory, pinned without FOLL_LONGTERM, before RDMA registers them."""

from __future__ import annotations

from regrepro.audit.catalogue import Contract
from regrepro.audit.finding import Condition, Exposure, Finding
from regrepro.audit.sheet import Sheet
from regrepro.audit.subjects import reservations
from regrepro.audit.subjects.memory import Unpinnable, likelihood, likely
from regrepro.audit.subjects.system import refuses

_CONTRACTS = {
    "longterm": "the driver's pin asks for FOLL_LONGTERM",
    "pin": "the driver pins without FOLL_LONGTERM",
    "get": "the driver takes plain references, without FOLL_LONGTERM",
    None: "what the driver's pin asks for is not known",
}


def exposure(sheet: Sheet, contract: Contract | None, memory: Unpinnable) -> Exposure:
    """Unpinnable memory, a host pin without FOLL_LONGTERM, RDMA that registers host memory by GUP."""
    pin = "the NVIDIA driver pins host memory without FOLL_LONGTERM"
    if contract is not None:
        holds = None if contract.longterm is None else not contract.longterm
        words = _CONTRACTS[contract.contract]
        pins = Condition(pin, holds, f"{words} ({contract.how}, {contract.source}: {contract.why})")
    elif sheet.value("nvidia", "state") == "absent":
        pins = Condition(pin, False, "there is no NVIDIA driver on this node")
    else:
        pins = Condition(pin, None, "the NVIDIA driver's version is not known")
    devices = sheet.value("rdma", "devices")
    rdma = "there is an RDMA device, which registers host memory by get_user_pages"
    if devices is None:
        gup = Condition(rdma, None, "the RDMA devices were not captured")
    elif devices:
        names = ", ".join(device["name"] for device in devices[:8])
        gup = Condition(rdma, True, f"host memory is registered by {names}")
    else:
        gup = Condition(rdma, False, "there is no RDMA device")
    what = "there is unpinnable memory that movable allocations can take"
    return Exposure("B", [Condition(what, memory.present, memory.reason), pins, gup, refuses(sheet)])


def finding(sheet: Sheet, b: Exposure, memory: Unpinnable, contract: Contract | None) -> Finding:
    """Say how exposed the node is, how soon, and what ends it."""
    entries = likelihood(sheet)
    words = likely(entries)
    soon = f"How soon: {words}." if words else "How likely it is depends on memory pressure."
    if any(entry["now"] for entry in entries):
        soon = f"It can happen at any time: {words}."
    cures = reservations.fixes(sheet, memory)
    old = contract is not None and contract.contract in ("pin", "get")
    if old and sheet.value("system", "arch") == "x86_64":
        cures.append(
            "or move to a driver whose pin asks for FOLL_LONGTERM on x86 (535.171.04, 550.67, 555 and later)"
        )
    found = b.finding(
        "Not exposed to host pages in unpinnable memory",
        (
            "Cannot tell whether host pages in unpinnable memory can fail here",
            "run the audit as root on the node, and measure the driver with `regrepro run pin_contract`",
        ),
        (
            "Exposed: a host page in unpinnable memory, pinned by the driver first, makes RDMA registration "
            "fail",
            "The driver's pin holds a page where Linux may not leave a long-term pin, so the later "
            f"registration can neither use nor move it and fails with ENOMEM. {soon}",
            "; ".join(cures),
        ),
    )
    if entries:
        source = sheet.source("memory", "zones")
        found.evidence.append({"what": "how likely", "value": words, "source": source})
    return found
