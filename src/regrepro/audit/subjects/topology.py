"""Topology: how near each RDMA device is to each GPU, IOMMU and ACS."""

from __future__ import annotations

import re
from functools import partial

from regrepro.audit import parse
from regrepro.audit.reader import Reader
from regrepro.audit.sheet import Sheet
from regrepro.audit.subjects.rdma import surveyed

_PCI = "sys/bus/pci/devices"


def collect(reader: Reader, sheet: Sheet) -> None:
    """Distances on the PCI bus, and what stands between: IOMMU and ACS."""
    add = partial(sheet.add, "topology")
    paths: dict[str, list[str]] = {}
    for device in reader.names(_PCI):
        target = reader.link(f"{_PCI}/{device}")
        if target:
            parts = target.split("/")
            paths[device] = [part for part in parts if re.match(r"(pci)?[0-9a-f]{4}:[0-9a-f]{2}", part)]
    pairs = [
        {
            "gpu": gpu["bus"],
            "rdma": nic["name"],
            "distance": distance(
                paths[gpu["bus"]], paths[nic["pci"]], gpu.get("numa_node"), nic["numa_node"]
            ),
        }
        for gpu in sheet.value("nvidia", "gpus", [])
        for nic in sheet.value("rdma", "devices", [])
        if nic["pci"] in paths and gpu["bus"] in paths
    ]
    if pairs:
        add("gpu-to-rdma", pairs, f"/{_PCI}")
    iommus, groups = reader.names("sys/class/iommu"), reader.names("sys/kernel/iommu_groups")
    if surveyed(reader) or iommus or groups:
        types = {reader.read(f"sys/kernel/iommu_groups/{group}/type").value for group in groups[:64]}
        found = {"active": bool(groups), "units": iommus, "domains": sorted(filter(None, types))}
        add("iommu", found, "/sys/class/iommu, /sys/kernel/iommu_groups")
    else:
        add("iommu", None, "/sys/class/iommu", why="not captured")
    acs, seen = {}, False
    for device in paths:
        base = f"{_PCI}/{device}"
        if not (reader.read(f"{base}/class").value or "").startswith("0x0604"):
            continue
        config, _ = reader.content(f"{base}/config", 4096)
        if config is not None and len(config) > 256:
            seen = True
            control = parse.pci_acs(config)
            if control:
                acs[device] = control
    add("acs", acs if seen else None, f"/{_PCI}/*/config", why="root reads the extended configuration")


def distance(first: list[str], second: list[str], node: int | None, other: int | None) -> str:
    """Name the distance of two devices as `nvidia-smi topo` does: PIX, PXB, PHB, NODE or SYS."""
    if first and second and first[0] == second[0]:
        shared = 0
        for one, two in zip(first[:-1], second[:-1], strict=False):
            if one != two:
                break
            shared += 1
        if shared < 2:
            return "PHB"
        hops = len(first) - 1 - shared + len(second) - 1 - shared
        return "PIX" if hops <= 2 else "PXB"
    if node is not None and node == other and node >= 0:
        return "NODE"
    return "SYS"
