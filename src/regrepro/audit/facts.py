"""Facts of a node, each with the place where it was read. Nothing is judged here; see findings.py for
that.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from regrepro.audit import parse
from regrepro.audit.reader import Reader, Text
from regrepro.audit.sheet import INFERRED, Sheet
from regrepro.kernel.trace_flags import has_btf
from regrepro.kernel_functions import Family, of_family

DRIVER_VERSION = re.compile(r"\d{3,4}\.\d{1,3}(?:\.\d{1,3})?")
NVIDIA_VENDOR = "0x10de"
OFED_VERSION = re.compile(r"\d{1,2}\.\d{1,2}-\d")
MAX_PROCESSES = 64
KMSG_LIMIT = 16 << 20


def collect(reader: Reader) -> Sheet:
    """Find all facts. Never raises for something that is missing: then the fact says why it is not
    known.
    """
    sheet = Sheet()
    system(reader, sheet)
    memory(reader, sheet)
    policy(reader, sheet)
    nvidia(reader, sheet)
    rdma(reader, sheet)
    topology(reader, sheet)
    limits(reader, sheet)
    confinement(reader, sheet)
    return sheet


def whole(value: object) -> int | None:
    """Return a foreign value where it is a whole number that a count can be, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def surveyed(reader: Reader) -> bool:
    """Tell whether what is not there was looked for: on the machine itself, and by scripts/collect.sh."""
    return reader.live or reader.read("collect.txt").text is not None


def _state(sheet: Sheet, group: str, name: str, text: Text, value: Any) -> None:
    """State what was made of a text: the value, or why there is none."""
    if text.text is None:
        sheet.add(group, name, None, text.source, why=text.why)
    else:
        sheet.add(group, name, value, text.source, why="the text has another shape than expected")


# --- system
# --------------------------------------------------------------------------------------------------------


def system(reader: Reader, sheet: Sheet) -> None:
    """Kernel, architecture, page size, boot arguments, configuration."""
    uname = reader.command("uname")
    words = (uname.value or "").split()
    hostname = reader.read("proc/sys/kernel/hostname")
    _state(sheet, "system", "hostname", hostname, hostname.value)
    release = reader.read("proc/sys/kernel/osrelease")
    if release.text is None and len(words) > 2:
        release = Text(words[2], uname.source)
    _state(sheet, "system", "kernel", release, release.value)
    version = reader.read("proc/sys/kernel/version")
    _state(sheet, "system", "kernel-version", version, version.value)
    banner = reader.read("proc/version")
    _state(sheet, "system", "kernel-banner", banner, banner.value)
    arch, source, how = _architecture(reader, uname, release.value)
    sheet.add("system", "arch", arch, source, how=how, why="neither uname nor /proc/cpuinfo was captured")
    cmdline = reader.read("proc/cmdline")
    _state(sheet, "system", "boot-arguments", cmdline, cmdline.value)
    kernel_config(reader, sheet, release.value)


def _architecture(reader: Reader, uname: Text, release: str | None) -> tuple[str | None, str, str]:
    if reader.live:
        return os.uname().machine, "uname", "observed"
    for text in (reader.read("proc/sys/kernel/arch"), reader.known("arch")):
        if text.value:
            return text.value, text.source, "observed"
    match = re.search(r"\b(x86_64|aarch64|ppc64le|i686|s390x|riscv64)\b", uname.text or "")
    if match:
        return match[1], uname.source, "observed"
    cpuinfo = reader.read("proc/cpuinfo")
    if cpuinfo.text:
        if "CPU implementer" in cpuinfo.text:
            return "aarch64", cpuinfo.source, INFERRED
        if re.search(r"^flags\s*:.*\blm\b", cpuinfo.text, re.MULTILINE):
            return "x86_64", cpuinfo.source, INFERRED
    driver = parse.nvidia_version(reader.read("proc/driver/nvidia/version").text or "")
    if "arch" in driver:
        return driver["arch"], "proc/driver/nvidia/version", INFERRED
    match = re.search(r"[-.](x86_64|aarch64|amd64|arm64)\b", release or "")
    if match:
        arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(match[1], match[1])
        return arch, "the kernel's release name", INFERRED
    return None, "uname, /proc/cpuinfo", "missing"


CONFIG_NAMES = (
    "CMA",
    "CMA_SYSFS",
    "CMA_DEBUGFS",
    "DMA_CMA",
    "CMA_SIZE_MBYTES",
    "KEXEC_HANDOVER",
    "KEXEC_HANDOVER_ENABLE_DEFAULT",
    "CROSS_MEMORY_ATTACH",
    "DMABUF_MOVE_NOTIFY",
    "INFINIBAND_ON_DEMAND_PAGING",
)


def kernel_config(reader: Reader, sheet: Sheet, release: str | None) -> None:
    """The kernel's configuration, of what matters here: name → "y", "m", a number, or "n"."""
    text = Text(None, "kernel configuration", "the kernel's release is not known")
    packed, _ = reader.content("proc/config.gz")
    if packed is not None:
        import gzip
        import zlib

        try:
            text = Text(gzip.decompress(packed).decode("ascii", "replace"), "/proc/config.gz")
        except (OSError, EOFError, zlib.error):
            text = Text(None, "/proc/config.gz", "it cannot be unpacked")
    if text.text is None and release and "/" not in release:
        text = reader.first((f"boot/config-{release}", f"lib/modules/{release}/config"))
    if text.text is None:
        sheet.add("system", "kernel-config", None, text.source, why=text.why)
        return
    found = dict(re.findall(r"^CONFIG_([A-Z0-9_]+)=(\S+)", text.text, re.MULTILINE))
    sheet.add("system", "kernel-config", {name: found.get(name, "n") for name in CONFIG_NAMES}, text.source)


