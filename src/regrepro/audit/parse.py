"""Parsers of single kernel files. Pure: text in, numbers out; whatever does not fit is left out, never
guessed.
"""

from __future__ import annotations

import re
import shlex
from typing import Any


def boot_arguments(cmdline: str) -> dict[str, list[str]]:
    """Return the boot arguments as name → values in order (a flag without `=` has the value "").

    `-` and `_` are the same in a name, as in the kernel; what follows `--` belongs to init.
    """
    found: dict[str, list[str]] = {}
    try:
        words = shlex.split(cmdline, posix=True)
    except ValueError:  # a quote without its end
        words = cmdline.split()
    for word in words:
        if word == "--":
            break
        name, _, value = word.partition("=")
        found.setdefault(name.replace("-", "_"), []).append(value)
    return found


def limits(text: str) -> dict[str, tuple[int | None, int | None]]:
    """Read /proc/PID/limits: name → (soft, hard); None is `unlimited`."""
    found: dict[str, tuple[int | None, int | None]] = {}
    for line in text.splitlines():
        match = re.match(r"(Max [a-z ]+?)\s{2,}(unlimited|\d{1,20})\s+(unlimited|\d{1,20})\b", line)
        if match:
            soft, hard = (None if word == "unlimited" else int(word) for word in match.groups()[1:])
            found[match[1]] = (soft, hard)
    return found


def status(text: str) -> dict[str, str]:
    """Read /proc/PID/status: name → value."""
    return {
        name: value.strip()
        for name, colon, value in (line.partition(":") for line in text.splitlines())
        if colon
    }


def choice(text: str) -> str | None:
    """Return the chosen word of a sysfs choice: `always [madvise] never` is `madvise`."""
    match = re.search(r"\[([^\]]{1,60})\]", text)
    return match[1] if match else None


def pci_capabilities(config: bytes) -> dict[str, int]:
    """Return from PCI configuration space: `relaxed_ordering` (0 or 1, PCI Express Device Control bit 4).

    Empty where the capabilities were not captured: without root a read ends after 64 bytes.
    """
    if len(config) < 256 or not config[0x06] & 0x10:
        return {}
    offset = config[0x34] & 0xFC
    for _ in range(48):
        if offset < 0x40 or offset > 0xFC - 12:
            return {}
        if config[offset] == 0x10:  # PCI Express
            control = int.from_bytes(config[offset + 8 : offset + 10], "little")
            return {"relaxed_ordering": control >> 4 & 1}
        offset = config[offset + 1] & 0xFC
    return {}


def pci_acs(config: bytes) -> int | None:
    """Return the ACS Control register (extended capability 0x000D) of a bridge, or None where there is
    none.
    """
    offset = 0x100
    for _ in range(96):
        if offset < 0x100 or offset + 8 > len(config):
            return None
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == 0x000D:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20 & 0xFFC
    return None


def pci_resources(text: str) -> list[int]:
    """Return the sizes in bytes of a PCI device's regions from sysfs `resource` (0 where a region is
    unused).
    """
    sizes = []
    for line in text.splitlines()[:16]:
        words = line.split()
        if len(words) < 3:
            break
        try:
            start, end = int(words[0], 16), int(words[1], 16)
        except ValueError:
            break
        sizes.append(end - start + 1 if end > start else 0)
    return sizes


def nvidia_version(text: str) -> dict[str, str]:
    """Read /proc/driver/nvidia/version: `{version, flavour, arch}`, each only where the text tells.

    The open flavour says "NVIDIA UNIX Open Kernel Module for x86_64  535.104.05", the proprietary one
    "NVIDIA UNIX x86_64 Kernel Module  525.105.17".
    """
    line = next((line for line in text.splitlines() if "NVRM version" in line), "")
    found: dict[str, str] = {}
    version = re.search(r"\b(\d{3,4}\.\d{1,3}(?:\.\d{1,3})?)\b", line)
    if version:
        found["version"] = version[1]
    if "Open Kernel Module" in line:
        found["flavour"] = "open"
    elif "Kernel Module" in line:
        found["flavour"] = "proprietary"
    arch = re.search(r"\b(x86_64|aarch64|AArch64|ppc64le)\b", line, re.IGNORECASE)
    if arch:
        found["arch"] = arch[1].lower()
    return found


