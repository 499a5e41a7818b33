"""What the instructions of x86-64 do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from regrepro.watch.flow.machine import End, Machine, Next, Step
from regrepro.watch.flow.state import UNKNOWN, WORD, Kind, Memory, State, Value, Where, constant


def _x86_registers() -> dict[str, tuple[str, int]]:
    names: dict[str, tuple[str, int]] = {}
    for letter in "abcd":
        names |= {f"r{letter}x": (f"r{letter}x", 8), f"e{letter}x": (f"r{letter}x", 4)}
        names |= {f"{letter}x": (f"r{letter}x", 2)}
        names |= {f"{letter}l": (f"r{letter}x", 1), f"{letter}h": (f"r{letter}x", 1)}
    for name in ("si", "di", "bp", "sp"):
        names |= {f"r{name}": (f"r{name}", 8), f"e{name}": (f"r{name}", 4), name: (f"r{name}", 2)}
        names |= {f"{name}l": (f"r{name}", 1)}
    for number in range(8, 16):
        full = f"r{number}"
        names |= {full: (full, 8), f"{full}d": (full, 4), f"{full}w": (full, 2), f"{full}b": (full, 1)}
    return names


class X86(Machine):
    stack, frame, result, red_zone = "rsp", "rbp", "rax", 128
    arguments = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
    saved = ("rbx", "rbp", "r12", "r13", "r14", "r15")
    clobbered = ("rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11")

    _NAMES = _x86_registers()
    _GUARD = "fs", 0, 0, 0x28  # psABI: %fs:0x28
    _VECTOR = re.compile(r"[xyz]?mm\d+")
    _NOTHING = frozenset(
        ("nop", "endbr64", "mfence", "sfence", "vzeroupper", "prefetcht0", "prefetcht1", "prefetcht2")
    )
    _JUMPS = frozenset(("ja", "jae", "jb", "jbe", "je", "jecxz", "jg", "jge", "jl", "jle", "jne", "jno",
                        "jnp", "jns", "jo", "jp", "jrcxz", "js"))  # fmt: skip
    _ARITHMETIC = frozenset(("add", "and", "cmp", "or", "sub", "test", "xor"))
    # Write nothing but the flags.
    _COMPARE = frozenset(("cmp", "test", "bt", "ucomiss", "ucomisd", "comiss", "comisd", "ptest", "vptest",
                          "vucomiss", "vucomisd", "vcomiss", "vcomisd"))  # fmt: skip
    # Write their first operand, and the flags or not.
    _FIRST = frozenset((
        "add", "adc", "and", "bsf", "bsr", "bswap", "dec", "inc", "lzcnt", "movbe",
        "movsx", "movsxd", "movzx", "neg", "not", "or", "popcnt", "rol", "ror", "sal", "sar", "sbb",
        "shl", "shld", "shr", "shrd", "sub", "tzcnt", "xor"
    ))  # fmt: skip
    _CONDITIONAL = re.compile(r"(cmov|set)n?(e|a|ae|b|be|g|ge|l|le|o|s|p)")
    _IMPLICIT: Mapping[str, tuple[str, ...]] = {
        "imul": ("rax", "rdx"), "mul": ("rax", "rdx"), "div": ("rax", "rdx"), "idiv": ("rax", "rdx"),
        "cwd": ("rdx",), "cdq": ("rdx",), "cqo": ("rdx",),
        "cbw": ("rax",), "cwde": ("rax",), "cdqe": ("rax",), "cmpxchg": ("rax",),
    }  # fmt: skip
    _BOTH = frozenset(("xchg", "xadd", "cmpxchg"))
    _VECTOR_REFUSED = re.compile(r"v?maskmov(dqu|q)|v?pcmp[ei]str[im]")  # write what no operand names

    def register(self, number: int) -> tuple[str, int]:
        return self._NAMES.get(self._decoder.reg_name(number) or "", ("", 0))

    def is_relative(self, code: Any) -> bool:
        return any(
            self.is_memory(operand) and self._decoder.reg_name(operand.mem.base) in ("rip", "eip")
            for operand in code.operands
        )

    def is_control(self, code: Any) -> bool:
        name = code.mnemonic.split()[-1]
        return name in self._JUMPS or name in ("call", "jmp", "ret", "endbr64")

    def where(self, state: State, operand: Any) -> Where:
        memory = operand.mem
        if self._decoder.reg_name(memory.segment) in ("fs", "gs"):
            return Memory.ELSEWHERE  # the thread's data
        base, size = self.register(memory.base)
        index, _ = self.register(memory.index)
        value = state.get(base)
        if value.kind is Kind.FRAME and size == 8 and not memory.index:
            return int(value.key) + int(memory.disp)
        # An index can also be a vector.
        if value.kind is Kind.FRAME or state.get(index).kind is Kind.FRAME:
            return Memory.SOMEWHERE
        return Memory.ELSEWHERE

    def read(self, state: State, operand: Any, changes: bool = False) -> Value | None:
        """Return an operand's value extended by zeros, None where it is not known or has no name.

        `changes`: the instruction writes it back. That is no evidence that what was there was needed: "and"
        and "or" are also short ways to store 0 or -1.
        """
        if self.is_number(operand):
            return constant(operand.imm)
        if self.is_register(operand):
            name, size = self.register(operand.reg)
            value = state.get(name).of(size) if name else UNKNOWN
        elif self.is_memory(operand):
            memory = operand.mem
            if (
                self._decoder.reg_name(memory.segment),
                memory.base,
                memory.index,
                memory.disp,
            ) == self._GUARD:
                return Value(Kind.GUARD) if operand.size == 8 else None
            evidence = None if changes else self.evidence
            found = state.load(self.where(state, operand), operand.size, evidence)
            value = UNKNOWN if found is None else found
        else:
            return None
        return None if value == UNKNOWN else value

    def step(self, state: State, code: Any) -> Step:
        *prefixes, name = code.mnemonic.split()
        operands = list(code.operands)
        following = [Next(code.address + code.size, state)]
        if set(prefixes) - {"bnd", "notrack", "lock"} and name != "ret":
            raise self.refuse(code, "this prefix is not modelled")
        if self.is_control(code) and name != "call" and code.prefix[2] == 0x66:
            raise self.refuse(code, "processors differ in what this prefix does")
        if name in self._NOTHING:
            return following
        if name in ("ud2", "hlt"):
            return End.NEVER
        if name == "ret":
            if operands:
                raise self.refuse(code, "removes its arguments from the stack")
            return self.finish(state, code)
        if name == "jmp":
            if not self.is_number(operands[0]):
                raise self.refuse(code, "jumps to where a register or memory says")
            return [Next(operands[0].imm & WORD, state)]
        if name in self._JUMPS:
            when_zero = {"je": True, "jne": False}.get(name)
            return self.branch(state, code, operands[0].imm & WORD, state.tested, when_zero)
        if name == "call":
            if self.is_memory(operands[0]):
                self.read(state, operands[0])
            return self.call(
                state, code, operands[0].imm & WORD if self.is_number(operands[0]) else None
            )  # fmt: skip
        if name in ("push", "pop", "leave"):
            self._stack(state, code, name, operands)
        elif name in ("mov", "movabs") and not self._has_vector(code):
            self._move(state, code, operands)
        elif name == "lea":
            self._address(state, code, operands)
        elif name in self._ARITHMETIC and self._arithmetic(state, code, name, operands):
            pass
        else:
            self._anything(state, code, name, operands)
        return following

    def _has_vector(self, code: Any) -> bool:
        return any(
            self.is_register(operand) and self._VECTOR.fullmatch(self._decoder.reg_name(operand.reg) or "")
            for operand in code.operands
        )

    def _stack(self, state: State, code: Any, name: str, operands: list[Any]) -> None:
        if name == "leave":
            state.put("rsp", state.get("rbp"))
            self._pop(state, code, "rbp")
            return
        operand = operands[0]
        register = self.register(operand.reg)[0] if self.is_register(operand) else ""
        if operand.size != 8 and not self.is_number(operand):
            raise self.refuse(code, "moves the stack pointer by less than eight bytes")
        if code.bytes[0] == 0x66:
            raise self.refuse(code, "this prefix is not modelled")
        if name == "pop":
            if not register:
                raise self.refuse(code, "pops into memory")
            self._pop(state, code, register)
            return
        if self.is_number(operand):
            value: Value | None = constant(operand.imm)
        elif self.is_memory(operand) or register not in ("", "rsp"):
            value = self.read(state, operand)
        else:
            raise self.refuse(code, "pushes a register that is not modelled")
        stack = state.get("rsp")
        if stack.kind is not Kind.FRAME:
            state.slots.clear()
            return
        state.put("rsp", Value(Kind.FRAME, stack.key - 8))
        state.store(stack.key - 8, 8, value or UNKNOWN)

    def _pop(self, state: State, code: Any, register: str) -> None:
        stack = state.get("rsp")
        known = stack.kind is Kind.FRAME
        # No evidence: to pop is also a short way to drop an argument.
        value = state.load(stack.key, 8) if known else None
        if known:
            state.put("rsp", Value(Kind.FRAME, stack.key + 8))
        if value is None:
            self.unknown(state, code, [register])
        elif value.kind is Kind.FRAME:
            self.put_address(state, register, value)
        else:
            state.put(register, value)

    def _move(self, state: State, code: Any, operands: list[Any]) -> None:
        target, source = operands
        value = self.read(state, source)
        if self.is_memory(target):
            if self.is_register(source):
                state.use(self.register(source.reg)[0])
            state.store(self.where(state, target), target.size, value or UNKNOWN)
            return
        register, size = self.register(target.reg)
        if not register:
            raise self.refuse(code, "writes a register that is not modelled")
        if self.is_register(source) and not self.register(source.reg)[0]:
            value = None
        if value is None or size < 4:
            if self.is_register(source):
                state.use(self.register(source.reg)[0])
            self.unknown(state, code, [register])
        elif value.kind is Kind.FRAME:
            self.put_address(state, register, value)
        else:
            state.put(register, value.of(size))

    def _address(self, state: State, code: Any, operands: list[Any]) -> None:
        register, size = self.register(operands[0].reg)
        where = self.where(state, operands[1])
        if isinstance(where, int) and size == 8:
            self.put_address(state, register, Value(Kind.FRAME, where))
            return
        if where is not Memory.ELSEWHERE:
            state.expose()
        self.unknown(state, code, [register])

    def _arithmetic(self, state: State, code: Any, name: str, operands: list[Any]) -> bool:
        """Arithmetic that is modelled; False: it is not."""
        left, right = operands
        same = self.is_register(left) and self.is_register(right) and left.reg == right.reg
        size = left.size
        guarded = any(
            (self.read(state, each, changes=True) or UNKNOWN).kind is Kind.GUARD for each in operands
        )
        if name in ("sub", "xor", "cmp") and size == 8 and guarded and not same:
            # Where the guard differs the process is killed, so it does not: the call that does that can lie
            # amidst the function, as if it returned.
            if name != "cmp":
                if not self.is_register(left):
                    return False
                self.unknown(state, code, [self.register(left.reg)[0]])
            state.tested = constant(0)
            return True
        if name in ("add", "sub") and self.is_number(right) and self.is_register(left):
            register, _ = self.register(left.reg)
            value = state.get(register)
            if size != 8 or value.kind is not Kind.FRAME:
                return False
            moved = value.key + (right.imm if name == "add" else -right.imm)
            state.put(register, Value(Kind.FRAME, moved))
            state.tested = None
            return True
        if size not in (4, 8):
            return False
        nothing = self.is_number(right) and right.imm == 0
        if (name in ("xor", "sub") and same) or (name == "and" and nothing and self.is_register(left)):
            register, _ = self.register(left.reg)
            if not register:
                return False
            state.put(register, constant(0))
            state.tested = constant(0)
            return True
        if name == "and" and nothing and self.is_memory(left):
            state.store(self.where(state, left), size, constant(0))
            state.tested = constant(0)
            return True
        if (name == "test" and same) or (name == "cmp" and nothing):
            state.tested = self.read(state, left)
            return True
        if name in ("and", "or") and same:
            register, _ = self.register(left.reg)
            value_now = self.read(state, left)
            if value_now is None or value_now.kind is Kind.FRAME:
                return False
            state.put(register, value_now)
            state.tested = value_now
            return True
        return False

    def _anything(self, state: State, code: Any, name: str, operands: list[Any]) -> None:
        """Whatever is written gets an unknown value."""
        vector = self._has_vector(code)
        chosen = self._CONDITIONAL.fullmatch(name)
        if vector and self._VECTOR_REFUSED.fullmatch(name):
            raise self.refuse(code, "this instruction is not modelled")
        if not (vector or chosen or name in self._COMPARE or name in self._FIRST or name in self._BOTH
                or name in self._IMPLICIT):  # fmt: skip
            raise self.refuse(code, "this instruction is not modelled")
        changed: set[str] = set()
        for position, operand in enumerate(operands):
            if self.is_memory(operand):
                stores = name in self._BOTH or (
                    position == 0
                    and name not in self._COMPARE
                    and not (name in self._IMPLICIT and len(operands) == 1)
                )
                self.read(state, operand, changes=stores)
                if stores:
                    # capstone's sizes of vector operands are not relied on.
                    size = max(operand.size, 64) if vector else operand.size
                    state.store(self.where(state, operand), size, UNKNOWN)
            elif self.is_register(operand):
                register, _ = self.register(operand.reg)
                if not register and not self._VECTOR.fullmatch(self._decoder.reg_name(operand.reg) or ""):
                    raise self.refuse(code, "uses a register that is not modelled")
                state.use(register)
                if name not in self._COMPARE and (position == 0 or name in self._BOTH):
                    changed.add(register)
        if name != "imul" or len(operands) == 1:
            changed.update(self._IMPLICIT.get(name, ()))
        if name not in self._COMPARE:
            changed |= self.written_registers(code)
        changed.discard("")
        self.unknown(state, code, sorted(changed))
        if not chosen:
            state.tested = None