def kernel_log(reader: Reader) -> Text:
    """Return the kernel's log: read from /dev/kmsg here, captured elsewhere."""
    if not reader.live:
        return reader.command("dmesg")
    lines: list[str] = []
    size = 0
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        fallback = reader.first(("var/log/dmesg", "var/log/kern.log"))
        if fallback.text is not None:
            return fallback
        why = (
            "permission denied (root can read it, or kernel.dmesg_restrict=0)"
            if error.errno in (1, 13)
            else ""
        )
        return Text(None, "/dev/kmsg", why or (error.strerror or "cannot be opened"))
    try:
        while size < KMSG_LIMIT:
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue  # overwritten while we read: the next one is still there
            except BlockingIOError:
                break
            if not record:
                break
            size += len(record)
            head, _, body = record.decode("utf-8", "replace").partition(";")
            stamp = head.split(",")[2] if head.count(",") >= 2 else "0"
            seconds = int(stamp) / 1e6 if stamp.isdigit() else 0.0
            lines.append(f"[{seconds:12.6f}] {body.splitlines()[0] if body else ''}")
    except OSError as error:
        return Text(None, "/dev/kmsg", error.strerror or "cannot be read")
    finally:
        os.close(descriptor)
    return Text("\n".join(lines) + "\n", "/dev/kmsg")


# --- memory
# --------------------------------------------------------------------------------------------------------


def memory(reader: Reader, sheet: Sheet) -> None:
    """CMA, ZONE_MOVABLE and page blocks, per node and zone, and where the reservations come from."""
    info_text = reader.read("proc/meminfo")
    info = parse.meminfo(info_text.text or "")
    for name, key in (("total", "MemTotal"), ("free", "MemFree"), ("available", "MemAvailable")):
        _state(sheet, "memory", name, info_text, info.get(key))
    for name, key in (("cma-total", "CmaTotal"), ("cma-free", "CmaFree")):
        if info_text.text is not None and "MemTotal" in info and key not in info:
            # Both lines are printed by a kernel with CONFIG_CMA only (fs/proc/meminfo.c).
            sheet.add(
                "memory", name, 0, f"{info_text.source} (no {key}: kernel without CONFIG_CMA)", how=INFERRED
            )
        else:
            _state(sheet, "memory", name, info_text, info.get(key))
    has_cma = "CmaTotal" in info if "MemTotal" in info else None
    sheet.add("memory", "kernel-has-cma", has_cma, info_text.source, why=info_text.why)
    zones_text = reader.read("proc/zoneinfo")
    zones = parse.zoneinfo(zones_text.text or "")
    blocks_text = reader.read("proc/pagetypeinfo")
    blocks, order = parse.pagetypeinfo(blocks_text.text or "")
    recorded, map_source, map_why = reader.memory_map()
    page_size, size_source, size_how = _page_size(reader, info, zones, recorded)
    sheet.add("memory", "page-size", page_size, size_source, how=size_how, why="no source tells it")
    if recorded is not None and not zones and isinstance(recorded.get("zones"), list):
        zones, zones_text = _zones_of_map(recorded), Text("", map_source)
    if recorded is not None and not blocks and isinstance(recorded.get("zones"), list):
        blocks, blocks_text = _blocks_of_map(recorded), Text("", map_source)
        found_order = whole(recorded.get("pageblock_order"))
        order = found_order if found_order is not None else order
    sheet.add("memory", "zones", zones or None, zones_text.source, why=zones_text.why or "no zone in it")
    sheet.add(
        "memory", "page-blocks", blocks or None, blocks_text.source, why=blocks_text.why or "no count in it"
    )
    sheet.add("memory", "page-block-order", order, blocks_text.source, why=blocks_text.why or "not in it")
    if recorded is not None:
        summary = {name: recorded.get(name) for name in ("complete", "has_unpinnable", "problems")}
        sheet.add("memory", "memory-map", summary, map_source)
    else:
        sheet.add("memory", "memory-map", None, map_source or "pageblock map", why=map_why)
    cma_areas(reader, sheet, page_size)
    log_text = kernel_log(reader)
    log = parse.boot_log(log_text.text or "") if log_text.text is not None else None
    stated = reader.known("reservations")
    if log is None and stated.text is not None:
        log, log_text = _log_of_record(stated.text), stated
    sheet.add("memory", "boot-log", log, log_text.source, why=log_text.why)
    sheet.add("memory", "hugetlb", *_hugetlb(reader))
    kho(reader, sheet)
    device_tree(reader, sheet)


def _page_size(
    reader: Reader, info: dict[str, int], zones: list[dict[str, Any]], recorded: dict[str, object] | None
) -> tuple[int | None, str, str]:
    if reader.live:
        return os.sysconf("SC_PAGE_SIZE"), "sysconf(_SC_PAGE_SIZE)", "observed"
    if recorded is not None and (size := whole(recorded.get("page_size"))):
        return size, "event memory-map of record.jsonl", "observed"
    for text in (reader.command("getconf"), reader.known("page_size")):
        if text.value and text.value.isdigit() and int(text.value) in (4096, 16384, 65536):
            return int(text.value), text.source, "observed"
    managed = sum(zone["managed"] or 0 for zone in zones)
    if managed and info.get("MemTotal"):
        # MemTotal is the sum of the zones' managed pages (si_meminfo, mm/show_mem.c), but for memory
        # that came or went between the two reads.
        ratio = info["MemTotal"] / managed
        for size in (4096, 16384, 65536):
            if 0.9 < ratio / size < 1.1:
                return size, "MemTotal over the zones' managed pages", INFERRED
    return None, "getconf PAGESIZE", "missing"


