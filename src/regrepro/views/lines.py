"""Styled lines to a terminal: colour by rich where it is there and the output is a terminal, else the
same text.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

Line = list[tuple[str, str]]
"""A line as segments of text and a style of rich's, or an empty style."""

WIDEST = 140
PLAIN_WIDTH = 110


def is_terminal(out: TextIO) -> bool:
    """Tell whether colour makes sense there (https://no-color.org)."""
    try:
        return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def width_of(out: TextIO) -> int:
    """Return how wide to write: the terminal's width within reason, or a fixed one for files."""
    if not is_terminal(out):
        return PLAIN_WIDTH
    return max(50, min(shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns, WIDEST))


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


def emit(lines: Iterable[Line], out: TextIO | None = None) -> None:
    """Write the lines."""
    out = out or sys.stdout
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
    for line in lines:
        out.write("".join(text for text, _ in line).rstrip() + "\n")
    out.flush()
