"""Reading logs of any size in constant memory: only lines that hold one of the known words come out.

The search itself is C (csrc/logscan.c) where the core is built, else `bytes.find`: slower, the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

CHUNK = 1 << 20
MAX_LINE = 1 << 16
"""A line longer than this is looked at in pieces."""
_OVERLAP = 2048
AROUND = 3
"""Lines before and after a found one that come with it: a wrapped line goes on there."""
SPANS = 4096


@dataclass(frozen=True)
class Found:
    """A line that holds a known word: its number (from 1), its text, and the lines before and after it."""

    number: int
    line: bytes
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]


class Needles:
    """Search for lines that hold any of the needles."""

    def __init__(self, needles: tuple[bytes, ...], *, use_core: bool = True) -> None:
        self.needles = needles
        self._scan: Any = None
        if use_core:
            try:
                from regrepro._core import ffi, lib

                self._ffi: Any = ffi
                self._lib: Any = lib
                scan = lib.rr_logscan_new(b"".join(needles), bytes(len(one) for one in needles), len(needles))
            except (ImportError, AttributeError):
                return
            if scan != ffi.NULL:
                self._scan = ffi.gc(scan, lib.rr_logscan_free)
                self._spans = ffi.new("uint64_t[]", 2 * SPANS)
                self._next = ffi.new("size_t *")

    def lines(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each line of `data` that holds a needle, in order."""
        if self._scan is None:
            yield from self._slow(data)
            return
        buffer = self._ffi.from_buffer(data)
        start = 0
        while start < len(data):
            count = self._lib.rr_logscan_lines(
                self._scan, buffer, len(data), start, self._spans, SPANS, self._next
            )
            flat = self._ffi.unpack(self._spans, 2 * count) if count else []
            yield from zip(flat[::2], flat[1::2], strict=True)
            start = self._next[0]

    def newlines(self, data: bytes, start: int, end: int) -> int:
        """Count the lines that end between two offsets."""
        if self._scan is None:
            return data.count(b"\n", start, end)
        return int(self._lib.rr_logscan_newlines(self._ffi.from_buffer(data), start, end))

    def _slow(self, data: bytes) -> Iterator[tuple[int, int]]:
        spans: set[tuple[int, int]] = set()
        for needle in self.needles:
            at = data.find(needle)
            while at >= 0:
                begin = data.rfind(b"\n", 0, at) + 1
                end = data.find(b"\n", at)
                end = len(data) if end < 0 else end
                spans.add((begin, end))
                at = data.find(needle, end)
        yield from sorted(spans)


def read(file: BinaryIO, needles: Needles) -> Iterator[Found]:
    """Yield the lines of interest of a stream, each with its neighbours; memory does not grow with the
    stream.
    """
    held = b""  # what is carried over: lines that were seen, as context, then lines that are not decided yet
    decided = 0  # bytes of `held` that were decided in an earlier round
    number = 0  # lines before `held`
    while True:
        part = file.read(CHUNK)
        data = held + part
        at_end = not part
        limit = len(data) if at_end else _lines_back(data, len(data), AROUND)
        if not at_end and limit <= decided:
            if len(data) < CHUNK + (AROUND + 1) * MAX_LINE:
                held = data  # too few whole lines yet
                continue
            limit = len(data)  # one endless line: cut it where we are
        last_start, last_number = 0, number
        for start, end in needles.lines(data):
            if start < decided:
                continue
            if start >= limit:
                break
            last_number += needles.newlines(data, last_start, start)
            last_start = start
            before, after = _before(data, start), _after(data, end)
            for piece in _pieces(data, start, end, needles.needles):
                yield Found(last_number + 1, piece, before, after)
        if at_end:
            return
        keep = _lines_back(data, limit, AROUND)
        keep = max(keep, limit - AROUND * MAX_LINE)
        number += needles.newlines(data, 0, keep)
        held = data[keep:]
        decided = limit - keep


def _pieces(data: bytes, start: int, end: int, needles: tuple[bytes, ...]) -> Iterator[bytes]:
    """Yield a line, or of a long one (a log in JSON) each piece that holds a needle; pieces overlap."""
    if end - start <= MAX_LINE:
        yield data[start:end]
        return
    for at in range(start, end, MAX_LINE - _OVERLAP):
        piece = data[at : min(end, at + MAX_LINE)]
        if any(needle in piece for needle in needles):
            yield piece


def _lines_back(data: bytes, end: int, count: int) -> int:
    """Return the start of the `count`th line before `end` (counting the one that `end` lies in)."""
    at = end
    for _ in range(count):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return 0
    return at + 1


def _before(data: bytes, start: int) -> tuple[bytes, ...]:
    lines: list[bytes] = []
    end = start - 1
    while end > 0 and len(lines) < AROUND:
        begin = data.rfind(b"\n", 0, end) + 1
        lines.append(data[max(begin, end - MAX_LINE) : end])
        end = begin - 1
    return tuple(reversed(lines))


def _after(data: bytes, end: int) -> tuple[bytes, ...]:
    lines: list[bytes] = []
    start = end + 1
    while start < len(data) and len(lines) < AROUND:
        stop = data.find(b"\n", start)
        stop = len(data) if stop < 0 else stop
        lines.append(data[start : min(stop, start + MAX_LINE)])
        start = stop + 1
    return tuple(lines)