def smi(text: str) -> dict[str, Any]:
    """Read `nvidia-smi -q`: `{driver, cuda, gpus: [{bus, name, fb_total, bar1_total, bar1_used}]}`, in
    bytes.
    """
    found: dict[str, Any] = {"gpus": []}
    gpu: dict[str, Any] | None = None
    section = ""
    for line in text.splitlines():
        match = re.match(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*$", line)
        if match:
            gpu = {"bus": match[1].lower()}
            found["gpus"].append(gpu)
            section = ""
            continue
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon:
            section = line.strip()
            continue
        if gpu is None:
            if name == "Driver Version":
                found["driver"] = value
            elif name == "CUDA Version":
                found["cuda"] = value
            continue
        size = re.match(r"(\d{1,12}) MiB$", value)
        if name == "Product Name":
            gpu["name"] = value
        elif section == "FB Memory Usage" and name == "Total" and size:
            gpu["fb_total"] = int(size[1]) << 20
        elif section == "BAR1 Memory Usage" and name in ("Total", "Used") and size:
            gpu[f"bar1_{name.lower()}"] = int(size[1]) << 20
    return found


def rdma_resource(text: str) -> dict[str, dict[str, int]]:
    """Read `rdma resource show`: device → {pd, cq, qp, cm_id, mr, ctx, srq}."""
    found: dict[str, dict[str, int]] = {}
    for line in text.splitlines():
        match = re.match(r"\d+:\s+(\S+?):\s+(.*)$", line)
        if match:
            pairs = re.findall(r"(?<![a-z_])([a-z_]+) (\d{1,18})(?=\s|$)", match[2])
            found[match[1]] = {name: int(number) for name, number in pairs}
    return found


def devinfo(text: str) -> dict[str, dict[str, str]]:
    """Read `ibv_devinfo -v`: device → attributes of the device (`max_mr`, `fw_ver`, …); ODP lines are
    joined.
    """
    found: dict[str, dict[str, str]] = {}
    device: dict[str, str] | None = None
    odp = False
    for line in text.splitlines():
        match = re.match(r"hca_id:\s*(\S+)", line)
        if match:
            device = found.setdefault(match[1], {})
            odp = False
            continue
        if device is None:
            continue
        name, colon, value = (part.strip() for part in line.partition(":"))
        if colon and re.fullmatch(r"[a-z0-9_]+", name):
            odp = name in ("general_odp_caps", "odp_caps")
            device.setdefault(name, value)
        elif odp and not colon and line.strip():
            device["odp"] = f"{device.get('odp', '')} {line.strip()}".strip()
    return found


_RESERVE_WANTED = re.compile(r"hugetlb_cma: reserve (\d{1,12}) MiB")
_FAILED = (
    re.compile(r"hugetlb_cma: reservation failed: err (-?\d+), node (\d+)"),
    re.compile(r"hugetlb_cma: cma area (?:of node \d+ )?should be at least \d+ MiB"),
    re.compile(r"hugetlb_cma: (?:invalid node \d+ specified|the option isn't supported by current arch)"),
    re.compile(r"cma: Failed to reserve \d+ MiB"),
    re.compile(r"(?:KHO: )?[Ff]ailed to reserve (?:scratch|lowmem scratch|global scratch) (?:area|buffer)"),
    re.compile(r"Reserved memory: unable to setup CMA region"),
    re.compile(r"OF: reserved mem: failed to allocate memory for node"),
)
_RESERVED = (
    re.compile(r"hugetlb_cma: reserved (?P<mib>\d{1,12}) MiB on node (?P<node>\d+)"),
    re.compile(r"cma: Reserved (?P<mib>\d{1,12}) MiB (?:at (?P<at>0x[0-9a-f]+)|in \d+ ranges?)"),
    re.compile(
        r"Reserved memory: created CMA memory pool at (?P<at>0x[0-9a-f]+), size (?P<mib>\d{1,12}) MiB"
    ),
)
_STAMP = re.compile(r"^(?:<\d+>)?\[\s*([0-9]+\.[0-9]+)\]\s?")


def boot_log(text: str) -> dict[str, Any]:
    """Read what the kernel said of reservations: `{reserved: […], failed: […], reaches_boot, kho}`.

    `reserved` items are `{line, bytes, node}`, `failed` are lines; `reaches_boot` tells whether the log
    still holds the start of the boot (the ring may have wrapped), without which silence proves nothing.
    """
    reserved: list[dict[str, Any]] = []
    failed: list[str] = []
    kho: list[str] = []
    reaches_boot = False
    for line in text.splitlines():
        if "Linux version " in line or "Command line:" in line:
            reaches_boot = True
        if "cma" not in line and "CMA" not in line and "KHO" not in line and "reserved mem" not in line:
            continue
        plain = _STAMP.sub("", line).strip()[:300]
        if "ommand line:" in plain:
            continue
        if any(pattern.search(plain) for pattern in _FAILED):
            failed.append(plain)
        for pattern in _RESERVED:
            match = pattern.search(plain)
            if match:
                groups = match.groupdict()
                reserved.append(
                    {
                        "line": plain,
                        "bytes": int(groups["mib"]) << 20,
                        "node": int(groups["node"]) if groups.get("node") else None,
                    }
                )
                break
        if plain.startswith("KHO:") or "kexec_handover" in plain:
            kho.append(plain)
    return {"reserved": reserved, "failed": failed, "kho": kho, "reaches_boot": reaches_boot}
