"""Any bytes → texts: what is packed is unpacked, what is encoded is decoded, as the bytes tell, not a name.

gzip, bzip2, xz, zstd, zip and tar (within the limits of `audit.archive`); UTF-8, UTF-16 and UTF-32 with or
without a mark; lines that end in CR. What is no text is refused: it must not be called clean.
"""

from __future__ import annotations

import codecs
import io
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from regrepro.audit import archive
from regrepro.errors import UsageError

_HEAD = 4096
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_JOURNAL = b"LPKSHHRH"  # systemd's journal-def.h
_LINE = 16 << 20  # bytes of one entry of journald's JSON
_DEPTH = 3  # archives in archives
_LARGE = 1 << 40  # bytes: of what is piped the packed size is not known


class _Stream(io.RawIOBase):
    """A stream of bytes made of another, part by part. `damage`: why its end is missing."""

    def __init__(self, source: BinaryIO, encoding: str = "", returns: bool = False) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
        self._returns = returns
        self._ready = b""
        self._any = False
        self.damage = ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        while not self._ready:
            part = self._part(len(view))
            if self._decoder is not None:
                self._ready = self._decoder.decode(part, final=not part).encode("utf-8", "replace")
            else:
                self._ready = part.replace(b"\r", b"\n") if self._returns else part
            if not part:
                break
        taken, self._ready = self._ready[: len(view)], self._ready[len(view) :]
        view[: len(taken)] = taken
        return len(taken)

    def _part(self, size: int) -> bytes:
        """Return what comes next, nothing where it is damaged: what came before counts."""
        if self.damage:
            return b""
        try:
            part: bytes = self._source.read1(size)  # type: ignore[attr-defined]
        except archive.BROKEN as error:
            if not self._any:
                raise
            self.damage = str(error) or type(error).__name__
            return b""
        self._any = self._any or bool(part)
        return part


class _Journald(io.RawIOBase):
    """journald's JSON, an object a line, as its messages: each is a text, or an array of bytes."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        while not self._ready:
            line = self._source.readline(_LINE)
            if not line:
                return 0
            self._ready = _message(line)
        taken, self._ready = self._ready[: len(view)], self._ready[len(view) :]
        view[: len(taken)] = taken
        return len(taken)


def _message(line: bytes) -> bytes:
    """Return an entry of journald as a line of its log; what is none stays as it is."""
    try:
        entry = json.loads(line)
        told = entry["MESSAGE"]
        message = bytes(told).decode(errors="replace") if isinstance(told, list) else str(told or "")
        head = (
            f"{entry.get('_HOSTNAME', '-')} {entry.get('SYSLOG_IDENTIFIER', '-')}[{entry.get('_PID', 0)}]: "
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return line
    return "".join(f"{head}{part}\n" for part in message.splitlines() or [""]).encode("utf-8", "replace")


class Texts:
    """What a file holds: `(name, stream)` of each text. `damaged`: what was cut, and why."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._streams: list[tuple[str, _Stream]] = []

    @property
    def damaged(self) -> list[str]:
        """Sentences on texts whose end could not be read."""
        return [
            f"{name} is damaged ({one.damage}): what came before was read"
            for name, one in self._streams
            if one.damage
        ]

    def of(self, name: str) -> Iterator[tuple[str, BinaryIO]]:
        """Yield the texts of a file, or of standard input (`-`). Raises OSError, EOFError, UsageError."""
        if name == "-":
            yield from self._within("standard input", cast(BinaryIO, sys.stdin.buffer), _LARGE, 0)
            return
        path = Path(name)
        if path.is_dir():
            raise UsageError(f"{name} is a folder", hint="give the log files in it")
        file = self._stack.enter_context(path.open("rb"))
        if file.peek(8)[:8] == _JOURNAL:
            yield name, self._journal(path)
            return
        yield from self._within(name, file, path.stat().st_size, 0)

    def _within(self, name: str, file: BinaryIO, size: int, depth: int) -> Iterator[tuple[str, BinaryIO]]:
        source = file if hasattr(file, "peek") else io.BufferedReader(cast(io.RawIOBase, file))
        head = source.peek(_HEAD)[:_HEAD]
        kind = archive.kind(head)
        if kind and depth >= _DEPTH:
            raise UsageError(f"{name} is not read", why=f"it lies in {depth} archives")
        if kind == "zip":
            yield from self._zipped(name, source, depth)
        elif kind == "tar":
            for tar, member in archive.tar_members(source):
                opened = tar.extractfile(member) if member.isreg() else None
                if opened is not None:
                    yield from self._within(
                        f"{name}:{member.name}", cast(BinaryIO, opened), member.size, depth + 1
                    )
        elif kind:
            unpacked = self._stream(name, archive.decompressed(source, kind, size, name))
            yield from self._within(name, unpacked, _LARGE, depth + 1)
        else:
            yield name, self._text(name, source, head, depth)

    def _zipped(self, name: str, source: BinaryIO, depth: int) -> Iterator[tuple[str, BinaryIO]]:
        if not source.seekable():
            raise UsageError(
                f"{name} is a zip archive", why="it cannot be read from a pipe", hint="name the file"
            )
        packed = self._stack.enter_context(zipfile.ZipFile(source))
        for entry in packed.infolist()[: archive.MAX_MEMBERS]:
            if not entry.is_dir():
                limited = archive.Limited(cast(BinaryIO, packed.open(entry)), entry.compress_size, name)
                text = cast(BinaryIO, io.BufferedReader(limited))
                yield from self._within(f"{name}:{entry.filename}", text, entry.file_size, depth + 1)

    def _text(self, name: str, source: BinaryIO, head: bytes, depth: int) -> BinaryIO:
        encoding = _encoding(head)
        if not encoding and _is_binary(head):
            if depth:
                return io.BytesIO()  # one of many: it is no log
            raise UsageError(
                f"{name} is no text", why="it holds bytes that no text does", hint="give the log itself"
            )
        if head.startswith(b"{") and b'"MESSAGE"' in head and b'"__CURSOR"' in head:
            return cast(BinaryIO, io.BufferedReader(_Journald(self._stream(name, source))))
        returns = b"\r" in head and b"\n" not in head and not encoding
        return self._stream(name, source, encoding, returns=returns)

    def _stream(self, name: str, source: BinaryIO, encoding: str = "", *, returns: bool = False) -> BinaryIO:
        made = _Stream(source, encoding, returns)
        self._streams.append((name, made))
        return cast(BinaryIO, io.BufferedReader(made, 1 << 16))

    def _journal(self, path: Path) -> BinaryIO:
        tool = shutil.which("journalctl")
        if tool is None:
            raise UsageError(f"{path} is a journal of systemd", hint="install journalctl, or give its text")
        command = [tool, "--file", str(path), "--no-pager", "--output", "short-iso"]
        process = self._stack.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        )
        assert process.stdout is not None
        return cast(BinaryIO, process.stdout)


def _encoding(head: bytes) -> str:
    """Return the encoding that a mark tells, or zeros in every second byte; "" for UTF-8 and the like."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    some = head[: len(head) // 2 * 2]
    if len(some) < 16:
        return ""
    for name, zeros, signs in (("utf-16-le", some[1::2], some[::2]), ("utf-16-be", some[::2], some[1::2])):
        if zeros.count(0) > len(zeros) * 0.7 and signs.count(0) < len(signs) * 0.1:
            return name
    return ""


def _is_binary(head: bytes) -> bool:
    """Whether it is no text: control characters other than those of lines, tabs and terminals."""
    strange = sum(head.count(code) for code in (*range(7), *range(14, 27), *range(28, 32), 127))
    return strange > len(head) // 20
