"""The code blocks of a Markdown document, as they stand there, for tests that run or check them.

A block that is not for running has `<!-- not run: why -->` before it.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

_MARK = re.compile(r"<!-- not run: (\S.*?) -->")
_FENCE = re.compile(r"(`{3,}|~{3,})(.*)")
_LIST = re.compile(r"\s*([-*+]|\d+[.)]) ")


@dataclass(frozen=True)
class Block:
    """One block: where it begins, its text without the indentation, and why it is not run, if it is not."""

    document: str
    line: int
    text: str
    language: str = ""
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text.splitlines()[0]}"


def blocks(document: Path) -> list[Block]:
    """Return the blocks of a document, fenced and indented ones, in their order."""
    lines = document.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    before = ""  # the last line of text that is not empty
    number = 0
    while number < len(lines):
        line = lines[number]
        begin = number
        mark = _MARK.fullmatch(before)
        why = mark[1] if mark else None
        if fence := _FENCE.match(line):
            number += 1
            while number < len(lines) and not lines[number].startswith(fence[1]):
                number += 1
            text = "\n".join(lines[begin + 1 : number]) + "\n"
            number += 1
            found.append(Block(document.name, begin + 1, text, fence[2].strip(), why))
            before = "block"
        elif (
            line.startswith("    ")
            and (begin == 0 or not lines[begin - 1].strip())
            and not _LIST.match(before)
        ):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            text = textwrap.dedent("\n".join(lines[begin:number])).strip("\n") + "\n"
            found.append(Block(document.name, begin + 1, text, "", why))
            before = "block"
        else:
            if line.strip():
                before = line
            number += 1
    return found


def the_block(document: Path, words: str) -> Block:
    """Return the one block in which these words stand."""
    having = [block for block in blocks(document) if words in block.text]
    assert len(having) == 1, f"{words!r} stands in {len(having)} blocks of {document.name}"
    return having[0]
