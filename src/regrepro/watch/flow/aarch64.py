"""What the instructions of aarch64 do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from regrepro.watch.flow.machine import End, Machine, Next, Step
from regrepro.watch.flow.state import UNKNOWN, WORD, Kind, Memory, State, Value, Where, constant


class Aarch64(Machine):
    stack, frame, result, red_zone = "sp", "x29", "x0", 0
    arguments = tuple(f"x{number}" for number in range(8))
    saved = tuple(f"x{number}" for number in range(19, 30))
    clobbered = (*(f"x{number}" for number in range(19)), "x30")

    _VECTOR = re.compile(r"[bhsdqv]\d+")
    _NOTHING = frozenset(("nop", "bti", "prfm", "dmb", "dsb", "isb"))
    _SIGN = frozenset(("paciasp", "pacibsp", "autiasp", "autibsp", "xpaclri", "paciaz", "autiaz"))
    _LOADS: Mapping[str, int] = {  # bytes; 0: as many as the register has
        "ldr": 0, "ldur": 0, "ldp": 0, "ldnp": 0, "ldar": 0, "ldapr": 0, "ldrb": 1, "ldurb": 1, "ldrsb": 1,
        "ldursb": 1, "ldarb": 1, "ldrh": 2, "ldurh": 2, "ldrsh": 2, "ldursh": 2, "ldarh": 2, "ldrsw": 4,
        "ldursw": 4, "ldpsw": 4,
    }  # fmt: skip
    _STORES: Mapping[str, int] = {
        "str": 0, "stur": 0, "stp": 0, "stnp": 0, "stlr": 0, "strb": 1, "sturb": 1, "stlrb": 1, "strh": 2,
        "sturh": 2, "stlrh": 2,
    }  # fmt: skip
    _COMPARE = frozenset(("cmp", "cmn", "tst", "ccmp", "ccmn", "fcmp", "fcmpe", "fccmp", "fccmpe"))
    # Write their first operand, and leave the flags.
    _FIRST = frozenset((
        "adc", "add", "addp", "addv", "adr", "adrp", "and", "asr", "bfc", "bfi", "bfm", "bfxil", "bic",
        "cinc", "cinv", "cls", "clz", "cmeq", "cneg", "cnt", "csel", "cset", "csetm", "csinc", "csinv",
        "csneg", "dup", "eon", "eor", "ext", "extr", "fcvtzs", "fcvtzu", "fmov", "ins", "lsl", "lsr",
        "madd", "mneg", "mov", "movi", "movk", "movn", "movz", "mrs", "msub", "mul", "mvn", "mvni",
        "neg", "ngc", "orn", "orr", "rbit", "rev", "rev16", "rev32", "ror", "sbc", "sbfiz", "sbfm",
        "sbfx", "scvtf", "sdiv", "smaddl", "smov", "smsubl", "smulh", "smull", "sub", "sxtb", "sxth",
        "sxtw", "trn1", "trn2", "ubfiz", "ubfm", "ubfx", "ucvtf", "udiv", "umaddl", "umov", "umsubl",
        "umulh", "umull", "uxtb", "uxth", "uxtw", "uzp1", "uzp2", "zip1", "zip2"
    ))  # fmt: skip
    _FLAGS = frozenset(("adds", "subs", "ands", "bics", "negs", "adcs", "sbcs", "ngcs"))

    def register(self, number: int) -> tuple[str, int]:
        name = self._decoder.reg_name(number) or ""
        name = {"fp": "x29", "lr": "x30"}.get(name, name)
        if name in ("sp", "wsp"):
            return "sp", 8 if name == "sp" else 4
        if re.fullmatch(r"[xw]([12]?\d|30)", name):
            return f"x{name[1:]}", 8 if name[0] == "x" else 4
        return "", 0

    def is_relative(self, code: Any) -> bool:
        return code.mnemonic in ("adr", "adrp") or (
            code.mnemonic in self._LOADS and not any(map(self.is_memory, code.operands))
        )

    def is_control(self, code: Any) -> bool:
        return bool(
            re.fullmatch(r"b|bl|blr\w*|br\w*|ret\w*|cbn?z|tbn?z|bti|hint|b\..*", code.mnemonic)
        ) or (code.mnemonic in self._SIGN)  # fmt: skip

    def _is_nothing(self, operand: Any) -> bool:
        """Whether it is zero: the number, or the register that always is."""
        if self.is_number(operand):
            return bool(operand.imm == 0)
        return self.is_register(operand) and self._decoder.reg_name(operand.reg) in ("xzr", "wzr")

    def read(self, state: State, operand: Any) -> Value | None:
        """Return a register's value extended by zeros, None where it is not known or has no name."""
        if self._is_nothing(operand):
            return constant(0)
        if not self.is_register(operand) or self._is_shifted(operand):
            return None
        name, size = self.register(operand.reg)
        value = state.get(name).of(size) if name else UNKNOWN
        return None if value == UNKNOWN else value

    def _is_shifted(self, operand: Any) -> bool:
        return bool(operand.shift.type or operand.ext)

    def step(self, state: State, code: Any) -> Step:
        name = code.mnemonic
        operands = list(code.operands)
        following = [Next(code.address + code.size, state)]
        if name in self._NOTHING:
            return following
        if name in self._SIGN or name == "hint":  # what older versions of capstone call all of them
            self.unknown(state, code, ["x16", "x17", "x30"])
            return following
        if name in ("brk", "hlt", "udf"):
            return End.NEVER
        if re.fullmatch(r"br(a[ab]z?)?", name):
            raise self.refuse(code, "jumps to where a register says")
        if name in ("ret", "retaa", "retab"):
            if operands and self.register(operands[0].reg)[0] != "x30":
                raise self.refuse(code, "jumps to where a register says")
            return self.finish(state, code)
        if name == "b":
            return [Next(operands[0].imm & WORD, state)]
        if name.startswith("b."):
            when_zero = {"b.eq": True, "b.ne": False}.get(name)
            return self.branch(state, code, operands[0].imm & WORD, state.tested, when_zero)
        if name in ("cbz", "cbnz"):
            value = self.read(state, operands[0])
            return self.branch(state, code, operands[1].imm & WORD, value, name == "cbz")
        if name in ("tbz", "tbnz"):
            return self.branch(state, code, operands[2].imm & WORD, None, None)
        if name == "bl":
            return self.call(state, code, operands[0].imm & WORD)
        if re.fullmatch(r"blr(a[ab]z?)?", name):
            return self.call(state, code, None)
        if name in self._LOADS or name in self._STORES:
            self._transfer(state, code, name, operands)
        elif name in self._COMPARE:
            for operand in operands:
                if self.is_register(operand):
                    state.use(self.register(operand.reg)[0])
            state.tested = self._tested(state, name, operands)
        elif name in self._FIRST or name in self._FLAGS:
            if name in self._FLAGS:
                state.tested = None
            self._compute(state, code, name, operands)
        else:
            raise self.refuse(code, "this instruction is not modelled")
        return following

    def _tested(self, state: State, name: str, operands: list[Any]) -> Value | None:
        if len(operands) != 2 or self._is_shifted(operands[1]):
            return None
        left, right = operands
        same = self.is_register(right) and left.reg == right.reg
        if (name == "cmp" and self._is_nothing(right)) or (name == "tst" and same):
            return self.read(state, left)
        return None

    def _compute(self, state: State, code: Any, name: str, operands: list[Any]) -> None:
        register, size = self.register(operands[0].reg)
        if not register:
            shown = self._decoder.reg_name(operands[0].reg) or ""
            if shown not in ("xzr", "wzr") and not self._VECTOR.fullmatch(shown):
                raise self.refuse(code, "writes a register that is not modelled")
            for operand in operands[1:]:
                if self.is_register(operand):
                    state.use(self.register(operand.reg)[0])
            return
        value: Value | None = None
        if name in ("mov", "movz") and len(operands) == 2:
            if self.is_number(operands[1]) and not operands[1].shift.type:
                value = constant(operands[1].imm).of(size)
            elif self._is_nothing(operands[1]):
                value = constant(0)
            else:
                value = self.read(state, operands[1])
        elif name in ("add", "sub") and size == 8 and len(operands) == 3 and self.is_number(operands[2]):
            base = self.read(state, operands[1])
            if base is not None and base.kind is Kind.FRAME and not operands[2].shift.type:
                moved = operands[2].imm if name == "add" else -operands[2].imm
                value = base._replace(key=base.key + moved)
        if value is not None and value.kind is Kind.FRAME:
            self.put_address(state, register, value)
        elif value is not None:
            state.put(register, value.of(size))
        else:
            for operand in operands[1:]:
                if self.is_register(operand):
                    state.use(self.register(operand.reg)[0])
            self.unknown(state, code, sorted(self.written_registers(code) | {register}))

    def _transfer(self, state: State, code: Any, name: str, operands: list[Any]) -> None:
        loads = name in self._LOADS
        each = (self._LOADS if loads else self._STORES)[name]
        memory = next((operand for operand in operands if self.is_memory(operand)), None)
        if memory is None:
            if not loads or not self.is_register(operands[0]):
                raise self.refuse(code, "this form is not modelled")
            self.unknown(state, code, [item for item in [self.register(operands[0].reg)[0]] if item])
            return
        moved = operands[: operands.index(memory)]
        after = operands[operands.index(memory) + 1 :]
        base, width = self.register(memory.mem.base)
        value = state.get(base)
        before = "]!" in code.op_str
        step = memory.mem.disp if before else 0
        if after:
            if len(after) > 1 or not self.is_number(after[0]):
                raise self.refuse(code, "this form is not modelled")
            step = after[0].imm
        where: Where = Memory.ELSEWHERE
        if value.kind is Kind.FRAME and width == 8 and not memory.mem.index:
            where = value.key + memory.mem.disp
        elif value.kind is Kind.FRAME or (
            memory.mem.index and state.get(self.register(memory.mem.index)[0]).kind is Kind.FRAME
        ):
            where = Memory.SOMEWHERE
        if step and before:
            self._advance(state, code, base, step)
        results: list[tuple[str, Value | None]] = []
        for operand in moved:
            register, size = self.register(operand.reg)
            shown = self._decoder.reg_name(operand.reg) or ""
            if register or shown in ("xzr", "wzr"):
                size = each or (8 if shown[0] != "w" else 4)
            elif self._VECTOR.fullmatch(shown):
                size = {"b": 1, "h": 2, "s": 4, "d": 8}.get(shown[0], 16)
            else:
                raise self.refuse(code, "moves a register that is not modelled")
            if loads:
                found = state.load(where, size, self.evidence)
                # Shorter ones may be extended by the sign.
                results.append((register, found if not each else None))
            else:
                state.use(register)
                data = self.read(state, operand) if size >= 4 else None
                state.store(where, size, data or UNKNOWN)
            if isinstance(where, int):
                where += size
        if step and not before:
            self._advance(state, code, base, step)
        # A new value takes its name from an older one, which a neighbour may hold.
        fresh = any(found is None for _, found in results)
        for register, found in results:
            if not register:
                continue
            if found is None or (fresh and found.kind is Kind.RESULT):
                self.unknown(state, code, [register])
            elif found.kind is Kind.FRAME:
                self.put_address(state, register, found)
            else:
                state.put(register, found)

    def _advance(self, state: State, code: Any, register: str, step: int) -> None:
        value = state.get(register)
        if value.kind is Kind.FRAME:
            self.put_address(state, register, value._replace(key=value.key + step))
        elif register:
            self.unknown(state, code, [register])
