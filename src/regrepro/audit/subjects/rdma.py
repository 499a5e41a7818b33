"""RDMA devices: firmware, driver and its origin, links, capabilities, memory regions and their limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from regrepro.audit import parse
from regrepro.audit.finding import Finding
from regrepro.audit.reader import Reader, Text
from regrepro.audit.sheet import INFERRED, Sheet
from regrepro.kernel import netlink

OFED_VERSION = re.compile(r"\d{1,2}\.\d{1,2}-\d")
MR_NEAR = 0.8
_CLASS = "sys/class/infiniband"
_BY_NAME = ((re.compile("mlx5_"), "mlx5_core"), (re.compile(r"rxe\d|.*_rxe"), "rdma_rxe"))


def collect(reader: Reader, sheet: Sheet) -> None:
    """Devices, what they have in use, where their drivers come from."""
    names = reader.names(_CLASS)
    infos_text = Text(None, "ibv_devinfo -v", "there is no RDMA device")
    if names or not reader.live:
        infos_text = reader.command("ibv_devinfo")
    infos = parse.devinfo(infos_text.text or "")
    queried, queried_why = _queried(reader, names)
    usage, usage_source, usage_why = _usage(reader, names)
    devices = [
        _device(reader, name, infos.get(name, {}), queried.get(name, {}), usage.get(name, {}))
        for name in names or sorted(set(infos) | set(usage))
    ]
    add = partial(sheet.add, "rdma")
    modules_text = reader.read("proc/modules")
    if devices:
        add("devices", devices, f"/{_CLASS}" if names else infos_text.source)
        why = usage_why or "no device was answered for"
        add("resources", usage or None, usage_source, why=why)
        if all(device["max_mr"] is None for device in devices):
            add("max-mr", None, "ibv_query_device", why=queried_why or infos_text.why)
    elif surveyed(reader):
        add("devices", [], f"/{_CLASS}")
    elif modules_text.text is not None and "ib_uverbs " not in modules_text.text:
        add("devices", [], f"{modules_text.source} (no ib_uverbs)", how=INFERRED)
    else:
        add("devices", None, f"/{_CLASS}", why="not captured")
    _origin(reader, sheet, {device["driver"] for device in devices if device["driver"]})


def surveyed(reader: Reader) -> bool:
    """Tell whether what is not there was looked for: on the machine itself, and by scripts/collect.sh."""
    return reader.live or reader.read("collect.txt").text is not None


def _device(
    reader: Reader, name: str, info: dict[str, Any], queried: dict[str, Any], usage: dict[str, int]
) -> dict[str, Any]:
    base = f"{_CLASS}/{name}"
    driver = (reader.link(f"{base}/device/driver") or "").rsplit("/", 1)[-1] or None
    if driver is None and isinstance(queried.get("driver"), str):
        driver = queried["driver"]
    driver = driver or next((its for pattern, its in _BY_NAME if pattern.match(name)), None)
    ports = [
        {
            "port": port,
            **{
                key: reader.read(f"{base}/ports/{port}/{key}").value
                for key in ("state", "phys_state", "rate", "link_layer")
            },
        }
        for port in reader.names(f"{base}/ports")
    ]
    config, _ = reader.content(f"{base}/device/config", 4096)
    pci = (reader.link(f"{base}/device") or "").rsplit("/", 1)[-1]
    pci = pci if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", pci) else ""
    if config is None and pci:
        config, _ = reader.content(f"sys/bus/pci/devices/{pci}/config", 4096)
    limit = queried.get("max_mr")
    if limit is None and str(info.get("max_mr", "")).isdigit():
        limit = int(info["max_mr"])
    return {
        "name": name,
        "driver": driver,
        "software": driver in ("rdma_rxe", "siw"),
        "firmware": reader.read(f"{base}/fw_ver").value or info.get("fw_ver"),
        "model": reader.read(f"{base}/hca_type").value or info.get("vendor_part_id"),
        "pci": pci or None,
        "numa_node": reader.read(f"{base}/device/numa_node").signed,
        "ports": ports,
        "relaxed_ordering": parse.pci_capabilities(config or b"").get("relaxed_ordering"),
        "odp": info.get("odp"),
        "mr": usage.get("mr"),
        "max_mr": limit,
    }


def _usage(reader: Reader, names: list[str]) -> tuple[dict[str, dict[str, int]], str, str]:
    if reader.live:
        if not names:
            return {}, "RDMA netlink", "there is no RDMA device"
        source = "RDMA netlink (RDMA_NLDEV_CMD_RES_GET)"
        try:
            return netlink.rdma_resources(), source, ""
        except OSError as error:
            return {}, source, f"RDMA netlink: {error.strerror or error}"
    text = reader.command("rdma-resource")
    return parse.rdma_resource(text.text or ""), text.source, text.why


def _queried(reader: Reader, names: list[str]) -> tuple[dict[str, dict[str, Any]], str]:
    """Ask libibverbs for the devices' limits, on the machine itself."""
    if not reader.live or not names:
        return {}, ""
    try:
        from regrepro.core import verbs
    except ImportError as error:
        return {}, f"the verbs wrapper cannot be loaded: {error}"
    missing = verbs.available()
    if missing is not None:
        return {}, str(missing)
    found: dict[str, dict[str, Any]] = {}
    why = ""
    for name in names:
        try:
            with verbs.Device(name) as device:
                found[name] = dict(device.query())
        except Exception as error:  # a device in reset, a container without its node: the others still answer
            why = f"{name}: {error}"
    return found, why


