"""Lines that speak of a failed registration in words that no rule of `formats` knows.

Where nothing else is found they are shown: "I do not know" is an answer, a denial would be a wrong one.
"""

from __future__ import annotations

import re

NEEDLES = (
    *(b"egist", b"EGIST", b"umem", b"p2p_get", b"p2p_free", b"MAP_DMA", b"MEMLOCK", b"locked mem"),
    b"PFNs busy",
)
KEPT = 5
_WHAT = re.compile(
    r"regist(?:er|rat|ring)\w*.*?(?:mem|buffer|region|\bMRs?\b|dma|gpu|page)"
    r"|(?:mem|buffer|region|\bMR|dma|gpu|page).*?regist(?:er|rat|ring)"
    r"|mem[_ ]reg|umem|p2p_(?:get_pages|free_callback)|MAP_DMA|RLIMIT_MEMLOCK|locked mem",
    re.IGNORECASE,
)
_FAILED = re.compile(
    r"\b(?:fail(?:ed|ure|s)?|error|cannot|can't|could not|unable|not registered|exceeded|invalid)\b",
    re.IGNORECASE,
)
# What says it without such words: the kernel of pages that are held.
_ALONE = re.compile(r"PFNs busy")
# What is denied, went well, is a setting, or is source code.
_NOT = re.compile(
    r"\b(?:no|0|zero|without) (?:fail|err)|\b(?:errors?|failures?|failed|rc|ret|status)\s*[=:]\s*0\b"
    r"|succe|recover|enabled|disabled|handler|checking|%[0-9.]*[sdiulxpz]|[;{}]\s*$|^\s*(?:if|return|//|#|\*|raise|except)\b",
    re.IGNORECASE,
)


class Closest:
    """Keeps the first lines of each shape."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []
        self._shapes: set[str] = set()

    def look_at(self, text: str, file: str, number: int, width: int) -> None:
        """Keep a line if it speaks of a registration that failed."""
        if len(self.lines) >= KEPT or len(text) > 4096:
            return
        spoken = _FAILED.search(text) and _WHAT.search(text) and not _NOT.search(text)
        if not spoken and not _ALONE.search(text):
            return
        shape = re.sub(r"0x[0-9a-f]+|[0-9a-f]*\d[0-9a-f]*", "0", text)
        if shape not in self._shapes:
            self._shapes.add(shape)
            self.lines.append({"file": file, "line": number, "text": text.strip()[:width]})
