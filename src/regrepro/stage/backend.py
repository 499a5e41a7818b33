"""The names under which users' scenario files know what is in `ports` and `system` now."""

from regrepro.kernel.zones import Zone, parse_zoneinfo
from regrepro.stage.hugepages import default_size as default_huge_page_size
from regrepro.stage.ports import (
    ORDINARY,
    PAGE_SIZE,
    PIN_OWNERS,
    UNKNOWN,
    UNPINNABLE,
    Backend,
    HeldPin,
    MemoryMap,
    MemoryRegion,
    PageState,
    Range,
    Tracer,
    join,
    readable,
)
from regrepro.stage.ports import Device as Registrar
from regrepro.stage.system import System, default_contract, parse_cpu_list

__all__ = [
    "ORDINARY",
    "PAGE_SIZE",
    "PIN_OWNERS",
    "UNKNOWN",
    "UNPINNABLE",
    "Backend",
    "HeldPin",
    "MemoryMap",
    "MemoryRegion",
    "PageState",
    "Range",
    "Registrar",
    "System",
    "Tracer",
    "Zone",
    "default_contract",
    "default_huge_page_size",
    "join",
    "parse_cpu_list",
    "parse_zoneinfo",
    "readable",
]
