"""The functions that this kernel has, of those that are followed."""

from __future__ import annotations

from pathlib import Path

from kernel_fakes import BtfWriter

from regrepro.kernel.btf import Signature
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


def test_signatures_are_those_of_the_kernel_and_of_each_module(tmp_path: Path) -> None:
    writer = BtfWriter()
    long = writer.integer("long", 8)
    pin = writer.function("pin_user_pages", {"start": long, "nr_pages": long})
    (tmp_path / "vmlinux").write_bytes(writer.blob())
    types, strings = writer.marks()
    ids = {}
    for module, function in (("rdma_rxe", "rxe_reg_user_mr"), ("ib_uverbs", "ib_uverbs_reg_mr")):
        split = BtfWriter()
        split._types, split._strings, split._count = writer._types, writer._strings, writer._count
        ids[module] = split.function(function, {"attrs": long})
        (tmp_path / module).write_bytes(split.blob(types, strings))
    (tmp_path / "damaged").write_bytes(b"none")
    btf = BtfFunctions(tmp_path)
    for _ in range(2):
        assert btf.function("pin_user_pages", "") == Signature(pin, ("start", "nr_pages"))
        assert btf.function("rxe_reg_user_mr", "rdma_rxe") == Signature(ids["rdma_rxe"], ("attrs",))
        assert btf.function("ib_uverbs_reg_mr", "ib_uverbs") == Signature(ids["ib_uverbs"], ("attrs",))
    assert (
        btf.function("rxe_reg_user_mr", "") is None and btf.function("rxe_reg_user_mr", "ib_uverbs") is None
    )
    assert btf.function("pin_user_pages", "damaged") is None and btf.function("x", "missing") is None
    empty = BtfFunctions(tmp_path / "nowhere")
    assert empty.kernel is None and empty.function("pin_user_pages", "") is None
    assert empty.function("rxe_reg_user_mr", "rdma_rxe") is None


def test_functions_with_a_type_are_followed_by_trampolines(tmp_path: Path) -> None:
    writer = BtfWriter()
    long = writer.integer("long", 8)
    many = {f"p{number}": long for number in range(7)}
    ids = {
        "pin_user_pages": writer.function("pin_user_pages", {"start": long}),
        "migrate_pages": writer.function("migrate_pages", many),
    }
    (tmp_path / "vmlinux").write_bytes(writer.blob())
    text = b"".join(b"0 T " + name + b"\n" for name in (b"pin_user_pages", b"migrate_pages", b"dma_buf_get"))
    btf = BtfFunctions(tmp_path)
    found = find_functions(btf, text, {})
    assert found.pins == [
        Function("pin_user_pages", "", ("start",), Returns.LONG, ids["pin_user_pages"]),
    ]
    assert found.plain_pins == found.pins
    assert found.migrate == Function("migrate_pages", "", tuple(many), type_id=ids["migrate_pages"])
    assert found.inner == [Function("dma_buf_get", "", None, Returns.POINTER)]
    by_kprobes = find_functions(btf, text, {}, trampolines=False)
    assert all(item.parameters is None and item.type_id == 0 for item in by_kprobes.all())


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
