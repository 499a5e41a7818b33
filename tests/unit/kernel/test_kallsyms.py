"""Addresses of kernel symbols: the text of /proc/kallsyms, and the kernel's own table."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_fakes import write_kallsyms, write_kcore

from regrepro.kernel import kallsyms, kcore


def test_kallsyms() -> None:
    text = (
        b"ffffffff81000000 T _text\n0000000000000000 D hidden\nffffffff8f1f0040 B mem_section\n"
        b"ffffffffc0001000 b mem_section\t[module]\nffffffff8f1f0000 b another_mem_section\n"
    )
    found = kallsyms.find_in(text, ["mem_section", "_text", "hidden", "nothing"])
    assert found == {"mem_section": 0xFFFFFFFF8F1F0040, "_text": 0xFFFFFFFF81000000}


def test_addresses_have_the_name_of_the_function_that_they_lie_in(tmp_path: Path) -> None:
    file = tmp_path / "kallsyms"
    file.write_text(
        "0000000000000000 A fixed_percpu_data\n"
        "ffffffff81000000 T _text\n"
        "ffffffffc0001000 t in_module\t[module]\n"  # not in their order
        "ffffffff810000a0 t second\n"
        "ffffffff9ABCDEF0 t last_of_kernel\n"
        "0000000000000000 d hidden\n"
    )
    expected = {
        0xFFFFFFFF81000000: "_text+0",
        0xFFFFFFFF8100009F: "_text+159",
        0xFFFFFFFF810000A0: "second+0",
        0xFFFFFFFF9ABCDEF8: "last_of_kernel+8",
        0xFFFFFFFFC0001010: "in_module+16",
        (1 << 64) - 1: "in_module+1073737727",
    }
    assert kallsyms.names_of([*expected, 0, 0x7F0000000000, 0xFFFFFFFF80FFFFFF], file) == expected
    assert kallsyms.names_of([], file) == {}


@pytest.mark.parametrize("text", ["", "\n", "0000000000000000 T _text\n0000000000000000 T second\n"])
def test_a_kernel_that_hides_its_addresses_names_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kallsyms"
    file.write_text(text)
    assert kallsyms.names_of([0, 1, 0xFFFFFFFF81000000], file) == {}
    with pytest.raises(OSError, match="none"):
        kallsyms.names_of([1], tmp_path / "none")


def test_addresses_of_32_bits_have_names_too(tmp_path: Path) -> None:
    file = tmp_path / "kallsyms"
    file.write_text("c0008000 T _text\nc0008100 T second\n")
    assert kallsyms.names_of([0xC0008004, 0xC0008104], file) == {
        0xC0008004: "_text+4",
        0xC0008104: "second+4",
    }


SYMBOLS = [
    ("_text", 0xFFFFFFFF81000000),
    ("init_uts_ns", 0xFFFFFFFF82000040),
    ("mem_section", 0xFFFFFFFF82100000),
    ("a_long_name_" + "x" * 200, 0xFFFFFFFF82200000),
    ("cma_areas", 0xFFFFFFFF82300000),
]


@pytest.mark.parametrize("form", ["self", "base", "percpu"])
def test_the_kernels_own_symbol_table(tmp_path: Path, form: str) -> None:
    at = 0xFFFFFFFF81800000
    blob, lines = write_kallsyms(SYMBOLS, at, form)
    write_kcore(
        tmp_path / "kcore",
        [(at, blob)],
        lines + "SYMBOL(init_uts_ns)=ffffffff82000040\nSYMBOL(swapper_pg_dir)=ffffffff81111000\n",
    )
    with kcore.Kcore(tmp_path / "kcore") as opened:
        found = kallsyms.find(["mem_section", "cma_areas", SYMBOLS[3][0], "nothing"], opened)
    assert found == dict(SYMBOLS[2:])


def test_a_symbol_table_whose_witness_is_elsewhere_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 0xFFFFFFFF81800000
    blob, lines = write_kallsyms(SYMBOLS, at, "base")
    write_kcore(tmp_path / "kcore", [(at, blob)], lines + "SYMBOL(init_uts_ns)=ffffffff82000041\n")
    (tmp_path / "kallsyms").write_text("ffffffff82100008 B mem_section\n")
    monkeypatch.setattr(kallsyms, "KALLSYMS", tmp_path / "kallsyms")
    with kcore.Kcore(tmp_path / "kcore") as opened:
        assert kallsyms.find_in_kcore(opened, ["mem_section"]) is None
        assert kallsyms.find(["mem_section"], opened) == {"mem_section": 0xFFFFFFFF82100008}


@pytest.mark.parametrize("cut", [20, 100, 400])
def test_a_damaged_symbol_table_is_not_believed(tmp_path: Path, cut: int) -> None:
    at = 0xFFFFFFFF81800000
    blob, lines = write_kallsyms(SYMBOLS, at, "base")
    blob = blob[:cut] + b"\xff" * 40 + blob[cut + 40 :]
    write_kcore(
        tmp_path / "kcore",
        [(at, blob)],
        lines + "SYMBOL(init_uts_ns)=ffffffff82000040\nSYMBOL(swapper_pg_dir)=ffffffff81111000\n",
    )
    with kcore.Kcore(tmp_path / "kcore") as opened:
        found = kallsyms.find_in_kcore(opened, ["cma_areas"])
    assert found in (None, {"cma_areas": 0xFFFFFFFF82300000})
