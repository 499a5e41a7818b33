"""What a verdict, or an event, is called by: its scenario and the scenario's variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def name_of(item: Mapping[str, Any]) -> str:
    """Return the name that a person reads: `file[memfd]`; without variants the scenario's."""
    scenario, variant = str(item.get("scenario")), item.get("variant") or "default"
    return scenario if variant == "default" else f"{scenario}[{variant}]"


def names_of(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every name that means it in a command: `file`, `file[memfd]`, `file_memfd`."""
    scenario, variant = str(item.get("scenario")), item.get("variant") or "default"
    return (scenario,) if variant == "default" else (scenario, name_of(item), f"{scenario}_{variant}")
