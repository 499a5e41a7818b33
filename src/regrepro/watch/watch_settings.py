"""What `regrepro watch` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PINS: dict[str, tuple[str, ...]] = {
    "off": (),
    "driver": ("pin_user_pages",),
    "all": ("pin_user_pages", "pin_user_pages_remote"),
    "unpins": ("pin_user_pages", "pin_user_pages_remote"),
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
