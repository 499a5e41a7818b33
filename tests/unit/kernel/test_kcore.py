"""Kernel memory by /proc/kcore."""

from __future__ import annotations

from pathlib import Path

import pytest

from regrepro.kernel import kcore


def test_kcore_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kcore"
    path.write_bytes(b"not ELF" * 20)
    with pytest.raises(kcore.KcoreError):
        kcore.Kcore(path)
    with pytest.raises(OSError, match="nowhere"):
        kcore.Kcore(tmp_path / "nowhere")
