"""Kernel functions to follow: which of them this kernel has. Sources: /proc/kallsyms, /sys/kernel/btf."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from regrepro.kernel.btf import Btf, BtfError
from regrepro.kernel.trace_probes import DRIVERS, Returns

BTF_DIRECTORY = Path("/sys/kernel/btf")

# Where a request of a program enters: int (*)(struct uverbs_attr_bundle *), drivers/infiniband/core.
ENTRIES = (
    ("ib_uverbs_reg_mr", "ib_uverbs"),
    ("ib_uverbs_handler_UVERBS_METHOD_REG_MR", "ib_uverbs"),
    ("ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR", "ib_uverbs"),
)
OPEN = ("ib_uverbs_open", "ib_uverbs")
MIGRATE = "migrate_pages"
# All int or long returns: negative is a failure.
PINS = ("pin_user_pages_fast", "pin_user_pages")
# What drivers and process_vm_readv let go of pins by (mm/gup.c), with a page or an array of pages in front.
UNPINS = (
    *("unpin_user_page", "unpin_user_pages", "unpin_user_pages_dirty_lock"),
    "unpin_user_page_range_dirty_lock",
)
# Failures only. Newest names first; the first that exists is followed.
INNER: tuple[tuple[tuple[str, ...], str, Returns], ...] = (
    (("__ib_umem_get_va", "ib_umem_get"), "ib_core", Returns.POINTER),
    (("ib_umem_dmabuf_get_with_dma_device", "ib_umem_dmabuf_get"), "ib_uverbs", Returns.POINTER),
    (("dma_buf_get",), "", Returns.POINTER),
    (("dma_map_sgtable",), "", Returns.INT),
    (("mlx5_core_create_mkey",), "mlx5_core", Returns.INT),
    (("__gup_longterm_locked",), "", Returns.LONG),
    (
        (
            "migrate_longterm_unpinnable_folios",
            "migrate_longterm_unpinnable_pages",
            "check_and_migrate_movable_pages",
            "check_and_migrate_cma_pages",
        ),
        "",
        Returns.INT,
    ),
    (("nvidia_p2p_get_pages",), "nvidia", Returns.INT),
    (("nvidia_p2p_get_pages_persistent",), "nvidia", Returns.INT),
)
# Modules whose functions are followed, and that may be loaded at any time.
MODULES = frozenset(
    name for name in (*(point.module for point in DRIVERS), *(row[1] for row in INNER)) if name
)


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


# enum migrate_reason, include/linux/migrate_mode.h since 5.17; MR_LONGTERM_PIN since 5.13.
_REASONS = {"MR_CONTIG_RANGE": "contig_range", "MR_LONGTERM_PIN": "longterm_pin"}


def find_functions(btf: BtfFunctions, kallsyms: bytes, modules: Mapping[str, bool]) -> Functions:
    """Look up what this kernel has. `modules`: names of the loaded ones (or built in), by `name: True`."""
    drivers = [(name, point.module) for point in DRIVERS for name in point.names]
    plain = ("pin_user_pages", "pin_user_pages_remote")
    wanted = {
        *(name for name, _ in (*ENTRIES, OPEN, *drivers)),
        *PINS,
        *plain,
        *UNPINS,
        MIGRATE,
        *(name for names, _, _ in INNER for name in names),
    }
    symbols = read_symbols(kallsyms, wanted)
    found = Functions()

    def make(name: str, returns: Returns = Returns.INT) -> Function:
        return Function(name, symbols[name], returns)

    found.entries += [make(name) for name, _ in ENTRIES if name in symbols]
    for name, module in drivers:
        if name in symbols and modules.get(module, True):
            found.drivers.append(make(name, Returns.POINTER))
    found.pins += [make(name, Returns.LONG) for name in PINS if name in symbols]
    found.plain_pins += [make(name, Returns.LONG) for name in plain if name in symbols]
    found.unpins += [make(name) for name in UNPINS if name in symbols]
    for names, module, returns in INNER:
        name = next((item for item in names if item in symbols), "")
        if name:
            found.inner.append(make(name, returns))
        elif not module or modules.get(module, False):
            found.missing[names[0]] = f"this kernel has no function {' or '.join(names)} to be seen"
    found.open = make(OPEN[0]) if OPEN[0] in symbols else None
    found.migrate = make(MIGRATE) if MIGRATE in symbols else None
    if found.migrate is None:
        found.missing[MIGRATE] = "this kernel has no function migrate_pages to be seen"
    if not found.drivers:
        found.missing["reg_user_mr"] = "no RDMA driver that is known here is loaded"
    values = btf.enum("migrate_reason")
    found.reasons = {values[key]: name for key, name in _REASONS.items() if key in values}
    return found


def without_coming(found: Functions, loaded: Collection[str]) -> Functions:
    """Leave out functions of modules that are only coming: they can be followed once those are loaded."""
    for group in (found.inner, found.drivers):
        group[:] = [item for item in group if not item.module or item.module in loaded]
    return found
