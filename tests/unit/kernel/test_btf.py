"""BTF: a small blob written by hand, damaged blobs, and this machine's own where it has one."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_fakes import BtfWriter

from regrepro.kernel.btf import BTF_PATH, Btf, BtfError


@pytest.fixture
def btf() -> Btf:
    writer = BtfWriter()
    long = writer.integer("unsigned long", 8)
    deep = writer.record("", 8, [("deep", long, 0)])
    middle = writer.record(
        "", 16, [("first", long, 0), ("", writer.const(writer.typedef("t", deep)), 8)], union=False
    )
    either = writer.record("", 16, [("", middle, 0), ("other", long, 0)], union=True)
    name = writer.array(writer.integer("char", 1), 64)
    writer.record("outer", 104, [("head", long, 0), ("", either, 16), ("name", name, 40)])
    writer.record("bits", 4, [("low", long, 0), ("high", long, 2)], bitfield=3)
    writer.enum("colour", {"RED": 0, "GREEN": 1, "LAST": 1, "NONE": -1})
    writer.enum64("wide", {"BIG": 1 << 40})
    writer.typedef("alias", writer.record("", 24, [("x", long, 8)]))
    return Btf(writer.blob())


def test_offsets_go_through_anonymous_members(btf: Btf) -> None:
    assert btf.offset("outer", "head") == 0
    assert btf.offset("outer", "first") == 16
    assert btf.offset("outer", "deep") == 24
    assert btf.offset("outer", "other") == 16
    assert btf.offset("outer", "missing", "name") == 40
    assert btf.size("outer") == 104
    assert btf.offset("alias", "x") == 8


def test_what_is_not_there_is_none(btf: Btf) -> None:
    assert btf.size("nothing") is None
    assert btf.offset("nothing", "head") is None
    assert btf.offset("outer", "nothing") is None
    assert btf.enum("nothing") is None


def test_bitfields_keep_bits(btf: Btf) -> None:
    high = btf.member("bits", "high")
    assert high is not None
    assert (high.bit_offset, high.bitfield_width) == (16, 3)


def test_enums_and_arrays(btf: Btf) -> None:
    assert btf.enum("colour") == {"RED": 0, "GREEN": 1, "LAST": 1, "NONE": -1}
    assert btf.enum("wide") == {"BIG": 1 << 40}
    name = btf.member("outer", "name")
    assert name is not None and btf.array_length(name) == 64
    head = btf.member("outer", "head")
    assert head is not None and btf.array_length(head) is None


def test_a_modules_types_go_on_where_the_kernels_end() -> None:
    writer = BtfWriter()
    long = writer.integer("unsigned long", 8)
    inner = writer.record("inner", 16, [("a", long, 0), ("b", long, 8)])
    base = writer.blob()
    kept, told = writer.marks()
    writer.record("of_module", 32, [("head", long, 0), ("", inner, 8), ("tail", long, 24)])
    module = writer.blob(kept, told)
    both = Btf.joined(base, module)
    assert both.offset("of_module", "b") == 16 and both.offset("of_module", "tail") == 24
    assert both.offset("inner", "b") == 8 and Btf(base).size("of_module") is None
    for cut in range(0, len(module), 3):
        with pytest.raises(BtfError):
            Btf.joined(base, module[:cut])


def test_an_unknown_kind_is_said(btf: Btf) -> None:
    writer = BtfWriter()
    writer._type("future", 31, 0, 0)
    with pytest.raises(BtfError, match="kind of type"):
        Btf(writer.blob()).size("anything")


@pytest.mark.parametrize("blob", [b"", b"\x9f\xeb", b"x" * 64])
def test_what_is_no_btf_is_refused(blob: bytes) -> None:
    with pytest.raises(BtfError):
        Btf(blob)


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 4000), change=st.binary(min_size=1, max_size=8))
def test_damage_never_crashes(cut: int, change: bytes) -> None:
    writer = BtfWriter()
    long = writer.integer("long", 8)
    writer.record("s", 16, [("a", long, 0), ("b", writer.array(long, 2), 8)])
    writer.enum("e", {"A": 1, "B": 2})
    writer.function("f", {"a": long, "b": long})
    blob = bytearray(writer.blob())
    at = 24 + cut % (len(blob) - 24)
    blob[at : at + len(change)] = change
    for data in (bytes(blob), bytes(blob[: len(blob) - cut % 64])):
        try:
            found = Btf(data)
            found.size("s")
            found.offset("s", "a", "b")
            found.enum("e")
        except (BtfError, struct.error, ValueError):
            pass


@pytest.mark.skipif(not BTF_PATH.exists(), reason="this kernel has no BTF (CONFIG_DEBUG_INFO_BTF)")
def test_the_running_kernel() -> None:
    btf = Btf.of_running_kernel()
    size = btf.size("page")
    assert size is not None and 32 <= size <= 128
    assert btf.offset("page", "_refcount") is not None
    types = btf.enum("migratetype")
    assert types is not None and types["MIGRATE_UNMOVABLE"] == 0 and "MIGRATE_TYPES" in types
    assert Path(BTF_PATH).stat().st_size > 0
