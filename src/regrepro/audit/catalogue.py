"""What the driver asks for, by the public record: `data/driver-catalogue.json`.

A release that is in the record is answered from it. One that is not is placed between its neighbours by
branch and release order, and the answer says `inferred`; where the neighbours differ it says unknown.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from regrepro.errors import UsageError

OBSERVED = "observed"
INFERRED = "inferred"
UNKNOWN = "unknown"
X86 = ("x86_64", "i386", "i686")


@dataclass(frozen=True)
class Property:
    """One property of a release: its `value` in the catalogue's words, or None, and how that is known."""

    value: str | None
    how: str
    why: str


@lru_cache(maxsize=1)
def load() -> dict[str, Any]:
    """Return the catalogue."""
    file = resources.files("regrepro.data").joinpath("driver-catalogue.json")
    catalogue: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return catalogue


def version_key(version: str) -> tuple[int, ...]:
    """Return the release order of a version such as `535.171.04`. Raises UsageError where it is none."""
    match = re.fullmatch(r"(\d{3,4})\.(\d{1,4})(?:\.(\d{1,4}))?", version.strip())
    if match is None:
        raise UsageError(
            f"{version!r} is no NVIDIA driver version",
            hint="for example 535.171.04 or 550.67 (nvidia-smi prints it)",
        )
    return tuple(int(part) for part in match.groups(default="0"))


def _line(version: str) -> str:
    return ".".join(version.split(".")[:2])


def look_up(version: str, name: str) -> Property:
    """Return the property `host_pin` or `peermem` of a release."""
    catalogue = load()
    releases: dict[str, dict[str, str]] = catalogue["releases"]
    key = version_key(version)
    for known, properties in releases.items():
        if version_key(known) == key:
            return Property(properties[name], OBSERVED, f"driver {known} is in the catalogue")
    early = set(catalogue["early_lines"])
    line = _line(version)
    # A branch's early line (550.40.x) has its own order and says nothing of the main line, nor the other
    # way round.
    peers = [other for other in releases if _line(other) == line] if line in early else []
    if not peers:
        peers = [other for other in releases if _line(other) not in early]
    ordered = sorted(peers, key=version_key)
    below = [other for other in ordered if version_key(other) < key]
    above = [other for other in ordered if version_key(other) > key]
    branch = key[0]
    if below and version_key(below[-1])[0] == branch and (not above or version_key(above[0])[0] != branch):
        return Property(
            releases[below[-1]][name],
            INFERRED,
            f"driver {version} is not in the catalogue; {below[-1]}, the last of its branch there, is taken",
        )
    if below and above:
        first, second = releases[below[-1]][name], releases[above[0]][name]
        if first == second:
            return Property(
                first,
                INFERRED,
                f"driver {version} is not in the catalogue; its neighbours {below[-1]} and {above[0]} agree",
            )
        return Property(
            None, UNKNOWN, f"driver {version} is not in the catalogue, and {below[-1]} and {above[0]} differ"
        )
    if below:
        return Property(
            releases[below[-1]][name],
            INFERRED,
            f"driver {version} is newer than {below[-1]}, the last in the catalogue, which is taken",
        )
    oldest = ordered[0]
    value = releases[oldest][name]
    if value in ("get", "pin", "legacy"):  # what came later than the oldest cannot have been there before it
        return Property(
            value,
            INFERRED,
            f"driver {version} is older than {oldest}, the first in the catalogue, which lacked it too",
        )
    return Property(None, UNKNOWN, f"driver {version} is older than {oldest}, the first in the catalogue")


@dataclass(frozen=True)
class Contract:
    """What the driver's host pin asks for: `contract` is `get`, `pin`, `longterm`, or None where it is
    not known.
    """

    contract: str | None
    how: str
    source: str
    why: str

    @property
    def longterm(self) -> bool | None:
        """Tell whether FOLL_LONGTERM is asked for."""
        return None if self.contract is None else self.contract == "longterm"

    def as_dict(self) -> dict[str, Any]:
        """Return it in the shape of the schema audit-1."""
        return {
            "contract": self.contract,
            "longterm": self.longterm,
            "how": self.how,
            "source": self.source,
            "why": self.why,
        }


def contract_of(
    host_pin: str | None, arch: str | None, kernel: tuple[int, int] | None, *, stock: bool = True
) -> tuple[str | None, str]:
    """Turn a release's property into the contract on one architecture and kernel: (contract, remark).

    `kernel` decides the two build-time conditions; where it is not known the answer is for a kernel
    since 5.6. `stock` False: a vendor's kernel, which has what its number says, and perhaps more.
    """
    since = load()["kernel"]
    has_longterm = kernel is None or kernel >= tuple(since["foll_longterm_since"])
    has_pin = kernel is None or kernel >= tuple(since["pin_user_pages_since"])
    plain = "pin" if has_pin else "get"
    remark = "" if kernel is not None else "; taken for a kernel since 5.6"
    if host_pin is None:
        return None, ""
    if host_pin == "get":
        return "get", "get_user_pages() without FOLL_LONGTERM"
    if host_pin == "pin":
        return plain, f"no FOLL_LONGTERM on any architecture{remark}"
    if arch is None:
        return None, "FOLL_LONGTERM on x86 only, and the architecture is not known"
    if arch not in X86:
        return plain, f"FOLL_LONGTERM on x86 only, and this is {arch}{remark}"
    if not has_longterm and not stock:
        return None, "FOLL_LONGTERM on x86 if the kernel has it at build time, and its number does not tell"
    if not has_longterm:
        return plain, "FOLL_LONGTERM needs a kernel that has it (5.2) at build time"
    return "longterm", f"FOLL_LONGTERM on x86{remark}"


def contract(
    version: str, arch: str | None, kernel: tuple[int, int] | None, *, stock: bool = True
) -> Contract:
    """Return what a release asks for on this architecture and kernel, by the catalogue."""
    found = look_up(version, "host_pin")
    decided, remark = contract_of(found.value, arch, kernel, stock=stock)
    why = found.why + (f"; {remark}" if remark else "")
    how = found.how if decided is not None else UNKNOWN
    return Contract(decided, how, "driver catalogue", why)
