"""Kernel functions to follow: which of them this kernel has, and how each can be followed.

A function that BTF describes is followed by a trampoline at its entry and exit (fentry, fexit: bpftrace's
`kfunc`, `kretfunc`), which costs a tenth of a kprobe and shows arguments at the return; any other by a kprobe
and a kretprobe. Sources: /proc/kallsyms, /sys/kernel/btf.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from regrepro.kernel.btf import Btf, BtfError, Signature
from regrepro.kernel_functions import FUNCTIONS, REASONS, KernelFunction, Returns, Watch, watched

KALLSYMS = Path("/proc/kallsyms")
BTF_DIRECTORY = Path("/sys/kernel/btf")

# Modules whose functions are followed, and that may be loaded at any time.
MODULES = frozenset(row.module for row in (*watched(Watch.DRIVER), *watched(Watch.FAILURE)) if row.module)
_MOST_PARAMETERS = 6
_DMABUF_FD = (
    5  # position from 0 of access_flags in a driver's reg_user_mr_dmabuf: (pd, start, length, iova, fd, …)
)


@dataclass(frozen=True)
class Function:
    """A function that can be followed. `parameters`: names by position, None where BTF does not tell.

    `module` is "" for the kernel itself; `type_id`: in BTF, 0 where BTF does not tell. With `parameters`
    bpftrace follows it by trampolines, else by kprobes.
    """

    name: str
    module: str
    parameters: tuple[str, ...] | None = None
    returns: Returns = Returns.INT
    type_id: int = 0

    @property
    def by_trampoline(self) -> bool:
        """Whether fentry and fexit are used. bpftrace offers them for what fits in six registers."""
        return self.parameters is not None and len(self.parameters) <= _MOST_PARAMETERS


@dataclass
class Functions:
    """What this kernel has of the functions that matter. `missing`: function → why it is not followed."""

    entries: list[Function] = field(default_factory=list)
    drivers: list[Function] = field(default_factory=list)
    pins: list[Function] = field(default_factory=list)
    inner: list[Function] = field(default_factory=list)
    open: Function | None = None
    migrate: Function | None = None
    plain_pins: list[Function] = field(default_factory=list)
    unpins: list[Function] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)  # of `enum migrate_reason`

    def all(self) -> list[Function]:
        """Every function that is followed."""
        rest = [item for item in (self.open, self.migrate) if item is not None]
        return [*self.entries, *self.drivers, *self.pins, *self.inner, *rest]

    def do_without(self, why: str) -> bool:
        """Follow the function that bpftrace's complaint names by a kprobe, or, if it was, not at all.

        Return False where the complaint names none that can be done without.
        """
        for group in (self.plain_pins, self.inner, self.drivers, self.pins, self.entries):
            for index, item in enumerate(group):
                if not _names(why, item):
                    continue
                if item.by_trampoline:
                    group[index] = replace(item, parameters=None)
                elif group is self.entries and len(group) == 1:
                    return False
                else:
                    del group[index]
                    self.missing[item.name] = f"bpftrace could not attach to it: {why}"
                return True
        for name in ("open", "migrate"):
            one: Function | None = getattr(self, name)
            if one is not None and _names(why, one):
                setattr(self, name, replace(one, parameters=None) if one.by_trampoline else None)
                if not one.by_trampoline:
                    self.missing[one.name] = f"bpftrace could not attach to it: {why}"
                return True
        return False


def _names(why: str, function: Function) -> bool:
    return re.search(rf"\b{re.escape(function.name)}\b", why) is not None


def read_symbols(text: bytes, names: Iterable[str]) -> dict[str, str]:
    """Return name → module ("" for the kernel) of those functions that stand in the text of kallsyms.

    A name that stands there more than once, as a local function of several files does, is left out.
    """
    found: dict[str, str] = {}
    for name in names:
        needle = b" " + name.encode()
        places = []
        at = text.find(needle)
        while at >= 0:
            end = at + len(needle)
            if text[end : end + 1] in (b"\n", b"\t", b"") and text[at - 1 : at] in (b"t", b"T"):
                line = text[end : text.find(b"\n", end)].strip()
                places.append(line.strip(b"[]").decode())
            at = text.find(needle, end)
        if len(places) == 1:
            found[name] = places[0]
    return found


class BtfFunctions:
    """Types of the kernel and of its modules, as far as it has them."""

    def __init__(self, directory: Path = BTF_DIRECTORY) -> None:
        self._directory = directory
        self._blob = b""
        self.kernel: Btf | None = None
        """The kernel's own types; None where it has none."""
        self._last: tuple[str, Btf | None] = "", None  # of a module: they are large
        try:
            self._blob = (directory / "vmlinux").read_bytes()
            self.kernel = Btf(self._blob)
        except (OSError, BtfError):
            self.kernel = None

    def of_module(self, module: str) -> Btf | None:
        """Return a module's types with the kernel's ("": the kernel's alone); None where there are none."""
        if not module or self.kernel is None:
            return self.kernel
        if self._last[0] != module:
            try:
                joined = Btf.joined(self._blob, (self._directory / module).read_bytes())
            except (OSError, BtfError):
                joined = None
            self._last = module, joined
        return self._last[1]

    def function(self, name: str, module: str) -> Signature | None:
        """Return a function's signature, None where BTF does not have the function."""
        types = self.of_module(module)
        try:
            return types.function(name) if types is not None else None
        except (BtfError, struct.error, ValueError):
            return None

    def enum(self, name: str) -> dict[str, int]:
        """Return the values of an enum of the kernel, empty where there is none."""
        try:
            return (self.kernel.enum(name) if self.kernel is not None else None) or {}
        except BtfError:
            return {}


