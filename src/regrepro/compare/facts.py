"""Which facts of the node and of the run differ between two record headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regrepro.views import words

# Boot arguments that say nothing of the machine: the lab's own, and what a boot loader writes anew each time.
_NOISE = (
    "virtme",
    "regrepro.lab",
    "console=",
    "earlyprintk=",
    "init=",
    "BOOT_IMAGE=",
    "initrd=",
    "root=",
    "quiet",
    "loglevel=",
    "nr_open=",
    "panic=",
    "ro",
    "rw",
)

# Path in the header → topic. What is not here (host name, start time, memory in bytes) is no explanation.
_FACTS = {
    "node.kernel": "kernel",
    "node.kernel_version": "kernel",
    "node.arch": "machine",
    "node.page_size": "kernel",
    "node.nvidia_driver": "driver",
    "node.lockdown": "rights",
    "node.euid": "rights",
    "node.capabilities": "rights",
    "node.limits.memlock_soft": "limits",
    "node.limits.memlock_hard": "limits",
    "lab.boot": "boot",
    "lab.numa": "machine",
    "run.cuda": "pin",
    "run.place": "placement",
    "run.rdma_device": "registrar",
    "run.trace": "evidence",
    "version": "regrepro",
}


@dataclass(frozen=True)
class Difference:
    """One fact that differs. `topic`: kernel, driver, boot, limits, pin, placement, machine, rights, …"""

    fact: str
    topic: str
    before: Any
    after: Any

    def sentence(self) -> str:
        """Return `fact: before → after` for a person."""
        return f"{self.fact}: {words.fact(self.before)} → {words.fact(self.after)}"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return the facts that differ between two headers, in a fixed order.

    A fact that only one header has counts as a difference, with None for the other: not knowing is not being
    equal.
    """
    found = [
        Difference(path, topic, _at(before, path), _at(after, path))
        for path, topic in _FACTS.items()
        if _at(before, path) != _at(after, path)
    ]
    found += _boot_arguments(before, after)
    found += [
        Difference(f"node.vm.{name}", "sysctl", one, other)
        for name, one, other in _pairs(_at(before, "node.vm"), _at(after, "node.vm"))
    ]
    found += [
        Difference(f"node.rdma.{name}", "registrar", one, other)
        for name, one, other in _pairs(_at(before, "node.rdma"), _at(after, "node.rdma"))
    ]
    return found


def _at(header: Mapping[str, Any], path: str) -> Any:
    value: Any = header
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _pairs(before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Return (key, before, after) of two mappings where they differ; a value that is no mapping is empty."""
    one, other = words.mapping_of(before), words.mapping_of(after)
    return [
        (str(key), one.get(key), other.get(key))
        for key in sorted({*one, *other}, key=str)
        if one.get(key) != other.get(key)
    ]


def _boot_arguments(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    one, other = _arguments(before), _arguments(after)
    if one is None or other is None or one == other:
        return []
    return [
        Difference(
            "boot arguments",
            "boot",
            sorted(one - other) or "nothing more",
            sorted(other - one) or "nothing more",
        )
    ]


def _arguments(header: Mapping[str, Any]) -> set[str] | None:
    """Return the boot arguments that describe a machine; None in a lab guest, where `lab.boot` has them."""
    line = _at(header, "node.cmdline")
    if not isinstance(line, str) or _at(header, "lab") is not None:
        return None
    return {
        word
        for word in line.split()
        if word not in _NOISE and not any(word.startswith(noise) for noise in _NOISE if len(noise) > 2)
    }