def _zones_of_map(recorded: dict[str, object]) -> list[dict[str, Any]]:
    """Bring a record's zones into the shape of /proc/zoneinfo; what the record does not hold is None."""
    zones = []
    listed = recorded.get("zones")
    for zone in listed if isinstance(listed, list) else []:
        if not isinstance(zone, dict) or not isinstance(zone.get("zone"), str):
            continue
        numbers = {
            name: whole(zone.get(name))
            for name in (
                "free",
                "min",
                "low",
                "high",
                "spanned",
                "present",
                "managed",
                "cma",
                "free_cma",
                "start_pfn",
            )
        }
        zones.append({"node": whole(zone.get("node")) or 0, "zone": zone["zone"], **numbers})
    return zones


def _blocks_of_map(recorded: dict[str, object]) -> list[dict[str, Any]]:
    found = []
    listed = recorded.get("zones")
    for zone in listed if isinstance(listed, list) else []:
        if not isinstance(zone, dict) or not isinstance(zone.get("blocks"), dict):
            continue
        counts = {
            str(name): number
            for name, count in zone["blocks"].items()
            if (number := whole(count)) is not None
        }
        found.append({"node": whole(zone.get("node")) or 0, "zone": str(zone.get("zone")), "blocks": counts})
    return found


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


def _number(text: Text) -> int | None:
    return int(text.value) if text.value and re.fullmatch(r"\d{1,20}", text.value) else None


def cma_areas(reader: Reader, sheet: Sheet, page_size: int | None) -> None:
    """CMA areas by name, from sysfs (CONFIG_CMA_SYSFS) or debugfs (CONFIG_CMA_DEBUGFS)."""
    areas = []
    folder = "sys/kernel/mm/cma"
    for name in reader.names(folder):
        total = _number(reader.read(f"{folder}/{name}/total_pages"))
        available = _number(reader.read(f"{folder}/{name}/available_pages"))
        success = _number(reader.read(f"{folder}/{name}/alloc_pages_success"))
        released = _number(reader.read(f"{folder}/{name}/release_pages_success"))
        areas.append(
            {
                "name": name,
                "bytes": total * page_size if total is not None and page_size else None,
                "used": (total - available) * page_size
                if total is not None and available is not None and page_size
                else None,
                "ever_used": None if success is None else success > 0,
                "released": released,
                "base_pfn": None,
            }
        )
    if areas:
        sheet.add("memory", "cma-areas", areas, f"/{folder}")
        return
    folder = "sys/kernel/debug/cma"
    for name in reader.names(folder):
        count = _number(reader.read(f"{folder}/{name}/count"))
        used = _number(reader.read(f"{folder}/{name}/used"))
        areas.append(
            {
                "name": name,
                "bytes": count * page_size if count is not None and page_size else None,
                "used": used * page_size if used is not None and page_size else None,
                "ever_used": None,
                "released": None,
                "base_pfn": _number(reader.read(f"{folder}/{name}/base_pfn")),
            }
        )
    if areas:
        sheet.add("memory", "cma-areas", areas, f"/{folder}")
    elif sheet.value("memory", "cma-total") == 0:
        sheet.add("memory", "cma-areas", [], sheet.source("memory", "cma-total"), how=INFERRED)
    else:
        why = "neither CONFIG_CMA_SYSFS nor a readable CONFIG_CMA_DEBUGFS"
        sheet.add("memory", "cma-areas", None, "/sys/kernel/mm/cma, /sys/kernel/debug/cma", why=why)


def _hugetlb(reader: Reader) -> tuple[dict[str, int] | None, str]:
    """Huge pages in the pools: size in KiB → pages."""
    folder = "sys/kernel/mm/hugepages"
    pools = {}
    for name in reader.names(folder):
        match = re.fullmatch(r"hugepages-(\d{1,12})kB", name)
        count = _number(reader.read(f"{folder}/{name}/nr_hugepages"))
        if match and count is not None:
            pools[match[1]] = count
    return pools or None, f"/{folder}"


def kho(reader: Reader, sheet: Sheet) -> None:
    """Kexec handover's scratch memory (kernel/liveupdate/kexec_handover.c), as far as it can be seen."""
    for folder in ("sys/kernel/debug/kho/out", "sys/kernel/debug/kho/in"):
        text = reader.read(f"{folder}/scratch_len")
        sizes = [int(word, 16) for word in re.findall(r"0x[0-9a-f]{1,16}", text.text or "")]
        if sizes:
            sheet.add("memory", "kho-scratch", sum(sizes), text.source)
            return
    why = "debugfs tells it to root only, where the kernel has kexec handover"
    sheet.add("memory", "kho-scratch", None, "/sys/kernel/debug/kho/out/scratch_len", why=why)


