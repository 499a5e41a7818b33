"""What instructions do to what is known: the part that all instruction sets share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from regrepro.watch.flow.state import Kind, State, Value


class Undecided(Exception):
    """The code cannot be followed, or what was asked for could not be proved of it."""


class End(Enum):
    NULL = auto()
    VALUE = auto()
    NEVER = auto()  # the process ends


class Next(NamedTuple):
    address: int
    state: State
    after_call: bool = False  # falls through from a call, which may never return


Step = list[Next] | End


class Machine(ABC):
    """What instructions do. A subclass for each instruction set."""

    stack: str
    # The register that is by convention the frame pointer: to hold an address there gives none away.
    frame: str
    result: str
    red_zone: int
    arguments: tuple[str, ...]
    saved: tuple[str, ...]
    clobbered: tuple[str, ...]

    def __init__(self, capstone: Any, decoder: Any, read: Callable[[int, int], bytes], span: range) -> None:
        self.capstone = capstone
        self._decoder = decoder
        self._decoder.detail = True
        self._read = read
        self._decoded: dict[int, Any] = {}
        self.span = span
        self.evidence: set[tuple[int, int]] = set()
        self.own: set[tuple[int, int]] | None = None

    def decode(self, address: int) -> Any:
        """Return the instruction, None where the text has ended."""
        if address not in self._decoded:
            code = self._read(address, 16)
            found = next(iter(self._decoder.disasm(code, address, 1)), None) if code else None
            if found is None and code:
                raise Undecided(f"{address:#x}: these bytes are no instruction that is known")
            self._decoded[address] = found
        return self._decoded[address]

    def has_ended(self, address: int) -> bool:
        """Whether no text is left."""
        return not self._read(address, 1)

    def begin(self, parameters: Mapping[str, int]) -> State:
        """Return the state at the function's first instruction."""
        if len(parameters) > len(self.arguments):
            raise Undecided("more parameters than the calling convention passes in registers")
        registers = {name: Value(Kind.SAVED, name) for name in self.saved}
        registers[self.stack] = Value(Kind.FRAME, 0)
        for register, name in zip(self.arguments, parameters, strict=False):
            registers[register] = Value(Kind.PARAMETER, name)
        return State(registers, self.stack, self.red_zone)

    @abstractmethod
    def register(self, number: int) -> tuple[str, int]:
        """Return a general register's full name and the bytes that are meant; ("", 0): another register."""

    @abstractmethod
    def step(self, state: State, code: Any) -> Step:
        """Run the instruction on the state, which is changed."""

    @abstractmethod
    def is_relative(self, code: Any) -> bool:
        """Whether the instruction uses its own address, other than to jump."""

    @abstractmethod
    def is_control(self, code: Any) -> bool:
        """Whether the instruction directs the flow of control, or guards it."""

    def refuse(self, code: Any, why: str) -> Undecided:
        return Undecided(f"{code.address:#x}: {code.mnemonic} {code.op_str}".rstrip() + f": {why}")

    def is_register(self, operand: Any) -> bool:
        return bool(operand.type == self.capstone.CS_OP_REG)

    def is_number(self, operand: Any) -> bool:
        return bool(operand.type == self.capstone.CS_OP_IMM)

    def is_memory(self, operand: Any) -> bool:
        return bool(operand.type == self.capstone.CS_OP_MEM)

    def written_registers(self, code: Any) -> set[str]:
        """Return the general registers that capstone says are written. It may know too few."""
        try:
            numbers = code.regs_access()[1]
        except self.capstone.CsError as error:
            raise self.refuse(code, str(error)) from None
        return {name for name, _ in map(self.register, numbers) if name}

    def unknown(self, state: State, code: Any, registers: Iterable[str]) -> None:
        """The registers have got some new value."""
        for name in registers:
            state.put(name, state.fresh((code.address, name)))

    def put_address(self, state: State, register: str, value: Value) -> None:
        """A register gets an address in the own frame."""
        if register not in (self.stack, self.frame):
            state.expose()
        state.put(register, value)

    def call(self, state: State, code: Any, target: int | None) -> Step:
        if target is not None and target in self.span and target != self.span.start:
            raise self.refuse(code, "calls into the middle of the function")
        state.call(code.address, self.clobbered, self.own)
        self.unknown(state, code, [self.result])
        return [Next(code.address + code.size, state, after_call=True)]

    def finish(self, state: State, code: Any) -> Step:
        if state.get(self.stack) != Value(Kind.FRAME, 0):
            raise self.refuse(code, "returns with a stack pointer that is not as it was")
        zero = state.is_zero(state.get(self.result))
        if zero is None:
            raise self.refuse(code, "returns a value of which no branch has found out whether it is NULL")
        return End.NULL if zero else End.VALUE

    def branch(
        self, state: State, code: Any, target: int, value: Value | None, when_zero: bool | None
    ) -> Step:
        """Both edges of a conditional jump, as far as they can be. `when_zero`: it jumps if the value is zero
        (True) or is not (False); None: on something else.
        """
        following = code.address + code.size
        if value is None or when_zero is None:
            return [Next(target, state.copy()), Next(following, state)]
        edges: list[Next] = []
        known = state.is_zero(value)
        for address, zero in ((target, when_zero), (following, not when_zero)):
            if known is None or known is zero:
                edge = state.copy()
                edge.assume(value, zero)
                edges.append(Next(address, edge))
        return edges
