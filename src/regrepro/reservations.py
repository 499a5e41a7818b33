"""Memory that the boot arguments asked to reserve, and what the kernel gave: it can fail silently."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro.errors import UsageError
from regrepro.options import parse_size
from regrepro.stage.backend import PAGE_SIZE, Zone, parse_zoneinfo

ARGUMENTS = ("hugetlb_cma", "cma", "movablecore")
_MIB = 1 << 20
# ZONE_MOVABLE is rounded to pageblocks and spread over nodes.
_ENOUGH = 0.9


@dataclass
class Reservation:
    """One boot argument; sizes in bytes, `got` None where the kernel does not tell."""

    argument: str
    wanted: int
    got: int | None
    kernel_lines: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool | None:
        """Whether the kernel reserved what was asked; None where it does not tell."""
        return None if self.got is None else self.got >= self.wanted * _ENOUGH

    def as_record(self) -> dict[str, Any]:
        """Return the keys of the record's event `reservation`."""
        return {
            "argument": self.argument,
            "wanted": self.wanted,
            "got": self.got,
            "ok": self.ok,
            "kernel_lines": self.kernel_lines,
        }


def wanted_size(value: str) -> int | None:
    """Return the bytes that a value asks for: `2G`, `0:1G,1:2G`, `64M@0x1000`; None for another form."""
    total = 0
    for part in value.split(","):
        size = part.split("@")[0].rpartition(":")[2]
        try:
            total += parse_size(size)
        except UsageError:
            return None
    return total


def find(command_line: str, kernel_log: Iterable[str], zones: Iterable[Zone]) -> list[Reservation]:
    """Return the reservations that a command line asks for; of an argument given twice the last counts."""
    asked: dict[str, str] = {}
    for word in command_line.split():
        name, equals, value = word.partition("=")
        if equals and name in ARGUMENTS:
            asked[name] = value
    lines = list(kernel_log)
    found = []
    for name, value in asked.items():
        wanted = wanted_size(value)
        if not wanted:
            continue
        argument = f"{name}={value}"
        if name == "movablecore":
            pages = sum(zone.present for zone in zones if zone.name == "Movable")
            found.append(Reservation(argument, wanted, pages * PAGE_SIZE))
            continue
        own = [line for line in lines if re.search(rf"\b{name}: ", line)]
        if name == "hugetlb_cma":
            given = [re.search(r"hugetlb_cma: reserved (\d+) MiB on node", line) for line in own]
        else:
            given = [re.search(r"\bcma: Reserved (\d+) MiB (?:at|in)", line) for line in own]
        failed = any(re.search(r"fail|err(?:or)? -?\d+|unable", line, re.IGNORECASE) for line in own)
        sizes = [int(match[1]) * _MIB for match in given if match]
        got = sum(sizes) if sizes or failed else None
        found.append(Reservation(argument, wanted, got, own))
    return found


def read_kernel_log(limit: int = 200_000) -> list[str]:
    """Return the messages in the kernel's ring, oldest first; empty where they may not be read."""
    lines: list[str] = []
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return lines
    try:
        while len(lines) < limit:
            try:
                message = os.read(fd, 8192)
            except BrokenPipeError:  # overwritten while we read: go on with the oldest that is left
                continue
            if not message:
                break
            text = message.decode("utf-8", "replace").partition(";")[2]
            lines.append(text.split("\n")[0])
    except OSError:  # EAGAIN: nothing more
        pass
    finally:
        os.close(fd)
    return lines


def read() -> list[Reservation]:
    """Return the reservations of this boot."""
    command_line = Path("/proc/cmdline").read_text()
    if not any(f"{name}=" in command_line for name in ARGUMENTS):
        return []
    return find(command_line, read_kernel_log(), parse_zoneinfo(Path("/proc/zoneinfo").read_text()))
