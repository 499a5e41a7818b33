"""Instructions of BPF programs, one after the other, with labels in the place of distances.

Formats and numbers: Documentation/bpf/standardization/instruction-set.rst, include/uapi/linux/bpf.h.
"""

from __future__ import annotations

import struct
import sys

RESULT, CONTEXT, STACK_END = 0, 1, 10
"""Registers: what calls return, what a program gets, the end of its stack. 1 to 5 are a call's parameters and
gone afterwards; 6 to 9 stay."""

_LOAD, _STORE_NUMBER, _STORE, _JUMP, _ALU64 = 0x61, 0x62, 0x63, 0x05, 0x07
_SIZES = {4: 0x00, 8: 0x18, 2: 0x08, 1: 0x10}
_FROM_REGISTER = 0x08
_OPERATIONS = {"+": 0x00, "<<": 0x60, "&": 0x50, "=": 0xB0, "s>>": 0xC0, "|": 0x40, ">>": 0x70}
_CONDITIONS = {"==": 0x10, ">": 0x20, "!=": 0x50, "s>": 0x60, "s>=": 0x70, "s<": 0xC0, "&": 0x40}
_ALWAYS, _CALL, _EXIT, _LOAD_WIDE, _MAP = 0x05, 0x85, 0x95, 0x18, 1


class Code:
    """A program that grows. Registers are numbers, sizes bytes, offsets of memory in bytes."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, int, int | str, int]] = []
        self._labels: dict[str, int] = {}
        self._named = 0

    def _add(self, code: int, to: int = 0, source: int = 0, offset: int | str = 0, number: int = 0) -> None:
        self._parts.append((code, to, source, offset, number))

    def do(self, to: int, operation: str, number: int) -> None:
        """`to` becomes itself `operation` a signed number of 32 bits, which is made 64 bits long."""
        self._add(_ALU64 | _OPERATIONS[operation], to, number=number)

    def set(self, to: int, number: int) -> None:
        """`to` becomes any number of 64 bits."""
        low, high = number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF
        self._add(_LOAD_WIDE, to, number=_signed(low))
        self._add(0, number=_signed(high))

    def copy(self, to: int, source: int) -> None:
        """`to` becomes `source`."""
        self._add(_ALU64 | _OPERATIONS["="] | _FROM_REGISTER, to, source)

    def add(self, to: int, source: int) -> None:
        """`to` becomes itself and `source`."""
        self._add(_ALU64 | _OPERATIONS["+"] | _FROM_REGISTER, to, source)

    def set_map(self, to: int, map_fd: int) -> None:
        """`to` becomes a map."""
        self._add(_LOAD_WIDE, to, _MAP, number=map_fd)
        self._add(0)

    def load(self, to: int, base: int, offset: int, size: int = 8) -> None:
        """`to` becomes what lies at `base` + `offset`."""
        self._add(_LOAD | _SIZES[size], to, base, offset)

    def load_signed(self, to: int, base: int, offset: int) -> None:
        """`to` becomes the int in the low half of the word at `base` + `offset`, made 64 bits long."""
        self.load(to, base, offset)
        self.do(to, "<<", 32)
        self.do(to, "s>>", 32)

    def store(self, base: int, offset: int, source: int, size: int = 8) -> None:
        """What lies at `base` + `offset` becomes `source`."""
        self._add(_STORE | _SIZES[size], base, source, offset)

    def store_number(self, base: int, offset: int, number: int, size: int = 8) -> None:
        """What lies at `base` + `offset` becomes a signed number of 32 bits, made as long as it is."""
        self._add(_STORE_NUMBER | _SIZES[size], base, 0, offset, number)

    def add_atomically(self, base: int, offset: int, source: int) -> None:
        """What lies at `base` + `offset` (8 bytes) becomes itself and `source`, for all CPUs at once."""
        self._add(0xDB, base, source, offset)

    def stack(self, to: int, offset: int) -> None:
        """`to` becomes a pointer into the stack, `offset` below 0."""
        self.copy(to, STACK_END)
        self.do(to, "+", offset)

    def call(self, helper: int) -> None:
        """Call a helper with registers 1 to 5."""
        self._add(_CALL, number=helper)

    def jump(self, label: str) -> None:
        """Go on at a label, which must come later."""
        self._add(_ALWAYS, offset=label)

    def jump_if(self, left: int, condition: str, number: int, label: str) -> None:
        """Go on at a label if `left` compares so with a signed number of 32 bits, made 64 bits long."""
        self._add(_JUMP | _CONDITIONS[condition], left, 0, label, number)

    def jump_if_register(self, left: int, condition: str, right: int, label: str) -> None:
        """`jump_if` with a register."""
        self._add(_JUMP | _CONDITIONS[condition] | _FROM_REGISTER, left, right, label)

    def label(self, name: str) -> None:
        """Name the place that is next. Raises ValueError for a name that stands already."""
        if name in self._labels:
            raise ValueError(f"two labels are called {name}")
        self._labels[name] = len(self._parts)

    def new_label(self) -> str:
        """Return a name for a label that nothing has yet."""
        self._named += 1
        return f"#{self._named}"

    def end(self, result: int = 0) -> None:
        """End the program; `result` tells the kernel's event, where there is one, whether to go on."""
        self._add(_ALU64 | _OPERATIONS["="], RESULT, number=result)
        self._add(_EXIT)

    def bytes(self) -> bytes:
        """Return the program as the kernel takes it. Raises KeyError for a label that stands nowhere."""
        made = []
        for place, (code, to, source, offset, number) in enumerate(self._parts):
            if isinstance(offset, str):
                offset = self._labels[offset] - place - 1  # noqa: PLW2901 - a distance in its place
            nibbles = (to, source) if sys.byteorder == "little" else (source, to)
            made.append(struct.pack("=BBhi", code, nibbles[0] | nibbles[1] << 4, offset, number))
        return b"".join(made)


def _signed(half: int) -> int:
    return half - (1 << 32) if half >> 31 else half