def device_tree(reader: Reader, sheet: Sheet) -> None:
    """CMA pools that a device tree reserves (`shared-dma-pool` with `reusable`)."""
    folder = "proc/device-tree/reserved-memory"
    names = reader.names(folder)
    pools = []
    for name in names:
        compatible = reader.read(f"{folder}/{name}/compatible").value or ""
        if "shared-dma-pool" in compatible and "reusable" in reader.names(f"{folder}/{name}"):
            pools.append(name)
    if names:
        sheet.add("memory", "device-tree-pools", pools, f"/{folder}")


# --- policy
# --------------------------------------------------------------------------------------------------------


def policy(reader: Reader, sheet: Sheet) -> None:
    """Memory policy: huge pages, compaction, overcommit, pressure, control group limits."""
    for name in ("enabled", "defrag", "shmem_enabled"):
        text = reader.read(f"sys/kernel/mm/transparent_hugepage/{name}")
        _state(sheet, "policy", f"thp-{name}", text, parse.choice(text.text or ""))
    for name in (
        "compaction_proactiveness",
        "compact_unevictable_allowed",
        "overcommit_memory",
        "overcommit_ratio",
        "min_free_kbytes",
        "max_map_count",
        "zone_reclaim_mode",
        "swappiness",
        "unprivileged_userfaultfd",
    ):
        text = reader.read(f"proc/sys/vm/{name}")
        _state(sheet, "policy", f"vm.{name}", text, _number(text))
    pressure = reader.read("proc/pressure/memory")
    match = re.search(r"some avg10=([0-9.]{1,10}) avg60=([0-9.]{1,10})", pressure.text or "")
    _state(
        sheet, "policy", "psi-memory-avg60", pressure, float(match[2]) if match and _float(match[2]) else None
    )
    groups = reader.read("proc/self/cgroup")
    path = next((line[3:] for line in groups.lines if line.startswith("0::")), None)
    if path is None:
        sheet.add("policy", "memory-cgroup", None, groups.source, why=groups.why or "no cgroup v2 in it")
        return
    found: dict[str, Any] = {"path": path}
    base = "sys/fs/cgroup" + (path if path != "/" else "")
    for name in ("memory.max", "memory.high", "memory.current", "rdma.max"):
        value = reader.read(f"{base}/{name}").value
        if value is not None:
            found[name] = int(value) if re.fullmatch(r"\d{1,20}", value) else value
    sheet.add("policy", "memory-cgroup", found, f"/{base}")


def _float(text: str) -> bool:
    return re.fullmatch(r"\d{1,8}(\.\d{1,8})?", text) is not None


# --- NVIDIA
# --------------------------------------------------------------------------------------------------------


def nvidia(reader: Reader, sheet: Sheet) -> None:
    """Driver, modules, peer memory, CUDA, GPUs and their BAR1."""
    modules_text = reader.read("proc/modules")
    loaded = {line.split()[0]: line.split() for line in modules_text.lines if line.split()}
    names = sorted(name for name in loaded if name.startswith("nvidia") or name in ("nv_peer_mem", "gdrdrv"))
    sheet.add(
        "nvidia",
        "modules",
        names if modules_text.text is not None else None,
        modules_text.source,
        why=modules_text.why,
    )
    driver(reader, sheet, names if modules_text.text is not None else None)
    symbols(reader, sheet)
    btf(reader, sheet)
    peermem(reader, sheet, names)
    smi_text = reader.command("nvidia-smi")
    smi = parse.smi(smi_text.text or "")
    libraries = reader.command("libcuda").lines
    if reader.live:
        libraries = [
            name
            for folder in (
                "usr/lib/x86_64-linux-gnu",
                "usr/lib/aarch64-linux-gnu",
                "usr/lib64",
                "usr/lib/wsl/lib",
            )
            for name in reader.names(folder)
            if re.match(r"libcuda\.so\.\d{3,4}\.", name)
        ]
    versions = [
        match[1] for line in libraries if (match := re.search(r"libcuda\.so\.(\d{3,4}\.[\d.]+\d)", line))
    ]
    if smi.get("cuda"):
        sheet.add("nvidia", "cuda-driver", smi["cuda"], smi_text.source)
    else:
        sheet.add("nvidia", "cuda-driver", None, smi_text.source, why=smi_text.why or "not in it")
    sheet.add("nvidia", "libcuda", versions or None, "libcuda.so.*", why="no libcuda.so.VERSION was found")
    toolkit = reader.first(("usr/local/cuda/version.json", "usr/local/cuda/version.txt"))
    match = re.search(r'"version"\s*:\s*"([\d.]+)"|CUDA Version ([\d.]+)', toolkit.text or "")
    _state(sheet, "nvidia", "cuda-toolkit", toolkit, (match[1] or match[2]) if match else None)
    gpus(reader, sheet, smi, smi_text)


