"""Kernel functions to follow: which of them this kernel has (/proc/kallsyms)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from regrepro.kernel.trace_probes import DRIVERS, Returns

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
    return found


def without_coming(found: Functions, loaded: Collection[str]) -> Functions:
    """Leave out functions of modules that are only coming: they can be followed once those are loaded."""
    for group in (found.inner, found.drivers):
        group[:] = [item for item in group if not item.module or item.module in loaded]
    return found
