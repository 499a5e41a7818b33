"""The lines that hold a word of interest."""

from __future__ import annotations

import io

from regrepro.explain.scan import Needles, read


def test_scan_counts_lines_and_cuts_endless_ones() -> None:
    data = b"x" * 3_000_000 + b"\n" + b"ibv_reg_mr\n" * 3 + b"y" * 2_000_000
    for use_core in (True, False):
        found = list(read(io.BytesIO(data), Needles((b"ibv_reg_mr",), use_core=use_core)))
        assert [one.line for one in found] == [b"ibv_reg_mr"] * 3
        assert [one.number for one in found] == [2, 3, 4]
