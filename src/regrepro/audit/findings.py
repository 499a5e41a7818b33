"""Findings, by rules that can be followed: each looks at named facts and says what they mean and what to
do.

Two classes of failure are judged, after the incident that this project follows:
A, the peer-memory path of GPU buffers (the teardown race of the API without persistent pages), and
B, host pages in unpinnable memory that a driver pins without FOLL_LONGTERM before RDMA registers them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regrepro.audit import parse
from regrepro.audit.catalogue import Contract, Property
from regrepro.audit.sheet import Sheet
from regrepro.kernel.release import stock_series
from regrepro.kernel_functions import PINS_IN_PLACE, Family, of_family

EXPOSED = "exposed"
NOT_EXPOSED = "not-exposed"
UNKNOWN = "unknown"

SEVERITIES = ("exposed", "warning", "unknown", "note", "ok")

MEMLOCK_ENOUGH = 1 << 30
"""A finite locked-memory limit below this is called too small: one rank registers gigabytes."""
MR_NEAR = 0.8
BAR1_NEAR = 0.9
LONGTERM_REFUSES_SINCE = (5, 13)
"""Since this kernel a long-term pin fails where a page cannot leave CMA or ZONE_MOVABLE (mm/gup.c)."""
KHO_SINCE = (6, 16)
DMABUF_SINCE = (5, 12)
OPEN_SINCE = 515


@dataclass
class Finding:
    """One finding. `evidence` items are {what, value, source}; `fix` is "" where nothing is to be done."""

    id: str
    severity: str
    title: str
    explanation: str
    fix: str = ""
    evidence: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the finding in the shape of the schema audit-1."""
        return {
            "id": self.id,
            "severity": self.severity,
            "title": self.title,
            "explanation": self.explanation,
            "fix": self.fix,
            "evidence": self.evidence,
        }