def _origin(reader: Reader, sheet: Sheet, drivers: set[str]) -> None:
    """Where the RDMA drivers come from: in the kernel's tree, or MLNX_OFED or DOCA with its version."""
    found: dict[str, dict[str, str | None]] = {}
    for name in sorted(drivers | {"mlx5_core", "ib_core"}):
        base = f"sys/module/{name}"
        facts = {key: reader.read(f"{base}/{key}").value for key in ("version", "taint")}
        if facts["version"] is not None or facts["taint"] is not None or reader.names(base):
            found[name] = facts
    ofed = reader.command("ofed_info")
    release = (ofed.value or "").rstrip(":") or None
    versions = [module["version"] for module in found.values() if module["version"]]
    outside = (
        reader.names("sys/module/mlx_compat")
        or any(OFED_VERSION.match(version) for version in versions)
        or any("O" in (module["taint"] or "") for module in found.values())
    )
    add, why = partial(sheet.add, "rdma"), "no RDMA driver is loaded, or not captured"
    if release:
        add("driver-origin", {"origin": "MLNX_OFED or DOCA", "version": release}, ofed.source)
    elif outside:
        value = {"origin": "out of tree", "version": versions[0] if versions else None}
        add("driver-origin", value, "/sys/module/*/version, taint", how=INFERRED)
    elif found:
        add("driver-origin", {"origin": "in-tree", "version": None}, "/sys/module/*/taint", how=INFERRED)
    else:
        add("driver-origin", None, "/sys/module", why=why)
    add("modules", found or None, "/sys/module", why=why)


def findings(sheet: Sheet) -> Iterator[Finding]:
    """Yield devices whose memory regions are nearly used up."""
    for device in sheet.value("rdma", "devices") or []:
        used, limit = device["mr"], device["max_mr"]
        if used is not None and limit and used >= MR_NEAR * limit:
            yield Finding(
                "mr-limit",
                "warning",
                f"{device['name']}: {used} of {limit} memory regions are in use",
                "The device has a limit on memory regions, and registration fails beyond it with ENOMEM, "
                "EAGAIN or EINVAL, whatever the pages are. A registration cache without bound gets there by "
                "itself.",
                "find who registers so many: `rdma resource show mr`; bound the registration cache",
                [{"what": device["name"], "value": used, "source": sheet.source("rdma", "resources")}],
            )