def driver(reader: Reader, sheet: Sheet, modules: list[str] | None) -> None:
    """Version, flavour and state of the kernel driver: loaded, installed only, or absent."""
    version_text = reader.read("proc/driver/nvidia/version")
    found = parse.nvidia_version(version_text.text or "")
    source = version_text.source
    state = "loaded" if found.get("version") else None
    module = reader.read("sys/module/nvidia/version")
    if "version" not in found and module.value and DRIVER_VERSION.fullmatch(module.value):
        found["version"], source, state = module.value, module.source, "loaded"
    smi_text = reader.command("nvidia-smi")
    smi = parse.smi(smi_text.text or "")
    if "version" not in found and DRIVER_VERSION.fullmatch(smi.get("driver", "")):
        found["version"], source, state = smi["driver"], smi_text.source, "loaded"
    known = reader.known("nvidia_driver")
    if "version" not in found and known.value and (match := DRIVER_VERSION.search(known.value)):
        found["version"], source, state = match[0], known.source, "loaded"
    folders = _driver_folders(reader)
    if "version" not in found and folders:
        installed = sorted({match[0] for folder in folders if (match := DRIVER_VERSION.search(folder))})
        if len(installed) == 1:
            found["version"], source, state = (
                installed[0],
                f"/{folders[0].lstrip('/')}",
                "installed, not loaded",
            )
    if state is None and modules is not None:
        if "nvidia" in modules:
            state = "loaded"
        elif not folders:
            state = "absent"
        else:
            state = "installed, not loaded"
        source = "/proc/modules"
    present = module_names(reader)
    if state is None and present:
        # A kernel without loadable modules has no /proc/modules; what is built in shows here.
        loaded = "nvidia" in present
        state = "loaded" if loaded else "installed, not loaded" if folders else "absent"
        source = "/sys/module"
    sheet.add("nvidia", "state", state, source, why="neither /proc/modules nor the driver's own files tell")
    why = (
        "there is no NVIDIA driver"
        if state == "absent"
        else version_text.why or "its version is not told anywhere"
    )
    sheet.add("nvidia", "version", found.get("version"), source, why=why)
    flavour = found.get("flavour")
    sheet.add(
        "nvidia", "flavour", flavour, version_text.source, why=why if state == "absent" else version_text.why
    )
    sheet.add("nvidia", "source-folders", folders or None, "/usr/src, /var/lib/dkms", why="none was found")


def module_names(reader: Reader) -> list[str]:
    """Names in /sys/module, only where the whole folder was seen."""
    return reader.names("sys/module") if reader.live else reader.command("sys-module").lines


def _driver_folders(reader: Reader) -> list[str]:
    """Folders with a driver's source: /usr/src/nvidia-VERSION and what DKMS knows."""
    if not reader.live:
        listed = [line.strip() for line in reader.command("driver-folders").lines]
        found = [folder for folder in listed if DRIVER_VERSION.search(folder) and "nvidia" in folder]
        return found or [f"usr/src/{name}" for name in reader.names("usr/src") if _is_driver_folder(name)]
    return [f"usr/src/{name}" for name in reader.names("usr/src") if _is_driver_folder(name)]


def _is_driver_folder(name: str) -> bool:
    return re.fullmatch(r"nvidia(?:-[a-z-]+)?-\d{3,4}\.\d{1,3}(?:\.\d{1,3})?", name) is not None


_TELLING = of_family(
    Family.DMABUF, Family.PEER, Family.UNPINNABLE, Family.LONGTERM, Family.GUP
)  # of what a kernel can do
_SYMBOL = re.compile(
    rf"^[0-9a-fA-F]+ \S (\w*reg_user_mr_dmabuf|{'|'.join(_TELLING)})(?:\.[.\w]*)?(?:\s+\[(\w+)\])?\s*$",
    re.MULTILINE,
)


def symbols(reader: Reader, sheet: Sheet) -> None:
    """Functions that tell what kernel and modules can do; their names are public even where addresses
    are not.
    """
    text = reader.read("proc/kallsyms") if reader.live else reader.command("kallsyms")
    if text.text is None:
        sheet.add("system", "symbols", None, text.source, why=text.why)
        return
    if not reader.live and not text.text.strip():
        sheet.add("system", "symbols", None, text.source, why="it is empty")
        return
    found = sorted({f"{name} [{module}]" if module else name for name, module in _SYMBOL.findall(text.text)})
    sheet.add("system", "symbols", found, text.source)


def btf(reader: Reader, sheet: Sheet) -> None:
    """Whether BTF has the reason of a migration for a long-term pin; a name in it stands between zeros."""
    blob, why = reader.content("sys/kernel/btf/vmlinux")
    source = "/sys/kernel/btf/vmlinux" if reader.live else "sys/kernel/btf/vmlinux"
    if blob is not None and has_btf(blob):
        sheet.add("system", "migrates-for-pins", b"\0MR_LONGTERM_PIN\0" in blob, source)
    else:
        sheet.add("system", "migrates-for-pins", None, source, why=why or "it is no BTF")


def peermem(reader: Reader, sheet: Sheet, modules: list[str]) -> None:
    """Peer memory: which module, its parameters, and the counters of MLNX_OFED per client."""
    loaded = [name for name in ("nvidia_peermem", "nv_peer_mem") if name in modules]
    present = module_names(reader)
    if sheet.value("nvidia", "modules") is None:
        loaded = [name for name in ("nvidia_peermem", "nv_peer_mem") if name in present]
    known = sheet.value("nvidia", "modules") is not None or bool(present)
    sheet.add(
        "nvidia",
        "peermem",
        loaded if known else None,
        "/proc/modules",
        why="neither /proc/modules nor /sys/module was captured",
    )
    parameter = reader.read("sys/module/nvidia_peermem/parameters/persistent_api_support")
    if parameter.value is not None:
        sheet.add("nvidia", "peermem-persistent-api-support", parameter.value, parameter.source)
    folder = "sys/kernel/mm/memory_peers"
    clients = {}
    for name in reader.names(folder):
        clients[name] = {
            counter: _number(reader.read(f"{folder}/{name}/{counter}"))
            for counter in ("num_alloc_mrs", "num_dealloc_mrs", "num_reg_pages", "num_free_callbacks")
        }
    if clients:
        sheet.add("nvidia", "peer-memory-clients", clients, f"/{folder}")


