"""What the kernel counted of registrations that succeed."""

from __future__ import annotations

import pytest

from regrepro.watch import registrations
from regrepro.watch.registrations import KEY, NO_SIZE, SIZE_KEY, Account


def test_the_account_adds_what_the_kernel_counted() -> None:
    account = Account()
    names = ["rxe_reg_user_mr", "mlx5_ib_reg_user_mr_dmabuf"]
    host = KEY.pack(0, 1, 42, 0, "é app".encode()[:15])
    dmabuf = KEY.pack(1, 2, 43, 0, b"x" * 16)
    account.take_counted({}, {}, names)
    assert not account.changed
    account.take_counted({host: (3, 12288)}, {SIZE_KEY.pack(0, 1, 12): 3}, names)
    rows, sizes = {host: (1, 0), dmabuf: (2, 8192)}, {SIZE_KEY.pack(0, 1, 12): 1}
    account.take_counted(rows, sizes | {SIZE_KEY.pack(0, 1, 0): 5, SIZE_KEY.pack(0, 1, NO_SIZE): 7}, names)
    assert account.changed
    assert account.totals() == {("host", "rxe"): (4, 12288), ("dma-buf", "mlx5_ib"): (2, 8192)}
    told = account.as_record()
    assert [(row["fn"], row["pid"], row["comm"]) for row in told["registrations"]] == [
        (names[1], 43, "x" * 16),
        (names[0], 42, "é app"),
    ]
    assert told["sizes"] == [{"fn": names[0], "path": "host", "buckets": [[0, 7], [1, 5], [4096, 4]]}]


def test_what_too_many_processes_did_is_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "_ROWS", 2)
    account = Account()
    for function, pid in ((0, 41), (0, 42), (0, 43), (0, 44), (0, 42), (1, 41)):
        row = {KEY.pack(function, 1, pid, 0, b"app"): (1, 4096)}
        account.take_counted(row, {}, ["rxe_reg_user_mr", "efa_reg_mr"])
    told = account.as_record()["registrations"]
    assert [(row["fn"], row["pid"], row["comm"], row["count"], row["bytes"]) for row in told] == [
        ("efa_reg_mr", 0, "(others)", 1, 4096),
        ("rxe_reg_user_mr", 0, "(others)", 2, 2 * 4096),
        ("rxe_reg_user_mr", 41, "app", 1, 4096),
        ("rxe_reg_user_mr", 42, "app", 2, 8192),
    ]
    assert account.totals() == {("host", "rxe"): (5, 5 * 4096), ("host", "efa"): (1, 4096)}
