"""Reservations: what boot arguments and the device tree set aside, what the boot gave, who uses it."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from regrepro.audit import parse
from regrepro.audit.finding import Finding, size
from regrepro.audit.reader import Reader, Text
from regrepro.audit.sheet import Sheet
from regrepro.audit.subjects.memory import Unpinnable, likelihood, likely, per_node, slack
from regrepro.kernel.zones import kernel_messages, memparse

KMSG_LIMIT = 16 << 20
ONLINES_MOVABLE = ("movablecore", "kernelcore", "movable_node")
"""Boot arguments that make ZONE_MOVABLE."""


def collect(reader: Reader, sheet: Sheet) -> None:
    """What the boot's log says of reservations, huge pages in the pools, CMA pools of the device tree."""
    add = partial(sheet.add, "memory")
    text = _kernel_log(reader)
    log = parse.boot_log(text.text) if text.text is not None else None
    stated = reader.known("reservations")
    if log is None and stated.text is not None:
        log, text = _log_of_record(stated.text), stated
    add("boot-log", log, text.source, why=text.why)
    folder, pools = "sys/kernel/mm/hugepages", {}
    for name in reader.names(folder):
        match = re.fullmatch(r"hugepages-(\d{1,12})kB", name)
        count = reader.read(f"{folder}/{name}/nr_hugepages").number
        if match and count is not None:
            pools[match[1]] = count
    add("hugetlb", pools or None, f"/{folder}")
    folder = "proc/device-tree/reserved-memory"
    names = reader.names(folder)
    if names:
        found = [
            name
            for name in names
            if "shared-dma-pool" in (reader.read(f"{folder}/{name}/compatible").value or "")
            and "reusable" in reader.names(f"{folder}/{name}")
        ]
        add("device-tree-pools", found, f"/{folder}")


def _kernel_log(reader: Reader) -> Text:
    """Return the kernel's log: read from /dev/kmsg here, captured elsewhere."""
    if not reader.live:
        return reader.command("dmesg")
    try:
        messages = kernel_messages(KMSG_LIMIT)
    except OSError as error:
        fallback = reader.first(("var/log/dmesg", "var/log/kern.log"))
        if fallback.text is not None:
            return fallback
        why = error.strerror or "cannot be read"
        if error.errno in (errno.EPERM, errno.EACCES):
            why = "permission denied (root can read it, or kernel.dmesg_restrict=0)"
        return Text(None, "/dev/kmsg", why)
    return Text("".join(f"[{seconds:12.6f}] {text}\n" for seconds, text in messages), "/dev/kmsg")


def _log_of_record(text: str) -> dict[str, Any]:
    """Make a boot log of a record's `reservation` events."""
    failed: list[str] = []
    reserved: list[dict[str, Any]] = []
    for event in json.loads(text):
        lines = event.get("kernel_lines")
        parsed = parse.boot_log("\n".join(str(line) for line in lines)) if isinstance(lines, list) else None
        if parsed is not None:
            failed += parsed["failed"]
            reserved += parsed["reserved"]
        if event.get("ok") is False and (parsed is None or not parsed["failed"]):
            why = event.get("why") or f"wanted {event.get('wanted')}, got {event.get('got')} bytes"
            failed.append(f"{event.get('argument')}: {why}")
    return {"reserved": reserved, "failed": failed, "kho": [], "reaches_boot": True}


