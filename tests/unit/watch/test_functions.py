"""The functions that this kernel has, of those that are followed."""

from __future__ import annotations

from pathlib import Path

from regrepro.kernel_functions import Returns
from regrepro.watch.functions import (
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


def test_functions_are_those_that_the_kernel_has() -> None:
    text = b"".join(b"0 T " + name + b"\n" for name in (b"pin_user_pages", b"migrate_pages", b"dma_buf_get"))
    found = find_functions(text, {})
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
