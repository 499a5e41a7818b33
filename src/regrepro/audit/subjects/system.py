"""The system: architecture, kernel, its configuration, its symbols, and whether it refuses long-term pins."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from functools import partial

from regrepro.audit import parse
from regrepro.audit.finding import Condition
from regrepro.audit.reader import Reader, Text
from regrepro.audit.sheet import INFERRED, OBSERVED, Sheet
from regrepro.kernel.release import stock_series
from regrepro.kernel.trace_flags import has_btf
from regrepro.kernel_functions import PINS_IN_PLACE, Family, of_family

LONGTERM_REFUSES_SINCE = (5, 13)
"""Since this kernel a long-term pin fails where a page cannot leave CMA or ZONE_MOVABLE (mm/gup.c)."""
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
# What tells what a kernel can do.
_TELLING = of_family(Family.DMABUF, Family.PEER, Family.UNPINNABLE, Family.LONGTERM, Family.GUP)
_SYMBOL = re.compile(
    rf"^[0-9a-fA-F]+ \S (\w*reg_user_mr_dmabuf|{'|'.join(_TELLING)})(?:\.[.\w]*)?(?:\s+\[(\w+)\])?\s*$",
    re.MULTILINE,
)


def collect(reader: Reader, sheet: Sheet) -> None:
    """Kernel, architecture, boot arguments, configuration, symbols, BTF."""
    state = partial(sheet.state, "system")
    uname = reader.command("uname")
    words = (uname.value or "").split()
    hostname = reader.read("proc/sys/kernel/hostname")
    state("hostname", hostname, hostname.value)
    release = reader.read("proc/sys/kernel/osrelease")
    if release.text is None and len(words) > 2:
        release = Text(words[2], uname.source)
    state("kernel", release, release.value)
    for name, path in (("kernel-version", "proc/sys/kernel/version"), ("kernel-banner", "proc/version")):
        text = reader.read(path)
        state(name, text, text.value)
    arch, source, how = _architecture(reader, uname, release.value)
    sheet.add("system", "arch", arch, source, how=how, why="neither uname nor /proc/cpuinfo was captured")
    cmdline = reader.read("proc/cmdline")
    state("boot-arguments", cmdline, cmdline.value)
    _config(reader, sheet, release.value)
    _symbols(reader, sheet)
    _btf(reader, sheet)


def _architecture(reader: Reader, uname: Text, release: str | None) -> tuple[str | None, str, str]:
    if reader.live:
        return os.uname().machine, "uname", OBSERVED
    for text in (reader.read("proc/sys/kernel/arch"), reader.known("arch")):
        if text.value:
            return text.value, text.source, OBSERVED
    match = re.search(r"\b(x86_64|aarch64|ppc64le|i686|s390x|riscv64)\b", uname.text or "")
    if match:
        return match[1], uname.source, OBSERVED
    cpuinfo = reader.read("proc/cpuinfo")
    if "CPU implementer" in (cpuinfo.text or ""):
        return "aarch64", cpuinfo.source, INFERRED
    if re.search(r"^flags\s*:.*\blm\b", cpuinfo.text or "", re.MULTILINE):
        return "x86_64", cpuinfo.source, INFERRED
    driver = parse.nvidia_version(reader.read("proc/driver/nvidia/version").text or "")
    if "arch" in driver:
        return driver["arch"], "proc/driver/nvidia/version", INFERRED
    match = re.search(r"[-.](x86_64|aarch64|amd64|arm64)\b", release or "")
    if match:
        arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(match[1], match[1])
        return arch, "the kernel's release name", INFERRED
    return None, "uname, /proc/cpuinfo", "missing"


def _config(reader: Reader, sheet: Sheet, release: str | None) -> None:
    """The kernel's configuration, of what matters here: name → "y", "m", a number, or "n"."""
    text = Text(None, "kernel configuration", "the kernel's release is not known")
    packed, _ = reader.content("proc/config.gz")
    if packed is not None:
        try:
            text = Text(gzip.decompress(packed).decode("ascii", "replace"), "/proc/config.gz")
        except (OSError, EOFError, zlib.error):
            text = Text(None, "/proc/config.gz", "it cannot be unpacked")
    if text.text is None and release and "/" not in release:
        text = reader.first((f"boot/config-{release}", f"lib/modules/{release}/config"))
    found = dict(re.findall(r"^CONFIG_([A-Z0-9_]+)=(\S+)", text.text or "", re.MULTILINE))
    sheet.state("system", "kernel-config", text, {name: found.get(name, "n") for name in CONFIG_NAMES})


def _symbols(reader: Reader, sheet: Sheet) -> None:
    """Functions that tell what kernel and modules can do; their names are public even where addresses
    are not.
    """
    text = reader.read("proc/kallsyms") if reader.live else reader.command("kallsyms")
    if not reader.live and text.text is not None and not text.text.strip():
        text = Text(None, text.source, "it is empty")
    found = sorted(
        {f"{name} [{module}]" if module else name for name, module in _SYMBOL.findall(text.text or "")}
    )
    sheet.state("system", "symbols", text, found)


def _btf(reader: Reader, sheet: Sheet) -> None:
    """Whether BTF has the reason of a migration for a long-term pin; a name in it stands between zeros."""
    blob, why = reader.content("sys/kernel/btf/vmlinux")
    source = "/sys/kernel/btf/vmlinux" if reader.live else "sys/kernel/btf/vmlinux"
    there = b"\0MR_LONGTERM_PIN\0" in blob if blob is not None and has_btf(blob) else None
    sheet.add("system", "migrates-for-pins", there, source, why=why or "it is no BTF")


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
