"""What the boot arguments asked of the kernel, and what the boot gave: it can fail silently.

The effect is held against the request. The kernel's own list of unknown arguments is no answer alone: it
names the lab's own, leaves out an argument that is known and had no effect, and there is none before 5.14.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro.kernel import procfs
from regrepro.kernel.zones import (
    PAGE_SIZE,
    CmaArea,
    Zone,
    cma_areas_of_debugfs,
    cma_areas_of_sysfs,
    kernel_log,
    parse_size,
    read_meminfo,
    read_zones,
)
from regrepro.options import format_size

CMA = ("cma", "hugetlb_cma", "cma_pernuma", "numa_cma")
MOVABLE = ("movablecore", "kernelcore")
KHO = ("kho", "kho_scratch")
# ZONE_MOVABLE begins at a whole block of the largest order on each node, and its holes are not counted.
_ENOUGH, _ROUNDING = 0.9, 8 << 20
# Read by the boot code before the kernel proper, which then calls it unknown: choose_random_location,
# arch/x86/boot/compressed/kaslr.c.
_BOOT_CODE = ("nokaslr",)
_NOT_KNOWN = "this kernel knows no such argument"
_TRUE = ("1", "y", "t", "on")


@dataclass
class Reservation:
    """One boot argument. `wanted` and `got`: bytes, None where it names no amount, or nobody tells.

    `ok`: whether the boot gave it, None where nobody tells. `why`: what is missing.
    """

    argument: str
    wanted: int | None
    got: int | None
    ok: bool | None
    why: str = ""
    kernel_lines: list[str] = field(default_factory=list)

    def as_record(self) -> dict[str, Any]:
        """Return the keys of the record's event `reservation`."""
        return dict(vars(self))


@dataclass
class Boot:
    """What tells of this boot. `kho_scratch`: bytes, None where debugfs does not say."""

    log: list[str] = field(default_factory=list)
    zones: list[Zone] = field(default_factory=list)
    meminfo: Mapping[str, int] = field(default_factory=dict)
    areas: list[CmaArea] = field(default_factory=list)
    kho_scratch: int | None = None
    passed_to_init: frozenset[str] = frozenset()

    @property
    def present(self) -> int:
        """Bytes of memory in all zones."""
        return sum(zone.present for zone in self.zones) * PAGE_SIZE

    @property
    def movable(self) -> int:
        """Bytes of ZONE_MOVABLE."""
        return sum(zone.present for zone in self.zones if zone.name == "Movable") * PAGE_SIZE


def read(given: Iterable[str] = ()) -> list[Reservation]:
    """Return what this boot made of the arguments; `given`: those of `--boot`, none on a node."""
    asked = list(given)
    command_line = procfs.command_line() or ""
    names = (*CMA, *MOVABLE, *KHO)
    if not asked and not any(name in names for name, _ in _words(command_line)):
        return []
    boot = Boot(
        kernel_log() or [],
        read_zones(),
        read_meminfo(),
        cma_areas_of_sysfs() or cma_areas_of_debugfs(),
        _kho_scratch(),
        frozenset(procfs.init_environment()),
    )
    return find(command_line, boot, asked)


def find(command_line: str, boot: Boot, given: Iterable[str] = ()) -> list[Reservation]:
    """Return what became of the reservations on a command line, and of what was `given` and is not known.

    Of an argument that is there twice the last counts. What asks for nothing (`hugetlb_cma=0`) is left out.
    """
    asked = dict(_words(command_line))
    found = [
        *(_cma(name, asked[name], boot) for name in CMA if name in asked),
        *_movable(asked, boot),
        *(_kho(name, asked[name], boot) for name in KHO if name in asked),
    ]
    known = [item for item in found if item is not None]
    unknown = _unknown(boot)
    written = {_word(word): word for word in command_line.split()}
    for item in known:
        # As it was written: so the kernel lists it, and so `--boot` stands in the record.
        item.argument = written.get(_word(item.argument), item.argument)
        if item.ok is None and item.argument in unknown:
            item.ok, item.why = False, _NOT_KNOWN
    last = {_word(word)[0]: word for word in given}
    known += [
        Reservation(word, None, None, False, _NOT_KNOWN)
        for name, word in last.items()
        if name not in (*CMA, *MOVABLE, *KHO, *_BOOT_CODE) and word in unknown
    ]
    return known


def _words(command_line: str) -> list[tuple[str, str]]:
    """Return names and values of a command line; what follows ` -- ` is init's (parse_args)."""
    return [_word(word) for word in command_line.partition(" -- ")[0].split()]


def _word(argument: str) -> tuple[str, str]:
    """Return name and value: `-` and `_` are one to the kernel in a name (parameq, kernel/params.c)."""
    name, _, value = argument.partition("=")
    return name.replace("-", "_"), value


def _unknown(boot: Boot) -> set[str]:
    """Return the arguments that the kernel did not know.

    It names them (print_unknown_bootoptions, init/main.c, since 5.14), and hands NAME=VALUE to init as its
    environment (unknown_bootoption, in every kernel). A bare word leaves no mark where init= comes after it.
    """
    words = set(boot.passed_to_init)
    for line in boot.log:
        match = re.search(r'Unknown kernel command line parameters "([^"]*)', line)
        if match:
            words |= set(match[1].split())
    return words