def gpus(reader: Reader, sheet: Sheet, smi: dict[str, Any], smi_text: Text) -> None:
    """GPUs, their memory and BAR1 (from PCI sysfs and nvidia-smi)."""
    found: dict[str, dict[str, Any]] = {}
    folder = "proc/driver/nvidia/gpus"
    sources = []
    for bus in reader.names(folder):
        text = reader.read(f"{folder}/{bus}/information")
        model = re.search(r"^Model:\s*(.+)$", text.text or "", re.MULTILINE)
        found[_bus(bus)] = {"bus": _bus(bus), "name": model[1].strip() if model else None}
        sources.append(f"/{folder}")
    for device in reader.names("sys/bus/pci/devices"):
        base = f"sys/bus/pci/devices/{device}"
        if reader.read(f"{base}/vendor").value != NVIDIA_VENDOR:
            continue
        if (reader.read(f"{base}/class").value or "")[:6] not in ("0x0300", "0x0302"):
            continue
        gpu = found.setdefault(_bus(device), {"bus": _bus(device), "name": None})
        sizes = parse.pci_resources(reader.read(f"{base}/resource").text or "")
        gpu["bar1"] = sizes[1] if len(sizes) > 1 and sizes[1] else None
        gpu["numa_node"] = _signed(reader.read(f"{base}/numa_node"))
        sources.append("/sys/bus/pci/devices")
    for item in smi["gpus"]:
        gpu = found.setdefault(_bus(item["bus"]), {"bus": _bus(item["bus"]), "name": None})
        gpu["name"] = gpu.get("name") or item.get("name")
        for name in ("fb_total", "bar1_total", "bar1_used"):
            if name in item:
                gpu[name] = item[name]
        sources.append(smi_text.source)
    state = sheet.value("nvidia", "state")
    why = (
        "there is no NVIDIA driver and no NVIDIA device on the PCI bus"
        if state == "absent"
        else "none was found"
    )
    sheet.add(
        "nvidia", "gpus", list(found.values()) or None, ", ".join(dict.fromkeys(sources)) or "PCI", why=why
    )


def _bus(text: str) -> str:
    """Make bus addresses of nvidia-smi (8-digit domain) and sysfs (4) the same."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest.count(":") >= 1 else text.lower()


def _signed(text: Text) -> int | None:
    return int(text.value) if text.value and re.fullmatch(r"-?\d{1,6}", text.value) else None


# --- RDMA
# ----------------------------------------------------------------------------------------------------------


def rdma(reader: Reader, sheet: Sheet) -> None:
    """RDMA devices: firmware, driver and its origin, links, capabilities, MRs in use and their limit."""
    folder = "sys/class/infiniband"
    names = reader.names(folder)
    infos_text = Text(None, "ibv_devinfo -v", "there is no RDMA device")
    if names or not reader.live:
        infos_text = reader.command("ibv_devinfo")
    infos = parse.devinfo(infos_text.text or "")
    limits_by_device, limits_why = _queried(reader, names)
    usage, usage_source, usage_why = _usage(reader, names)
    if not names and (infos or usage):
        names = sorted(set(infos) | set(usage))
    devices: list[dict[str, Any]] = []
    for name in names:
        base = f"{folder}/{name}"
        driver_name = (reader.link(f"{base}/device/driver") or "").rsplit("/", 1)[-1] or None
        if driver_name is None and isinstance(limits_by_device.get(name, {}).get("driver"), str):
            driver_name = limits_by_device[name]["driver"]
        if driver_name is None and name.startswith("mlx5_"):
            driver_name = "mlx5_core"
        if driver_name is None and re.match(r"rxe\d|.*_rxe", name):
            driver_name = "rdma_rxe"
        ports = []
        for port in reader.names(f"{base}/ports"):
            values = {
                key: reader.read(f"{base}/ports/{port}/{key}").value
                for key in ("state", "phys_state", "rate", "link_layer")
            }
            ports.append({"port": port, **values})
        config, _ = reader.content(f"{base}/device/config", 4096)
        pci = (reader.link(f"{base}/device") or "").rsplit("/", 1)[-1]
        pci = pci if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", pci) else ""
        if config is None and pci:
            config, _ = reader.content(f"sys/bus/pci/devices/{pci}/config", 4096)
        info = infos.get(name, {})
        limit = limits_by_device.get(name, {}).get("max_mr")
        if limit is None and str(info.get("max_mr", "")).isdigit():
            limit = int(info["max_mr"])
        devices.append(
            {
                "name": name,
                "driver": driver_name,
                "software": driver_name in ("rdma_rxe", "siw"),
                "firmware": reader.read(f"{base}/fw_ver").value or info.get("fw_ver"),
                "model": reader.read(f"{base}/hca_type").value or info.get("vendor_part_id"),
                "pci": pci or None,
                "numa_node": _signed(reader.read(f"{base}/device/numa_node")),
                "ports": ports,
                "relaxed_ordering": parse.pci_capabilities(config or b"").get("relaxed_ordering"),
                "odp": info.get("odp"),
                "mr": usage.get(name, {}).get("mr"),
                "max_mr": limit,
            }
        )
    modules_text = reader.read("proc/modules")
    if devices:
        sheet.add("rdma", "devices", devices, f"/{folder}" if reader.names(folder) else infos_text.source)
    elif surveyed(reader):
        sheet.add("rdma", "devices", [], f"/{folder}")
    elif modules_text.text is not None and "ib_uverbs " not in modules_text.text:
        sheet.add("rdma", "devices", [], f"{modules_text.source} (no ib_uverbs)", how=INFERRED)
    else:
        sheet.add("rdma", "devices", None, f"/{folder}", why="not captured")
    if devices:
        unused = usage_why or "no device was answered for"
        sheet.add("rdma", "resources", usage or None, usage_source, why=unused)
        if all(device["max_mr"] is None for device in devices):
            sheet.add("rdma", "max-mr", None, "ibv_query_device", why=limits_why or infos_text.why)
    origin(reader, sheet, {device["driver"] for device in devices if device["driver"]})


def _usage(reader: Reader, names: list[str]) -> tuple[dict[str, dict[str, int]], str, str]:
    if reader.live:
        if not names:
            return {}, "RDMA netlink", "there is no RDMA device"
        from regrepro.audit import nldev

        found, why = nldev.resources()
        return found, "RDMA netlink (RDMA_NLDEV_CMD_RES_GET)", why
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


def origin(reader: Reader, sheet: Sheet, drivers: set[str]) -> None:
    """Where the RDMA drivers come from: in the kernel's tree, or MLNX_OFED or DOCA with its version."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(drivers | {"mlx5_core", "ib_core"}):
        version = reader.read(f"sys/module/{name}/version").value
        taint = reader.read(f"sys/module/{name}/taint").value
        if version is None and taint is None and not reader.names(f"sys/module/{name}"):
            continue
        found[name] = {"version": version, "taint": taint}
    ofed = reader.command("ofed_info")
    release = (ofed.value or "").rstrip(":") or None
    compat = bool(reader.names("sys/module/mlx_compat"))
    outside = compat or any(
        OFED_VERSION.match(module["version"] or "") or "O" in (module["taint"] or "")
        for module in found.values()
    )
    if release:
        sheet.add("rdma", "driver-origin", {"origin": "MLNX_OFED or DOCA", "version": release}, ofed.source)
    elif outside:
        versions = [module["version"] for module in found.values() if module["version"]]
        value = {"origin": "out of tree", "version": versions[0] if versions else None}
        sheet.add("rdma", "driver-origin", value, "/sys/module/*/version, taint", how=INFERRED)
    elif found:
        sheet.add(
            "rdma",
            "driver-origin",
            {"origin": "in-tree", "version": None},
            "/sys/module/*/taint",
            how=INFERRED,
        )
    else:
        sheet.add(
            "rdma", "driver-origin", None, "/sys/module", why="no RDMA driver is loaded, or not captured"
        )
    sheet.add(
        "rdma", "modules", found or None, "/sys/module", why="no RDMA driver is loaded, or not captured"
    )


