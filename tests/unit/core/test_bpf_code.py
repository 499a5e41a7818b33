"""Instructions of BPF: their bytes, as linux/bpf.h and linux/bpf_common.h have the numbers."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrepro.core.bpf_code import Code

# BPF_CLASS, BPF_SIZE, BPF_MODE, BPF_SRC; BPF_OP is in each row.
LD, LDX, ST, STX, JMP, ALU64 = 0, 1, 2, 3, 5, 7
W, H, B, DW = 0x00, 0x08, 0x10, 0x18
IMM, MEM, ATOMIC = 0x00, 0x60, 0xC0
K, X = 0x00, 0x08


def made(write: Callable[[Code], None]) -> bytes:
    code = Code()
    write(code)
    return code.bytes()


def insn(code: int, to: int = 0, source: int = 0, offset: int = 0, number: int = 0) -> bytes:
    """Return a struct bpf_insn, whose two registers are bit-fields of 4 bits."""
    registers = to | source << 4 if sys.byteorder == "little" else to << 4 | source
    return struct.pack("=BBhi", code, registers, offset, number)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda c: c.do(3, "+", -5), insn(ALU64 | K | 0x00, 3, number=-5)),  # BPF_ADD
        (lambda c: c.do(3, "|", 8), insn(ALU64 | K | 0x40, 3, number=8)),  # BPF_OR
        (lambda c: c.do(3, "&", 7), insn(ALU64 | K | 0x50, 3, number=7)),  # BPF_AND
        (lambda c: c.do(3, "<<", 32), insn(ALU64 | K | 0x60, 3, number=32)),  # BPF_LSH
        (lambda c: c.do(3, ">>", 32), insn(ALU64 | K | 0x70, 3, number=32)),  # BPF_RSH
        (lambda c: c.do(3, "=", -1), insn(ALU64 | K | 0xB0, 3, number=-1)),  # BPF_MOV
        (lambda c: c.do(3, "s>>", 32), insn(ALU64 | K | 0xC0, 3, number=32)),  # BPF_ARSH
        (lambda c: c.copy(6, 1), insn(ALU64 | X | 0xB0, 6, 1)),
        (lambda c: c.add(1, 7), insn(ALU64 | X | 0x00, 1, 7)),
        (lambda c: c.load(2, 6, 24), insn(LDX | MEM | DW, 2, 6, 24)),
        (lambda c: c.load(2, 6, -24, 4), insn(LDX | MEM | W, 2, 6, -24)),
        (lambda c: c.load(2, 6, 24, 2), insn(LDX | MEM | H, 2, 6, 24)),
        (lambda c: c.load(2, 6, 24, 1), insn(LDX | MEM | B, 2, 6, 24)),
        (lambda c: c.store(10, -8, 0), insn(STX | MEM | DW, 10, 0, -8)),
        (lambda c: c.store(10, -8, 3, 4), insn(STX | MEM | W, 10, 3, -8)),
        (lambda c: c.store(10, -8, 3, 2), insn(STX | MEM | H, 10, 3, -8)),
        (lambda c: c.store_number(10, -16, -1), insn(ST | MEM | DW, 10, 0, -16, -1)),
        (lambda c: c.store_number(10, -16, 9, 4), insn(ST | MEM | W, 10, 0, -16, 9)),
        (lambda c: c.add_atomically(0, 8, 1), insn(STX | ATOMIC | DW, 0, 1, 8)),  # imm: BPF_ADD
        (lambda c: c.call(125), insn(JMP | 0x80, number=125)),
        (lambda c: c.set_map(1, 5), insn(LD | IMM | DW, 1, 1, number=5) + insn(0)),  # BPF_PSEUDO_MAP_FD
        (lambda c: c.end(), insn(ALU64 | K | 0xB0, 0) + insn(JMP | 0x90)),
        (lambda c: c.end(1), insn(ALU64 | K | 0xB0, 0, number=1) + insn(JMP | 0x90)),
        (
            lambda c: c.stack(2, -40),
            insn(ALU64 | X | 0xB0, 2, 10) + insn(ALU64 | K | 0x00, 2, number=-40),
        ),
        (
            lambda c: c.load_signed(7, 6, 8),
            insn(LDX | MEM | DW, 7, 6, 8) + insn(0x67, 7, number=32) + insn(0xC7, 7, number=32),
        ),
    ],
)
def test_instructions_are_the_kernels(write: Callable[[Code], None], expected: bytes) -> None:
    assert made(write) == expected


@pytest.mark.parametrize(
    ("condition", "operation"),
    [("==", 0x10), (">", 0x20), ("&", 0x40), ("!=", 0x50), ("s>", 0x60), ("s>=", 0x70), ("s<", 0xC0)],
)
def test_conditions_are_the_kernels(condition: str, operation: int) -> None:
    code = Code()
    code.jump_if(4, condition, -3, "out")
    code.jump_if_register(4, condition, 5, "out")
    code.label("out")
    assert code.bytes() == insn(JMP | K | operation, 4, 0, 1, -3) + insn(JMP | X | operation, 4, 5, 0)


@pytest.mark.parametrize(
    ("number", "low", "high"),
    [
        (0, 0, 0),
        (0x7FFFFFFF, 0x7FFFFFFF, 0),
        (0x80000000, -0x80000000, 0),
        (0x1_0000_0002, 2, 1),
        (0xFFFFFFFFFFFFF000, -4096, -1),
        (-1, -1, -1),
        (-(1 << 63), 0, -0x80000000),
    ],
)
def test_numbers_of_64_bits_take_two_instructions(number: int, low: int, high: int) -> None:
    assert made(lambda c: c.set(1, number)) == insn(LD | IMM | DW, 1, number=low) + insn(0, number=high)


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_any_number_of_64_bits_comes_back_from_its_halves(number: int) -> None:
    (_, _, _, low), (_, _, _, high) = struct.iter_unpack("=BBhI", made(lambda c: c.set(1, number)))
    assert high << 32 | low == number & (1 << 64) - 1


def test_labels_are_distances_from_the_next_instruction_and_wide_ones_count_twice() -> None:
    code = Code()
    code.jump("end")
    code.jump_if(1, "==", 0, "middle")
    code.set(2, 1 << 40)
    code.label("middle")
    code.copy(3, 4)
    code.label("end")
    code.label("also the end")
    code.jump("also the end")
    code.label("behind")
    parts = list(struct.iter_unpack("=BBhi", code.bytes()))
    assert [(part[0], part[2]) for part in parts if part[0] & 7 == JMP] == [(5, 4), (0x15, 2), (5, -1)]
    assert len(parts) == 6


def test_new_labels_have_no_name_that_was_given() -> None:
    code = Code()
    names = [code.new_label() for _ in range(5)]
    assert len(set(names)) == 5
    for name in names:
        code.label(name)
    code.jump_if(1, "!=", 0, "a")
    code.label("a")
    assert code.bytes() == insn(0x55, 1, 0, 0, 0)


def test_a_label_that_stands_twice_is_refused_and_one_that_stands_nowhere_too() -> None:
    code = Code()
    code.label("a")
    with pytest.raises(ValueError, match="two labels are called a"):
        code.label("a")
    code.jump("b")
    with pytest.raises(KeyError, match="b"):
        code.bytes()
    code.label("b")
    assert code.bytes() == insn(5, offset=0)


@pytest.mark.parametrize(
    "write",
    [
        lambda c: c.do(1, "+", 1 << 31),
        lambda c: c.do(1, "=", -(1 << 31) - 1),
        lambda c: c.store_number(10, -8, 0xFFFFFFFF),
        lambda c: c.load(1, 6, 1 << 15),
        lambda c: c.store(10, -(1 << 15) - 1, 1),
    ],
)
def test_what_does_not_fit_an_instruction_is_no_instruction(write: Callable[[Code], None]) -> None:
    with pytest.raises(struct.error):
        made(write)


@pytest.mark.parametrize(
    "write",
    [
        lambda c: c.do(1, "*", 2),
        lambda c: c.jump_if(1, "<", 2, "a"),
        lambda c: c.load(1, 6, 0, 3),
        lambda c: c.store(10, -8, 1, 16),
    ],
)
def test_what_is_not_known_is_said_at_once(write: Callable[[Code], None]) -> None:
    with pytest.raises(KeyError):
        write(Code())
