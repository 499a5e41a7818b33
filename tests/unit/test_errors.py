"""Errors that teach, and the kernel's own names of error numbers."""

from __future__ import annotations

import errno

import pytest

from regrepro.errors import Unmet, UsageError, errno_name


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (errno.ENOMEM, "ENOMEM"),
        (errno.EOPNOTSUPP, "EOPNOTSUPP"),
        (errno.EAGAIN, "EAGAIN"),
        (errno.EDEADLK, "EDEADLK"),
        (4095, "errno 4095"),
    ],
)
def test_a_number_has_the_kernel_s_name(number: int, name: str) -> None:
    assert errno_name(number) == name


def test_an_error_is_one_line_with_reason_and_hint() -> None:
    error = UsageError("no scenario\nof that name", why="it is not shipped", hint="regrepro list shows them")
    assert str(error) == "no scenario of that name: it is not shipped (regrepro list shows them)"
    assert error.exit_code == 2


def test_an_unmet_need_says_how_to_meet_it() -> None:
    error = Unmet("root", "the page frame numbers are hidden", "run as root")
    assert str(error) == "root is not met: the page frame numbers are hidden (run as root)"
    assert error.exit_code == 125