def findings(sheet: Sheet, memory: Unpinnable) -> Iterator[Finding]:
    """Yield what failed at boot, what nobody uses, and where unpinnable memory comes from."""
    arguments, log = sheet.boot_arguments(), sheet.value("memory", "boot-log")
    wanted = reservations_wanted(arguments)
    failed = list(log["failed"]) if isinstance(log, dict) else []
    missing = list(_shortfall(sheet, wanted))
    if failed or missing:
        source = sheet.source("memory", "boot-log")
        yield Finding(
            "reservation-failed",
            "warning",
            "A memory reservation failed at boot",
            "The kernel did not get all of what the boot arguments ask for, so the nodes of this machine "
            f"differ from each other and from what was planned. {(failed or missing)[0].rstrip('.')}.",
            "leave room for an aligned area of that size on each node, ask for less, or drop the argument",
            [{"what": "kernel log", "value": line, "source": source} for line in failed]
            + [
                {"what": "asked for and not there", "value": it, "source": "boot arguments"} for it in missing
            ],
        )
    elif wanted and isinstance(log, dict) and not log["reaches_boot"]:
        yield Finding(
            "boot-log-cut",
            "unknown",
            "Cannot tell whether every reservation succeeded at boot",
            "The kernel's log no longer reaches back to the boot. The amounts that can be compared agree, or "
            "are not known.",
            "keep the boot log (journalctl -k -b), or read it soon after boot",
            sheet.evidence("system", "boot-arguments"),
        )
    yield from _unused(sheet, wanted)
    yield _unpinnable(sheet, memory)


def _unpinnable(sheet: Sheet, memory: Unpinnable) -> Finding:
    why = f"{memory.reason[:1].upper()}{memory.reason[1:]}."
    total = sheet.evidence("memory", "cma-total")
    if memory.present:
        source = sheet.source("memory", "zones")
        return Finding(
            "unpinnable-memory",
            "note",
            f"Unpinnable memory: {memory.reason.removeprefix('there is ')}",
            f"It comes from {', '.join(origin(sheet, memory))}. "
            f"{likely(likelihood(sheet)) or 'None of it is free now'}.",
            "",
            [
                *sheet.evidence("memory", "cma-total", "cma-free", "cma-areas"),
                {"what": "by node", "value": per_node(sheet), "source": source},
            ],
        )
    if memory.present is False:
        why += " Long-term pins can have every page of this node."
        return Finding("unpinnable-memory", "ok", "No unpinnable memory", why, "", total)
    return Finding(
        "unpinnable-memory",
        "unknown",
        "Cannot tell whether there is unpinnable memory",
        f"{why} Without that the placement of a page cannot be known.",
        "run the audit as root, or capture the node with scripts/collect.sh as root",
        total,
    )


def reservations_wanted(arguments: dict[str, list[str]]) -> dict[str, int]:
    """Return what the boot arguments reserve, in bytes: hugetlb_cma, cma, movablecore (sizes only, no
    percentages).
    """
    wanted: dict[str, int] = {}
    for value in arguments.get("hugetlb_cma", [])[-1:]:
        parts = [memparse(part.rpartition(":")[2]) for part in value.split(",")]
        wanted["hugetlb_cma"] = sum(part for part in parts if part)
    for name in ("cma", "movablecore"):
        for value in arguments.get(name, [])[-1:]:
            amount = None if value.endswith("%") else memparse(value)
            if amount:
                wanted[name] = amount
    return {name: amount for name, amount in wanted.items() if amount}


def _shortfall(sheet: Sheet, wanted: dict[str, int]) -> Iterator[str]:
    """Compare what was asked for with what is there; only a clear lack is told."""
    total, zones = sheet.value("memory", "cma-total"), sheet.value("memory", "zones")
    names = [name for name in ("hugetlb_cma", "cma") if name in wanted]
    asked = sum(wanted[name] for name in names)
    if asked and sheet.value("memory", "kernel-has-cma") is False:
        yield f"{'= and '.join(names)}= has no effect: the kernel is built without CONFIG_CMA"
    elif asked and total is not None and total < asked * 0.98:
        yield f"{' and '.join(names)}: {size(asked)} asked for, CmaTotal is {size(total)}"
    if (
        "movablecore" in wanted
        and zones
        and not any(zone["managed"] for zone in zones if zone["zone"] == "Movable")
    ):
        yield f"movablecore: {size(wanted['movablecore'])} asked for, ZONE_MOVABLE is empty"


