"""What a lab machine is made of, and what its command line may hold."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from regrepro.errors import UsageError
from regrepro.options import format_size, parse_size

ACCEL_CHOICES = ("auto", "kvm", "tcg", "icount")
MAX_NODES = 8
_MIB, _GIB = 1 << 20, 1 << 30
# Below this, Python and numpy do not fit beside the kernel.
_LEAST_MEMORY = 512 * _MIB
_ORDINARY_MEMORY = 2 * _GIB
# x86-64 and arm64 take 2,048 bytes (COMMAND_LINE_SIZE); about 700 are ours and virtme-ng's.
_COMMAND_LINE_LIMIT = 1200

# What the lab or virtme-ng sets itself; a second value would break the boot or hide a panic.
_OWN = frozenset(
    {"init", "rdinit", "root", "rootfstype", "rootflags", "rootwait", "initrd", "ro", "rw", "raid"}
    | {"console", "earlyprintk", "earlycon", "panic", "loglevel", "quiet", "nr_open"}
)
_OWN_PREFIXES = ("virtme", "regrepro.")
# kernel parameters of memory reservations: [KMGTPE] as memparse (lib/cmdline.c) takes it.
_SIZE = r"(?:0[xX][0-9a-fA-F]+|\d+)[kKmMgGtTpPeE]?"
_FORMS = {
    "cma": (rf"{_SIZE}(?:@{_SIZE}(?:-{_SIZE})?)?", "512M"),
    "hugetlb_cma": (rf"{_SIZE}|\d+:{_SIZE}(?:,\d+:{_SIZE})*", "2G, or 0:1G,1:1G by node"),
    "movablecore": (rf"{_SIZE}|\d{{1,2}}%", "512M, or 25%"),
    "kernelcore": (rf"{_SIZE}|\d{{1,2}}%|mirror", "1G, or 50%"),
}


def parse_boot(values: Iterable[str]) -> tuple[str, ...]:
    """Return the single boot arguments in what `--boot` was given. Raises `UsageError`."""
    arguments: list[str] = []
    for value in values:
        bad = re.search(r"[^ -~]|[\"'`\\$]", value)
        if bad:
            raise UsageError(
                f"--boot {value!r} cannot be a kernel argument",
                why=f"it holds {bad[0]!r}",
                hint="plain words such as hugetlb_cma=2G, with a space between two",
            )
        arguments += value.split()
    for argument in arguments:
        _check(argument)
    length = sum(len(argument) + 1 for argument in arguments)
    if length > _COMMAND_LINE_LIMIT:
        raise UsageError(
            "--boot is too long",
            why=f"{length} characters; the kernel takes {_COMMAND_LINE_LIMIT} beside the lab's",
        )
    return tuple(arguments)


def _check(argument: str) -> None:
    name, equals, value = argument.partition("=")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):
        raise UsageError(f"--boot {argument} is no kernel argument", hint="NAME or NAME=VALUE")
    plain = name.replace("-", "_").lower()
    if plain in _OWN or name.startswith(_OWN_PREFIXES):
        raise UsageError(f"--boot {argument} is not possible", why=f"the lab sets {name} itself")
    if plain in _FORMS:
        form, example = _FORMS[plain]
        if not equals or not re.fullmatch(form, value):
            raise UsageError(f"--boot {argument} has a bad value", hint=f"{name}={example}")


@dataclass(frozen=True)
class Settings:
    """A machine. `nodes`: bytes of each NUMA node, whole MiB."""

    boot: tuple[str, ...]
    nodes: tuple[int, ...]
    cpus: int
    accel: str

    @property
    def numa(self) -> int:
        """Number of NUMA nodes."""
        return len(self.nodes)

    @property
    def memory(self) -> int:
        """Bytes of all nodes together."""
        return sum(self.nodes)

    def virtme_arguments(self) -> list[str]:
        """Return what virtme-run takes for this."""
        arguments = ["--memory", f"{self.memory // _MIB}M", "--cpus", str(self.cpus)]
        if self.numa > 1:
            each, more = divmod(self.cpus, self.numa)
            first = 0
            for node, size in enumerate(self.nodes):
                last = first + each + (node < more) - 1
                cpus = f"cpus={first}" if first == last else f"cpus={first}-{last}"
                arguments += ["--numa", f"{size // _MIB}M,{cpus}"]
                first = last + 1
        for argument in self.boot:
            arguments += ["--kopt", argument]
        if any(argument.partition("=")[0].replace("-", "_") == "hugetlb_cma" for argument in self.boot):
            # A node of `default_memory` has one whole gigantic page, and a kernel that lies anywhere in it
            # (one boot in seven) leaves none.
            arguments += ["--kopt", "nokaslr"]
        return arguments


def make_settings(
    *,
    boot: Iterable[str] = (),
    memory: int | None = None,
    numa: int | tuple[int, ...] = 1,
    cpus: int | None = None,
    accel: str = "auto",
) -> Settings:
    """Make settings, with defaults that fit the reservations that `boot` asks for. Raises `UsageError`.

    `memory` is split evenly among `numa` nodes, or `numa` is the bytes of each node.
    """
    arguments = parse_boot(boot)
    sizes = numa if isinstance(numa, tuple) else None
    if sizes is not None and memory is not None:
        raise UsageError("--memory and the sizes of --numa do not go together", hint="leave --memory out")
    count = len(numa) if isinstance(numa, tuple) else numa
    if not 1 <= count <= MAX_NODES:
        raise UsageError(f"--numa {count} is not possible", hint=f"1 to {MAX_NODES} nodes")
    if accel not in ACCEL_CHOICES:
        raise UsageError(f"--accel {accel} is not known", hint=f"one of {', '.join(ACCEL_CHOICES)}")
    if sizes is None:
        wanted = memory if memory is not None else default_memory(arguments, count)
        sizes = (wanted // count,) * count
    wanted = sum(sizes)
    if min(sizes) < _LEAST_MEMORY:
        given = (
            f"--memory {format_size(wanted)}" if memory is not None else f"--numa {format_size(min(sizes))}"
        )
        raise UsageError(
            f"{given} is too little",
            hint=f"{format_size(_LEAST_MEMORY)} for each node at least",
        )
    host = host_memory()
    # A guest touches what it uses only: what it reserves costs the host nothing.
    if wanted > 2 * host:
        raise UsageError(
            f"--memory {format_size(wanted)} is too much", why=f"this machine has {format_size(host)}"
        )
    processors = cpus if cpus is not None else min(4, os.cpu_count() or 1)
    if processors < 1:
        raise UsageError(f"--cpus {processors} is not possible", hint="1 at least")
    nodes = tuple(size // _MIB * _MIB for size in sizes)
    return Settings(arguments, nodes, max(processors, count, 2 if cpus is None else 1), accel)


def parse_nodes(text: str) -> int | tuple[int, ...]:
    """Return the number of NUMA nodes for `2`, the bytes of each for `1001M,999M`. Raises `UsageError`."""
    if re.fullmatch(r"\d{1,9}", text):
        return int(text)
    return tuple(parse_size(word) for word in text.split(","))


def host_memory() -> int:
    """Return the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_memory(arguments: Iterable[str], numa: int) -> int:
    """Return bytes enough for the reservations in `arguments`, and for the guest beside them.

    `hugetlb_cma` reserves whole gigantic pages (1 GiB on x86-64), aligned, on each node: a node of 3 GiB had
    no room for one, a node of 4 GiB has (mm/hugetlb_cma.c: per_node = DIV_ROUND_UP(size, nodes)).
    """
    node = _ORDINARY_MEMORY
    for argument in arguments:
        name, _, value = argument.partition("=")
        name = name.replace("-", "_")  # one to the kernel (parameq, kernel/params.c)
        # `2G`, `0:1G,1:1G`, `512M@0x40000000`; a bare number is in bytes or a percentage, and small.
        words = [part.partition("@")[0].rpartition(":")[2] for part in value.split(",")]
        sizes = [parse_size(word) for word in words if re.fullmatch(r"0*[1-9]\d*[kKmMgGtT]", word)]
        if name == "hugetlb_cma" and sizes:
            share = max(sizes) if ":" in value else -(-sizes[0] // numa)
            node = max(node, -(-share // _GIB) * _GIB + 3 * _GIB)
        elif name in {"cma", "movablecore"} and sizes:
            node = max(node, _ORDINARY_MEMORY + -(-sizes[0] // numa) * 2 - _GIB)
    return node * numa


def as_words(arguments: Iterable[str]) -> str:
    """Return arguments as one string, as a person would type them."""
    return shlex.join(arguments)
