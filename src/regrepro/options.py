"""The options of a run, as one value that travels: command line, record header, lab guest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from regrepro.errors import UsageError

CUDA_CHOICES = ("auto", "real", "standin:pin", "standin:longterm", "none")
TRACE_CHOICES = ("auto", "on", "off")
PLACE_CHOICES = ("gather", "pressure", "online-movable")
PROFILES = ("default", "node", "faults")

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class RunOptions:
    """Options of `regrepro run`, and of the run inside a lab guest. Round trip: `as_json`, `from_json`.

    `names` are scenario names or files; empty means every scenario of `profile`. `pressure_limit` is in
    bytes. `timeout` is in seconds and, where given, replaces the time limit that each scenario declares.
    `option` holds values for scenarios' own options, as `NAME=VALUE` or `SCENARIO.NAME=VALUE`.
    """

    names: tuple[str, ...] = ()
    profile: str = "default"
    cuda: str = "auto"
    gpu: int = 0
    rdma_device: str = "auto"
    port: int = 1
    gid_index: int | None = None
    trace: str = "auto"
    place: str = "gather"
    pressure_limit: int | None = None
    pressure_beside_gpu_jobs: bool = False
    expect: str | None = None
    timeout: float | None = None
    option: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("profile", self.profile, PROFILES),
            ("cuda", self.cuda, CUDA_CHOICES),
            ("trace", self.trace, TRACE_CHOICES),
            ("place", self.place, PLACE_CHOICES),
            ("expect", self.expect, (None, "declared")),
        ):
            if value not in choices:
                known = ", ".join(str(choice) for choice in choices if choice)
                raise UsageError(f"--{name} {value} is not known", hint=f"one of {known}")
        if self.place == "pressure" and self.pressure_limit is None:
            raise UsageError(
                "--place pressure needs a limit",
                why="it holds most of a node's ordinary memory",
                hint="add --pressure-limit SIZE, such as 64G; one that is too small says how much it takes",
            )
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"--timeout {self.timeout} is no time", hint="seconds, more than 0")

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; the `run` of a record's header."""
        value = asdict(self)
        value["names"] = list(self.names)
        value["option"] = list(self.option)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunOptions:
        """Make options from `as_json`'s value. Raises `UsageError` for a key that is not known."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise UsageError(
                f"unknown run option {unknown[0]!r}", hint=f"known are {', '.join(sorted(known))}"
            )
        lists = {key: tuple(value.get(key, ())) for key in ("names", "option")}
        return cls(**{**value, **lists})


def parse_size(text: str) -> int:
    """Return bytes for `512M`, `2G`, `1048576`. Raises `UsageError`."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if not match or int(match[1]) == 0:
        raise UsageError(f"{text!r} is no size", hint="write a number with K, M, G or T, such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2]]


def format_size(size: int) -> str:
    """Return bytes as a person reads them: `64 MiB`, `1.5 GiB`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            return f"{size // unit} {name}" if size % unit == 0 else f"{size / unit:.1f} {name}"
    return f"{size} bytes"
