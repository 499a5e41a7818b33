"""Opening archives that came from somebody else: nothing leaves the folder, nothing swells without bound.

Only regular files and symbolic links that stay inside are kept; device nodes, pipes and hard links are
skipped. A member name that leads out of the folder makes the whole archive hostile, and it is refused.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import posixpath
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from regrepro.errors import UsageError

MAX_MEMBERS = 200_000
MAX_TOTAL = 4 << 30
"""Bytes that an archive may hold unpacked."""
MAX_FILE = 64 << 20
"""Bytes of one file; a larger one is skipped, for nothing that the audit reads is that large."""
RATIO = 250
RATIO_FROM = 64 << 20
"""Beyond this many bytes, unpacked over packed may not exceed RATIO (text reaches 50, zeros a thousand)."""
XZ_MEMORY = 256 << 20
MAX_HEADER = 64 << 10
"""Bytes of one extended header of tar: a path has 4,096 at most."""
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)

_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
)
BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


def kind(head: bytes) -> str:
    """Name the packing by its first bytes: gzip, bzip2, xz, zstd, zip, tar, or "" where it is none of
    them.
    """
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if len(head) > 262 and head[257:262] == b"ustar":
        return "tar"
    return ""


class _Xz(io.RawIOBase):
    """An xz stream with a limit on the memory that its dictionary may take."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        while True:
            if self._decoder.eof:
                rest = self._decoder.unused_data.lstrip(b"\0") or self._file.read(1 << 16).lstrip(b"\0")
                if not rest:
                    return 0
                self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
                data = self._decoder.decompress(rest, len(view))
            elif self._decoder.needs_input:
                packed = self._file.read(1 << 16)
                if not packed:
                    raise EOFError("the xz stream ends too early")
                data = self._decoder.decompress(packed, len(view))
            else:
                data = self._decoder.decompress(b"", len(view))
            if data:
                view[: len(data)] = data
                return len(data)


class Limited(io.RawIOBase):
    """Count what comes out of a decompressor, and stop a bomb."""

    def __init__(self, file: BinaryIO, packed: int, name: str, total: int = MAX_TOTAL) -> None:
        # One step at a time: a stream that is cut still gives what came before the cut.
        self._read = getattr(file, "read1", file.read)
        self._packed = max(packed, 1)
        self._name = name
        self._total = total
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        data: bytes = self._read(len(view))
        self.count += len(data)
        if self.count > self._total or (self.count > RATIO_FROM and self.count > RATIO * self._packed):
            raise UsageError(
                f"{self._name} is refused",
                why=f"it unpacks to more than {self.count >> 20} MiB from {self._packed >> 10} KiB",
                hint="unpack it yourself and give the folder",
            )
        view[: len(data)] = data
        return len(data)


def decompressed(file: BinaryIO, packing: str, packed: int, name: str) -> BinaryIO:
    """Return a stream of the unpacked bytes of `file` (packed in `packing`), with the limits of this
    module.
    """
    inner: BinaryIO
    if packing == "gzip":
        inner = cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb"))
    elif packing == "bzip2":
        inner = cast(BinaryIO, bz2.BZ2File(file, "rb"))
    elif packing == "xz":
        inner = cast(BinaryIO, io.BufferedReader(_Xz(file), 1 << 16))
    elif packing == "zstd":
        inner = _zstd(file, name)
    else:
        inner = file
    return cast(BinaryIO, io.BufferedReader(Limited(inner, packed, name), 1 << 16))


def _zstd(file: BinaryIO, name: str) -> BinaryIO:
    """Open a zstd stream with whatever this Python has for it (3.14 has its own)."""
    for module, attribute in (("compression.zstd", "ZstdFile"), ("backports.zstd", "ZstdFile")):
        try:
            found = __import__(module, fromlist=[attribute])
        except ImportError:
            continue
        return cast(BinaryIO, getattr(found, attribute)(file, "rb"))
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(
            f"{name} cannot be opened",
            why="it is packed with zstd, and this Python has no reader for it",
            hint="unpack it with `zstd -d` first and give what comes out",
        ) from None
    return cast(BinaryIO, zstandard.ZstdDecompressor(max_window_size=XZ_MEMORY).stream_reader(file))


def inside(name: str) -> str | None:
    """Return a member's name made plain, or None where it leads out of the folder."""
    if "\0" in name or name.startswith("/") or "\\" in name:
        return None
    plain = posixpath.normpath(name)
    if plain == ".." or plain.startswith("../"):
        return None
    return plain


def _refuse_name(archive: str, name: str) -> UsageError:
    return UsageError(
        f"{archive} is refused",
        why=f"the member {name[:80]!r} leads out of the folder",
        hint="an archive made by tar or zip of a folder has no such member",
    )


class _Member(tarfile.TarInfo):
    """A member whose extended headers (pax, GNU's long names) are no larger than names need."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENDED and self.size > MAX_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        made: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        made.pax_headers = {}
        return made


def tar_members(file: BinaryIO) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of a tar stream, each while it can be read. Raises tarfile.TarError."""
    with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as tar:
        for member in tar:
            yield tar, member
            tar.members = []  # type: ignore[attr-defined]  # it would keep what it has seen
            tar.pax_headers = {}