def _unused(sheet: Sheet, wanted: dict[str, int]) -> Iterator[Finding]:
    """CMA that nobody on this node uses."""
    areas, pools = sheet.value("memory", "cma-areas"), sheet.value("memory", "hugetlb")
    hugetlb, total = wanted.get("hugetlb_cma"), sheet.value("memory", "cma-total")
    idle = [area for area in areas or [] if area["ever_used"] is False and not area["used"]]
    no_gigantic = isinstance(pools, dict) and not any(
        count for kib, count in pools.items() if int(kib) >= 1 << 19
    )
    if idle:
        amount = sum(area["bytes"] or 0 for area in idle)
        evidence = sheet.evidence("memory", "cma-areas")
        why = f"No page of {', '.join(area['name'] for area in idle)} has been allocated from it since boot."
    elif hugetlb and total and no_gigantic and areas is None:
        amount = min(hugetlb, total)
        evidence = sheet.evidence("system", "boot-arguments")
        why = "hugetlb_cma reserves memory for gigantic pages, and there is none in the pool."
    else:
        return
    yield Finding(
        "cma-unused",
        "warning",
        f"CMA that nobody uses on this node: {size(amount)}",
        f"{why} Until somebody does, it is lent to movable allocations, which is where pins go wrong.",
        "boot with hugetlb_cma=0" if hugetlb else "drop the reservation, if no device here needs it",
        evidence + sheet.evidence("memory", "hugetlb"),
    )


def origin(sheet: Sheet, memory: Unpinnable) -> list[str]:
    """Name where the unpinnable memory comes from."""
    arguments, pools = sheet.boot_arguments(), sheet.value("memory", "device-tree-pools")
    wanted = reservations_wanted(arguments)
    total = sheet.value("memory", "cma-total") or 0
    found = [f"{name}={arguments[name][-1]}" for name in ("hugetlb_cma", "cma") if total and name in wanted]
    if total and pools:
        found.append(f"the device tree ({', '.join(pools)})")
    rest = total - wanted.get("hugetlb_cma", 0) - wanted.get("cma", 0)
    if rest > 0 and "cma" not in arguments and not pools:
        config = sheet.value("system", "kernel-config")
        default = config.get("CMA_SIZE_MBYTES") if isinstance(config, dict) else None
        known = f" ({default} MiB, CONFIG_CMA_SIZE_MBYTES)" if default not in (None, "n", "0") else ""
        found.append(f"the kernel's DMA default{known}")
    if (memory.blocks_cma or 0) > total + slack(sheet) or (sheet.value("memory", "cma-free") or 0) > total:
        found.append("kexec handover's scratch memory (KHO)")
    if memory.movable:
        names = [name for name in ONLINES_MOVABLE if name in arguments]
        found.append(", ".join(names) or "memory blocks that were put online as movable")
    return found or ["a source that the boot arguments do not name"]


def fixes(sheet: Sheet, memory: Unpinnable) -> list[str]:
    """Return what rids the node of its unpinnable memory."""
    arguments = sheet.boot_arguments()
    wanted = [part for value in arguments.get("hugetlb_cma", []) for part in value.split(",")]
    found = []
    if any(memparse(part.rpartition(":")[2]) for part in wanted):
        found.append("boot with hugetlb_cma=0")
    if any(memparse(value) for value in arguments.get("cma", [])):
        found.append("boot without cma=, or with what a device needs")
    if memory.movable:
        names = ", ".join(name for name in ONLINES_MOVABLE if name in arguments)
        found.append(
            f"boot without {names}" if names else "online memory as online_kernel, not online_movable"
        )
    if memory.blocks_cma is not None and memory.blocks_cma > sheet.value("memory", "cma-total", 0):
        found.append("boot with kho=off")
    return found or ["find out which reservation it is: see the CMA areas and the boot log among the facts"]
