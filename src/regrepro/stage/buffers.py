"""Buffers: memory of a scenario, and what is asked of the places of its pages (see `search` for the way)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regrepro.errors import UsageError
from regrepro.stage.ports import PAGE_SIZE, Backend, Range, has_unpinnable
from regrepro.stage.search import KINDS, Search, Wanted, consume_first

if TYPE_CHECKING:
    from regrepro.stage.stage import Stage

__all__ = ["BACKINGS", "Buffer", "Place", "Wanted", "consume_first", "make", "wanted"]

BACKINGS = ("anonymous", "thp", "memfd", "shm", "hugetlb", "file")
PLACES = ("any", "ordinary", *KINDS)
Place = str | Mapping[str, Sequence[int] | int]


class Buffer:
    """Memory of a scenario. `address` and `length` in bytes, `pages` pages of `page_size` bytes."""

    no_pages = ""
    """Why its pages are not looked at; empty where they are."""
    owner = "host"
    stand_in: str | None = None
    """Which software stood in for what allocated it."""

    def __init__(self, stage: Stage, number: int, memory: Range, backing: str, placed: str) -> None:
        self._stage = stage
        self._memory = memory
        self.id = number
        self.address = memory.address
        self.length = memory.length
        self.page_size = PAGE_SIZE
        self.backing = backing
        self.placed = placed
        self.freed = False

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.length // self.page_size

    def _view(self, offset: int, length: int) -> memoryview:
        if self.freed:
            raise UsageError(f"buffer {self.id} is used after it was freed")
        if offset < 0 or length < 0 or offset + length > self.length:
            raise UsageError(
                f"bytes {offset} to {offset + length} are not in buffer {self.id}",
                why=f"it has {self.length} bytes",
            )
        return self._stage.backend.view(self.address + offset, length)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Write bytes; the pages stay where they are unless the kernel must copy them (after a fork)."""
        self._view(offset, len(data))[:] = data

    def read(self, length: int, offset: int = 0) -> bytes:
        """Return a copy of bytes."""
        return bytes(self._view(offset, length))

    def fill(self, seed: int) -> None:
        """Write a pattern over the whole buffer."""
        self._memory.fill(seed)

    def checksum(self) -> int:
        """Return a checksum of the whole buffer."""
        return int(self._memory.checksum())

    def free(self) -> None:
        """Unmap the buffer; what is registered or pinned keeps its pages until it is let go."""
        self._stage._free(self)

    def __len__(self) -> int:
        return self.length


def size_of(pages: int | None, length: int | None) -> int:
    """Return the bytes of so many pages, or of a length rounded up to pages. Raises `UsageError`."""
    if (pages is None) == (length is None):
        raise UsageError("memory needs either pages or length", hint="write pages=8, or length=4096")
    size = pages * PAGE_SIZE if pages is not None else -(-(length or 0) // PAGE_SIZE) * PAGE_SIZE
    if size <= 0:
        raise UsageError("memory has at least one page", hint="write pages=8, or length=4096")
    return size


def place_as_record(place: Place, pages: int) -> str | dict[str, list[int]]:
    """Return what was asked for as the record holds it: a word, or the pages of the pattern."""
    if isinstance(place, str):
        return place
    return {
        key: list(range(value)) if isinstance(value, int) else list(value) for key, value in place.items()
    }


def wanted(place: Place, pages: int, node: int | None = None) -> Wanted:
    """Return what `place=` of `Stage.buffer` means for a buffer of so many pages. Raises `UsageError`."""
    if isinstance(place, str):
        if place not in PLACES:
            raise UsageError(
                f"place={place!r} is not known", hint=f'one of {", ".join(PLACES)}, or {{"unpinnable": [3]}}'
            )
        whole = None if place == "any" else place != "ordinary"
        return Wanted((whole,) * pages, place if place in KINDS else "unpinnable", node)
    if len(place) != 1 or next(iter(place)) not in KINDS:
        raise UsageError(
            f"place={dict(place)!r} is not known",
            hint='write {"unpinnable": [page, …]} or {"cma": number of pages}; the others are ordinary',
        )
    [(kind, which)] = place.items()
    indexes = list(range(which)) if isinstance(which, int) else list(which)
    if not indexes:
        raise UsageError(
            f"place={dict(place)!r} asks for no page",
            hint='write {"unpinnable": [page, …]}, or place="ordinary"',
        )
    pattern: list[bool | None] = [False] * pages
    for index in indexes:
        if not 0 <= index < pages:
            raise UsageError(f"page {index} is not in the buffer", why=f"it has pages 0 to {pages - 1}")
        pattern[index] = True
    return Wanted(tuple(pattern), kind, node)


def make(  # noqa: PLR0917 - what a buffer is made of, in order
    backend: Backend,
    length: int,
    place: Place,
    backing: str,
    fill: int,
    node: int | None = None,
) -> tuple[Range, str, dict[str, Any]]:
    """Make a buffer's memory: populated, placed and filled. Returns it, how it was placed, and facts of the
    search.

    Raises `Unmet` where the pages could not be placed or their places not be read, OSError where the kernel
    refuses the memory itself.
    """
    target = wanted(place, length // PAGE_SIZE, node)
    if backing == "anonymous":
        memory, placed, facts = _placed(backend, length, target, Search.gather, backing)
    else:

        def draw(search: Search) -> Range:
            return search.draw(lambda: backend.allocate(length, backing))

        memory, placed, facts = _placed(backend, length, target, draw, backing)
    try:
        memory.fill(fill)
    except BaseException:
        memory.close()
        raise
    return memory, placed, facts


def _placed(
    backend: Backend, length: int, target: Wanted, how: Callable[[Search], Range], backing: str
) -> tuple[Range, str, dict[str, Any]]:
    def plain() -> Range:
        return _populated(backend.allocate(length, backing))

    if target.anywhere:
        return plain(), "as-allocated", {}
    if not has_unpinnable(backend.memory_map) and target.node is None:
        return plain(), "none-on-node" if True in target.pattern else "as-allocated", {}
    search = Search(backend, length, target)
    with search:
        memory = how(search)
    return memory, backend.options.place, search.facts()


def _populated(memory: Range) -> Range:
    try:
        memory.populate()
    except BaseException:
        memory.close()
        raise
    return memory
