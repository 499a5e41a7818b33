"""The functions that this kernel has, of those that are followed."""

from __future__ import annotations

from pathlib import Path

from kernel_fakes import BtfWriter

from regrepro.kernel_functions import Returns
from regrepro.watch.functions import (
    BtfFunctions,
    Function,
    Functions,
    find_functions,
    loaded_modules,
    read_symbols,
    without_coming,
)


def test_symbols_are_found_with_their_module_and_only_if_they_are_one() -> None:
    text = (
        b"0000000000000000 t twice\n0000000000000000 T twice\n0000000000000000 T pin_user_pages\n"
        b"0000000000000000 t ib_uverbs_reg_mr\t[ib_uverbs]\n0000000000000000 d data\n"
        b"0000000000000000 T pin_user_pages_fast\n"
    )
    names = ["twice", "pin_user_pages", "ib_uverbs_reg_mr", "data", "absent"]
    assert read_symbols(text, names) == {"pin_user_pages": "", "ib_uverbs_reg_mr": "ib_uverbs"}


def test_the_types_of_a_module_are_joined_with_the_kernels(tmp_path: Path) -> None:
    writer = BtfWriter()
    long = writer.integer("long", 8)
    (tmp_path / "vmlinux").write_bytes(writer.blob())
    types, strings = writer.marks()
    split = BtfWriter()
    split._types, split._strings, split._count = writer._types, writer._strings, writer._count
    split.function("ib_uverbs_reg_mr", {"attrs": long})
    (tmp_path / "ib_uverbs").write_bytes(split.blob(types, strings))
    (tmp_path / "damaged").write_bytes(b"none")
    btf = BtfFunctions(tmp_path)
    for _ in range(2):
        joined = btf.of_module("ib_uverbs")
        assert joined is not None and joined.function("ib_uverbs_reg_mr") is not None
    assert btf.of_module("") is btf.kernel is not None
    assert btf.of_module("damaged") is None and btf.of_module("missing") is None
    empty = BtfFunctions(tmp_path / "nowhere")
    assert (
        empty.kernel is None and empty.of_module("ib_uverbs") is None and empty.enum("migrate_reason") == {}
    )


def test_functions_are_those_that_the_kernel_has(tmp_path: Path) -> None:
    text = b"".join(b"0 T " + name + b"\n" for name in (b"pin_user_pages", b"migrate_pages", b"dma_buf_get"))
    found = find_functions(BtfFunctions(tmp_path), text, {})
    assert found.pins == [Function("pin_user_pages", "", Returns.LONG)] == found.plain_pins
    assert found.migrate == Function("migrate_pages", "")
    assert found.inner == [Function("dma_buf_get", "", Returns.POINTER)]
    assert not found.entries and found.open is None and "reg_user_mr" in found.missing


def test_modules_that_are_only_coming_or_going_are_not_loaded(tmp_path: Path) -> None:
    for name, state in (("rdma_rxe", "live"), ("mlx5_ib", "coming"), ("efa", "going"), ("kernel", None)):
        (tmp_path / name).mkdir()
        if state is not None:
            (tmp_path / name / "initstate").write_text(f"{state}\n")
    assert loaded_modules(tmp_path) == {"rdma_rxe", "kernel"}


def test_functions_of_a_module_that_is_only_coming_are_left_out_until_it_is_loaded() -> None:
    found = Functions(
        inner=[Function("dma_buf_get", ""), Function("mlx5_core_create_mkey", "mlx5_core")],
        drivers=[Function("rxe_reg_user_mr", "rdma_rxe"), Function("efa_reg_mr", "efa")],
    )
    left = without_coming(found, {"rdma_rxe"})
    assert [item.name for item in (*left.inner, *left.drivers)] == ["dma_buf_get", "rxe_reg_user_mr"]
