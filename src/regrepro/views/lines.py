"""Styled lines to a terminal: colour by rich where it is there and the output is a terminal, else the
same text, so that a log reads like the screen.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from regrepro.foreign import visible

Segment = tuple[str, str]
"""A text and a style of rich's, or an empty style."""
Line = list[Segment]

WIDEST = 140
PLAIN_WIDTH = 110


def _isatty(out: TextIO) -> bool:
    try:
        return out.isatty()
    except (AttributeError, ValueError):
        return False


def is_terminal(out: TextIO) -> bool:
    """Tell whether colour makes sense there (https://no-color.org)."""
    return _isatty(out) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width_of(out: TextIO, plain: int = PLAIN_WIDTH, widest: int = WIDEST) -> int:
    """Return how wide to write: the terminal's width within reason, or `plain` for files."""
    if not _isatty(out):
        return plain
    return max(50, min(shutil.get_terminal_size((plain, 24)).columns, widest))


def wrap(text: str, width: int, indent: str = "", first: str | None = None, style: str = "") -> list[Line]:
    """Wrap a text into lines; words that are longer than a line (paths) are left whole."""
    wrapped = textwrap.wrap(
        text,
        max(width, len(indent) + 20),
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [[(line, style)] for line in wrapped] or [[((first or indent).rstrip(), style)]]


def columns(head: Sequence[str], rows: Sequence[Sequence[Segment]]) -> list[Line]:
    """Lay out a table: its head in bold, then the rows, each column as wide as its widest cell."""
    table = [[(name, "bold") for name in head], *rows]
    widths = [max(len(row[n][0]) for row in table) for n in range(len(head))]
    return [
        [(text.ljust(size + 2), style) for (text, style), size in zip(row[:-1], widths, strict=False)]
        + [row[-1]]
        for row in table
    ]


def emit(lines: Iterable[Line], out: TextIO | None = None) -> None:
    """Write the lines, `visible`. It never fails for what the stream cannot encode."""
    out = out or sys.stdout
    lines = [[(visible(text), style) for text, style in line] for line in lines]
    if is_terminal(out):
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            console = Console(file=out, highlight=False, soft_wrap=True)
            for line in lines:
                console.print(Text.assemble(*line))
            return
    encoding = getattr(out, "encoding", None) or "utf-8"
    for line in lines:
        text = "".join(part for part, _ in line).rstrip()
        try:
            text.encode(encoding)
        except (UnicodeEncodeError, LookupError):
            text = text.replace("─", "-").replace("✗", "x").encode("ascii", "replace").decode("ascii")
        out.write(text + "\n")
    out.flush()
