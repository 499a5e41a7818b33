"""A matrix of lab runs as a table: terminal, Markdown, HTML. Rows are machines, columns pin contracts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, TextIO

from regrepro.judge.names import name_of
from regrepro.views.lines import Line, emit, wrap

_STYLES = {
    "reproduced": "bold red",
    "not-reproduced": "green",
    "other-failure": "yellow",
    "unmet": "magenta",
    "error": "magenta",
}
_COLOURS = {"reproduced": "#b3261e", "not-reproduced": "#14692f", "other-failure": "#8a5200"}
_NOTE = (
    "Lab runs in virtual machines: no vendor driver took part. The pins are stand-ins; a verdict says what "
    "the kernel does under that contract."
)


def show(matrix: Mapping[str, Any], file: TextIO) -> None:
    """Write the table, and below it why a cell has no verdict that is one."""
    lines: list[Line] = []
    for scenario in scenarios(matrix):
        head, rows = table(matrix, scenario)
        plain = [[text for text, _ in row] for row in rows]
        widths = [max(len(row[n]) for row in [list(head), *plain]) for n in range(len(head))]
        lines += [[], [(f"{scenario}", "bold")]]
        lines.append([("  ".join(name.ljust(size) for name, size in zip(head, widths, strict=True)), "bold")])
        for row in rows:
            line: Line = []
            for (text, verdict), size in zip(row, widths, strict=True):
                line += [(text.ljust(size), _STYLES.get(verdict, "")), ("  ", "")]
            lines.append(line)
    for text in _undecided(matrix):
        lines += [[], *wrap(text, 100, "  ", "")]
    lines += [[], *wrap(_NOTE, 100)]
    emit(lines, file)


def markdown(matrix: Mapping[str, Any]) -> str:
    """Return the table as Markdown, with the command that makes it."""
    out = [f"Made by `{matrix['command']}` (regrepro {matrix['version']}).", ""]
    for scenario in scenarios(matrix):
        head, rows = table(matrix, scenario)
        out += [f"`{scenario}`:", "", f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
        for row in rows:
            cells = [f"**{_md(text)}**" if verdict == "reproduced" else _md(text) for text, verdict in row]
            out.append(f"| {' | '.join(cells)} |")
        out.append("")
    undecided = list(_undecided(matrix))
    out += [f"- {_md(text)}" for text in undecided]
    out += [""] if undecided else []
    return "\n".join([*out, _NOTE]) + "\n"


def html(matrix: Mapping[str, Any]) -> str:
    """Return the table as one HTML document."""
    out = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        "<title>regrepro lab matrix</title><style>",
    ]
    out.append(
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;max-width:70rem}table{border-collapse:collapse}"
        "th,td{border:1px solid #ccc;padding:.35rem .8rem;text-align:left}code{background:#f2f2f2}"
        "</style></head><body><h1>Which kernel, with which memory, under which pin</h1>"
    )
    out.append(f"<p>{escape(_NOTE)}</p><p>Made by <code>{escape(str(matrix['command']))}</code>.</p>")
    for scenario in scenarios(matrix):
        head, rows = table(matrix, scenario)
        out.append(f"<h2>{escape(scenario)}</h2><table><tr>")
        out += [f"<th>{escape(name)}</th>" for name in head]
        out.append("</tr>")
        for row in rows:
            cells = [
                f'<td style="color:{_COLOURS.get(verdict, "#5b3a8c")};font-weight:600">{escape(text)}</td>'
                if verdict
                else f"<td>{escape(text)}</td>"
                for text, verdict in row
            ]
            out.append(f"<tr>{''.join(cells)}</tr>")
        out.append("</table>")
    items = [f"<li>{escape(text)}</li>" for text in _undecided(matrix)]
    out += ["<h2>Undecided</h2><ul>", *items, "</ul>"] if items else []
    return "\n".join([*out, "</body></html>"]) + "\n"


Row = list[tuple[str, str]]
"""Cells as text and verdict; the verdict is empty in the columns that name the row."""


def scenarios(matrix: Mapping[str, Any]) -> list[str]:
    """Return the scenarios that have a verdict in any cell; those that were asked for, where none has."""
    found = [name_of(item) for cell in matrix["cells"] for item in cell["verdicts"]]
    return list(dict.fromkeys(found)) or [str(name) for name in matrix["scenarios"]]


def table(matrix: Mapping[str, Any], scenario: str) -> tuple[Sequence[str], list[Row]]:
    """Return head and rows of one scenario's table."""
    cells = matrix["cells"]
    pins = list(dict.fromkeys(cell["pin"] for cell in cells))
    places = list(dict.fromkeys(cell["place"] for cell in cells))
    rows: dict[tuple[str, str, str], Row] = {}
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


def _cell(cell: Mapping[str, Any], scenario: str) -> tuple[str, str]:
    if cell["state"] != "done":
        return ("not run yet" if cell["state"] == "waiting" else "could not be run"), "error"
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
            return f"{verdict} ({detail})" if detail else verdict, verdict
    return "no verdict", "error"


def _undecided(matrix: Mapping[str, Any]) -> Iterator[str]:
    for cell in matrix["cells"]:
        name = f"{cell['kernel']}, {cell['boot'] or 'no boot arguments'}, {cell['pin']}"
        if cell["state"] == "failed":
            yield f"{name}: {cell['why']}"
        for item in cell["verdicts"]:
            if item["verdict"] in ("unmet", "error"):
                yield f"{name}: {name_of(item)} is {item['verdict']}: {item['reason']}"


def _md(text: str) -> str:
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))
