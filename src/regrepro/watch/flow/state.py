"""What is known before an instruction: what registers and the function's own frame hold.

Less may be known than there is, and nothing that is not so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1


@dataclass(frozen=True)
class Place:
    """Where a value lies: in a register, or in memory at the stack pointer + offset (`register` is "").

    `size`: bytes that are valid; 4 where only the low half of the register is the value's.
    """

    register: str = ""
    offset: int = 0
    size: int = 8


class Kind(Enum):
    UNKNOWN = auto()  # without identity: two of them may differ
    RESULT = auto()  # what the instruction at `key` left; the same value wherever it was copied to
    PARAMETER = auto()
    SAVED = auto()  # what a register held for the caller when the function began
    FRAME = auto()  # the stack pointer at entry + `key`
    CONSTANT = auto()
    GUARD = auto()  # the number that the stack protector keeps for the thread


class Value(NamedTuple):
    """What 64 bits hold. `low`: the low half of that, and zeros above."""

    kind: Kind
    key: Any = None
    low: bool = False

    def half(self) -> Value:
        """Of this value the low half, extended by zeros."""
        if self.kind is Kind.CONSTANT:
            return constant(self.key & _HALF)
        return UNKNOWN if self.kind in (Kind.FRAME, Kind.UNKNOWN) else self._replace(low=True)

    def of(self, size: int) -> Value:
        """Of this value the low `size` bytes, extended by zeros."""
        return self if size == 8 else self.half() if size == 4 else UNKNOWN


UNKNOWN = Value(Kind.UNKNOWN)


def constant(number: int) -> Value:
    return Value(Kind.CONSTANT, number & WORD)


class Slot(NamedTuple):
    """Bytes of the function's own frame. `survived`: the calls since they were written."""

    size: int
    value: Value
    survived: frozenset[int] = frozenset()


class Memory(Enum):
    SOMEWHERE = auto()  # in the own frame, at an offset that is not known
    ELSEWHERE = auto()  # through a pointer that does not come from the stack pointer


Where = int | Memory  # an offset from the stack pointer at entry


