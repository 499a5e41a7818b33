"""The real machine: what is read of it."""

from __future__ import annotations

from regrepro.stage.system import parse_cpu_list


def test_cpu_list() -> None:
    assert parse_cpu_list("0-2,5\n") == {0, 1, 2, 5}
    assert parse_cpu_list("\n") == set()