def members(file: BinaryIO, archive: str, wanted: Callable[[str], bool] | None = None) -> dict[str, bytes]:
    """Return the wanted regular files of a tar stream, for a few small ones out of a large package."""
    found: dict[str, bytes] = {}
    for tar, member in islice(tar_members(file), MAX_MEMBERS):
        name = inside(member.name)
        if name is None:
            raise _refuse_name(archive, member.name)
        if member.isreg() and member.size <= MAX_FILE and (wanted is None or wanted(name)):
            data = tar.extractfile(member)
            if data is not None:
                found[name] = data.read(MAX_FILE)
    return found


def unpack(path: Path, into: Path) -> None:
    """Unpack a tar (plain, gzip, bzip2, xz, zstd) or zip into a folder of our own.

    Raises UsageError, in one line, where the archive is broken, cut, empty, hostile or too large.
    """
    name = path.name
    try:
        with path.open("rb") as file:
            packing = kind(file.read(512))
            file.seek(0)
            if packing == "zip":
                kept = _unzip(file, name, into)
            else:
                kept = _untar(decompressed(file, packing, path.stat().st_size, name), name, into)
    except UsageError:
        raise
    except MemoryError:
        raise UsageError(f"{name} is refused", why="unpacking it takes too much memory") from None
    except (*BROKEN, NotImplementedError, RuntimeError) as error:
        raise UsageError(
            f"{name} cannot be read",
            why=f"it is broken or cut ({str(error) or type(error).__name__})",
            hint="have it sent again, or give the unpacked folder",
        ) from None
    if kept == 0:
        raise UsageError(f"{name} is empty", why="it holds no file")


def _write(into: Path, name: str, data: BinaryIO) -> None:
    target = into / name
    target.parent.mkdir(parents=True, exist_ok=True)
    # The folder is ours and holds no link yet, so no member can be written through one.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, 0o600), "wb") as file:
        while part := data.read(1 << 20):
            file.write(part)


def _links(into: Path, links: dict[str, str]) -> None:
    """Make the symbolic links, last, and only those that stay inside."""
    for name, target in links.items():
        # An absolute link of a captured tree means the machine's root, which is this folder's.
        base = "" if target.startswith("/") else posixpath.dirname(name)
        plain = inside(posixpath.join(base, target.lstrip("/")) or ".")
        place = into / name
        if plain is None or "\0" in target or place.is_symlink() or place.exists():
            continue
        relative = posixpath.relpath(plain, posixpath.dirname(name) or ".")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(relative)
        except OSError:
            continue


def _untar(stream: BinaryIO, archive: str, into: Path) -> int:
    kept = 0
    links: dict[str, str] = {}
    for count, (tar, member) in enumerate(tar_members(stream)):
        if count > MAX_MEMBERS:
            raise UsageError(f"{archive} is refused", why=f"it has more than {MAX_MEMBERS} members")
        name = inside(member.name)
        if name is None:
            raise _refuse_name(archive, member.name)
        if member.issym():
            links[name] = member.linkname
        elif member.isreg() and member.size <= MAX_FILE and name != ".":
            data = tar.extractfile(member)
            if data is not None:
                _put(into, name, cast(BinaryIO, data))
                kept += 1
    _links(into, links)
    return kept


def _put(into: Path, name: str, data: BinaryIO) -> None:
    try:
        _write(into, name, data)
    except (NotADirectoryError, IsADirectoryError, FileExistsError):
        return  # a file where another member is a folder: the first stays
    except OSError as error:
        if error.errno in (36,):  # ENAMETOOLONG
            return
        raise


def _unzip(file: BinaryIO, archive: str, into: Path) -> int:
    kept = 0
    links: dict[str, str] = {}
    with zipfile.ZipFile(file) as packed:
        entries = packed.infolist()
        total = sum(entry.file_size for entry in entries)
        compressed = sum(entry.compress_size for entry in entries)
        if len(entries) > MAX_MEMBERS:
            raise UsageError(f"{archive} is refused", why=f"it has more than {MAX_MEMBERS} members")
        if total > MAX_TOTAL or (total > RATIO_FROM and total > RATIO * max(compressed, 1)):
            raise UsageError(
                f"{archive} is refused", why=f"it unpacks to {total >> 20} MiB from {compressed >> 10} KiB"
            )
        for entry in entries:
            name = inside(entry.filename)
            if name is None:
                raise _refuse_name(archive, entry.filename)
            mode = entry.external_attr >> 16
            if entry.is_dir() or entry.file_size > MAX_FILE or entry.flag_bits & 1 or name == ".":
                continue
            with packed.open(entry) as data:
                # The sizes in the directory may lie: the stream itself is limited too.
                limited = io.BufferedReader(
                    Limited(cast(BinaryIO, data), entry.compress_size, archive, entry.file_size + 1)
                )
                if stat.S_ISLNK(mode):
                    links[name] = limited.read(4096).decode("utf-8", "replace")
                elif stat.S_IFMT(mode) in (0, stat.S_IFREG):
                    _put(into, name, cast(BinaryIO, limited))
                    kept += 1
    _links(into, links)
    return kept
