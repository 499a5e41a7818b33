"""A machine that runs BPF programs: the instructions that `Code` can make, and nothing else.

Of the verifier it has what shows while a program runs: what a program must not do raises `Refused`.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from regrepro.core import bpf

STACK_BYTES = 512
_ALL = (1 << 64) - 1
_SIZES = {0x00: 4, 0x08: 2, 0x10: 1, 0x18: 8}
_STACK, _CONTEXT, _ENTRIES = 0xFFFFC90000010000, 0xFFFFC90000020000, 0xFFFFC90001000000
_MAP_POINTERS = 0xFFFFC8FF00000000

Operation = Callable[[int, int], int]
Condition = Callable[[int, int], bool]


class Refused(Exception):
    """The verifier would not take the program, or the kernel has no such instruction."""


def signed(value: int) -> int:
    """Return a word of 64 bits as a signed number."""
    return value - (1 << 64) if value >> 63 else value


_OPERATIONS: dict[int, Operation] = {
    0x00: lambda a, b: a + b,
    0x40: lambda a, b: a | b,
    0x50: lambda a, b: a & b,
    0x60: lambda a, b: a << b,
    0x70: lambda a, b: a >> b,
    0xB0: lambda _, b: b,
    0xC0: lambda a, b: signed(a) >> b,
}
_CONDITIONS: dict[int, Condition] = {
    0x10: lambda a, b: a == b,
    0x20: lambda a, b: a > b,
    0x40: lambda a, b: bool(a & b),
    0x50: lambda a, b: a != b,
    0x60: lambda a, b: signed(a) > signed(b),
    0x70: lambda a, b: signed(a) >= signed(b),
    0xC0: lambda a, b: signed(a) < signed(b),
}


class Memory:
    """Bytes at addresses; what was not put there faults."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def put(self, address: int, data: bytes) -> None:
        """Let bytes lie at an address."""
        for index, byte in enumerate(data):
            self._bytes[address + index] = byte

    def put_word(self, address: int, word: int) -> None:
        """Let a word of 8 bytes lie at an address."""
        self.put(address, struct.pack("=Q", word & _ALL))

    def read(self, address: int, size: int) -> bytes | None:
        """Return what lies there, None where any of it faults."""
        found = [self._bytes.get(address + index) for index in range(size)]
        return bytes(byte for byte in found if byte is not None) if None not in found else None


@dataclass
class Map:
    """A map of bpf(2). `limit`: entries that it has room for; an array has all of its own from the start."""

    key_size: int
    value_size: int
    limit: int = 1 << 20
    entries: dict[bytes, bytearray] = field(default_factory=dict)
    array: bool = False

    def __post_init__(self) -> None:
        if self.array:
            self.entries = {struct.pack("=I", n): bytearray(self.value_size) for n in range(self.limit)}

    def update(self, key: bytes, value: bytes, flags: int) -> int:
        """Put an entry; return 0 or a negative errno."""
        if flags not in (0, bpf.BPF_NOEXIST):
            return -errno.EINVAL
        if key in self.entries and flags == bpf.BPF_NOEXIST:
            return -errno.EEXIST
        if key not in self.entries and len(self.entries) >= self.limit:
            return -errno.E2BIG
        self.entries.setdefault(key, bytearray(self.value_size))[:] = value
        return 0

    def words(self, key: bytes) -> tuple[int, ...]:
        """Return an entry as words of 8 bytes."""
        return struct.unpack(f"={self.value_size // 8}Q", self.entries[key])


@dataclass
class Machine:
    """What a program meets. `maps`: by descriptor; `ring`: the descriptor of the ring, `room` records fit it.

    `ran`: instructions of the last run.
    """

    maps: dict[int, Map]
    ring: int
    room: int = 1 << 20
    tid: int = 7
    pid: int = 6
    uid: int = 1000
    gid: int = 100
    comm: bytes = b"app"
    task: int = 0
    ns: int = 1000
    stack: bytes | int = b""
    """What GET_STACK writes, or the errno (negative) that it gives."""
    kernel: Memory = field(default_factory=Memory)
    user: Memory = field(default_factory=Memory)
    records: list[bytes] = field(default_factory=list)
    ran: int = 0

    def run(self, program: bytes, context: bytes) -> int:
        """Run a program to its end and return its result."""
        return _Run(self, program, context).result()

    @property
    def thread(self) -> bytes:
        """The key of the thread's entries."""
        return struct.pack("=I", self.tid)


