"""What `regrepro watch` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from regrepro.kernel_functions import Watch, watched

_ALL = watched(Watch.SHORT_TERM_PIN)
PINS: dict[str, tuple[str, ...]] = {
    "off": (),
    # What a driver pins by takes no other process.
    "driver": tuple(row.names[0] for row in _ALL if Watch.PIN in row.watch),
    "all": tuple(row.names[0] for row in _ALL),
    "unpins": tuple(row.names[0] for row in _ALL),
}
"""A value of --pins → the functions whose short-term pins are remembered."""


@dataclass
class WatchSettings:
    """What the command line asks for. `window`, `duration`: seconds; `rotate`, `quota`: bytes."""

    out: Path
    pins: str = "driver"
    registrations: bool = False
    libraries: bool = True
    rate: float = 10.0
    burst: int = 50
    each: int = 5
    window: float = 60.0
    rotate: int = 16 << 20
    quota: int = 256 << 20
    metrics: Path | None = None
    as_json: bool = False
    quiet: bool = False
    limit: int = 0  # failures after which to stop; 0: never
    duration: float = 0.0
