# ruff: noqa: F401, F403
"""The names of `ports` and `system` as users' scenario files know them."""

from regrepro.kernel.zones import Zone, parse_zoneinfo
from regrepro.stage.hugepages import default_size as default_huge_page_size
from regrepro.stage.ports import *
from regrepro.stage.ports import Device as Registrar
from regrepro.stage.system import *