@dataclass
class State:
    """What is known before an instruction. Registers that are not named hold anything."""

    registers: dict[str, Value]
    stack_register: str
    red_zone: int  # bytes below the stack pointer that stay as they are
    slots: dict[int, Slot] = field(default_factory=dict)
    written: frozenset[int] = frozenset()  # eight-byte units of the frame, since the last call
    tested: Value | None = None  # the zero flag says whether this is zero
    zero: dict[Value, bool] = field(default_factory=dict)  # what branches have found out
    exposed: bool = False  # others may hold an address of the own frame

    def copy(self) -> State:
        return State(
            dict(self.registers),
            self.stack_register,
            self.red_zone,
            dict(self.slots),
            self.written,
            self.tested,
            dict(self.zero),
            self.exposed,
        )

    def key(self) -> tuple[object, ...]:
        """Return what tells two states apart; forgets what was found out of values that are gone."""
        held = {(value.kind, value.key) for value in self.registers.values()}
        held |= {(slot.value.kind, slot.value.key) for slot in self.slots.values()}
        if self.tested is not None:
            held.add((self.tested.kind, self.tested.key))
        self.zero = {value: known for value, known in self.zero.items() if (value.kind, value.key) in held}
        return (
            frozenset(self.registers.items()),
            frozenset(self.slots.items()),
            self.written,
            self.tested,
            frozenset(self.zero.items()),
            self.exposed,
        )

    def is_zero(self, value: Value) -> bool | None:
        """Return whether the 64 bits are zero, None where that is open."""
        if value.kind is Kind.CONSTANT:
            return bool(value.key == 0)
        if value.kind is Kind.FRAME:
            return False
        known = self.zero.get(value)
        if known is None and value.low:
            return True if self.zero.get(value._replace(low=False)) else None
        if known is None and self.zero.get(value._replace(low=True)) is False:
            return False
        return known

    def assume(self, value: Value, zero: bool) -> None:
        """Hold it for known, on this edge of a branch."""
        if value.kind not in (Kind.UNKNOWN, Kind.CONSTANT, Kind.FRAME):
            self.zero[value] = zero

    def get(self, register: str) -> Value:
        return self.registers.get(register, UNKNOWN)

    def put(self, register: str, value: Value) -> None:
        if register == self.stack_register:
            if value.kind is not Kind.FRAME:  # aligned, or alloca(): nothing is known of the frame any more
                self.expose()
                self.slots.clear()
            else:  # below the stack pointer a signal handler may write
                floor = value.key - self.red_zone
                self.slots = {at: slot for at, slot in self.slots.items() if at >= floor}
        self.registers[register] = value
        if value.kind is Kind.UNKNOWN:
            del self.registers[register]

    def fresh(self, key: object) -> Value:
        """Return a new value that `key` names. What had that name, made one turn of a loop ago, loses it."""
        value = Value(Kind.RESULT, key)

        def old(other: Value) -> bool:
            return other.kind is Kind.RESULT and other.key == key

        self.registers = {name: held for name, held in self.registers.items() if not old(held)}
        self.slots = {
            at: slot._replace(value=UNKNOWN) if old(slot.value) else slot for at, slot in self.slots.items()
        }
        self.zero = {held: known for held, known in self.zero.items() if not old(held)}
        if self.tested is not None and old(self.tested):
            self.tested = None
        return value

    def expose(self) -> None:
        self.exposed = True

    def use(self, register: str) -> None:
        """The register's value goes somewhere: where it is an address of the frame, it is no secret now."""
        if self.get(register).kind is Kind.FRAME:
            self.expose()

    def load(self, where: Where, size: int, evidence: set[tuple[int, int]] | None = None) -> Value | None:
        """Return what memory holds, None where that is not known.

        `evidence`: is added which parts of the frame are not handed to which call; see `call`.
        """
        if not isinstance(where, int):
            return None
        for at, slot in self.slots.items():
            if evidence is not None and at < where + size and where < at + slot.size:
                evidence.update((call, at) for call in slot.survived)
        found = self.slots.get(where)
        if found is None or size not in (4, 8) or found.size < size:
            return None
        return found.value.of(size) if found.value is not UNKNOWN else None

    def store(self, where: Where, size: int, value: Value) -> None:
        if value.kind is Kind.FRAME:
            self.expose()
        if where is Memory.SOMEWHERE:
            self.expose()
        if not isinstance(where, int):
            if self.exposed:
                self.slots.clear()
            return
        self.slots = {
            at: slot
            for at, slot in self.slots.items()
            if at >= where + size or where >= at + slot.size
        }  # fmt: skip
        if where < 0 and size in (4, 8):
            self.slots[where] = Slot(size, value.of(size))
        self.written |= frozenset(range(where & ~7, where + size, 8))

    def call(self, address: int, clobbered: Iterable[str], own: set[tuple[int, int]] | None) -> None:
        """A callee may change what it was handed on the stack: what was written right at the stack pointer
        since the last call.

        `own`: parts of the frame that are not handed to that call, since they are read after it. None: they
        are only marked, so that `load` finds that out.
        """
        stack = self.get(self.stack_register)
        if self.exposed or stack.kind is not Kind.FRAME:
            self.slots.clear()
        else:
            bottom = end = stack.key
            # An argument can be aligned to 16 bytes, but the first one is then at the stack pointer. What was
            # saved for the caller is no argument.
            while end in self.written or (end > bottom and end + 8 in self.written):
                if (slot := self.slots.get(end)) and slot.value.kind is Kind.SAVED:
                    break
                end += 8
            for at, slot in list(self.slots.items()):
                if at < bottom:
                    del self.slots[at]
                elif at < end and own is None:
                    self.slots[at] = slot._replace(survived=slot.survived | {address})
                elif at < end and own is not None and (address, at) not in own:
                    del self.slots[at]
        self.written = frozenset()
        self.tested = None
        for name in clobbered:
            self.registers.pop(name, None)

    def places(self, parameters: Mapping[str, int]) -> dict[str, set[Place]]:
        """Return all places of each parameter."""
        found: dict[str, set[Place]] = {name: set() for name in parameters}
        stack = self.get(self.stack_register)
        for register, value in self.registers.items():
            if value.kind is Kind.PARAMETER and not (value.low and parameters[value.key] == 8):
                found[value.key].add(Place(register, size=parameters[value.key]))
        if stack.kind is Kind.FRAME:
            for at, slot in self.slots.items():
                value = slot.value
                if value.kind is Kind.PARAMETER and stack.key <= at:
                    size = parameters[value.key]
                    if size <= slot.size and not (value.low and size == 8):
                        found[value.key].add(Place(offset=at - stack.key, size=size))
        return found

    def decided(self) -> dict[Place, bool]:
        """Return the places of eight bytes of which it is known whether they are zero."""
        stack = self.get(self.stack_register)
        held = {Place(register): value for register, value in self.registers.items()}
        if stack.kind is Kind.FRAME:
            held |= {
                Place(offset=at - stack.key): slot.value
                for at, slot in self.slots.items()
                if stack.key <= at and slot.size == 8
            }
        known = {place: self.is_zero(value) for place, value in held.items()}
        return {place: zero for place, zero in known.items() if zero is not None}
