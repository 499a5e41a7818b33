"""A kernel on paper: BTF, /proc/kcore and the texts of /proc, small and written by hand, for the tests
of the kernel package.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from regrepro.kernel.zones import Zone

PAGE = os.sysconf("SC_PAGE_SIZE")
PAGE_SHIFT = PAGE.bit_length() - 1

INT, PTR, ARRAY, STRUCT, UNION, ENUM, TYPEDEF, CONST, ENUM64 = 1, 2, 3, 4, 5, 6, 8, 10, 19
FUNC, FUNC_PROTO = 12, 13


class BtfWriter:
    """Writes BTF, type by type; each method returns the type's id."""

    def __init__(self) -> None:
        self._types = b""
        self._strings = b"\0"
        self._count = 0

    def _name(self, name: str) -> int:
        if not name:
            return 0
        at = len(self._strings)
        self._strings += name.encode() + b"\0"
        return at

    def _type(
        self, name: str, kind: int, vlen: int, size: int, more: bytes = b"", *, flag: bool = False
    ) -> int:
        info = kind << 24 | vlen | flag << 31
        self._types += struct.pack("=III", self._name(name), info, size) + more
        self._count += 1
        return self._count

    def integer(self, name: str, size: int) -> int:
        return self._type(name, INT, 0, size, struct.pack("=I", size * 8))

    def pointer(self, target: int) -> int:
        return self._type("", PTR, 0, target)

    def typedef(self, name: str, target: int) -> int:
        return self._type(name, TYPEDEF, 0, target)

    def const(self, target: int) -> int:
        return self._type("", CONST, 0, target)

    def array(self, element: int, length: int) -> int:
        return self._type("", ARRAY, 0, 0, struct.pack("=III", element, 0, length))

    def record(
        self,
        name: str,
        size: int,
        members: list[tuple[str, int, int]],
        *,
        union: bool = False,
        bitfield: int = 0,
    ) -> int:
        """A struct or union of (name, type, byte offset); `bitfield` makes every member that many bits
        wide.
        """
        raw = b"".join(
            struct.pack("=III", self._name(member), kind, at * 8 | bitfield << 24)
            for member, kind, at in members
        )
        return self._type(name, UNION if union else STRUCT, len(members), size, raw, flag=bool(bitfield))

    def enum(self, name: str, values: dict[str, int]) -> int:
        raw = b"".join(struct.pack("=Ii", self._name(key), value) for key, value in values.items())
        return self._type(name, ENUM, len(values), 4, raw)

    def enum64(self, name: str, values: dict[str, int]) -> int:
        raw = b"".join(
            struct.pack("=III", self._name(key), value & 0xFFFFFFFF, value >> 32)
            for key, value in values.items()
        )
        return self._type(name, ENUM64, len(values), 8, raw)

    def function(self, name: str, parameters: dict[str, int], returns: int = 0) -> int:
        """A function of (name → type) that are its parameters, behind its prototype."""
        raw = b"".join(struct.pack("=II", self._name(key), kind) for key, kind in parameters.items())
        prototype = self._type("", FUNC_PROTO, len(parameters), returns, raw)
        return self._type(name, FUNC, 1, prototype)

    def marks(self) -> tuple[int, int]:
        """Where types and strings end by now: what comes is a module's."""
        return len(self._types), len(self._strings)

    def blob(self, types_from: int = 0, strings_from: int = 0) -> bytes:
        types, strings = self._types[types_from:], self._strings[strings_from:]
        header = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
        return header + types + strings


# The kernel's two anonymous enums since 6.3: FOLL_* flags for all, and those of mm/ itself.
PUBLIC_FLAGS = {"FOLL_WRITE": 1, "FOLL_GET": 2, "FOLL_DUMP": 4, "FOLL_LONGTERM": 1 << 9}
PRIVATE_FLAGS = {"FOLL_TOUCH": 1 << 16, "FOLL_TRIED": 1 << 17, "FOLL_PIN": 1 << 19}


def anonymous_enums(*enums: dict[str, int]) -> bytes:
    """Return BTF of these enums, and of an int that is called as the first member of one."""
    writer = BtfWriter()
    writer.integer("FOLL_WRITE", 4)
    for values in enums:
        writer.enum("", values)
    return writer.blob()


