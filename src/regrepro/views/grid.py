"""Tables of many lab runs, what is told below them, and how they are written: terminal, Markdown, HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from regrepro.views.lines import PLAIN_WIDTH, Line, Segment, columns, emit, wrap
from regrepro.views.markup import html, md, md_table

_COLOURS = {
    "bold red": "#b3261e",
    "green": "#14692f",
    "yellow": "#8a5200",
    "magenta": "#5b3a8c",
    "bold magenta": "#5b3a8c",
}


@dataclass(frozen=True)
class Table:
    """One table. A cell is a text and its style; what has none names the row. `scenario`: its title."""

    head: Sequence[str]
    rows: Sequence[Sequence[Segment]]
    scenario: str = ""
    rows_are_scenarios: bool = False


@dataclass(frozen=True)
class Grid:
    """The tables of one command, `notes` on single cells, and a last sentence of all of them."""

    command: str
    version: str
    tables: Sequence[Table]
    notes: Sequence[str]
    last: str
    heading: str = ""

    def show(self, file: TextIO) -> None:
        """Write it to a terminal or a log."""
        lines: list[Line] = []
        for table in self.tables:
            lines += [[], [(table.scenario, "bold")]] if table.scenario else []
            lines += columns(table.head, table.rows)
        for note in self.notes:
            lines += [[], *wrap(note, PLAIN_WIDTH, "  ", "")]
        emit([*lines, [], *wrap(self.last, PLAIN_WIDTH)], file)

    def markdown(self) -> str:
        """Return it as Markdown, with the command that makes it."""
        out = [f"Made by `{self.command}` (regrepro {self.version}).", ""]
        for table in self.tables:
            out += [f"`{table.scenario}`:", ""] if table.scenario else []
            rows = [[f"**{md(text)}**" if style.startswith("bold") else md(text) for text, style in row]
                    for row in table.rows]  # fmt: skip
            if table.rows_are_scenarios:
                rows = [[f"`{name}`", *rest] for name, *rest in rows]
            out += md_table(table.head, rows)
        out += [f"- {md(note)}" for note in self.notes]
        return "\n".join([*out, *([""] if self.notes else []), self.last]) + "\n"

    def html(self) -> str:
        """Return it as one HTML document."""
        out = [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            "<title>regrepro lab matrix</title><style>",
            "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;max-width:70rem}"
            "table{border-collapse:collapse}th,td{border:1px solid #ccc;padding:.35rem .8rem;text-align:left}"
            "code{background:#f2f2f2}"
            f"</style></head><body><h1>{html(self.heading)}</h1>",
            f"<p>{html(self.last)}</p><p>Made by <code>{html(self.command)}</code>.</p>",
        ]
        for table in self.tables:
            out.append(f"<h2>{html(table.scenario)}</h2><table><tr>")
            out += [*(f"<th>{html(name)}</th>" for name in table.head), "</tr>"]
            for row in table.rows:
                cells = (
                    f'<td style="color:{_COLOURS[style]};font-weight:600">{html(text)}</td>'
                    if style
                    else f"<td>{html(text)}</td>"
                    for text, style in row
                )
                out.append(f"<tr>{''.join(cells)}</tr>")
            out.append("</table>")
        items = [f"<li>{html(note)}</li>" for note in self.notes]
        out += ["<h2>Undecided</h2><ul>", *items, "</ul>"] if items else []
        return "\n".join([*out, "</body></html>"]) + "\n"
