"""What `run` probes of the functions in kernel_functions.py: lines for kprobe_events, what a return keeps.

Which of a function's names exist and can be probed is asked of the kernel, by trying (`Tracer.arm()`).
"""

from __future__ import annotations

from regrepro.kernel_functions import BY_NAME, FUNCTIONS, Kept, KernelFunction, Returns

PROBED: tuple[KernelFunction, ...] = tuple(row for row in FUNCTIONS if row.run is not Kept.NOTHING)
GUP_FUNCTIONS = frozenset(name for row in PROBED if row.arguments for name in row.names)


def kept(name: str, value: int) -> int:
    """Return what is kept of a return value: of a pointer only its errno, 0 for NULL, else 1.

    A kernel address says nothing here and does not belong in a file that is passed on.
    """
    row = BY_NAME.get(name)
    pointer = row is not None and row.returns in (Returns.POINTER, Returns.POINTER_OR_NULL)
    return 1 if value and pointer and not -4096 < value < 0 else value


def return_probe(group: str, event: str, name: str, row: KernelFunction, *, with_arguments: bool) -> str:
    """Return the line for kprobe_events that records a return (and, since 6.9, its arguments with it)."""
    line = f"r:{group}/{event} {name}"
    if with_arguments:
        line += _fetches(row)
    return f"{line} ret=$retval:{row.returns.fetch}"


def entry_probe(group: str, event: str, name: str, row: KernelFunction) -> str:
    """Return the line for kprobe_events that records a call's arguments."""
    return f"p:{group}/{event} {name}{_fetches(row)}"


def _fetches(row: KernelFunction) -> str:
    return "".join(f" {name}=$arg{position}:{kind}" for name, position, kind in row.arguments)