def loaded_modules(directory: Path = Path("/sys/module")) -> frozenset[str]:
    """Return the modules that are loaded, or have parameters though they are built in; not those that are
    only coming, of which the kernel lets nobody follow a function yet.
    """
    found = set()
    for path in directory.iterdir():
        try:
            state = (path / "initstate").read_text().strip()
        except OSError:  # built in
            state = "live"
        if state == "live":
            found.add(path.name)
    return frozenset(found)


def find_functions(
    btf: BtfFunctions, kallsyms: bytes, modules: Mapping[str, bool], *, trampolines: bool = True
) -> Functions:
    """Look up what this kernel has. `modules`: names of the loaded ones (or built in), by `name: True`."""
    symbols = read_symbols(kallsyms, {name for row in FUNCTIONS if row.watch for name in row.names})
    found = Functions()

    def make(row: KernelFunction) -> Function | None:
        name = next((item for item in row.names if item in symbols), "")
        if not name:
            return None
        module = symbols[name]
        given = btf.function(name, module) if trampolines else None
        if given is None:
            return Function(name, module, None, row.returns)
        return Function(name, module, given.parameters, row.returns, given.type_id)

    def those(what: Watch) -> list[Function]:
        return [item for row in watched(what) if (item := make(row)) is not None]

    found.entries, found.pins = those(Watch.REQUEST), those(Watch.PIN)
    found.plain_pins, found.unpins = those(Watch.SHORT_TERM_PIN), those(Watch.UNPIN)
    found.drivers = [item for item in those(Watch.DRIVER) if modules.get(item.module, True)]
    found.inner = those(Watch.FAILURE)
    found.open = next(iter(those(Watch.OPEN)), None)
    found.migrate = next(iter(those(Watch.MIGRATION)), None)
    for row in (*watched(Watch.FAILURE), *watched(Watch.MIGRATION)):
        if make(row) is None and (not row.module or modules.get(row.module, False)):
            found.missing[row.names[0]] = f"this kernel has no function {' or '.join(row.names)} to be seen"
    if not found.drivers:
        found.missing["reg_user_mr"] = "no RDMA driver that is known here is loaded"
    values = btf.enum("migrate_reason")
    found.reasons = {values[key]: name for key, name in REASONS.items() if key in values}
    return found


def without_coming(found: Functions, loaded: Collection[str]) -> Functions:
    """Leave out functions of modules that are only coming: they can be followed once those are loaded."""
    for group in (found.inner, found.drivers):
        group[:] = [item for item in group if not item.module or item.module in loaded]
    return found


def access_position(driver: str) -> int:
    """Return the position (from 0) of the access flags in a driver's registration function."""
    return _DMABUF_FD if "dmabuf" in driver else 4
