"""NVIDIA: the driver, its modules, peer memory, CUDA, GPUs and their BAR1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from regrepro.audit import parse
from regrepro.audit.finding import Finding, size
from regrepro.audit.reader import Reader, Text
from regrepro.audit.sheet import Sheet

DRIVER_VERSION = re.compile(r"\d{3,4}\.\d{1,3}(?:\.\d{1,3})?")
NVIDIA_VENDOR = "0x10de"
BAR1_NEAR = 0.9
_FOLDER = re.compile(rf"nvidia(?:-[a-z-]+)?-{DRIVER_VERSION.pattern}")
_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib/wsl/lib")
_PEER_COUNTERS = ("num_alloc_mrs", "num_dealloc_mrs", "num_reg_pages", "num_free_callbacks")


def collect(reader: Reader, sheet: Sheet) -> None:
    """Driver, modules, peer memory, CUDA, GPUs and their BAR1."""
    add = partial(sheet.add, "nvidia")
    text = reader.read("proc/modules")
    names = sorted({line.split()[0] for line in text.lines if line.split()})
    modules = [name for name in names if name.startswith("nvidia") or name in ("nv_peer_mem", "gdrdrv")]
    sheet.state("nvidia", "modules", text, modules)
    smi_text = reader.command("nvidia-smi")
    smi = parse.smi(smi_text.text or "")
    present = reader.names("sys/module") if reader.live else reader.command("sys-module").lines
    # A kernel without loadable modules has no /proc/modules; what is built in shows in /sys/module.
    seen = (modules, "/proc/modules") if text.text is not None else (present or None, "/sys/module")
    _driver(reader, sheet, seen, (smi.get("driver", ""), smi_text.source))
    _peermem(reader, sheet, seen[0])
    libraries = reader.command("libcuda").lines
    if reader.live:
        libraries = [name for folder in _LIBRARIES for name in reader.names(folder)]
    versions = [
        found[1] for line in libraries if (found := re.search(r"libcuda\.so\.(\d{3,4}\.[\d.]+\d)", line))
    ]
    add("cuda-driver", smi.get("cuda") or None, smi_text.source, why=smi_text.why or "not in it")
    add("libcuda", versions or None, "libcuda.so.*", why="no libcuda.so.VERSION was found")
    toolkit = reader.first(("usr/local/cuda/version.json", "usr/local/cuda/version.txt"))
    match = re.search(r'"version"\s*:\s*"([\d.]+)"|CUDA Version ([\d.]+)', toolkit.text or "")
    sheet.state("nvidia", "cuda-toolkit", toolkit, (match[1] or match[2]) if match else None)
    _gpus(reader, sheet, smi, smi_text)


def _driver(reader: Reader, sheet: Sheet, seen: tuple[list[str] | None, str], smi: tuple[str, str]) -> None:
    """Version, flavour and state of the kernel driver: loaded, installed only, or absent. `seen`: the modules
    that are loaded, and where that is told; `smi`: the version of nvidia-smi, and the same.
    """
    version_text = reader.read("proc/driver/nvidia/version")
    found = parse.nvidia_version(version_text.text or "")
    module, known = reader.read("sys/module/nvidia/version"), reader.known("nvidia_driver")
    stated = DRIVER_VERSION.search(known.value or "")
    folders = _driver_folders(reader)
    installed = sorted({match[0] for folder in folders if (match := DRIVER_VERSION.search(folder))})
    version, source = found.get("version"), version_text.source
    state = "loaded" if version else None
    for candidate, its_source in (
        (module.value or "", module.source),
        smi,
        (stated[0] if stated else "", known.source),
    ):
        if version is None and DRIVER_VERSION.fullmatch(candidate):
            version, source, state = candidate, its_source, "loaded"
    if version is None and len(installed) == 1:
        version, source, state = installed[0], f"/{folders[0].lstrip('/')}", "installed, not loaded"
    modules, modules_source = seen
    if state is None and modules is not None:
        state = "loaded" if "nvidia" in modules else "installed, not loaded" if folders else "absent"
        source = modules_source
    add = partial(sheet.add, "nvidia")
    add("state", state, source, why="neither /proc/modules nor the driver's own files tell")
    absent = "there is no NVIDIA driver" if state == "absent" else version_text.why
    add("version", version, source, why=absent or "its version is not told anywhere")
    add("flavour", found.get("flavour"), version_text.source, why=absent)
    add("source-folders", folders or None, "/usr/src, /var/lib/dkms", why="none was found")


def _driver_folders(reader: Reader) -> list[str]:
    """Folders with a driver's source: /usr/src/nvidia-VERSION and what DKMS knows."""
    listed = [] if reader.live else [line.strip() for line in reader.command("driver-folders").lines]
    found = [folder for folder in listed if DRIVER_VERSION.search(folder) and "nvidia" in folder]
    return found or [f"usr/src/{name}" for name in reader.names("usr/src") if _FOLDER.fullmatch(name)]


