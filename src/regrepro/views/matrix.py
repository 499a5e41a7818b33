"""A matrix of lab runs as tables: rows are machines, columns pin contracts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regrepro.judge.names import name_of
from regrepro.views.grid import Grid, Table
from regrepro.views.lines import Segment

_STYLES = {
    "reproduced": "bold red",
    "not-reproduced": "green",
    "other-failure": "yellow",
    "unmet": "magenta",
    "error": "magenta",
}
_NOTE = (
    "Lab runs in virtual machines: no vendor driver took part. The pins are stand-ins; a verdict says what "
    "the kernel does under that contract."
)


def grid(matrix: Mapping[str, Any]) -> Grid:
    """Return the matrix as tables, one a scenario; below them why a cell has no verdict that is one."""
    tables = [Table(*table(matrix, scenario), scenario) for scenario in scenarios(matrix)]
    heading = "Which kernel, with which memory, under which pin"
    return Grid(matrix["command"], matrix["version"], tables, list(_undecided(matrix)), _NOTE, heading)


def scenarios(matrix: Mapping[str, Any]) -> list[str]:
    """Return the scenarios that have a verdict in any cell; those that were asked for, where none has."""
    found = [name_of(item) for cell in matrix["cells"] for item in cell["verdicts"]]
    return list(dict.fromkeys(found)) or [str(name) for name in matrix["scenarios"]]


def table(matrix: Mapping[str, Any], scenario: str) -> tuple[Sequence[str], list[list[Segment]]]:
    """Return head and rows of one scenario's table."""
    cells = matrix["cells"]
    pins = list(dict.fromkeys(cell["pin"] for cell in cells))
    places = list(dict.fromkeys(cell["place"] for cell in cells))
    rows: dict[tuple[str, str, str], list[Segment]] = {}
    for cell in cells:
        key = (cell["kernel"], cell["boot"], cell["place"])
        name = _kernel(cell, cells)
        row = rows.setdefault(
            key, [(name, ""), (cell["boot"] or "none", ""), *([(cell["place"], "")] * (len(places) > 1))]
        )
        row.append(_cell(cell, scenario))
    head = ["kernel", "boot arguments", *(["placement"] if len(places) > 1 else []), *pins]
    return head, list(rows.values())


def _kernel(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """A kernel's name, with the release that it turned out to be, in any cell."""
    releases = [other["release"] for other in cells if other["kernel"] == cell["kernel"] and other["release"]]
    name = str(cell["kernel"]).rpartition("/")[2]
    return f"{name} ({releases[0]})" if releases and releases[0] != name else name


def _cell(cell: Mapping[str, Any], scenario: str) -> Segment:
    if cell["state"] != "done":
        return ("not run yet" if cell["state"] == "waiting" else "could not be run"), _STYLES["error"]
    for item in cell["verdicts"]:
        if name_of(item) == scenario:
            verdict = str(item["verdict"])
            detail = (
                item["basis"]
                if verdict == "not-reproduced"
                else item["layer"]
                if verdict == "other-failure"
                else ""
            )
            return f"{verdict} ({detail})" if detail else verdict, _STYLES.get(verdict, "magenta")
    return "no verdict", _STYLES["error"]


def _undecided(matrix: Mapping[str, Any]) -> Iterator[str]:
    for cell in matrix["cells"]:
        name = f"{cell['kernel']}, {cell['boot'] or 'no boot arguments'}, {cell['pin']}"
        if cell["state"] == "failed":
            yield f"{name}: {cell['why']}"
        for item in cell["verdicts"]:
            if item["verdict"] in ("unmet", "error"):
                yield f"{name}: {name_of(item)} is {item['verdict']}: {item['reason']}"
