"""How much processes wait for memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from regrepro.kernel.pressure import stalls


def test_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stalls.time, "monotonic", lambda: now[0])
    psi = tmp_path / "memory"
    text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
    psi.write_text(text.format(1000))
    watched = stalls.Stalls(psi)
    assert watched.share() == 0.0
    now[0] += 2
    psi.write_text(text.format(1_001_000))
    assert watched.share() == pytest.approx(0.5)
    now[0] += 2
    assert watched.share() == 0.0
    assert watched.worst == pytest.approx(0.5)
    without = stalls.Stalls(tmp_path / "missing")
    now[0] += 2
    assert without.share() == 0.0
    assert without.worst is None
