"""Markdown and HTML: what is foreign is escaped, tables are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from regrepro.foreign import visible


def md(text: object, *, code: bool = False) -> str:
    """Return text that Markdown shows as it is, on one line; with `code`, backticks keep their meaning."""
    line = visible(" ".join(str(text).split()))
    if code and line.count("`") % 2 == 0:
        return "".join(
            part if part.startswith("`") else _escaped(part) for part in re.split(r"(`[^`]*`)", line)
        )
    return _escaped(line)


def _escaped(line: str) -> str:
    line = re.sub(r"([\\`*\[\]<>|~])", r"\\\1", line)
    # An underscore between letters or digits is no emphasis, and a # only where a heading could begin.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|^#", lambda found: "\\" + found[0], line)


def md_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table and an empty one; what is in the cells is Markdown already."""
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield f"| {' | '.join('---' for _ in names)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def html(text: object) -> str:
    """Return text that HTML shows as it is."""
    return escape(visible(str(text), "\n"))


def html_table(head: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return an HTML table; what is in the cells is HTML already. `kind`: its class."""
    names = "".join(f"<th>{html(name)}</th>" for name in head)
    lines = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    css = f' class="{kind}"' if kind else ""
    body = f"<thead><tr>{names}</tr></thead><tbody>\n{lines}\n</tbody>"
    return f'<div class="wide"><table{css}>{body}</table></div>'