@dataclass(frozen=True)
class Condition:
    """One of the conditions that must all hold: `holds` is None where it is not known."""

    what: str
    holds: bool | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return it in the shape of the schema audit-1."""
        return {"what": self.what, "holds": self.holds, "reason": self.reason}


@dataclass
class Exposure:
    """Whether the node is exposed to one class, by the conditions that must all hold."""

    name: str
    conditions: list[Condition]

    @property
    def state(self) -> str:
        """Exposed where all hold, not exposed where one does not, else unknown."""
        values = [condition.holds for condition in self.conditions]
        if False in values:
            return NOT_EXPOSED
        return UNKNOWN if None in values else EXPOSED

    @property
    def reason(self) -> str:
        """What decides: the condition that fails, those that are not known, or all."""
        wanted = {NOT_EXPOSED: False, UNKNOWN: None, EXPOSED: True}[self.state]
        return "; ".join(condition.reason for condition in self.conditions if condition.holds is wanted)

    def as_dict(self) -> dict[str, Any]:
        """Return it in the shape of the schema audit-1."""
        return {
            "class": self.name,
            "state": self.state,
            "reason": self.reason,
            "conditions": [condition.as_dict() for condition in self.conditions],
        }


def size(count: int | None) -> str:
    """Write bytes for people: 6 GiB, 9.3 GiB, 512 MiB, 64 KiB."""
    if count is None:
        return "an unknown amount"
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            text = f"{count / unit:.1f}"
            return f"{text.removesuffix('.0')} {name}"
    return f"{count} bytes"


# --- unpinnable memory
# ---------------------------------------------------------------------------------------------


@dataclass
class Unpinnable:
    """How much unpinnable memory there is, in bytes (None: not known), and whether there is any at all."""

    present: bool | None
    reason: str
    cma: int | None
    movable: int | None
    blocks_cma: int | None


def unpinnable(sheet: Sheet) -> Unpinnable:
    """Decide whether this node has memory that movable allocations can take and long-term pins cannot
    have.
    """
    page = sheet.value("memory", "page-size")
    zones: list[dict[str, Any]] | None = sheet.value("memory", "zones")
    blocks: list[dict[str, Any]] | None = sheet.value("memory", "page-blocks")
    order = sheet.value("memory", "page-block-order")
    total = sheet.value("memory", "cma-total")
    free = sheet.value("memory", "cma-free")
    has_cma = sheet.value("memory", "kernel-has-cma")
    recorded = sheet.value("memory", "memory-map")
    block_pages = 1 << order if isinstance(order, int) and 0 <= order < 40 else None
    count = None if blocks is None else sum(entry["blocks"].get("CMA", 0) for entry in blocks)
    blocks_cma = count * block_pages * page if count is not None and block_pages and page else None
    if count == 0:
        blocks_cma = 0
    cma = blocks_cma if blocks_cma is not None else max(total, free) if None not in (total, free) else total
    movable_pages = None
    if zones is not None:
        movable_pages = sum(zone["managed"] or 0 for zone in zones if zone["zone"] == "Movable")
    movable = (
        movable_pages * page if movable_pages is not None and page else 0 if movable_pages == 0 else None
    )
    found = []
    if (count or 0) > 0 or (total or 0) > 0 or (free or 0) > 0:
        found.append(f"{size(cma)} of CMA")
    if movable_pages:
        found.append(f"{size(movable)} of ZONE_MOVABLE" if movable else "ZONE_MOVABLE")
    if not found and isinstance(recorded, dict) and recorded.get("has_unpinnable") is True:
        found.append("unpinnable page blocks in the memory map")
    if found:
        return Unpinnable(True, f"there is {' and '.join(found)}", cma, movable, blocks_cma)
    if (
        isinstance(recorded, dict)
        and recorded.get("complete") is True
        and recorded.get("has_unpinnable") is False
    ):
        return Unpinnable(
            False, "the complete memory map has no CMA block and no ZONE_MOVABLE page", 0, 0, blocks_cma
        )
    if movable_pages is None:
        why = "/proc/zoneinfo was not read, so ZONE_MOVABLE is not known"
        return Unpinnable(None, why, cma, movable, blocks_cma)
    if has_cma is False:
        return Unpinnable(False, "the kernel has no CMA and ZONE_MOVABLE is empty", 0, 0, 0)
    if count == 0:
        return Unpinnable(False, "no page block is CMA and ZONE_MOVABLE is empty", 0, 0, 0)
    if total == 0 and free == 0 and all((zone["cma"] or 0) == 0 for zone in zones or []):
        without = _without_kho(sheet)
        if without:
            return Unpinnable(False, f"CmaTotal is 0, ZONE_MOVABLE is empty, and {without}", 0, 0, None)
        why = (
            "CmaTotal is 0, but kexec handover keeps CMA blocks that it does not count, and only root can "
            "read "
            "/proc/pagetypeinfo"
        )
        return Unpinnable(None, why, None, 0, None)
    return Unpinnable(None, "the CMA counts were not read", cma, movable, blocks_cma)


def _without_kho(sheet: Sheet) -> str:
    """Return why kexec handover cannot have left CMA blocks, or ""."""
    config = sheet.value("system", "kernel-config")
    if isinstance(config, dict) and config.get("KEXEC_HANDOVER") == "n":
        return "the kernel has no kexec handover"
    arguments = parse.boot_arguments(sheet.value("system", "boot-arguments", ""))
    if arguments.get("kho", [""])[-1].lower() in ("off", "0", "n", "no", "false"):
        return f"kexec handover is off (kho={arguments['kho'][-1]})"
    stock = stock_of(sheet)
    if stock is not None and stock < KHO_SINCE:
        return f"Linux {stock[0]}.{stock[1]} has no kexec handover"
    return ""


def stock_of(sheet: Sheet) -> tuple[int, int] | None:
    """Return the series of a kernel.org or Debian kernel, None where a number decides nothing."""
    names = ("kernel", "kernel-version", "kernel-banner")
    return stock_series(*(str(sheet.value("system", name, "")) for name in names))


def refuses(sheet: Sheet) -> Condition:
    """Decide whether this kernel refuses a long-term pin of a page that cannot move.

    The kernel's own functions decide, then the reason of its migrations: MR_LONGTERM_PIN (enum
    migrate_reason) came with the patch that brought check_and_migrate_movable_pages() (d1e153fea2a8, 5.13),
    after the one that made a failed migration an error (f0f4463837da). A number decides only where it names
    a source that is known: a vendor's 4.18 may refuse, and only the kernel itself can say so.
    """
    what = "the kernel refuses a long-term pin where the page cannot move"
    symbols = sheet.value("system", "symbols") or []
    moves_or_refuses = {name for name in of_family(Family.UNPINNABLE) if name != PINS_IN_PLACE}
    for symbol in symbols:
        if symbol in moves_or_refuses:
            return Condition(what, True, f"the kernel has {symbol}()")
    if sheet.value("system", "migrates-for-pins") is True:
        return Condition(what, True, "the kernel migrates pages for long-term pins (MR_LONGTERM_PIN in BTF)")
    if PINS_IN_PLACE in symbols:
        return Condition(what, False, f"the kernel pins in place where migration fails ({PINS_IN_PLACE})")
    stock = stock_of(sheet)
    if stock is None:
        name = sheet.value("system", "kernel")
        why = f"{name} is no kernel whose number decides" if name else "the kernel's release is not known"
        return Condition(what, None, f"{why}, and no symbol or BTF of it says so")
    if stock >= LONGTERM_REFUSES_SINCE:
        return Condition(what, True, f"Linux {stock[0]}.{stock[1]} does so (since 5.13)")
    return Condition(
        what, False, f"Linux {stock[0]}.{stock[1]} pins in place where migration fails (before 5.13)"
    )


# --- exposure
# ------------------------------------------------------------------------------------------------------


def class_b(sheet: Sheet, contract: Contract | None, memory: Unpinnable) -> Exposure:
    """Class B: unpinnable memory, a host pin without FOLL_LONGTERM, RDMA that registers host memory by
    GUP.
    """
    pin = "the NVIDIA driver pins host memory without FOLL_LONGTERM"
    state = sheet.value("nvidia", "state")
    if contract is not None:
        holds = None if contract.longterm is None else not contract.longterm
        words = {
            "longterm": "the driver's pin asks for FOLL_LONGTERM",
            "pin": "the driver pins without FOLL_LONGTERM",
            "get": "the driver takes plain references, without FOLL_LONGTERM",
            None: "what the driver's pin asks for is not known",
        }[contract.contract]
        condition = Condition(pin, holds, f"{words} ({contract.how}, {contract.source}: {contract.why})")
    elif state == "absent":
        condition = Condition(pin, False, "there is no NVIDIA driver on this node")
    else:
        condition = Condition(pin, None, "the NVIDIA driver's version is not known")
    devices = sheet.value("rdma", "devices")
    rdma = "there is an RDMA device, which registers host memory by get_user_pages"
    if devices is None:
        gup = Condition(rdma, None, "the RDMA devices were not captured")
    elif devices:
        names = ", ".join(device["name"] for device in devices[:8])
        gup = Condition(rdma, True, f"host memory is registered by {names}")
    else:
        gup = Condition(rdma, False, "there is no RDMA device")
    there = Condition(
        "there is unpinnable memory that movable allocations can take", memory.present, memory.reason
    )
    return Exposure("B", [there, condition, gup, refuses(sheet)])


def class_a(sheet: Sheet, peermem: Property | None) -> Exposure:
    """Class A: GPU buffers registered through peer memory without the persistent API."""
    loaded = sheet.value("nvidia", "peermem")
    used = "peer memory (nvidia-peermem) is loaded"
    api = "it uses the API without persistent pages"
    if sheet.value("nvidia", "state") == "absent":
        return Exposure("A", [Condition(used, False, "there is no NVIDIA driver on this node")])
    if loaded is None:
        return Exposure("A", [Condition(used, None, "the loaded modules were not captured")])
    if not loaded:
        return Exposure("A", [Condition(used, False, "nvidia-peermem is not loaded")])
    first = Condition(used, True, f"{', '.join(loaded)} is loaded")
    if "nv_peer_mem" in loaded:
        return Exposure("A", [first, Condition(api, True, "nv_peer_mem has the old API only")])
    clients = sheet.value("nvidia", "peer-memory-clients", {})
    parameter = sheet.value("nvidia", "peermem-persistent-api-support")
    if peermem is None or peermem.value is None:
        why = peermem.why if peermem else "the driver's version is not known"
        return Exposure(
            "A", [first, Condition(api, None, f"which API nvidia-peermem uses is not known: {why}")]
        )
    told = f"{peermem.how}: {peermem.why}"
    if peermem.value == "legacy":
        return Exposure("A", [first, Condition(api, True, f"this release has the old API only ({told})")])
    if peermem.value == "persistent":
        if parameter == "0":
            return Exposure("A", [first, Condition(api, True, "persistent_api_support=0 forces the old API")])
        return Exposure("A", [first, Condition(api, False, f"this release uses the persistent API ({told})")])
    legacy = clients.get("nv_mem", {}).get("num_alloc_mrs")
    persistent = clients.get("nv_mem_nc", {}).get("num_alloc_mrs")
    if legacy:
        why = f"the old client nv_mem has served {legacy} registrations (/sys/kernel/mm/memory_peers)"
        return Exposure("A", [first, Condition(api, True, why)])
    if legacy == 0 and persistent:
        why = f"only the persistent client nv_mem_nc serves ({persistent} registrations)"
        return Exposure("A", [first, Condition(api, False, why)])
    why = (
        "this release registers a client of the old API and one of the persistent API, and which of them "
        "serves is "
        f"the RDMA stack's choice ({told}); the counters in /sys/kernel/mm/memory_peers tell once GPU "
        f"buffers are registered"
    )
    return Exposure("A", [first, Condition(api, None, why)])


# --- findings
# ------------------------------------------------------------------------------------------------------


def _fact(sheet: Sheet, group: str, name: str) -> dict[str, Any]:
    return {
        "what": f"{group}/{name}",
        "value": sheet.value(group, name),
        "source": sheet.source(group, name),
    }


def likelihood(sheet: Sheet) -> list[dict[str, Any]]:
    """Per node and zone: does a movable allocation take unpinnable memory now, or what must be used up
    first?

    The stock rule (`__rmqueue`, mm/page_alloc.c): movable allocations take CMA once the zone's free CMA
    pages are more than half of its free pages. ZONE_MOVABLE stands first in the zone list and is taken
    first.
    """
    page = sheet.value("memory", "page-size")
    found = []
    for zone in sheet.value("memory", "zones") or []:
        free, free_cma = zone["free"], zone["free_cma"]
        if zone["zone"] == "Movable":
            if zone["managed"]:
                known = free is not None
                now = free > (zone["high"] or 0) if known else None
                found.append(
                    {
                        "node": zone["node"],
                        "zone": zone["zone"],
                        "kind": "ZONE_MOVABLE",
                        "free_bytes": free * page if known and page else None,
                        "share": None,
                        "now": now,
                        "to_go_bytes": 0 if now else None,
                    }
                )
            continue
        if not free_cma:
            continue
        ordinary = free - free_cma if free is not None else None
        now = free_cma > free // 2 if free is not None else None
        # It begins once ordinary free pages are fewer than free CMA pages.
        left = None if ordinary is None or page is None else max(ordinary - free_cma, 0) * page
        found.append(
            {
                "node": zone["node"],
                "zone": zone["zone"],
                "kind": "CMA",
                "free_bytes": free_cma * page if page else None,
                "share": round(free_cma / free, 4) if free else None,
                "now": now,
                "to_go_bytes": left,
            }
        )
    return found


def _likely(entries: list[dict[str, Any]]) -> str:
    parts = []
    for entry in entries:
        place = f"node {entry['node']} {entry['zone']}"
        if entry["now"]:
            share = "" if entry["share"] is None else f" ({entry['share']:.0%} of its free pages are CMA)"
            parts.append(f"{place}: movable allocations take {entry['kind']} now{share}")
        elif entry["to_go_bytes"] is not None:
            parts.append(
                f"{place}: after {size(entry['to_go_bytes'])} more of ordinary memory are used up, by the "
                f"stock rule"
            )
    return "; ".join(parts)


def find(
    sheet: Sheet,
    contract: Contract | None,
    peermem: Property | None,
    *,
    driver: str | None,
) -> tuple[list[Finding], list[Exposure]]:
    """Apply all rules. `driver` is the release that the contract speaks of (installed or asked about)."""
    memory = unpinnable(sheet)
    b = class_b(sheet, contract, memory)
    a = class_a(sheet, peermem)
    found = [_class_b_finding(sheet, b, memory, contract), _class_a_finding(sheet, a)]
    found += _memory_findings(sheet, memory)
    found += _limit_findings(sheet)
    found += _device_findings(sheet, driver)
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return found, [a, b]


def _class_b_finding(sheet: Sheet, b: Exposure, memory: Unpinnable, contract: Contract | None) -> Finding:
    evidence = [{"what": one.what, "value": one.holds, "source": one.reason} for one in b.conditions]
    entries = likelihood(sheet)
    if entries:
        evidence.append(
            {"what": "how likely", "value": _likely(entries), "source": sheet.source("memory", "zones")}
        )
    if b.state == NOT_EXPOSED:
        return Finding(
            "class-b",
            "ok",
            "Not exposed to host pages in unpinnable memory",
            f"One condition of the failure does not hold here: {b.reason}. It needs all of them at once.",
            "",
            evidence,
        )
    if b.state == UNKNOWN:
        return Finding(
            "class-b",
            "unknown",
            "Cannot tell whether host pages in unpinnable memory can fail here",
            f"No condition is excluded, but not all are known: {b.reason}. Until they are, the node "
            f"counts as undecided.",
            "run the audit as root on the node, and measure the driver with `regrepro run pin_contract`",
            evidence,
        )
    likely = _likely(entries)
    now = any(entry["now"] for entry in entries)
    fixes = _memory_fixes(sheet, memory)
    if (
        contract is not None
        and contract.contract in ("pin", "get")
        and sheet.value("system", "arch") in ("x86_64",)
    ):
        fixes.append(
            "or move to a driver whose pin asks for FOLL_LONGTERM on x86 (535.171.04, 550.67, 555 and later)"
        )
    return Finding(
        "class-b",
        "exposed",
        "Exposed: a host page in unpinnable memory, pinned by the driver first, makes RDMA registration fail",
        "The driver's pin holds a page where Linux may not leave a long-term pin, so the later "
        "registration can "
        "neither use nor move it and fails with ENOMEM. "
        + (
            f"It can happen at any time: {likely}."
            if now
            else f"How soon: {likely}."
            if likely
            else "How likely it is depends on memory pressure."
        ),
        "; ".join(fixes),
        evidence,
    )


def _memory_fixes(sheet: Sheet, memory: Unpinnable) -> list[str]:
    arguments = parse.boot_arguments(sheet.value("system", "boot-arguments", ""))
    fixes = []
    if any(
        parse.memparse(part.rpartition(":")[2])
        for value in arguments.get("hugetlb_cma", [])
        for part in value.split(",")
    ):
        fixes.append("boot with hugetlb_cma=0")
    if any(parse.memparse(value) for value in arguments.get("cma", [])):
        fixes.append("boot without cma=, or with what a device needs")
    if memory.movable:
        names = [name for name in ("movablecore", "kernelcore", "movable_node") if name in arguments]
        fixes.append(
            f"boot without {', '.join(names)}"
            if names
            else "online memory as online_kernel, not online_movable"
        )
    if memory.blocks_cma is not None and memory.blocks_cma > sheet.value("memory", "cma-total", 0):
        fixes.append("boot with kho=off")
    return fixes or ["find out which reservation it is: see the CMA areas and the boot log among the facts"]


def _class_a_finding(sheet: Sheet, a: Exposure) -> Finding:
    evidence = [{"what": one.what, "value": one.holds, "source": one.reason} for one in a.conditions]
    if a.state == NOT_EXPOSED:
        return Finding(
            "class-a",
            "ok",
            "Not exposed to the peer-memory teardown race",
            f"One condition of the failure does not hold here: {a.reason}. It needs all of them at once.",
            "",
            evidence,
        )
    if a.state == UNKNOWN:
        return Finding(
            "class-a",
            "unknown",
            "Cannot tell whether the peer-memory teardown race can happen here",
            f"No condition is excluded, but not all are known: {a.reason}. Until they are, the node "
            f"counts as undecided.",
            "look at /sys/kernel/mm/memory_peers on the node, or move GPU buffers to DMA-BUF",
            evidence,
        )
    return Finding(
        "class-a",
        "exposed",
        "Exposed: peer memory without the persistent API can race with the teardown of a GPU allocation",
        "The driver's invalidation callback and the RDMA stack's release of the pages can meet, and "
        "registration of "
        "GPU buffers then fails or goes stale. " + a.reason[:1].upper() + a.reason[1:] + ".",
        "move to 525.105.17, 535.43.02 or later, or register GPU buffers by DMA-BUF and unload "
        "nvidia-peermem",
        evidence,
    )


def _memory_findings(sheet: Sheet, memory: Unpinnable) -> list[Finding]:
    found: list[Finding] = []
    total, free = sheet.value("memory", "cma-total"), sheet.value("memory", "cma-free")
    arguments = parse.boot_arguments(sheet.value("system", "boot-arguments", ""))
    beyond = memory.blocks_cma is not None and total is not None and memory.blocks_cma > total + _slack(sheet)
    above = free is not None and total is not None and free > total
    if beyond or above:
        evidence = [_fact(sheet, "memory", "cma-total"), _fact(sheet, "memory", "cma-free")]
        if memory.blocks_cma is not None:
            evidence.append(
                {
                    "what": "CMA page blocks",
                    "value": memory.blocks_cma,
                    "source": sheet.source("memory", "page-blocks"),
                }
            )
        extra = (memory.blocks_cma or 0) - (total or 0) if beyond else (free or 0) - (total or 0)
        found.append(
            Finding(
                "cma-beyond-total",
                "warning",
                f"CMA beyond CmaTotal: about {size(extra)} that the kernel does not count",
                "Kexec handover (KHO) marks its scratch memory as CMA without counting it in CmaTotal, so "
                "the node has "
                "unpinnable memory though CmaTotal says otherwise. Movable allocations, and so buffers, "
                "can land there.",
                "boot with kho=off, unless a crash kernel or a live update relies on kexec handover",
                evidence,
            )
        )
    log = sheet.value("memory", "boot-log")
    wanted = reservations_wanted(arguments)
    failed = list(log["failed"]) if isinstance(log, dict) else []
    missing = _shortfall(sheet, wanted, total)
    if failed or missing:
        evidence = [
            {"what": "kernel log", "value": line, "source": sheet.source("memory", "boot-log")}
            for line in failed
        ]
        evidence += [
            {"what": "asked for and not there", "value": line, "source": "boot arguments"} for line in missing
        ]
        found.append(
            Finding(
                "reservation-failed",
                "warning",
                "A memory reservation failed at boot",
                "The kernel did not get all of what the boot arguments ask for, so the nodes of this "
                "machine differ from "
                "each other and from what was planned. " + (failed or missing)[0].rstrip(".") + ".",
                "leave room for an aligned area of that size on each node, ask for less, or drop the "
                "argument",
                evidence,
            )
        )
    elif wanted and isinstance(log, dict) and not log["reaches_boot"]:
        found.append(
            Finding(
                "boot-log-cut",
                "unknown",
                "Cannot tell whether every reservation succeeded at boot",
                "The kernel's log no longer reaches back to the boot. The amounts that can be compared "
                "agree, or are not known.",
                "keep the boot log (journalctl -k -b), or read it soon after boot",
                [_fact(sheet, "system", "boot-arguments")],
            )
        )
    found += _unused(sheet, arguments, total)
    if memory.present:
        evidence = [_fact(sheet, "memory", name) for name in ("cma-total", "cma-free", "cma-areas")]
        evidence.append(
            {"what": "by node", "value": per_node(sheet), "source": sheet.source("memory", "zones")}
        )
        origins = origin(sheet, arguments, memory)
        found.append(
            Finding(
                "unpinnable-memory",
                "note",
                f"Unpinnable memory: {memory.reason.removeprefix('there is ')}",
                f"It comes from {', '.join(origins)}. "
                + (_likely(likelihood(sheet)) or "None of it is free now")
                + ".",
                "",
                evidence,
            )
        )
    elif memory.present is False:
        found.append(
            Finding(
                "unpinnable-memory",
                "ok",
                "No unpinnable memory",
                f"{memory.reason[:1].upper()}{memory.reason[1:]}. Long-term pins can have every page of "
                f"this node.",
                "",
                [_fact(sheet, "memory", "cma-total")],
            )
        )
    else:
        found.append(
            Finding(
                "unpinnable-memory",
                "unknown",
                "Cannot tell whether there is unpinnable memory",
                f"{memory.reason[:1].upper()}{memory.reason[1:]}. Without that the placement of a page "
                f"cannot be known.",
                "run the audit as root, or capture the node with scripts/collect.sh as root",
                [_fact(sheet, "memory", "cma-total")],
            )
        )
    return found


def _slack(sheet: Sheet) -> int:
    """CMA areas are whole page blocks; a difference below one block per node is rounding."""
    page, order = sheet.value("memory", "page-size"), sheet.value("memory", "page-block-order")
    return page << order if page and isinstance(order, int) and 0 <= order < 40 else 0


def reservations_wanted(arguments: dict[str, list[str]]) -> dict[str, int]:
    """Return what the boot arguments reserve, in bytes: hugetlb_cma, cma, movablecore (sizes only, no
    percentages).
    """
    wanted: dict[str, int] = {}
    for value in arguments.get("hugetlb_cma", [])[-1:]:
        parts = [parse.memparse(part.rpartition(":")[2]) for part in value.split(",")]
        wanted["hugetlb_cma"] = sum(part for part in parts if part)
    for name in ("cma", "movablecore"):
        for value in arguments.get(name, [])[-1:]:
            amount = None if value.endswith("%") else parse.memparse(value)
            if amount:
                wanted[name] = amount
    return {name: amount for name, amount in wanted.items() if amount}


def _shortfall(sheet: Sheet, wanted: dict[str, int], total: int | None) -> list[str]:
    """Compare what was asked for with what is there; only a clear lack is told."""
    found = []
    cma_wanted = wanted.get("hugetlb_cma", 0) + wanted.get("cma", 0)
    if sheet.value("memory", "kernel-has-cma") is False:
        if cma_wanted:
            names = "= and ".join(name for name in ("hugetlb_cma", "cma") if name in wanted)
            found.append(f"{names}= has no effect: the kernel is built without CONFIG_CMA")
    elif total is not None and cma_wanted and total < cma_wanted * 0.98:
        names = " and ".join(name for name in ("hugetlb_cma", "cma") if name in wanted)
        found.append(f"{names}: {size(cma_wanted)} asked for, CmaTotal is {size(total)}")
    zones = sheet.value("memory", "zones")
    if "movablecore" in wanted and zones:
        managed = sum(zone["managed"] or 0 for zone in zones if zone["zone"] == "Movable")
        if managed == 0:
            found.append(f"movablecore: {size(wanted['movablecore'])} asked for, ZONE_MOVABLE is empty")
    return found


def _unused(sheet: Sheet, arguments: dict[str, list[str]], total: int | None) -> list[Finding]:
    """CMA that nobody on this node uses."""
    areas = sheet.value("memory", "cma-areas")
    idle = []
    if areas:
        idle = [area for area in areas if area["ever_used"] is False and not area["used"]]
    pools = sheet.value("memory", "hugetlb")
    gigantic = (
        sum(count for kib, count in pools.items() if int(kib) >= 1 << 19) if isinstance(pools, dict) else None
    )
    hugetlb = reservations_wanted(arguments).get("hugetlb_cma")
    if idle:
        amount = sum(area["bytes"] or 0 for area in idle)
        evidence = [_fact(sheet, "memory", "cma-areas"), _fact(sheet, "memory", "hugetlb")]
        names = ", ".join(area["name"] for area in idle)
        why = f"No page of {names} has been allocated from it since boot."
    elif hugetlb and total and gigantic == 0 and areas is None:
        amount = min(hugetlb, total)
        evidence = [_fact(sheet, "system", "boot-arguments"), _fact(sheet, "memory", "hugetlb")]
        why = "hugetlb_cma reserves memory for gigantic pages, and there is none in the pool."
    else:
        return []
    return [
        Finding(
            "cma-unused",
            "warning",
            f"CMA that nobody uses on this node: {size(amount)}",
            f"{why} Until somebody does, it is lent to movable allocations, which is where pins go wrong.",
            "boot with hugetlb_cma=0" if hugetlb else "drop the reservation, if no device here needs it",
            evidence,
        )
    ]


def per_node(sheet: Sheet) -> list[dict[str, Any]]:
    """Sum up per NUMA node in bytes: CMA (page blocks where they are known), free CMA, ZONE_MOVABLE,
    free memory.
    """
    page = sheet.value("memory", "page-size")
    order = sheet.value("memory", "page-block-order")
    nodes: dict[int, dict[str, Any]] = {}
    if not page:
        return []
    for zone in sheet.value("memory", "zones") or []:
        node = nodes.setdefault(
            zone["node"], {"node": zone["node"], "cma": 0, "cma_free": 0, "movable": 0, "free": 0}
        )
        node["cma"] += (zone["cma"] or 0) * page
        node["cma_free"] += (zone["free_cma"] or 0) * page
        node["free"] += (zone["free"] or 0) * page
        if zone["zone"] == "Movable":
            node["movable"] += (zone["managed"] or 0) * page
    blocks = sheet.value("memory", "page-blocks")
    if blocks and isinstance(order, int) and 0 <= order < 40:
        counted: dict[int, int] = {}
        for entry in blocks:
            counted[entry["node"]] = counted.get(entry["node"], 0) + entry["blocks"].get("CMA", 0)
        for number, count in counted.items():
            if number in nodes:
                nodes[number]["cma"] = (count << order) * page
    return [nodes[number] for number in sorted(nodes)]


def origin(sheet: Sheet, arguments: dict[str, list[str]], memory: Unpinnable) -> list[str]:
    """Name where the unpinnable memory comes from."""
    found = []
    wanted = reservations_wanted(arguments)
    total = sheet.value("memory", "cma-total") or 0
    if total and "hugetlb_cma" in wanted:
        found.append(f"hugetlb_cma={arguments['hugetlb_cma'][-1]}")
    if total and "cma" in wanted:
        found.append(f"cma={arguments['cma'][-1]}")
    pools = sheet.value("memory", "device-tree-pools")
    if total and pools:
        found.append(f"the device tree ({', '.join(pools)})")
    rest = total - wanted.get("hugetlb_cma", 0) - wanted.get("cma", 0)
    config = sheet.value("system", "kernel-config")
    default = config.get("CMA_SIZE_MBYTES") if isinstance(config, dict) else None
    if rest > 0 and "cma" not in arguments and not pools:
        known = f" ({default} MiB, CONFIG_CMA_SIZE_MBYTES)" if default not in (None, "n", "0") else ""
        found.append(f"the kernel's DMA default{known}")
    if (memory.blocks_cma or 0) > total + _slack(sheet) or (sheet.value("memory", "cma-free") or 0) > total:
        found.append("kexec handover's scratch memory (KHO)")
    if memory.movable:
        names = [name for name in ("movablecore", "kernelcore", "movable_node") if name in arguments]
        found.append(", ".join(names) if names else "memory blocks that were put online as movable")
    return found or ["a source that the boot arguments do not name"]


def _limit_findings(sheet: Sheet) -> list[Finding]:
    small = []
    shell = sheet.value("limits", "this-shell")
    if shell and shell["soft"] is not None and shell["soft"] < MEMLOCK_ENOUGH:
        small.append(("this shell", shell["soft"], sheet.source("limits", "this-shell")))
    default = sheet.value("limits", "services-default")
    if default and default not in ("infinity", "unlimited"):
        amount = parse.memparse(default.partition(":")[0])
        if amount is not None and amount < MEMLOCK_ENOUGH:
            small.append(
                ("services (DefaultLimitMEMLOCK)", amount, sheet.source("limits", "services-default"))
            )
    for process in sheet.value("limits", "processes") or []:
        limit = process["memlock"]
        if (
            limit
            and limit["soft"] is not None
            and limit["soft"] < MEMLOCK_ENOUGH
            and process["ipc_lock"] is not True
        ):
            small.append((f"{process['command']} (pid {process['pid']})", limit["soft"], "/proc/PID/limits"))
    if not small:
        return []
    return [
        Finding(
            "memlock-too-small",
            "warning",
            f"Locked-memory limit too small: "
            f"{', '.join(f'{who} {size(limit)}' for who, limit, _ in small[:4])}",
            "RDMA counts registered pages against RLIMIT_MEMLOCK before it pins any, and answers ENOMEM "
            "beyond it. That "
            "is the most common cause of the same words, and needs no unpinnable memory at all.",
            "set memlock to unlimited for the jobs: LimitMEMLOCK=infinity in the service that starts "
            "them, or limits.conf",
            [{"what": who, "value": limit, "source": source} for who, limit, source in small],
        )
    ]


def _device_findings(sheet: Sheet, driver: str | None) -> list[Finding]:
    found: list[Finding] = []
    for device in sheet.value("rdma", "devices") or []:
        used, limit = device["mr"], device["max_mr"]
        if used is not None and limit and used >= MR_NEAR * limit:
            found.append(
                Finding(
                    "mr-limit",
                    "warning",
                    f"{device['name']}: {used} of {limit} memory regions are in use",
                    "The device has a limit on memory regions, and registration fails beyond it with "
                    "ENOMEM, EAGAIN or "
                    "EINVAL, whatever the pages are. A registration cache without bound gets there by "
                    "itself.",
                    "find who registers so many: `rdma resource show mr`; bound the registration cache",
                    [{"what": device["name"], "value": used, "source": sheet.source("rdma", "resources")}],
                )
            )
    gpus = sheet.value("nvidia", "gpus") or []
    for gpu in gpus:
        total, used, memory = (
            gpu.get("bar1_total") or gpu.get("bar1"),
            gpu.get("bar1_used"),
            gpu.get("fb_total"),
        )
        evidence = [{"what": gpu["bus"], "value": dict(gpu), "source": sheet.source("nvidia", "gpus")}]
        if total and memory and total < memory:
            found.append(
                Finding(
                    "bar1-small",
                    "warning",
                    f"GPU {gpu['bus']}: BAR1 is {size(total)} for {size(memory)} of memory",
                    "Peer devices reach GPU memory through BAR1, and not all of it can be mapped at once "
                    "here. Registration "
                    "of GPU buffers fails when the aperture is used up.",
                    "enable above-4G decoding and resizable BAR in the firmware, or reduce what is "
                    "registered",
                    evidence,
                )
            )
        elif total and used and used > BAR1_NEAR * total:
            found.append(
                Finding(
                    "bar1-used",
                    "warning",
                    f"GPU {gpu['bus']}: {size(used)} of {size(total)} BAR1 are in use",
                    "Peer devices reach GPU memory through BAR1, and little of it is left. Registration "
                    "of GPU buffers "
                    "fails when the aperture is used up.",
                    "see which processes map it (`nvidia-smi -q`), and deregister what is not needed",
                    evidence,
                )
            )
    if sheet.value("nvidia", "state") in ("loaded", "installed, not loaded") and sheet.value(
        "rdma", "devices"
    ):
        found.append(_dmabuf(sheet, driver))
    return found


IB_MODULES = {
    "mlx5_core": "mlx5_ib",
    "bnxt_en": "bnxt_re",
    "ice": "irdma",
    "i40e": "irdma",
    "mlx4_core": "mlx4_ib",
}


def dmabuf_conditions(sheet: Sheet, driver: str | None) -> list[Condition]:
    """The conditions of registering GPU buffers by DMA-BUF: open module, CUDA 11.7, Linux 5.12,
    provider.
    """
    flavour = sheet.value("nvidia", "flavour")
    conditions = [
        Condition(
            "the driver's kernel module is the open one",
            None if flavour is None else flavour == "open",
            f"the flavour is {flavour or 'not known'}",
        )
    ]
    branch = int(driver.split(".")[0]) if driver else None
    conditions.append(
        Condition(
            "the driver is of CUDA 11.7 or later (branch 515)",
            None if branch is None else branch >= OPEN_SINCE,
            f"driver {driver}" if driver else "the driver's version is not known",
        )
    )
    symbols = sheet.value("system", "symbols")
    conditions.append(_kernel_dmabuf(sheet, symbols or []))
    drivers = {device["driver"] for device in sheet.value("rdma", "devices") or [] if device["driver"]}
    if symbols is None or not drivers:
        provider = Condition(
            "the RDMA driver takes DMA-BUF", None, "the kernel's symbols or the driver are not known"
        )
    else:
        able = [
            name
            for name in sorted(drivers)
            if any(
                "reg_user_mr_dmabuf" in symbol
                and (
                    symbol.endswith(f"[{IB_MODULES.get(name, name)}]")
                    or symbol.startswith(f"{IB_MODULES.get(name, name)}_")
                )
                for symbol in symbols
            )
        ]
        provider = Condition(
            "the RDMA driver takes DMA-BUF",
            bool(able),
            f"{', '.join(able)} has reg_user_mr_dmabuf()"
            if able
            else f"{', '.join(sorted(drivers))} has no reg_user_mr_dmabuf()",
        )
    return [*conditions, provider]


def _kernel_dmabuf(sheet: Sheet, symbols: list[str]) -> Condition:
    """Whether ib_uverbs registers DMA-BUF: drivers/infiniband/core/umem_dmabuf.c, since 5.12."""
    what = "the kernel registers DMA-BUF for RDMA (Linux 5.12)"
    has = next((symbol for symbol in symbols if "dmabuf" in symbol), None)
    if has is not None:
        return Condition(what, True, f"the kernel has {has}")
    stock, name = stock_of(sheet), sheet.value("system", "kernel")
    if stock is None:
        return Condition(what, None, f"no symbol of kernel {name or '(not known)'} says so")
    return Condition(what, stock >= DMABUF_SINCE, f"kernel {name}")


def _dmabuf(sheet: Sheet, driver: str | None) -> Finding:
    conditions = dmabuf_conditions(sheet, driver)
    evidence = [{"what": one.what, "value": one.holds, "source": one.reason} for one in conditions]
    failing = [one for one in conditions if one.holds is False]
    if failing:
        return Finding(
            "dmabuf",
            "warning",
            "GPU buffers cannot be registered by DMA-BUF here",
            f"Not met: {'; '.join(one.what + ' (' + one.reason + ')' for one in failing)}. GPU buffers "
            f"then need "
            "nvidia-peermem, or are copied through host memory.",
            "use the open kernel module (branch 515 or later), Linux 5.12 or later and an RDMA driver "
            "with DMA-BUF",
            evidence,
        )
    if any(one.holds is None for one in conditions):
        return Finding(
            "dmabuf",
            "unknown",
            "Cannot tell whether GPU buffers can be registered by DMA-BUF",
            f"Not known: {'; '.join(one.what for one in conditions if one.holds is None)}. Nothing that "
            f"is known forbids it.",
            "capture the node with scripts/collect.sh",
            evidence,
        )
    return Finding(
        "dmabuf",
        "ok",
        "GPU buffers can be registered by DMA-BUF",
        "All conditions are met. Whether a job does so is its own choice (NCCL_DMABUF_ENABLE, the network "
        "plugin).",
        "",
        evidence,
    )