def _peermem(reader: Reader, sheet: Sheet, modules: list[str] | None) -> None:
    """Peer memory: which module, its parameters, and the counters of MLNX_OFED per client."""
    loaded = None
    if modules is not None:
        loaded = [name for name in ("nvidia_peermem", "nv_peer_mem") if name in modules]
    why = "neither /proc/modules nor /sys/module was captured"
    sheet.add("nvidia", "peermem", loaded, "/proc/modules", why=why)
    parameter = reader.read("sys/module/nvidia_peermem/parameters/persistent_api_support")
    if parameter.value is not None:
        sheet.add("nvidia", "peermem-persistent-api-support", parameter.value, parameter.source)
    folder = "sys/kernel/mm/memory_peers"
    clients = {
        name: {counter: reader.read(f"{folder}/{name}/{counter}").number for counter in _PEER_COUNTERS}
        for name in reader.names(folder)
    }
    if clients:
        sheet.add("nvidia", "peer-memory-clients", clients, f"/{folder}")


def _gpus(reader: Reader, sheet: Sheet, smi: dict[str, Any], smi_text: Text) -> None:
    """GPUs, their memory and BAR1 (from PCI sysfs and nvidia-smi)."""
    found: dict[str, dict[str, Any]] = {}

    def gpu_at(bus: str) -> dict[str, Any]:
        return found.setdefault(_bus(bus), {"bus": _bus(bus), "name": None})

    folder = "proc/driver/nvidia/gpus"
    sources = []
    for bus in reader.names(folder):
        text = reader.read(f"{folder}/{bus}/information")
        model = re.search(r"^Model:\s*(.+)$", text.text or "", re.MULTILINE)
        gpu_at(bus)["name"] = model[1].strip() if model else None
        sources.append(f"/{folder}")
    for device in reader.names("sys/bus/pci/devices"):
        base = f"sys/bus/pci/devices/{device}"
        if reader.read(f"{base}/vendor").value != NVIDIA_VENDOR:
            continue
        if (reader.read(f"{base}/class").value or "")[:6] not in ("0x0300", "0x0302"):
            continue
        gpu = gpu_at(device)
        sizes = parse.pci_resources(reader.read(f"{base}/resource").text or "")
        gpu["bar1"] = sizes[1] if len(sizes) > 1 and sizes[1] else None
        gpu["numa_node"] = reader.read(f"{base}/numa_node").signed
        sources.append("/sys/bus/pci/devices")
    for item in smi["gpus"]:
        gpu = gpu_at(item["bus"])
        gpu["name"] = gpu.get("name") or item.get("name")
        gpu.update({name: item[name] for name in ("fb_total", "bar1_total", "bar1_used") if name in item})
        sources.append(smi_text.source)
    absent = sheet.value("nvidia", "state") == "absent"
    why = "there is no NVIDIA driver and no NVIDIA device on the PCI bus" if absent else "none was found"
    source = ", ".join(dict.fromkeys(sources)) or "PCI"
    sheet.add("nvidia", "gpus", list(found.values()) or None, source, why=why)


def _bus(text: str) -> str:
    """Make bus addresses of nvidia-smi (8-digit domain) and sysfs (4) the same."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest.count(":") >= 1 else text.lower()


def findings(sheet: Sheet) -> Iterator[Finding]:
    """Yield GPUs whose BAR1 is too small, or nearly used up."""
    for gpu in sheet.value("nvidia", "gpus") or []:
        total, used, memory = (
            gpu.get("bar1_total") or gpu.get("bar1"),
            gpu.get("bar1_used"),
            gpu.get("fb_total"),
        )
        evidence = [{"what": gpu["bus"], "value": dict(gpu), "source": sheet.source("nvidia", "gpus")}]
        if total and memory and total < memory:
            yield Finding(
                "bar1-small",
                "warning",
                f"GPU {gpu['bus']}: BAR1 is {size(total)} for {size(memory)} of memory",
                "Peer devices reach GPU memory through BAR1, and not all of it can be mapped at once here. "
                "Registration of GPU buffers fails when the aperture is used up.",
                "enable above-4G decoding and resizable BAR in the firmware, or reduce what is registered",
                evidence,
            )
        elif total and used and used > BAR1_NEAR * total:
            yield Finding(
                "bar1-used",
                "warning",
                f"GPU {gpu['bus']}: {size(used)} of {size(total)} BAR1 are in use",
                "Peer devices reach GPU memory through BAR1, and little of it is left. Registration of GPU "
                "buffers fails when the aperture is used up.",
                "see which processes map it (`nvidia-smi -q`), and deregister what is not needed",
                evidence,
            )
