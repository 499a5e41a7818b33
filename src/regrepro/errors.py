"""Errors that a person can do something about.

Each carries what happened, why, and what to do next, and the exit code of the contract. The command line
prints one line from it; nothing that a user can cause ends in a traceback.
"""

from __future__ import annotations

import errno

from regrepro.foreign import visible

# Where one number has several names, Python's table keeps whichever was defined last. These are the kernel's.
_KERNEL_NAMES = {errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EAGAIN: "EAGAIN", errno.EDEADLK: "EDEADLK"}

EXIT_DECIDED = 0
EXIT_USAGE = 2
EXIT_REPRODUCED = 10
EXIT_OTHER_FAILURE = 11
EXIT_UNDECIDED = 125


def errno_name(number: int) -> str:
    """Return the kernel's name of a positive error number, such as `ENOMEM`; `errno 4095` without one."""
    return _KERNEL_NAMES.get(number) or errno.errorcode.get(number, f"errno {number}")


class RegreproError(Exception):
    """Something the user or the environment caused. `exit_code` is the process' exit code (2 unless said)."""

    exit_code = EXIT_USAGE

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        self.what = what
        self.why = why
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        """One line, `visible`: what happened, why, what to do next."""
        line = self.what
        if self.why:
            line += f": {self.why}"
        if self.hint:
            line += f" ({self.hint})"
        return visible(" ".join(line.split()))


class UsageError(RegreproError):
    """The command line or a scenario file asks for something that cannot be."""


class EnvironmentProblem(RegreproError):
    """This machine lacks something that the command cannot do without."""


class Unmet(RegreproError):
    """A precondition of a scenario is not met, or could not be proven. Ends the pass, not the run."""

    exit_code = EXIT_UNDECIDED

    def __init__(self, need: str, why: str, how: str) -> None:
        self.need = need
        self.how = how
        super().__init__(f"{need} is not met", why=why, hint=how)
