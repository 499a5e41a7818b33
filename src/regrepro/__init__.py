"""regrepro reproduces, proves and reports one family of RDMA memory-registration failures.

A scenario file begins with `from regrepro import Size, Stage, change, instead, scenario`, as it needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Imported here and not when first used: the decorator bears its module's name, and the import system would
# put the module in its place.
from regrepro.scenario import Size, change, instead, scenario

if TYPE_CHECKING:
    from regrepro.stage import Stage

__all__ = ["Size", "Stage", "__version__", "change", "instead", "scenario"]


def __getattr__(name: str) -> Any:
    # The stage is wanted for its name in annotations only: no need to load it for that before a run.
    if name == "Stage":
        from regrepro.stage import Stage

        return Stage
    raise AttributeError(f"module 'regrepro' has no attribute {name!r}")