def _made(
    argument: str, wanted: int | None, got: int | None, lines: list[str], *, ok: bool | None
) -> Reservation:
    why = ""
    if ok is False:
        of = f" of {format_size(wanted)}" if wanted else ""
        why = f"the kernel gave {format_size(got) if got else 'nothing'}{of}"
    return Reservation(argument, wanted, got, ok, why, lines)


# CMA


def _cma(name: str, value: str, boot: Boot) -> Reservation | None:
    wanted = wanted_size(value)
    if not wanted:
        return None
    lines = [line for line in boot.log if re.search(rf"\b{name}: |\bcma: .*activated", line)][:16]
    got = _cma_got(name, boot)
    return _made(f"{name}={value}", wanted, got, lines, ok=None if got is None else got >= wanted)


def wanted_size(value: str) -> int | None:
    """Return the bytes that a value asks for: `2G`, `0:1G,1:2G`, `64M@0x1000`; None for another form."""
    sizes = [parse_size(part.split("@")[0].rpartition(":")[2]) for part in value.split(",")]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _cma_got(name: str, boot: Boot) -> int | None:
    """Return the bytes of CMA that are there for an argument, None where nothing tells.

    An area can be reserved, as the log says, and not be activated later: /proc/meminfo counts what is left
    (cma_activate_area, mm/cma.c).
    """
    total = boot.meminfo.get("CmaTotal", 0)
    if not total:
        return 0  # CmaTotal is there exactly where the kernel has CONFIG_CMA
    reserved = [re.search(r"hugetlb_cma: reserved (\d+) MiB on node", line) for line in boot.log]
    of_hugetlb = sum(int(match[1]) << 20 for match in reserved if match)
    if any(area.pages for area in boot.areas):  # total_pages in sysfs since 6.10
        prefixes = {"hugetlb_cma": ("hugetlb",), "cma": ("reserved",)}.get(name, ("pernuma", "numa"))
        return sum(area.pages for area in boot.areas if area.name.startswith(prefixes)) * PAGE_SIZE
    if name == "hugetlb_cma":
        return min(total, of_hugetlb) if boot.log else None
    return max(0, total - of_hugetlb)


# ZONE_MOVABLE


def _movable(asked: Mapping[str, str], boot: Boot) -> Iterable[Reservation]:
    """Hold movablecore and kernelcore against ZONE_MOVABLE (find_zone_movable_pfns_for_nodes, mm/mm_init.c).

    kernelcore is the least that is not movable: how much more it becomes depends on where the highest zone
    begins, so that a ZONE_MOVABLE of any size fulfils it; given both, movablecore is the most.
    """
    lines = [
        line
        for line in boot.log
        if re.search(r"ovable zone|kernelcore|mirror", line) and "ommand line" not in line
    ][:16]
    sizes = {name: _of_memory(asked[name], boot) for name in MOVABLE if name in asked}
    slack = _ROUNDING * len({zone.node for zone in boot.zones})
    movable = boot.movable
    for name, size in sizes.items():
        argument = f"{name}={asked[name]}"
        if asked[name] == "mirror":
            yield _made(argument, None, movable, lines, ok=movable > 0)
        elif size and name == "movablecore":
            enough = "kernelcore" in sizes or movable + slack >= size * _ENOUGH
            yield _made(argument, size, movable, lines, ok=movable > 0 and enough)
        elif size and size < boot.present:  # else all memory is to be the kernel's
            item = _made(argument, size, boot.present - movable, lines, ok=movable > 0)
            if not item.ok:
                item.why = "there is no ZONE_MOVABLE beside it"
            yield item


def _of_memory(value: str, boot: Boot) -> int | None:
    """Return the bytes of `512M`, or of `25%` of all memory; None for another form."""
    share = re.fullmatch(r"(\d+)%", value)
    return boot.present * int(share[1]) // 100 if share else parse_size(value)


# KHO


def _kho(name: str, value: str, boot: Boot) -> Reservation | None:
    """Kexec handover: its scratch memory is CMA that no area counts (kernel/liveupdate/kexec_handover.c)."""
    if name == "kho" and not value.lower().startswith(_TRUE):
        return None
    wanted = wanted_size(value) if name == "kho_scratch" else None
    if name == "kho_scratch" and wanted == 0:
        return None
    got = boot.kho_scratch
    total, free = (boot.meminfo.get(key, 0) for key in ("CmaTotal", "CmaFree"))
    if got is None and (free > total or not total):
        got = max(0, free - total)
    lines = [line for line in boot.log if "KHO" in line][:16]
    # How much of it is scratch is the kernel's own reckoning, over zones and nodes.
    item = _made(f"{name}={value}", wanted, got, lines, ok=None if got is None else got > 0)
    if item.ok is False:
        item.why = "there is no scratch memory of kexec handover"
    return item


def _kho_scratch() -> int | None:
    for folder in ("out", "in"):
        try:
            text = Path(f"/sys/kernel/debug/kho/{folder}/scratch_len").read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        return sum(int(word, 16) for word in re.findall(r"0x[0-9a-fA-F]{1,16}", text))
    return None
