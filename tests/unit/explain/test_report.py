"""The explanation for people."""

from __future__ import annotations

from regrepro.explain.report import plain, ranges
from unit.explain.explaining import LOG, run


def test_ranges() -> None:
    assert ranges([0, 1, 2, 3, 7]) == "0-3, 7"
    assert ranges([]) == ""


def test_foreign_text_reaches_the_terminal_without_control_characters() -> None:
    shown = plain(run(b"\x1b]0;owned\x07" + LOG.encode() + b"libfabric: fi_mr_reg failed \x1b[2J -12\n"))
    assert "\x1b" not in shown
    assert "\x07" not in shown
