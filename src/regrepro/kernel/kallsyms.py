"""Addresses of kernel symbols.

The kernel formats /proc/kallsyms line by line, hundreds of thousands of them. Where /proc/kcore is open, its
compressed table is searched instead (scripts/kallsyms.c), which also works where kernel.kptr_restrict hides
addresses; symbols that vmcoreinfo names prove that the table was read rightly.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regrepro._core import ffi, lib
from regrepro.kernel.kcore import Kcore, KcoreError
from regrepro.kernel.procfs import KALLSYMS

# Symbols whose addresses vmcoreinfo has on every kernel (kernel/vmcore_info.c).
_WITNESSES = ("init_uts_ns", "node_online_map", "swapper_pg_dir")

_PART = 1 << 20  # bytes of /proc/kallsyms that are looked at at once: the whole takes a hundred megabytes


def find(names: Iterable[str], kcore: Kcore | None = None) -> dict[str, int]:
    """Look symbols up in the running kernel, in its own table if `kcore` is given and shows it.

    A name is missing where the kernel has no such symbol or hides addresses (kernel.kptr_restrict). Raises
    OSError when /proc/kallsyms is needed and cannot be read.
    """
    wanted = list(names)
    if kcore is not None:
        found = find_in_kcore(kcore, wanted)
        if found is not None:
            return found
    return find_in(KALLSYMS.read_bytes(), wanted)


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


def names_of(addresses: Iterable[int], kallsyms: Path = KALLSYMS) -> dict[int, str]:
    """Return by address the function that it lies in, as NAME+OFFSET (bytes), of the kernel or a module.

    An address is missing where the kernel says nothing of it, or hides addresses. Raises OSError.
    """
    wanted = np.unique(np.fromiter(addresses, np.uint64))
    nearest = np.zeros(len(wanted), np.uint64)
    names = [""] * len(wanted)
    rest = b""
    with kallsyms.open("rb") as file:
        while part := file.read(_PART):
            text = rest + part
            rest = text[text.rfind(b"\n") + 1 :]
            known, starts = _addresses(text[: len(text) - len(rest)])
            at = np.searchsorted(known, wanted, "right") - 1
            for number in np.flatnonzero((at >= 0) & (wanted > 0)):
                address = known[at[number]]
                if address and address >= nearest[number]:
                    nearest[number] = address
                    start = starts[at[number]]
                    names[number] = text[start : text.index(b"\n", start)].split()[2].decode()
    found = zip(wanted.tolist(), nearest.tolist(), names, strict=True)
    return {address: f"{name}+{address - its}" for address, its, name in found if its}


def _addresses(text: bytes) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the addresses of whole lines of kallsyms, sorted, and where the line of each begins."""
    width = text.find(b" ")  # each line begins with an address of as many digits as a pointer has
    if width <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    signs = np.frombuffer(text, np.uint8)
    starts = np.concatenate(([0], np.flatnonzero(signs == ord("\n"))[:-1] + 1)).astype(np.int64)
    digits = signs[starts[:, None] + np.arange(width)]
    values = (digits & 0xF) + np.where(digits > ord("9"), 9, 0).astype(np.uint8)
    known = np.zeros(len(starts), np.uint64)
    for column in values.T:
        known = known << np.uint64(4) | column.astype(np.uint64)
    order = np.argsort(known, kind="stable")
    return known[order], starts[order]


def find_in_kcore(kcore: Kcore, names: list[str]) -> dict[str, int] | None:
    """Search the kernel's own table. None where it is not shown or not of a form that is known here."""
    parts = ("names", "num_syms", "token_table", "token_index", "offsets")
    at = {part: kcore.symbol(f"kallsyms_{part}") for part in parts}
    witnesses = {name: address for name in _WITNESSES if (address := kcore.symbol(name)) is not None}
    table, first = at["token_table"], at["names"]
    if (
        any(address is None for address in at.values())
        or not witnesses
        or not table
        or not first
        or table < first
    ):
        return None
    wanted = [*witnesses, *names]
    try:
        compressed = kcore.read(first, table - first)
        tokens = kcore.read(table, max((at["token_index"] or 0) - table, 0))
        index = kcore.read(at["token_index"] or 0, 512)
        symbols = kcore.u32(at["num_syms"] or 0)
        keep = [ffi.new("char[]", name.encode()) for name in wanted]
        numbers = ffi.new("int64_t[]", len(wanted))
        error = lib.rr_kallsyms_find(
            ffi.from_buffer("uint8_t[]", compressed),
            len(compressed),
            ffi.from_buffer("char[]", tokens),
            len(tokens),
            ffi.cast("uint16_t *", ffi.from_buffer(index)),
            symbols,
            ffi.new("char *[]", keep),
            len(wanted),
            numbers,
        )
        if error:
            return None
        base_at = kcore.symbol("kallsyms_relative_base")
        base = None if base_at is None else kcore.u64(base_at)
        places = {}
        for name, number in zip(wanted, numbers, strict=True):
            if number >= 0:
                offset_at = (at["offsets"] or 0) + 4 * int(number)
                places[name] = (offset_at, struct.unpack("=i", kcore.read(offset_at, 4))[0])
    except (KcoreError, OSError):
        return None
    for form in range(3):
        found = {name: _address(form, *place, base) for name, place in places.items()}
        # swapper_pg_dir is another name's macro on some architectures and then in no table.
        seen = [found[name] == address for name, address in witnesses.items() if name in found]
        if seen and all(seen):
            return {name: address for name in names if (address := found.get(name)) is not None}
    return None


def _address(form: int, offset_at: int, offset: int, base: int | None) -> int | None:
    """The address that an entry of kallsyms_offsets[] stands for, in the three forms that kernels have
    had.
    """
    if form == 0:  # relative to the entry itself
        return offset_at + offset
    if base is None:
        return None
    if form == 1:  # relative to a base
        return base + (offset & 0xFFFFFFFF)
    return offset if offset >= 0 else base - 1 - offset  # CONFIG_KALLSYMS_ABSOLUTE_PERCPU
