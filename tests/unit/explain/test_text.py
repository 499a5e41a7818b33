"""Return values and errnos in a text."""

from __future__ import annotations

import pytest

from regrepro.explain import text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("-12", -12),
        ("0xfffffff4", -12),
        ("0xfffffffffffffff4", -12),
        ("4294967284", -12),
        ("8", 8),
        ("zz", None),
    ],
)
def test_return_values(value: str, expected: int | None) -> None:
    assert text.signed(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("failed with error Cannot allocate memory", "ENOMEM"),
        ("failed: -14", "EFAULT"),
        ("errno 22", "EINVAL"),
        ("returned ENOSPC", "ENOSPC"),
        ("RC: -12, Error: whatever", "ENOMEM"),
        ("nothing of it", None),
        ("step 12 of 22", None),
    ],
)
def test_errno_of(value: str, expected: str | None) -> None:
    assert text.errno_of(value) == expected
