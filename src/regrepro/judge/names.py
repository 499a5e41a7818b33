"""What a verdict, or an event, is called by: its scenario, and the variant or the caught failure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def called(scenario: str, variant: str) -> str:
    """Return the name that a person reads: `file[memfd]`; without variants the scenario's."""
    return scenario if variant == "default" else f"{scenario}[{variant}]"


def parsed(name: str) -> tuple[str, str]:
    """Return scenario and variant of a name as `called` makes it."""
    found = re.fullmatch(r"(\w+)\[(\w+)\]", name)
    return (found[1], found[2]) if found else (name, "default")


def name_of(item: Mapping[str, Any]) -> str:
    """Return what a person reads for a verdict or an event: `file[memfd]`, `watch (failure-1)`."""
    name = called(str(item.get("scenario")), str(item.get("variant") or "default"))
    return f"{name} ({item['failure']})" if item.get("failure") else name


def names_of(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every name that means it in a command, its own last: `file`, `file[memfd]`, `file_memfd`."""
    scenario, variant = parsed(name_of(item))
    if variant != "default":
        return scenario, called(scenario, variant), f"{scenario}_{variant}"
    return tuple(dict.fromkeys((str(item.get("scenario")), scenario)))
