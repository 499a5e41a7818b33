"""What a scenario file declares, held against a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KEYS = ("verdict", "layer", "basis", "errno")
DECIDED = ("reproduced", "not-reproduced", "other-failure", "caught")
_RANGE = re.compile(r"kernel(>=|<=|==|>|<)(\d+)\.(\d+)")


def declared(expects: Any, contract: str, kernel: str) -> Any:
    """Return what is expected under a contract on a kernel (`uname -r`); None where nothing is.

    A declaration by kernels is resolved: the first range that the kernel lies in counts.
    """
    expected = expects.get(contract) if isinstance(expects, Mapping) else None
    if not isinstance(expected, Mapping) or not any(_RANGE.fullmatch(str(key)) for key in expected):
        return expected
    running = re.match(r"(\d+)\.(\d+)", kernel)
    if running is None:
        return None
    version = (int(running[1]), int(running[2]))
    for key, value in expected.items():
        found = _RANGE.fullmatch(str(key))
        if found and _lies_in(version, found[1], (int(found[2]), int(found[3]))):
            return value
    return None


def _lies_in(version: tuple[int, int], comparison: str, bound: tuple[int, int]) -> bool:
    if version == bound:
        return "=" in comparison
    return comparison.startswith(">") if version > bound else comparison.startswith("<")


def as_declared(item: Mapping[str, Any]) -> bool | None:
    """Whether a verdict is what the scenario file declares under this contract; None where undecided.

    A declaration is a verdict's name, or a mapping of `verdict`, `layer`, `basis`, `errno` to a value or to
    a list of those that are right.
    """
    expected = item.get("declared")
    if isinstance(expected, str):
        expected = {"verdict": expected}
    if not isinstance(expected, Mapping) or not expected:
        return None
    wanted = {key: value if isinstance(value, list) else [value] for key, value in expected.items()}
    if item.get("verdict") not in DECIDED and item.get("verdict") not in wanted.get("verdict", []):
        return None
    return all(item.get(key) in values for key, values in wanted.items() if key in KEYS)