class _Run:
    """One run: registers are None as long as they hold nothing that may be read."""

    def __init__(self, machine: Machine, program: bytes, context: bytes) -> None:
        if len(program) % 8 or not program:
            raise Refused("no whole instructions")
        self._machine = machine
        self._program = list(struct.iter_unpack("=BBhi", program))
        self._context = context
        self._stack: list[int | None] = [None] * STACK_BYTES
        self._registers: list[int | None] = [None] * 11
        self._registers[1], self._registers[10] = _CONTEXT, _STACK
        self._found: list[bytearray] = []  # entries of maps that the program has pointers to
        self._at = 0

    def result(self) -> int:
        self._machine.ran = 0
        while True:
            if not 0 <= self._at < len(self._program):
                raise Refused(f"it leaves the program at {self._at}")
            code, registers, offset, number = self._program[self._at]
            self._at += 1
            self._machine.ran += 1
            pair = registers & 0xF, registers >> 4
            to, source = pair if sys.byteorder == "little" else pair[::-1]
            if code == 0x95:
                self._unused(to, source, offset, number)
                return self._get(0)
            self._step(code, to, source, offset, number)

    @staticmethod
    def _unused(*fields: int) -> None:
        if any(fields):
            raise Refused("fields that are not used are not 0")

    def _get(self, register: int) -> int:
        value = self._registers[register] if register <= 10 else None
        if value is None:
            raise Refused(f"register {register} has nothing that may be read")
        return value

    def _set(self, register: int, value: int) -> None:
        if register >= 10:
            raise Refused(f"register {register} cannot be written")
        self._registers[register] = value & _ALL

    def _step(self, code: int, to: int, source: int, offset: int, number: int) -> None:
        kind, operation, by_register = code & 0x07, code & 0xF0, code & 0x08
        if code == 0x18:
            self._load_wide(to, source, offset, number)
        elif code == 0x85:
            self._unused(to, source, offset)
            self._call(number)
        elif code == 0x05:
            self._unused(to, source, number)
            self._jump(offset)
        elif kind == 0x07 and operation in _OPERATIONS:
            if by_register and operation not in (0x00, 0xB0):
                raise Refused(f"{code:#x} is not for registers here")
            self._unused(offset, number if by_register else source)
            if operation in (0x60, 0x70, 0xC0) and not 0 <= number < 64:
                raise Refused(f"a shift by {number}")
            before = 0 if operation == 0xB0 else self._get(to)
            other = self._get(source) if by_register else number & _ALL
            self._set(to, _OPERATIONS[operation](before, other))
        elif kind == 0x05 and operation in _CONDITIONS:
            self._unused(number if by_register else source)
            other = self._get(source) if by_register else number & _ALL
            if _CONDITIONS[operation](self._get(to), other):
                self._jump(offset)
        elif code & 0xE7 == 0x61:
            self._unused(number)
            size = _SIZES[code & 0x18]
            self._set(to, int.from_bytes(self._read(self._get(source) + offset, size), sys.byteorder))
        elif code & 0xE7 in (0x62, 0x63):
            self._unused(source if code & 0x07 == 0x02 else number)
            size = _SIZES[code & 0x18]
            value = number if code & 0x07 == 0x02 else self._get(source)
            low = value & ((1 << 8 * size) - 1)
            self._write(self._get(to) + offset, low.to_bytes(size, sys.byteorder))
        elif code == 0xDB and number == 0:
            address = self._get(to) + offset
            value = int.from_bytes(self._read(address, 8), sys.byteorder) + self._get(source)
            self._write(address, (value & _ALL).to_bytes(8, sys.byteorder))
        else:
            raise Refused(f"no instruction {code:#x} {number:#x}")

    def _load_wide(self, to: int, source: int, offset: int, number: int) -> None:
        if self._at >= len(self._program):
            raise Refused("half an instruction")
        code, registers, more, high = self._program[self._at]
        self._at += 1
        self._unused(code, registers, more, offset)
        if source == 1:
            self._unused(high)
            if number not in self._machine.maps and number != self._machine.ring:
                raise Refused(f"descriptor {number} is no map")
            self._set(to, _MAP_POINTERS + number)
        elif source == 0:
            self._set(to, (high & 0xFFFFFFFF) << 32 | number & 0xFFFFFFFF)
        else:
            raise Refused(f"no pointers of kind {source}")

    def _jump(self, distance: int) -> None:
        if distance < 0:
            raise Refused("a jump back")
        self._at += distance

    # Memory

    def _span(self, address: int, size: int) -> tuple[str, int, bytearray | None]:
        """Return which memory of the program it is, and from where."""
        if address >= _STACK - STACK_BYTES and address + size <= _STACK:
            return "stack", address - (_STACK - STACK_BYTES), None
        if address >= _CONTEXT and address + size <= _CONTEXT + len(self._context):
            return "context", address - _CONTEXT, None
        for index, entry in enumerate(self._found):
            begin = _ENTRIES + 0x1000 * index
            if begin <= address and address + size <= begin + len(entry):
                return "entry", address - begin, entry
        raise Refused(f"{size} bytes at {address:#x} are not the program's")

    def _bytes(self, address: int, size: int) -> bytes:
        what, at, entry = self._span(address, size)
        if what == "context":
            return self._context[at : at + size]
        if entry is not None:
            return bytes(entry[at : at + size])
        found = [byte for byte in self._stack[at : at + size] if byte is not None]
        if len(found) < size:
            raise Refused(f"the stack has not been written at {at - STACK_BYTES}")
        return bytes(found)

    def _read(self, address: int, size: int) -> bytes:
        if address % size:
            raise Refused(f"{size} bytes at {address:#x} are across their size")
        return self._bytes(address, size)

    def _write(self, address: int, data: bytes) -> None:
        if address % len(data):
            raise Refused(f"{len(data)} bytes at {address:#x} are across their size")
        self._fill(address, data)

    def _fill(self, address: int, data: bytes) -> None:
        what, at, entry = self._span(address, len(data))
        if what == "context":
            raise Refused("the context cannot be written")
        if entry is not None:
            entry[at : at + len(data)] = data
        else:
            self._stack[at : at + len(data)] = data

    # Helpers

    def _call(self, helper: int) -> None:
        if helper not in _HELPERS:
            raise Refused(f"no helper {helper}")
        result = _HELPERS[helper](self)
        for register in range(1, 6):
            self._registers[register] = None
        self._set(0, result)

    def _map(self) -> Map:
        found = self._machine.maps.get(self._get(1) - _MAP_POINTERS)
        if found is None:
            raise Refused("register 1 is no map with entries")
        return found

    def _look_up(self) -> int:
        found = self._map()
        entry = found.entries.get(self._bytes(self._get(2), found.key_size))
        if entry is None:
            return 0
        self._found.append(entry)
        return _ENTRIES + 0x1000 * (len(self._found) - 1)

    def _update(self) -> int:
        found = self._map()
        key, value = self._bytes(self._get(2), found.key_size), self._bytes(self._get(3), found.value_size)
        return found.update(key, value, self._get(4))

    def _output(self) -> int:
        if self._get(1) - _MAP_POINTERS != self._machine.ring:
            raise Refused("register 1 is no ring")
        data = self._bytes(self._get(2), self._get(3))
        if self._get(4):
            return -errno.EINVAL
        if len(self._machine.records) >= self._machine.room:
            return -errno.EAGAIN
        self._machine.records.append(data)
        return 0

    def _probe_read(self, memory: Memory, *, kernel: bool = False) -> int:
        to, size, source = self._get(1), self._get(2), self._get(3)
        begin = source - _CONTEXT
        if kernel and 0 <= begin <= len(self._context) - size:
            data: bytes | None = self._context[begin : begin + size]
        else:
            data = memory.read(source, size)
        self._fill(to, data if data is not None else bytes(size))
        return 0 if data is not None else -errno.EFAULT

    def _get_stack(self) -> int:
        if self._get(1) != _CONTEXT or self._get(4):
            raise Refused("a stack without its context")
        size, stack = self._get(3), self._machine.stack
        if isinstance(stack, int):
            self._fill(self._get(2), bytes(size))
            return stack
        self._fill(self._get(2), stack[:size].ljust(size, b"\0"))
        return min(size, len(stack))

    def _get_comm(self) -> int:
        size = self._get(2)
        self._fill(self._get(1), self._machine.comm[: size - 1].ljust(size, b"\0"))
        return 0


_HELPERS: dict[int, Callable[[_Run], int]] = {
    bpf.MAP_LOOKUP: _Run._look_up,
    bpf.MAP_UPDATE: _Run._update,
    bpf.GET_CURRENT_PID_TGID: lambda run: run._machine.pid << 32 | run._machine.tid,
    bpf.GET_CURRENT_UID_GID: lambda run: run._machine.gid << 32 | run._machine.uid,
    bpf.GET_CURRENT_COMM: _Run._get_comm,
    bpf.GET_CURRENT_TASK: lambda run: run._machine.task,
    bpf.KTIME_GET_BOOT_NS: lambda run: run._machine.ns,
    bpf.GET_STACK: _Run._get_stack,
    bpf.PROBE_READ_USER: lambda run: run._probe_read(run._machine.user),
    bpf.PROBE_READ_KERNEL: lambda run: run._probe_read(run._machine.kernel, kernel=True),
    bpf.RINGBUF_OUTPUT: _Run._output,
}
