"""Addresses of kernel symbols, from /proc/kallsyms.

The file has hundreds of thousands of lines that the kernel formats one by one; it is read once and searched
as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

KALLSYMS = Path("/proc/kallsyms")


def find_in(text: bytes, names: Iterable[str]) -> dict[str, int]:
    """Return the addresses of `names` in the text of kallsyms, without symbols of modules and hidden (0)
    ones.
    """
    found = {}
    for name in names:
        needle = b" " + name.encode() + b"\n"
        at = text.find(needle)
        if at < 0:
            continue
        line = text[text.rfind(b"\n", 0, at) + 1 : at]
        address = int(line.split()[0], 16)
        if address:
            found[name] = address
    return found


def find(names: Iterable[str]) -> dict[str, int]:
    """Look symbols up in the running kernel.

    A name is missing where the kernel has no such symbol or hides addresses (kernel.kptr_restrict).
    Raises OSError when the file cannot be read at all.
    """
    return find_in(KALLSYMS.read_bytes(), names)
