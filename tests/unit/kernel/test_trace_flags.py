"""FOLL_* flags by the kernel's version and by its BTF."""

from __future__ import annotations

import pytest
from kernel_fakes import PRIVATE_FLAGS, PUBLIC_FLAGS, anonymous_enums

from regrepro.kernel import trace_flags


@pytest.mark.parametrize(
    ("release", "bits", "expected"),
    [
        ("5.10.0-46-amd64", 0x10001, ["FOLL_WRITE", "FOLL_LONGTERM"]),
        ("6.1.0-57-amd64", 0x10001, ["FOLL_WRITE", "FOLL_LONGTERM"]),
        ("6.2.1", 0x101, ["FOLL_WRITE", "FOLL_HWPOISON"]),
        ("6.3.0", 0x101, ["FOLL_WRITE", "FOLL_LONGTERM"]),
        ("7.3.4+deb13-amd64", 0x101, ["FOLL_WRITE", "FOLL_LONGTERM"]),
        ("7.3.4", 0, []),
        ("7.3.4", 1 << 30 | 1, ["FOLL_WRITE", "0x40000000"]),
        ("5.13.19", 0x80, ["FOLL_SPLIT"]),
        ("6.1.0", 0x80, ["FOLL_NOFAULT"]),
    ],
)
def test_flags_are_named_by_the_kernels_version(release: str, bits: int, expected: list[str]) -> None:
    assert trace_flags.from_version(release).decode(bits) == expected


@pytest.mark.parametrize("release", ["4.19.0", "5.5.19", "not a version"])
def test_flags_of_an_unknown_kernel_are_not_guessed(release: str) -> None:
    assert trace_flags.from_version(release).values == {}


def test_flags_from_btf_win_over_the_table() -> None:
    blob = anonymous_enums({"OTHER": 1}, PUBLIC_FLAGS, PRIVATE_FLAGS, {"LAST": 3})
    found = trace_flags.from_btf(blob)
    assert found is not None
    assert found.values == PUBLIC_FLAGS | PRIVATE_FLAGS
    assert "BTF" in found.source
    assert found.decode(1 << 9) == ["FOLL_LONGTERM"]


def test_btf_without_the_flags_or_no_btf_says_nothing() -> None:
    assert trace_flags.from_btf(anonymous_enums({"OTHER": 1, "MORE": 2, "STILL": 3})) is None
    assert trace_flags.from_btf(b"no BTF at all, only some text") is None
    assert trace_flags.from_btf(b"") is None


def test_flags_of_a_vendors_kernel_follow_its_btf_and_not_its_number() -> None:
    """A 5.14 with the enums of 6.3 ported back, a 4.18 with FOLL_PIN, and one without BTF."""
    new = trace_flags.of_kernel(anonymous_enums(PUBLIC_FLAGS, PRIVATE_FLAGS), "5.14.0-427.el9.x86_64", False)
    assert new.decode(1 << 9) == ["FOLL_LONGTERM"]
    assert "FOLL_LONGTERM" not in new.decode(1 << 16)
    old = trace_flags.of_kernel(anonymous_enums({"OTHER": 1, "MORE": 2}), "4.18.0-553.el8_10.x86_64", False)
    assert old.decode(0x50001) == ["FOLL_WRITE", "FOLL_LONGTERM", "FOLL_PIN"]
    assert old.decode(0x80) == ["0x80"]
    blind = trace_flags.of_kernel(b"", "5.14.0-427.el9.x86_64", False)
    assert blind.decode(0x101) == ["0x101"]
    assert trace_flags.of_kernel(b"", "6.1.0-57-amd64", True).decode(0x10000) == ["FOLL_LONGTERM"]
