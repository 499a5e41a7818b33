"""Where this process allocates, and the giving back of single pages (`csrc/pressure.c`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from regrepro._core import ffi, lib
from regrepro.core.calls import check, failure

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def allocate_on_node(node: int | None) -> None:
    """Have this thread, and those that it starts, allocate on one NUMA node from now on (MPOL_BIND).

    None ends it. Raises OSError: EINVAL for a node without memory. A kernel without CONFIG_NUMA has node 0
    alone, and that is no error.
    """
    status = lib.rr_allocate_on_node(-1 if node is None else node)
    if status and node:
        raise failure(status, f"memory of NUMA node {node} alone")


_THP = Path("/sys/kernel/mm/transparent_hugepage")


def quiet_huge_pages(folder: Path = _THP) -> bool | None:
    """Return how to ask for memory in huge pages without having the kernel compact memory for them.

    Compaction moves other pages upward in a zone, into CMA for one, and so away from where they were put. The
    answer is `huge` of `Range.anonymous`: None (the system's setting gives them), True (ask for them), False
    (there is no way but compaction, or no huge pages). See vma_alloc_folio's gfp in `vma_thp_gfp_mask`,
    mm/huge_memory.c.
    """
    chosen = []
    for name in ("enabled", "defrag"):
        try:
            found = re.search(r"\[(\S+)\]", (folder / name).read_text(encoding="ascii"))
        except OSError:
            return False
        chosen.append(found[1] if found else "")
    enabled, defrag = chosen
    if enabled == "always" and defrag in ("madvise", "never"):
        return None
    return enabled == "madvise" and defrag == "never"


def drop_pages(address: int, marks: npt.NDArray[np.uint8]) -> int:
    """Give back the pages from `address` on whose mark is not 0; the range stays mapped. Returns how many.

    Raises OSError.
    """
    dropped = ffi.new("size_t *")
    status = lib.rr_drop_pages(address, len(marks), ffi.from_buffer("uint8_t[]", marks), dropped)
    check(status, "giving pages back")
    return int(dropped[0])
