"""How code knows that it runs inside a guest of the lab: by a boot argument that only the lab gives."""

from __future__ import annotations

import re
import secrets

from regrepro.kernel import procfs

ARGUMENT = "regrepro.lab"
_TOKEN = re.compile(r"[0-9a-f]{32}")


def new_token() -> str:
    """Return a token for one boot: 32 hex digits."""
    return secrets.token_hex(16)


def token_in(command_line: str) -> str | None:
    """Return the token on a kernel command line, None where there is none."""
    for word in command_line.split():
        name, _, value = word.partition("=")
        if name == ARGUMENT and _TOKEN.fullmatch(value):
            return value
    return None


def in_lab_guest() -> bool:
    """Whether this machine is a guest that the lab booted: nothing on it outlives the run."""
    return token_in(procfs.command_line() or "") is not None


def is_guest_of(token: str) -> bool:
    """Whether this machine was booted by the lab run that has `token`."""
    return token_in(procfs.command_line() or "") == token