def topology(reader: Reader, sheet: Sheet) -> None:
    """How near each RDMA device is to each GPU, IOMMU and ACS."""
    paths: dict[str, list[str]] = {}
    for device in reader.names("sys/bus/pci/devices"):
        target = reader.link(f"sys/bus/pci/devices/{device}")
        if target:
            paths[device] = [
                part for part in target.split("/") if re.match(r"(pci)?[0-9a-f]{4}:[0-9a-f]{2}", part)
            ]
    pairs = []
    for gpu in sheet.value("nvidia", "gpus", []):
        for nic in sheet.value("rdma", "devices", []):
            if nic["pci"] in paths and gpu["bus"] in paths:
                pairs.append(
                    {
                        "gpu": gpu["bus"],
                        "rdma": nic["name"],
                        "distance": distance(
                            paths[gpu["bus"]], paths[nic["pci"]], gpu.get("numa_node"), nic["numa_node"]
                        ),
                    }
                )
    if pairs:
        sheet.add("topology", "gpu-to-rdma", pairs, "/sys/bus/pci/devices")
    iommus = reader.names("sys/class/iommu")
    groups = reader.names("sys/kernel/iommu_groups")
    domain_types: set[str] = set()
    for group in groups[:64]:
        value = reader.read(f"sys/kernel/iommu_groups/{group}/type").value
        if value:
            domain_types.add(value)
    if surveyed(reader) or iommus or groups:
        sheet.add(
            "topology",
            "iommu",
            {"active": bool(groups), "units": iommus, "domains": sorted(domain_types)},
            "/sys/class/iommu, /sys/kernel/iommu_groups",
        )
    else:
        sheet.add("topology", "iommu", None, "/sys/class/iommu", why="not captured")
    acs = {}
    seen = False
    for device in paths:
        base = f"sys/bus/pci/devices/{device}"
        if not (reader.read(f"{base}/class").value or "").startswith("0x0604"):
            continue
        config, _ = reader.content(f"{base}/config", 4096)
        if config is not None and len(config) > 256:
            seen = True
            control = parse.pci_acs(config)
            if control:
                acs[device] = control
    if seen:
        sheet.add("topology", "acs", acs, "/sys/bus/pci/devices/*/config")
    else:
        sheet.add(
            "topology",
            "acs",
            None,
            "/sys/bus/pci/devices/*/config",
            why="root reads the extended configuration",
        )


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


# --- limits and confinement
# ----------------------------------------------------------------------------------------


