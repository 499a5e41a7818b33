"""The running kernel's types, from BTF (`/sys/kernel/btf/vmlinux`; format: Documentation/bpf/btf.rst).

Only what is asked for elsewhere: member offsets (through nested anonymous structs and unions), sizes, enum
values. The walk over all types is C; Python looks at single types.
"""

from __future__ import annotations

import errno
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regrepro._core import ffi, lib
from regrepro.kernel.procfs import BTF_PATH

_MAGIC = 0xEB9F
_ARRAY, _STRUCT, _UNION, _ENUM, _TYPEDEF, _VOLATILE, _CONST, _ENUM64 = 3, 4, 5, 6, 8, 9, 10, 19
_TYPE_TAG = 18


class BtfError(Exception):
    """The blob is not BTF, or not of a form that this reader knows."""


class Member(NamedTuple):
    """A struct member: offset in bits from the start of the outer struct; width 0 unless a bitfield."""

    bit_offset: int
    bitfield_width: int
    type_id: int

    @property
    def offset(self) -> int:
        """Offset in bytes."""
        return self.bit_offset // 8


def _sections(blob: bytes) -> tuple[int, int, int, int]:
    """Return where types begin in a blob and their length, and so of the strings. Raises BtfError."""
    if len(blob) < 24 or struct.unpack_from("=H", blob)[0] != _MAGIC:
        raise BtfError("no BTF magic")
    header_length, type_off, type_len, str_off, str_len = struct.unpack_from("=IIIII", blob, 4)
    types, strings = header_length + type_off, header_length + str_off
    if types + type_len > len(blob) or strings + str_len > len(blob):
        raise BtfError("BTF is cut short")
    return types, type_len, strings, str_len


class _Table(NamedTuple):
    """All types: where each lies, where its name lies among the strings, its kind."""

    offset: NDArray[np.uint32]
    name: NDArray[np.uint32]
    kind: NDArray[np.uint8]


