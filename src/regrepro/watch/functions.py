"""Kernel functions to follow: which of them this kernel has (/proc/kallsyms)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from regrepro.kernel_functions import FUNCTIONS, KernelFunction, Returns, Watch, watched

# Modules whose functions are followed, and that may be loaded at any time.
MODULES = frozenset(row.module for row in (*watched(Watch.DRIVER), *watched(Watch.FAILURE)) if row.module)


@dataclass(frozen=True)
class Function:
    """A function that can be followed. `module` is "" for the kernel itself."""

    name: str
    module: str
    returns: Returns = Returns.INT


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


def find_functions(kallsyms: bytes, modules: Mapping[str, bool]) -> Functions:
    """Look up what this kernel has. `modules`: names of the loaded ones (or built in), by `name: True`."""
    symbols = read_symbols(kallsyms, {name for row in FUNCTIONS if row.watch for name in row.names})
    found = Functions()

    def make(row: KernelFunction) -> Function | None:
        name = next((item for item in row.names if item in symbols), "")
        return Function(name, symbols[name], row.returns) if name else None

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
    return found


def without_coming(found: Functions, loaded: Collection[str]) -> Functions:
    """Leave out functions of modules that are only coming: they can be followed once those are loaded."""
    for group in (found.inner, found.drivers):
        group[:] = [item for item in group if not item.module or item.module in loaded]
    return found
