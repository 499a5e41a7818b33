"""Kexec handover (KHO): its scratch memory is CMA that CmaTotal does not count."""

from __future__ import annotations

import re
from collections.abc import Iterator

from regrepro.audit.finding import Finding, size
from regrepro.audit.reader import Reader
from regrepro.audit.sheet import Sheet
from regrepro.audit.subjects.memory import Unpinnable, slack


def collect(reader: Reader, sheet: Sheet) -> None:
    """The scratch memory (kernel/liveupdate/kexec_handover.c), as far as it can be seen."""
    for folder in ("sys/kernel/debug/kho/out", "sys/kernel/debug/kho/in"):
        text = reader.read(f"{folder}/scratch_len")
        sizes = [int(word, 16) for word in re.findall(r"0x[0-9a-f]{1,16}", text.text or "")]
        if sizes:
            sheet.add("memory", "kho-scratch", sum(sizes), text.source)
            return
    why = "debugfs tells it to root only, where the kernel has kexec handover"
    sheet.add("memory", "kho-scratch", None, "/sys/kernel/debug/kho/out/scratch_len", why=why)


def beyond_total(sheet: Sheet, memory: Unpinnable) -> int | None:
    """Return how many bytes of CMA there are beyond CmaTotal, None where none are seen."""
    total, free = sheet.value("memory", "cma-total"), sheet.value("memory", "cma-free")
    if total is not None and memory.blocks_cma is not None and memory.blocks_cma > total + slack(sheet):
        return int(memory.blocks_cma - total)
    return int(free - total) if free is not None and total is not None and free > total else None


def findings(sheet: Sheet, memory: Unpinnable) -> Iterator[Finding]:
    """Yield what CMA is beyond CmaTotal."""
    beyond = beyond_total(sheet, memory)
    if beyond is None:
        return
    evidence = sheet.evidence("memory", "cma-total", "cma-free")
    if memory.blocks_cma is not None:
        source = sheet.source("memory", "page-blocks")
        evidence.append({"what": "CMA page blocks", "value": memory.blocks_cma, "source": source})
    yield Finding(
        "cma-beyond-total",
        "warning",
        f"CMA beyond CmaTotal: about {size(beyond)} that the kernel does not count",
        "Kexec handover (KHO) marks its scratch memory as CMA without counting it in CmaTotal, so the node "
        "has unpinnable memory though CmaTotal says otherwise. Movable allocations, and so buffers, can land "
        "there.",
        "boot with kho=off, unless a crash kernel or a live update relies on kexec handover",
        evidence,
    )
