"""What the kernel says of this process around a registration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from regrepro.kernel import own_process


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    own_process.refuses_writable_files.cache_clear()
    yield
    own_process.refuses_writable_files.cache_clear()


def test_what_is_pinned_and_locked_is_read_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmLck:\t      8 kB\nVmPin:\t     160 kB\n")
    monkeypatch.setattr(own_process, "STATUS", str(status))
    locked = own_process.Locked()
    assert locked.read() == {"vmpin": 160 * 1024, "vmlck": 8 * 1024}
    status.write_text("VmPin:\t     164 kB\n")
    assert locked.read() == {"vmpin": 164 * 1024}
    locked.close()
    monkeypatch.setattr(own_process, "STATUS", str(tmp_path / "none"))
    assert locked.read() == {}


def test_this_process_has_pinned_nothing() -> None:
    locked = own_process.Locked()
    assert locked.read()["vmpin"] == 0
    locked.close()


@pytest.mark.parametrize(
    ("symbols", "due"),
    [
        ("pin_user_pages_fast vma_needs_dirty_tracking", True),
        ("pin_user_pages_fast", False),
        ("pin_user_pages_fast not_vma_needs_dirty_tracking", False),
        ("", None),
    ],
)
def test_a_symbol_tells_whether_the_kernel_refuses_writable_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symbols: str, due: bool | None
) -> None:
    kallsyms = tmp_path / "kallsyms"
    kallsyms.write_text("".join(f"0000000000000000 T {name}\n" for name in symbols.split()))
    monkeypatch.setattr(own_process, "KALLSYMS", kallsyms)
    assert own_process.refuses_writable_files() is due


def test_without_kallsyms_it_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_process, "KALLSYMS", tmp_path / "none")
    assert own_process.refuses_writable_files() is None