class Btf:
    """A BTF blob. Look-ups return None where the kernel has no such type or member."""

    def __init__(self, blob: bytes) -> None:
        types, type_len, strings, str_len = _sections(blob)
        self._blob = blob
        self._types: int = types
        self._type_len: int = type_len
        self._strings: int = strings
        self._str_len: int = str_len
        self._walked: _Table | None = None
        self._found: dict[tuple[int, str], int | None] = {}

    @classmethod
    def of_running_kernel(cls) -> Btf:
        """Read the running kernel's BTF. Raises OSError (kernel without CONFIG_DEBUG_INFO_BTF), BtfError."""
        return cls(BTF_PATH.read_bytes())

    @classmethod
    def joined(cls, base: bytes, module: bytes) -> Btf:
        """Read a module's BTF together with the kernel's own, whose ids and strings it goes on counting from.

        Raises BtfError.
        """
        types = strings = b""
        for blob in (base, module):
            its_types, type_len, its_strings, str_len = _sections(blob)
            types += blob[its_types : its_types + type_len]
            strings += blob[its_strings : its_strings + str_len]
        head = base[:4] + struct.pack("=IIIII", 24, 0, len(types), len(types), len(strings))
        return cls(head + types + strings)

    def _find(self, kind: int, name: str) -> int | None:
        """Return the offset of a type in the blob. Each search reads all names: it is done once."""
        key = kind, name
        if key not in self._found:
            self._found[key] = self._search(kind, name)
        return self._found[key]

    def _search(self, kind: int, name: str) -> int | None:
        """Return the offset of the first type of this kind and name. Raises BtfError."""
        table = self._table()
        here = table.kind == kind
        named = np.zeros(len(here), dtype=np.bool_)
        needle, at = b"\0" + name.encode() + b"\0", self._strings - 1
        while (at := self._blob.find(needle, at + 1, self._strings + self._str_len)) >= 0:
            named |= table.name == at + 1 - self._strings
        found = np.flatnonzero(here & named)
        return self._types + int(table.offset[found[0]]) if len(found) else None

    def _table(self) -> _Table:
        """Return all types, in the order of their ids, from 1 on. They are walked over once."""
        if self._walked is None:
            room = self._type_len // 12
            offset = np.empty(room, dtype=np.uint32)
            types = ffi.from_buffer("uint8_t[]", self._blob) + self._types
            n = int(lib.rr_btf_index(types, self._type_len, ffi.from_buffer("uint32_t[]", offset), room))
            if n == -errno.ENOTSUP:
                raise BtfError("BTF has a kind of type that this version does not know")
            if n < 0:
                raise BtfError("BTF is damaged")
            words = np.frombuffer(self._blob, np.uint32, self._type_len // 4, self._types)
            first = offset[:n] // 4
            self._walked = _Table(offset[:n], words[first], (words[first + 1] >> 24 & 0x1F).astype(np.uint8))
        return self._walked

    def _at(self, type_id: int) -> int:
        """Return the offset in the blob of a type id."""
        offsets = self._table().offset
        if not 0 < type_id <= len(offsets):
            raise BtfError(f"BTF has no type {type_id}")
        return self._types + int(offsets[type_id - 1])

    def _name(self, offset: int) -> str:
        start = self._strings + offset
        return self._blob[start : self._blob.index(b"\0", start)].decode(errors="replace")

    def _header(self, at: int) -> tuple[int, int, bool, int]:
        """Return kind, vlen, kind flag, size or type."""
        _, info, size = struct.unpack_from("=III", self._blob, at)
        return info >> 24 & 0x1F, info & 0xFFFF, bool(info >> 31), size

    def _struct(self, name: str) -> int | None:
        at = self._find(_STRUCT, name)
        if at is not None:
            return at
        at = self._find(_TYPEDEF, name)
        if at is None:
            return None
        at = self._resolve(self._header(at)[3])
        return at if at is not None and self._header(at)[0] in (_STRUCT, _UNION) else None

    def _resolve(self, type_id: int) -> int | None:
        """Follow typedefs and qualifiers. None for void."""
        for _ in range(32):
            if not type_id:
                return None
            at = self._at(type_id)
            kind, _, _, target = self._header(at)
            if kind not in (_TYPEDEF, _VOLATILE, _CONST, _TYPE_TAG):
                return at
            type_id = target
        raise BtfError("BTF has a loop of typedefs")

    def size(self, name: str) -> int | None:
        """Return the size in bytes of a struct (or of a typedef of one)."""
        at = self._struct(name)
        return None if at is None else self._header(at)[3]

    def member(self, struct_name: str, member: str) -> Member | None:
        """Return a member of a struct, looked for in nested anonymous structs and unions too."""
        at = self._struct(struct_name)
        return None if at is None else self._member(at, member, 0, 0)

    def offset(self, struct_name: str, *members: str) -> int | None:
        """Return the byte offset of the first of `members` that the struct has."""
        for name in members:
            found = self.member(struct_name, name)
            if found is not None:
                return found.offset
        return None

    def _member(self, at: int, wanted: str, base: int, depth: int) -> Member | None:
        kind, vlen, bitfields, _ = self._header(at)
        if kind not in (_STRUCT, _UNION) or depth > 16:
            return None
        for i in range(vlen):
            name_off, type_id, bits = struct.unpack_from("=III", self._blob, at + 12 + 12 * i)
            width = bits >> 24 if bitfields else 0
            offset = base + (bits & 0xFFFFFF if bitfields else bits)
            if name_off:
                if self._name(name_off) == wanted:
                    return Member(offset, width, type_id)
                continue
            inner = self._resolve(type_id)
            found = None if inner is None else self._member(inner, wanted, offset, depth + 1)
            if found is not None:
                return found
        return None

    def array_length(self, member: Member) -> int | None:
        """Return the number of elements of a member that is an array (0 for a flexible one), else None."""
        at = self._resolve(member.type_id)
        if at is None or self._header(at)[0] != _ARRAY:
            return None
        return int(struct.unpack_from("=I", self._blob, at + 20)[0])

    def enum(self, name: str) -> dict[str, int] | None:
        """Return the values of a named enum by name, in order. Names may share a value."""
        at = self._find(_ENUM, name)
        if at is not None:
            return self._values(at)
        at = self._find(_ENUM64, name)
        if at is None:
            return None
        _, vlen, _, _ = self._header(at)
        triples = (struct.unpack_from("=III", self._blob, at + 12 + 12 * i) for i in range(vlen))
        return {self._name(name_off): high << 32 | low for name_off, low, high in triples}

    def _values(self, at: int) -> dict[str, int]:
        _, vlen, _, _ = self._header(at)
        pairs = (struct.unpack_from("=Ii", self._blob, at + 12 + 8 * i) for i in range(vlen))
        return {self._name(name_off): value for name_off, value in pairs}

    def enum_from(self, member: str) -> dict[str, int] | None:
        """Return the values of the enum whose first member is `member`; such an enum need not have a name."""
        table = self._table()
        for offset in table.offset[table.kind == _ENUM]:
            at = self._types + int(offset)
            if self._header(at)[1] and self._name(struct.unpack_from("=I", self._blob, at + 12)[0]) == member:
                return self._values(at)
        return None