def write_kcore(path: Path, segments: list[tuple[int, bytes]], vmcoreinfo: str) -> None:
    """Write an ELF core file with one note and one program header for each (address, bytes)."""
    name = b"VMCOREINFO\0"
    info = vmcoreinfo.encode()
    note = (
        struct.pack("=III", len(name), len(info), 0)
        + name.ljust(12, b"\0")
        + info.ljust(-(-len(info) // 4) * 4, b"\0")
    )
    other = struct.pack("=III", 5, 3, 1) + b"CORE\0\0\0\0" + b"abc\0"
    notes = other + note
    table_at = 64
    at = table_at + 56 * (1 + len(segments))
    headers = struct.pack("=IIQQQQQQ", 4, 0, at, 0, 0, len(notes), 0, 0)
    body = notes
    for address, data in segments:
        headers += struct.pack("=IIQQQQQQ", 1, 7, at + len(body), address, 0, len(data), len(data), PAGE)
        body += data
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    elf = ident + struct.pack(
        "=HHIQQQIHHHHHH", 4, 62, 1, 0, table_at, 0, 0, 64, 56, 1 + len(segments), 0, 0, 0
    )
    path.write_bytes(elf + headers + body)


@dataclass
class FakeZone:
    """A zone with the migratetype of each of its pageblocks, the first at the block of `start_pfn`."""

    node: int
    name: str
    start_pfn: int
    spanned: int


@dataclass
class FakeKernel:
    """A kernel of one section root, whose memory map, zones and counts agree; tests then spoil one of them.

    `types` is the migratetype by absolute pageblock number; blocks that are not in it are holes.
    """

    folder: Path
    zones: list[FakeZone]
    types: dict[int, int]
    cma: bool = True
    isolate_bit: bool = True  # 8 bits a block and a bit of its own, as from 6.17 on
    pageblock_order: int = 9
    section_bits: int = 27
    nodes_shift: int = 10
    own_zone: dict[int, tuple[int, str]] = field(
        default_factory=dict
    )  # block: (node, zone), where spans overlap

    ZONES = ("DMA", "DMA32", "Normal", "Movable", "Device")
    ROOT, SECTIONS, USAGE, MEMMAP = (
        0xFFFF888000001000,
        0xFFFF888000100000,
        0xFFFF888000200000,
        0xFFFFEA0000000000,
    )

    @property
    def names(self) -> list[str]:
        return [
            "Unmovable",
            "Movable",
            "Reclaimable",
            "HighAtomic",
            *(["CMA"] if self.cma else []),
            "Isolate",
        ]

    @property
    def section_shift(self) -> int:
        return self.section_bits - PAGE_SHIFT

    def btf(self) -> bytes:
        writer = BtfWriter()
        long = writer.integer("unsigned long", 8)
        number = writer.integer("int", 4)
        pointer = writer.pointer(0)
        atomic = writer.typedef("atomic_t", writer.record("", 4, [("counter", number, 0)]))
        flags = writer.typedef("memdesc_flags_t", writer.record("", 8, [("f", long, 0)]))
        writer.record("mem_section", 32, [("section_mem_map", long, 0), ("usage", pointer, 8)])
        words = writer.array(long, max((1 << self.section_bits - 21) // 64, 1))
        size = 16 + 8 * max((1 << self.section_bits - 21) // 64, 1)
        writer.record(
            "mem_section_usage",
            size,
            [("subsection_map", words, 16), ("pageblock_flags", writer.array(long, 0), size)],
        )
        tail = writer.record("", 8, [("compound_info", long, 0)])
        inner = writer.record("", 40, [("lru", writer.array(long, 2), 0), ("", tail, 0)], union=True)
        counts = writer.record("", 4, [("_mapcount", writer.const(atomic), 0)], union=True)
        writer.record(
            "page", 64, [("flags", flags, 0), ("", inner, 8), ("", counts, 48), ("_refcount", atomic, 52)]
        )
        writer.record(
            "folio",
            256,
            [("_large_mapcount", atomic, 80), ("_pincount", atomic, 92), ("_nr_pages", number, 120)],
        )
        types = {
            "MIGRATE_UNMOVABLE": 0,
            "MIGRATE_MOVABLE": 1,
            "MIGRATE_RECLAIMABLE": 2,
            "MIGRATE_HIGHATOMIC": 3,
        }
        if self.cma:
            types |= {"MIGRATE_CMA": 4, "__MIGRATE_TYPE_END": 4}
        types |= {"MIGRATE_ISOLATE": len(self.names) - 1, "MIGRATE_TYPES": len(self.names)}
        writer.enum("migratetype", types)
        if self.isolate_bit:
            bits = {"PB_migrate_0": 0, "PB_migrate_1": 1, "PB_migrate_2": 2, "PB_compact_skip": 3}
            bits |= {"PB_migrate_isolate": 4, "__NR_PAGEBLOCK_BITS": 5}
        else:
            bits = {"PB_migrate": 0, "PB_migrate_end": 2, "PB_migrate_skip": 3, "NR_PAGEBLOCK_BITS": 4}
        writer.enum("pageblock_bits", bits)
        writer.enum(
            "zone_type", {f"ZONE_{z.upper()}": i for i, z in enumerate(self.ZONES)} | {"__MAX_NR_ZONES": 5}
        )
        writer.enum("pageflags", {"PG_locked": 0, "PG_head": 6})
        return writer.blob()

    def zone_of(self, block: int) -> tuple[int, str]:
        if block in self.own_zone:
            return self.own_zone[block]
        for zone in self.zones:
            if (
                zone.start_pfn < (block + 1) << self.pageblock_order
                and block << self.pageblock_order < zone.start_pfn + zone.spanned
            ):
                return zone.node, zone.name
        raise AssertionError(block)

    def counts(self) -> dict[tuple[int, str], list[int]]:
        """What pagetypeinfo_showblockcount_print() would print."""
        answer = {}
        step = 1 << self.pageblock_order
        for zone in self.zones:
            row = [0] * len(self.names)
            for pfn in range(zone.start_pfn, zone.start_pfn + zone.spanned, step):
                block = pfn >> self.pageblock_order
                if block in self.types and self.zone_of(block) == (zone.node, zone.name):
                    row[self.types[block]] += 1
            answer[zone.node, zone.name] = row
        return answer

    def pagetypeinfo(self) -> str:
        text = f"Page block order: {self.pageblock_order}\nPages per block:  {1 << self.pageblock_order}\n\n"
        text += "Free pages count per migrate type at order       0      1 \n"
        text += "Node    0, zone   Normal, type    Unmovable      1      2 \n\n"
        counts = self.counts()
        for node in sorted({zone.node for zone in self.zones}):
            text += "Number of blocks type " + " ".join(f"{name:>12}" for name in self.names) + " \n"
            for (where, name), row in counts.items():
                if where == node:
                    text += f"Node {node}, zone {name:>8} " + " ".join(f"{count:12}" for count in row) + " \n"
            text += "\n"
        return text

    def zoneinfo(self) -> str:
        text = ""
        for zone in self.zones:
            text += f"Node {zone.node}, zone {zone.name:>8}\n"
            text += f"  pages free     {zone.spanned // 2}\n        boost    0\n        min      10\n"
            text += "        low      12\n"
            text += f"        high     14\n        spanned  {zone.spanned}\n"
            text += f"        present  {zone.spanned}\n"
            text += f"        managed  {zone.spanned}\n        cma      0\n"
            text += "        protection: (0, 0, 0)\n"
            text += "      nr_free_pages 99\n      nr_free_cma  0\n  pagesets\n    cpu: 0\n"
            text += "              count: 7\n              high:  378\n  node_unreclaimable:  0\n"
            text += f"  start_pfn:           {zone.start_pfn}\n"
        return text

    def write(self) -> None:
        """Write btf, kcore, zoneinfo, pagetypeinfo, meminfo into the folder."""
        self.folder.mkdir(exist_ok=True)
        per = 1 << self.section_shift - self.pageblock_order
        subsections = max((1 << self.section_bits - 21), 1)
        head = 16 + 8 * max(subsections // 64, 1)
        width = 8 if self.isolate_bit else 4
        usage_size = head + per * width // 8
        last = max(self.types) // per + 1
        sections, usages = b"", b""
        step = 1 << self.pageblock_order
        memmap = np.zeros((last * per * step, 8), dtype=np.uint64)  # struct page has 64 bytes
        for number in range(last):
            mine = {block: kind for block, kind in self.types.items() if block // per == number}
            present = 0x7 if mine else 0
            coded = self.MEMMAP if mine else 0
            sections += struct.pack(
                "=QQQQ", coded | present, self.USAGE + number * usage_size if mine else 0, 0, 0
            )
            valid = np.zeros(max(subsections, 64), dtype=np.uint8)
            bits = np.zeros(per, dtype=np.uint8)
            for block, kind in mine.items():
                inside = block % per
                share = max(subsections // per, 1)
                valid[inside * subsections // per : inside * subsections // per + share] = 1
                isolated = self.isolate_bit and kind == len(self.names) - 1
                bits[inside] = 0x10 | 1 if isolated else kind
                node, name = self.zone_of(block)
                shift = 64 - self.nodes_shift
                flags = (node << shift | self.ZONES.index(name) << shift - 3 | 0x28) & (1 << 64) - 1
                memmap[block << self.pageblock_order : (block + 1) << self.pageblock_order, 0] = flags
            packed = bits if width == 8 else bits[0::2] | bits[1::2] << 4
            usages += (
                bytes(16)
                + np.packbits(valid, bitorder="little").tobytes()
                + packed.astype(np.uint8).tobytes()
            )
        roots = struct.pack("=Q", self.SECTIONS).ljust(PAGE, b"\0")
        sections = sections.ljust(PAGE, b"\0")
        info = (
            f"SYMBOL(mem_section)={self.ROOT:x}\nLENGTH(mem_section)=512\nNUMBER(SECTION_SIZE_BITS)={self.section_bits}\n"
            f"NUMBER(MAX_PHYSMEM_BITS)=46\nSIZE(nodemask_t)=128\nLENGTH(node_data)={1 << self.nodes_shift}\n"
        )
        write_kcore(
            self.folder / "kcore",
            [
                (self.ROOT, roots),
                (self.SECTIONS, sections),
                (self.USAGE, usages),
                (self.MEMMAP, memmap.tobytes()),
            ],
            info,
        )
        (self.folder / "btf").write_bytes(self.btf())
        (self.folder / "zoneinfo").write_text(self.zoneinfo())
        (self.folder / "pagetypeinfo").write_text(self.pagetypeinfo())
        total = "CmaTotal:              0 kB\nCmaFree:               0 kB\n" if self.cma else ""
        (self.folder / "meminfo").write_text(
            f"MemTotal:        2048000 kB\n{total}HugePages_Total:       0\n"
        )


def write_kallsyms(
    symbols: list[tuple[str, int]], at: int, form: str, base: int = 0xFFFFFFFF81000000
) -> tuple[bytes, str]:
    """Return the kernel's compressed symbol table, to lie at address `at`, and its lines of vmcoreinfo.

    `form` is how offsets are kept: `self` (relative to the entry), `base`, or `percpu` (negative to it).
    """
    # Token 0 stands for "mem_", token 1 for a name that needs two bytes of length; the others for themselves.
    tokens = [b"mem_", b"x"] + [bytes([i]) for i in range(2, 256)]
    tokens[0] = b"mem_"
    table, index = b"", []
    for token in tokens:
        index.append(len(table))
        table += (b"" if token == b"\0" else token) + b"\0"
    names = b""
    for name, _ in symbols:
        text = b"T" + name.encode()
        packed = text.replace(b"mem_", b"\0")
        length = len(packed)
        names += bytes([length] if length < 128 else [length & 0x7F | 0x80, length >> 7])
        names += packed
    pad = (-len(names)) % 8
    names += bytes(pad)
    places = {"num_syms": at, "relative_base": at + 8, "names": at + 16}
    places["token_table"] = places["names"] + len(names)
    places["token_index"] = places["token_table"] + len(table) + (-len(table)) % 8
    places["offsets"] = places["token_index"] + 512
    offsets = b""
    for number, (_, address) in enumerate(symbols):
        own = places["offsets"] + 4 * number
        value = {"self": address - own, "base": address - base, "percpu": base - 1 - address}[form]
        offsets += struct.pack("=i", value)
    blob = struct.pack("=QQ", len(symbols), base) + names + table + bytes((-len(table)) % 8)
    blob += struct.pack("=256H", *index) + offsets
    if form == "self":
        del places["relative_base"]
    return blob, "".join(f"SYMBOL(kallsyms_{name})={place:x}\n" for name, place in places.items())


def zone(node: int, name: str, free: int, free_cma: int | None = None, **more: int) -> Zone:
    """Return a populated zone of free pages, managed 64 times that."""
    managed = more.pop("managed", 64 * free)
    made = Zone(node, name, 1, managed, managed, managed, free, free_cma=free_cma)
    for key, value in more.items():
        setattr(made, key, value)
    return made