def limits(reader: Reader, sheet: Sheet) -> None:
    """Locked-memory limits: of this shell, of the service manager, of processes that hold an RDMA device
    open.
    """
    for name, path in (("this-shell", "proc/self/limits"), ("service-manager", "proc/1/limits")):
        text = reader.read(path)
        pair = parse.limits(text.text or "").get("Max locked memory")
        if pair is None and name == "this-shell":
            soft, hard = reader.known("memlock_soft"), reader.known("memlock_hard")
            if soft.value is not None:
                pair = (_limit(soft.value), _limit(hard.value or soft.value))
                text = soft
        _state(sheet, "limits", name, text, {"soft": pair[0], "hard": pair[1]} if pair else None)
    text = reader.first(("etc/systemd/system.conf",))
    lines = list(text.lines)
    for name in reader.names("etc/systemd/system.conf.d"):
        lines += reader.read(f"etc/systemd/system.conf.d/{name}").lines
    shown = reader.command("systemctl-memlock").lines
    setting = next(
        (line.strip() for line in reversed(lines) if line.startswith("DefaultLimitMEMLOCK=")), None
    )
    setting = setting or next(
        (line.strip() for line in shown if line.startswith("DefaultLimitMEMLOCK=")), None
    )
    if setting:
        sheet.add("limits", "services-default", setting.partition("=")[2], text.source or "systemctl show")
    else:
        sheet.add(
            "limits", "services-default", None, text.source, why=text.why or "DefaultLimitMEMLOCK is not set"
        )
    processes = _holders(reader)
    sheet.add("limits", "processes", processes, "/proc/*/fd, /proc/*/limits")


def _limit(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,20}", text) and int(text) < 1 << 62 else None


def _holders(reader: Reader) -> list[dict[str, Any]]:
    """Processes with /dev/infiniband/uverbs* open. Without root only one's own can be seen."""
    found = []
    for pid in reader.names("proc"):
        if not pid.isdigit() or len(pid) > 10:
            continue
        holds = any(
            (reader.link(f"proc/{pid}/fd/{number}") or "").startswith("/dev/infiniband/uverbs")
            for number in reader.names(f"proc/{pid}/fd")
        )
        if not holds:
            continue
        pair = parse.limits(reader.read(f"proc/{pid}/limits").text or "").get("Max locked memory")
        status = parse.status(reader.read(f"proc/{pid}/status").text or "")
        capabilities = status.get("CapEff", "")
        found.append(
            {
                "pid": int(pid),
                "command": status.get("Name"),
                "memlock": {"soft": pair[0], "hard": pair[1]} if pair else None,
                "ipc_lock": _has_ipc_lock(capabilities),
                "locked": status.get("VmLck"),
                "pinned": status.get("VmPin"),
            }
        )
        if len(found) >= MAX_PROCESSES:
            break
    return found


def _has_ipc_lock(capabilities: str) -> bool | None:
    """CAP_IPC_LOCK is bit 14 (include/uapi/linux/capability.h)."""
    return bool(int(capabilities, 16) >> 14 & 1) if re.fullmatch(r"[0-9a-fA-F]{1,16}", capabilities) else None


def confinement(reader: Reader, sheet: Sheet) -> None:
    """Lockdown, seccomp, container, capabilities, and so what evidence can be had here."""
    lockdown = reader.read("sys/kernel/security/lockdown")
    value = parse.choice(lockdown.text or "")
    if lockdown.text is None and reader.known("lockdown").value:
        lockdown = reader.known("lockdown")
        value = lockdown.value
    _state(sheet, "confinement", "lockdown", lockdown, value)
    status_text = reader.read("proc/self/status")
    status = parse.status(status_text.text or "")
    seccomp = {"0": "off", "1": "strict", "2": "filter"}.get(status.get("Seccomp", ""))
    _state(sheet, "confinement", "seccomp", status_text, seccomp)
    capabilities = status.get("CapEff")
    _state(sheet, "confinement", "capabilities", status_text, capabilities)
    container = reader.read("run/systemd/container")
    if container.value:
        sheet.add("confinement", "container", container.value, container.source)
    elif reader.exists(".dockerenv"):
        sheet.add("confinement", "container", "docker", "/.dockerenv")
    elif reader.read("proc/1/cgroup").text is not None or reader.live:
        sheet.add(
            "confinement", "container", "none seen", "/run/systemd/container, /.dockerenv", how=INFERRED
        )
    else:
        sheet.add("confinement", "container", None, container.source, why="not captured")
    if reader.live:
        evidence(sheet)


def evidence(sheet: Sheet) -> None:
    """What evidence a run can have on this machine, as this user: name → "yes" or why not."""
    root = os.geteuid() == 0
    lockdown = sheet.value("confinement", "lockdown", "none")
    found = {
        "page frame numbers (/proc/self/pagemap)": "yes" if root else "needs root (CAP_SYS_ADMIN)",
        "page blocks (/proc/kcore)": "yes"
        if os.access("/proc/kcore", os.R_OK) and lockdown != "confidentiality"
        else "lockdown forbids it"
        if lockdown == "confidentiality"
        else "needs root, or /proc/kcore is not there",
        "kernel trace (tracefs)": "yes"
        if any(
            os.access(path, os.R_OK | os.W_OK | os.X_OK)
            for path in ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")
        )
        and (root or os.access("/sys/kernel/tracing/kprobe_events", os.W_OK))
        and lockdown != "confidentiality"
        else "needs root and a mounted tracefs, without lockdown",
        "a pin from user space (userfaultfd)": "yes"
        if root or sheet.value("policy", "vm.unprivileged_userfaultfd") == 1
        else "needs root or vm.unprivileged_userfaultfd=1",
    }
    sheet.add("confinement", "evidence", found, "this process")
