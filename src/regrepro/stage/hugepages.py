"""Huge pages: the kernel's pool of them, and whether gigantic ones still come out of a reserve that a pin
sits in.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrepro.errors import Unmet
from regrepro.kernel import zones
from regrepro.stage.ports import PAGE_SIZE, Backend, Range

if TYPE_CHECKING:
    from regrepro.stage.buffers import Buffer
    from regrepro.stage.stage import Stage

HUGEPAGES = Path("/sys/kernel/mm/hugepages")
COUNT = Path("/proc/sys/vm/nr_hugepages")  # of the default size


def default_size() -> int:
    """Return the default hugetlb page size in bytes. Raises `Unmet` where the kernel has none."""
    size = zones.read_meminfo().get("Hugepagesize")
    if not size:
        raise Unmet("hugetlb", "this kernel has no CONFIG_HUGETLBFS", "use a kernel that has it")
    return size


class Pool:
    """The kernel's pool of huge pages, and those of it that are mapped here."""

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend = backend
        self._size = size
        self._before = int(COUNT.read_text(encoding="ascii"))
        self.mapped: list[Range] = []

    def grow(self, pages: int) -> None:
        """Have the kernel make so many more, as far as it can, and map every one that is free."""
        have = int(COUNT.read_text(encoding="ascii"))
        COUNT.write_text(str(have + pages), encoding="ascii")
        for _ in range(self.free()):
            memory = self._backend.allocate(self._size, "hugetlb")
            self.mapped.append(memory)
            memory.populate()

    def exhaust(self) -> None:
        """Make and map huge pages until the kernel, its memory compacted, can make none three times over.

        It stops at the first that it cannot have at once, while compaction goes on by itself and makes more.
        """
        in_vain = 0
        while in_vain < 3:
            before = len(self.mapped)
            for name, what in (("drop_caches", "3"), ("compact_memory", "1")):
                with suppress(OSError):
                    Path("/proc/sys/vm", name).write_text(what, encoding="ascii")
            self.grow(self._backend.available_memory() // self._size)
            in_vain = in_vain + 1 if len(self.mapped) == before else 0

    @staticmethod
    def free() -> int:
        """Return how many huge pages are in the pool, and not in use."""
        return zones.read_meminfo().get("HugePages_Free", 0)

    def give_back(self) -> None:
        """Unmap all that are mapped here; they stay in the pool."""
        while self.mapped:
            self.mapped.pop().close()

    def close(self) -> None:
        """Unmap, and have the pool as it was. What is still in use goes when it is unmapped."""
        self.give_back()
        COUNT.write_text(str(self._before), encoding="ascii")


@dataclass(frozen=True)
class Reserve:
    """The `hugetlb_cma` areas of the node. `size`: bytes of a gigantic page; `pages`: how many they hold."""

    size: int
    pages: int
    ranges: tuple[tuple[int, int], ...]  # first PFN, last PFN + 1

    @property
    def count_file(self) -> Path:
        """The file that holds how many gigantic pages there are."""
        return HUGEPAGES / f"hugepages-{self.size // 1024}kB" / "nr_hugepages"


def gigantic_size() -> int | None:
    """Return the bytes of the smallest gigantic page: one that the page allocator alone cannot make.

    Gigantic are those above MAX_PAGE_ORDER (hstate_is_gigantic(), include/linux/hugetlb.h), which is 10 with
    4 KiB pages, so that 1 GiB pages are on x86-64 and on arm64. None where the kernel has none.
    """
    sizes = []
    for folder in HUGEPAGES.glob("hugepages-*kB"):
        size = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        if size >= 1 << 29:
            sizes.append(size)
    return min(sizes, default=None)


def reserve(stage: Stage) -> Reserve:
    """Return the reserve of this node. Raises `Unmet`."""
    how = "boot with hugetlb_cma=1G or more on a kernel with CONFIG_CMA and 1 GiB pages"
    size = gigantic_size()
    if size is None:
        raise Unmet("hugetlb_cma", "this kernel, or this CPU, has no gigantic pages", how)
    memory_map = stage.backend.memory_map
    areas = [] if memory_map is None else memory_map.as_record().get("cma_areas") or []
    mine = [area for area in areas if str(area.get("name")).startswith("hugetlb")]
    pages = sum(int(area.get("pages") or 0) * PAGE_SIZE // size for area in mine)
    if not pages:
        raise Unmet("hugetlb_cma", "no CMA area of hugetlb is reserved on this node", how)
    if any(area.get("ranges") is None for area in mine):
        raise Unmet(
            "hugetlb_cma", "where its areas lie is not known", "run as root, with /proc/kcore and BTF"
        )
    ranges = tuple((int(first), int(end)) for area in mine for first, end in area["ranges"])
    return Reserve(size, pages, ranges)


def require_inside(stage: Stage, buffer: Buffer, held: Reserve) -> None:
    """See to it that every page of a buffer lies in the reserve. Raises `Unmet`."""
    state = stage.look(buffer)
    pfns = [] if state is None else [int(pfn) for pfn in state.pfn]
    inside = sum(any(first <= pfn < end for first, end in held.ranges) for pfn in pfns)
    if inside < buffer.pages:
        raise Unmet(
            "hugetlb_cma",
            f"{buffer.pages - inside} of {buffer.pages} pages lie in another CMA area",
            "boot without cma=, so that hugetlb_cma is the only area",
        )


def ask(stage: Stage, held: Reserve, when: str) -> int:
    """Ask for as many gigantic pages as the reserve holds; give them back. Returns how many came.

    Recorded as step `gigantic-pages`: `when`, `asked`, `got`, `size`. Raises `Unmet` where it may not be
    asked.
    """
    file = held.count_file
    before = int(file.read_text())
    facts: dict[str, Any] = {"when": when, "size": held.size, "asked": held.pages}
    try:
        file.write_text(str(before + held.pages))
    except OSError as error:
        raise Unmet("root", f"{file}: {error.strerror}", "run it as root") from None
    try:
        got = int(file.read_text()) - before
    finally:
        file.write_text(str(before))
    stage.step("gigantic-pages", got=got, **facts)
    return got
