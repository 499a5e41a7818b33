"""The table of planted faults: a row for each fault, a column for each kernel, in each cell the layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regrepro.views.grid import Grid, Table
from regrepro.views.lines import Segment

Cell = Mapping[str, Any]
WRONG, UNDECIDED, RIGHT = "wrong", "undecided", "right"
_STYLES = {WRONG: "bold red", UNDECIDED: "bold magenta", RIGHT: ""}


def state(cell: Cell | None) -> str:
    """Return whether a cell is `right`, `wrong` or `undecided`, by what its scenario declares."""
    if cell is None or cell["as_declared"] is None:
        return UNDECIDED
    return RIGHT if cell["as_declared"] else WRONG


def text(cell: Cell | None) -> str:
    """Return what a cell says."""
    if cell is None:
        return "not run"
    errno = f" ({cell['errno']})" if cell["errno"] else ""
    verdict = cell["verdict"]
    if verdict == "reproduced":
        said = f"{cell['layer']}{errno}, reproduced"
    elif verdict == "not-reproduced":
        said = f"succeeds ({cell['basis']})"
    elif verdict == "other-failure":
        said = f"{cell['layer']}{' (blocked)' if cell['blocked'] else errno}"
    elif verdict == "unmet":
        said = "not proven" if cell["tried"] else "cannot be planted"
    else:
        said = str(verdict)
    return f"WRONG: {said}" if state(cell) == WRONG else said


def grid(table: Mapping[str, Any]) -> Grid:
    """Return the table; below it what is wrong, undecided or unknown, with the reason."""
    head = ["fault", *(_kernel(column) for column in table["kernels"])]
    rows = [[(str(fault["scenario"]), ""), *_cells(table, fault)] for fault in table["faults"]]
    tables = [Table(head, rows, rows_are_scenarios=True)]
    return Grid(table["command"], table["version"], tables, list(notes(table)), summary(table))


def summary(table: Mapping[str, Any]) -> str:
    """Return how many cells are right, wrong and unknown."""
    cells = [cell for fault in table["faults"] for cell in fault["cells"].values()]
    counts = {name: sum(state(cell) == name for cell in cells) for name in (RIGHT, WRONG, UNDECIDED)}
    unknown = sum(cell is not None and cell["layer"] == "unknown" for cell in cells)
    return (
        f"{len(cells)} cells: {counts[RIGHT]} as declared, {counts[WRONG]} wrong, "
        f"{counts[UNDECIDED]} undecided, {unknown} with an unknown layer."
    )


def notes(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a cell is wrong, undecided, unknown, blocked, or could not be planted."""
    for fault in table["faults"]:
        for kernel, cell in fault["cells"].items():
            if cell is None:
                yield f"{fault['scenario']} on {kernel} was not run"
            elif (
                state(cell) != RIGHT
                or cell["blocked"]
                or cell["layer"] == "unknown"
                or cell["verdict"] == "unmet"
            ):
                expected = f"; declared is {cell['declared']}" if state(cell) == WRONG else ""
                yield f"{fault['scenario']} on {kernel}: {cell['reason']}{expected}"


def _cells(table: Mapping[str, Any], fault: Mapping[str, Any]) -> Iterator[Segment]:
    for column in table["kernels"]:
        cell = fault["cells"].get(column["kernel"])
        yield text(cell), _STYLES[state(cell)]


def _kernel(column: Mapping[str, Any]) -> str:
    """A kernel's name, with the release that it turned out to be."""
    name = str(column["kernel"]).rpartition("/")[2]
    release = column["release"]
    return f"{name} ({release})" if release and release != name else name
