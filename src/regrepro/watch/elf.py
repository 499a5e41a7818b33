"""What is asked of a library's ELF file: the functions that it offers, and where they lie in it.

Only files of 64 bits and of this machine's byte order. Layouts: elf(5).
"""

from __future__ import annotations

import struct

_SHT_DYNSYM, _SHT_VERSYM = 11, 0x6FFFFFFF
_HIDDEN = 0x8000  # a versioned symbol that is not the default one
_PT_LOAD = 1


class NotElf(Exception):
    """The file is no ELF file of 64 bits and this machine's byte order, or is damaged."""


def _check(blob: bytes) -> None:
    order = b"\x01" if struct.pack("=H", 1) == b"\x01\x00" else b"\x02"
    if blob[:6] != b"\x7fELF\x02" + order:
        raise NotElf("no 64-bit ELF file of this byte order")


def dynamic_functions(blob: bytes) -> dict[str, tuple[int, int]]:
    """Return the functions that a 64-bit ELF library offers in their default version: name → address, size.

    Raises NotElf.
    """
    try:
        _check(blob)
        (table,) = struct.unpack_from("=Q", blob, 0x28)
        size, count, _ = struct.unpack_from("=HHH", blob, 0x3A)
        sections = [struct.unpack_from("=IIQQQQIIQQ", blob, table + size * i) for i in range(count)]
        symbols = next((item for item in sections if item[1] == _SHT_DYNSYM), None)
        if symbols is None:
            raise NotElf("no dynamic symbols")
        versions = next((item for item in sections if item[1] == _SHT_VERSYM), None)
        strings = sections[symbols[6]][4]
        found = {}
        for index in range(symbols[5] // 24):
            name, info, _, section, value, length = struct.unpack_from(
                "=IBBHQQ", blob, symbols[4] + 24 * index
            )
            if info & 0xF not in (2, 10) or not section:  # STT_FUNC, STT_GNU_IFUNC; undefined
                continue
            if versions is not None:
                (version,) = struct.unpack_from("=H", blob, versions[4] + 2 * index)
                if version & _HIDDEN:
                    continue
            start = strings + name
            shown = blob[start : blob.index(b"\0", start)].decode(errors="replace")
            found[shown] = (value, length)
    except (struct.error, IndexError, ValueError) as error:
        raise NotElf(str(error)) from None
    return found


def _loaded(blob: bytes) -> list[tuple[int, int, int]]:
    """Return what is loaded of the file, as (address, offset, size)."""
    _check(blob)
    try:
        (table,) = struct.unpack_from("=Q", blob, 0x20)
        size, count = struct.unpack_from("=HH", blob, 0x36)
        headers = [struct.unpack_from("=IIQQQQ", blob, table + size * i) for i in range(count)]
    except struct.error as error:
        raise NotElf(str(error)) from None
    return [(address, offset, length) for kind, _, offset, address, _, length in headers if kind == _PT_LOAD]


def file_offset(blob: bytes, address: int) -> int:
    """Return where an address of the library lies in its file. Raises NotElf."""
    for start, offset, length in _loaded(blob):
        if start <= address < start + length:
            return offset + address - start
    raise NotElf(f"{address:#x} is not in the file")
