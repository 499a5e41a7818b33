"""The program that bpftrace runs: made for this kernel, silent on success.

Every filter is in the kernel. A registration that succeeds costs a few trampolines, uprobes and map updates,
and nothing leaves the kernel. One that fails leaves a handful of short lines, a thread's in time order:

    B|ns                                            the program runs
    W|symbol                                        nothing: bpftrace has read the kernel's symbols
    H|ns                                            a heartbeat, every ten seconds: all probes are attached
    O|pid|ns|cpu                                    a process opened an RDMA device
    D|tid|ns|function|ret|start|length|iova|access  a driver's registration failed
    G|tid|ns|function|ret|start|pages|flags         a pin failed inside of a registration
    I|tid|ns|function|ret                           another function failed inside of a registration
    M|tid|ns|ret|reason                             migrate_pages left pages behind, or failed
    S|tid|ns|page|refcount|mapcount|pincount|flags  a page that it left behind (struct page)
    A|tid|ns|start|length|iova|access|fd|present    what it had asked for, right before K. `present`: bits of
                                                    UVERBS_ATTR_*; "-": all but `fd`
    K|tid|pid|ns|since|function|ret|pins|user|uid|start|memlock|pinned|comm
                                                    the request failed; `pins`: calls << 40, and pages; of its
                                                    process `start` (ns of boottime), `memlock` (bytes, -1:
                                                    unlimited) and `pinned` (pages), "-" where unknown
    U|tid|pid|ns|verb|address|length|iova|access|fd|comm   libibverbs gave NULL
    P|tid|pid|ns|function|start|pages|flags|stack   a pin without FOLL_LONGTERM, where they are asked for

Functions are numbers: their places in `Program.names`.

Maps are written on the hot path only where it must be, and nothing is taken out of them there: to make an
entry and delete it again costs a multiple of writing one again.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from regrepro.kernel_functions import Family, Returns, of_family
from regrepro.watch.functions import Function, Functions, access_position

VERBS = {1: "ibv_reg_mr", 2: "ibv_reg_mr_iova2", 3: "ibv_reg_dmabuf_mr"}
STUCK_PAGES = 4  # that are told of one failed migration
ACCOUNT_SECONDS = 15

# IS_ERR(), include/linux/err.h. Written as one comparison: of a returned pointer, which to a trampoline has a
# type, the verifier allows no other arithmetic.
_POINTER_FAILED = "(uint64)retval > (uint64)0xfffffffffffff000"


@dataclass(frozen=True)
class PageOffsets:
    """Offsets (bytes) in struct page, of which `pincount` lies in the pages after a large folio's head."""

    lru: int
    flags: int
    refcount: int
    mapcount: int
    pincount: int


@dataclass(frozen=True)
class TaskOffsets:
    """Offsets (bytes) of what is told of the process whose request failed.

    In task_struct `leader` (group_leader), `signal` and `mm`, pointers, and `start` (start_boottime);
    `memlock` in signal_struct: of rlim[RLIMIT_MEMLOCK].rlim_cur; `pinned` in mm_struct: of pinned_vm.
    """

    leader: int
    start: int
    signal: int
    memlock: int
    mm: int
    pinned: int


@dataclass(frozen=True)
class RequestOffsets:
    """Offsets (bytes) in struct uverbs_attr_bundle (include/rdma/uverbs_ioctl.h), by which what a request
    asked for is read again when it has failed: `command`: of ucore.inbuf, in user space a struct
    ib_uverbs_reg_mr; `present`: of attr_present; `attributes`: of attrs, each of `size` bytes.
    """

    command: int
    present: int
    attributes: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Where this kernel has what is told of a failure; None: its BTF does not say."""

    pages: PageOffsets | None = None
    task: TaskOffsets | None = None
    request: RequestOffsets | None = None


# The attributes of requests that are not of struct ib_uverbs_reg_mr: start, length, iova, access, fd; from
# the enums uverbs_attrs_reg_*_cmd_attr_ids in include/uapi/rdma/ib_user_ioctl_cmds.h.
REQUESTS = {
    "ib_uverbs_handler_UVERBS_METHOD_REG_MR": (4, 5, 3, 6, 7),
    "ib_uverbs_handler_UVERBS_METHOD_REG_DMABUF_MR": (2, 3, 4, 6, 5),
}


def verb_number(name: str) -> int:
    """Return a verb's number in `VERBS`."""
    return next(number for number, verb in VERBS.items() if verb == name)


def attribute_index(identifier: int) -> int:
    """Return where an attribute of the core stands in attrs and attr_present: uapi_key_attr() and
    uapi_bkey_attr(), include/rdma/uverbs_ioctl.h; the odd places are of drivers' attributes.
    """
    return identifier << 1


@dataclass(frozen=True)
class Library:
    """A copy of libibverbs: a path that bpftrace can open, and where its functions begin (bytes of the file).

    `functions`: a verb's name → its address as the file's symbols say it.
    """

    path: str
    functions: dict[str, int]


@dataclass(frozen=True)
class Dialect:
    """What a version of bpftrace calls things."""

    entry: str = "kfunc"
    exit: str = "kretfunc"
    argument: str = "args->"

    @classmethod
    def of(cls, version: tuple[int, int]) -> Dialect:
        """Return the words of bpftrace `version` (major, minor)."""
        entry, leave = ("fentry", "fexit") if version >= (0, 21) else ("kfunc", "kretfunc")
        return cls(entry, leave, "args." if version >= (0, 18) else "args->")


@dataclass
class Program:
    """Text for bpftrace, and the functions that its lines name by number."""

    text: str = ""
    names: list[str] = field(default_factory=list)


class _Maker:
    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.names: list[str] = []
        self._parts: list[str] = []

    def number(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def add(self, text: str) -> None:
        self._parts.append(text)

    def text(self) -> str:
        return "\n".join(self._parts) + "\n"

    def place(self, function: Function, *, leaving: bool) -> str:
        """Return the attach point of a function's entry, or of its return."""
        if function.by_trampoline:
            kind = self._dialect.exit if leaving else self._dialect.entry
            module = f"{function.module}:" if function.module else ""
            return f"{kind}:{module}{function.name}"
        return f"{'kretprobe' if leaving else 'kprobe'}:{function.name}"

    def argument(self, function: Function, position: int) -> str:
        """Return a parameter, for the function's entry, or with a trampoline for its return, too."""
        if function.by_trampoline and function.parameters is not None:
            return f"(uint64){self._dialect.argument}{function.parameters[position]}"
        return f"arg{position}"

    def at_return(self, function: Function, positions: Sequence[int], guard: str, keep: str) -> list[str]:
        """Return expressions for parameters at the return; by kprobes they are kept from the entry on."""
        if function.by_trampoline:
            return [self.argument(function, position) for position in positions]
        values = ", ".join(f"arg{position}" for position in positions)
        self.add(f"kprobe:{function.name} {guard} {{ @{keep}[tid] = ({values}, (uint64)0); }}")
        return [f"@{keep}[tid].{index}" for index in range(len(positions))]

    def forget(self, function: Function, keep: str) -> str:
        return "" if function.by_trampoline else f" delete(@{keep}[tid]);"


def make_program(
    functions: Functions,
    libraries: Sequence[Library] = (),
    *,
    dialect: Dialect | None = None,
    offsets: PageOffsets | None = None,
    task: TaskOffsets | None = None,
    request: RequestOffsets | None = None,
    plain_pins: Sequence[str] = (),
    longterm: int = 0,
    account: bool = False,
) -> Program:
    """Make the program. `plain_pins`: functions whose pins without `longterm` (FOLL_LONGTERM) are told."""
    make = _Maker(dialect or Dialect())
    # The last one in the text is the first to be attached: a heartbeat means that all are.
    zero = "(uint64)0"
    make.add(
        f"BEGIN {{ @call[tid] = ({', '.join([zero] * 6)}); @in[tid] = ({zero}, {zero}); @ret[tid] = {zero}; "
        "delete(@call[tid]); delete(@in[tid]); delete(@ret[tid]); "
        'printf("B|%lld", nsecs);' + (' printf("W|%s", ksym((uint64)1)); }' if plain_pins else " }")
        # Symbols are read now, and not when the first stack is to be told.
    )
    # The first beat is told soon, the others seldom: each wakes two processes.
    make.add(
        'interval:s:2 { @beat = @beat + 1; if (@beat == 1 || @beat % 5 == 0) { printf("H|%lld", nsecs); } }'
    )
    if account and functions.drivers:
        make.add(
            f"interval:s:{ACCOUNT_SECONDS} {{ print(@count); print(@bytes); print(@sizes); clear(@count); "
            "clear(@bytes); clear(@sizes); }"
        )
    for library in libraries:
        _library(make, library)
    if functions.open is not None:
        make.add(
            f"{make.place(functions.open, leaving=True)} {{ if ((int32)retval == 0) "
            '{ printf("O|%d|%lld|%d", pid, nsecs, cpu); } }'
        )
    for function in functions.entries:
        _entry(make, function, task, request)
    for function in functions.drivers:
        _driver(make, function, account=account, asked=request is not None)
    for function in functions.pins:
        _pin(make, function)
    for function in functions.inner:
        _inner(make, function)
    if functions.migrate is not None:
        _migrate(make, functions.migrate, offsets, sorted(functions.reasons))
    for function in functions.plain_pins:
        if function.name in plain_pins and longterm:
            _plain_pin(make, function, longterm)
    make.add("tracepoint:sched:sched_process_exit { delete(@call[tid]); delete(@in[tid]); }")
    make.add("END { clear(@call); clear(@in); clear(@ret); clear(@beat); }")
    return Program(make.text(), make.names)


def _library(make: _Maker, library: Library) -> None:
    """Follow a copy of libibverbs at entry and return: which verb was called with what, whether it gave NULL.

    In current versions ibv_reg_mr ends by jumping into ibv_reg_mr_iova2, which then stands for both.
    """
    for number, verb in VERBS.items():
        address = library.functions.get(verb)
        if address is None or is_jump(verb, library.functions):
            continue
        place = f"{library.path}:{address:#x}"
        # ibv_reg_mr(pd, addr, length, access); ibv_reg_mr_iova2(pd, addr, length, iova, access);
        # ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access).
        given = {
            1: "arg1, arg2, arg1, arg3, (uint64)0",
            2: "arg1, arg2, arg3, arg4, (uint64)0",
            3: "arg1, arg2, arg3, arg5, arg4",
        }[number]
        make.add(f"uprobe:{place} {{ @call[tid] = ((uint64){number}, {given}); }}")
        make.add(
            f"uretprobe:{place} {{ if (retval == 0) {{ $c = @call[tid]; if ($c.0) "
            '{ printf("U|%d|%d|%lld|%d|%llx|%lld|%llx|%lld|%d|%s", tid, pid, nsecs, $c.0, $c.1, '
            "$c.2, $c.3, $c.4, $c.5, comm); } } delete(@call[tid]); }"
        )


def is_jump(verb: str, functions: Mapping[str, int]) -> bool:
    """Whether ibv_reg_mr is so short that it can only be a jump into ibv_reg_mr_iova2."""
    if verb != "ibv_reg_mr" or not {"ibv_reg_mr_iova2", "ibv_reg_mr_iova2:size"} & functions.keys():
        return False
    return functions.get("ibv_reg_mr:size", 1 << 30) < 32


def _entry(
    make: _Maker, function: Function, task: TaskOffsets | None, request: RequestOffsets | None
) -> None:
    """Keep since when a thread is in a request, and what it pinned since then.

    It stays in the map until the thread's next request; what a thread does in between is told by its time.
    """
    number = make.number(function.name)
    read, shown, values = "", "-|-|-", ""
    if task is not None:

        def at(pointer: str, offset: int) -> str:
            return f"*(uint64 *)({pointer} + {offset})"

        read = (
            f"$t = (uint64)curtask; $g = {at('$t', task.leader)}; $s = {at('$t', task.signal)}; "
            f"$m = {at('$t', task.mm)}; "
        )
        shown = "%lld|%lld|%lld"
        values = f"{at('$g', task.start)}, {at('$s', task.memlock)}, {at('$m', task.pinned)}, "
    asked = _asked(make, function, request) if request is not None and function.by_trampoline else ""
    make.add(f"{make.place(function, leaving=False)} {{ @in[tid] = ((uint64)nsecs, (uint64)0); }}")
    make.add(
        f"{make.place(function, leaving=True)} {{ if ((int32)retval != 0) {{ $i = @in[tid]; {read}{asked}"
        f'printf("K|%d|%d|%lld|%lld|{number}|%d|%lld|%d|%d|{shown}|%s", tid, pid, nsecs, $i.0, '
        f"(int32)retval, $i.1, @call[tid].0, uid, {values}comm); }} }}"
    )


def _asked(make: _Maker, function: Function, request: RequestOffsets) -> str:
    """Return what tells what the failed request had asked for: of its only parameter, the bundle."""
    bundle = f"$b = {make.argument(function, 0)}; "
    if function.name not in REQUESTS:
        # struct ib_uverbs_reg_mr, include/uapi/rdma/ib_user_verbs.h: response, start, length, hca_va,
        # pd_handle, access_flags.
        values = ", ".join(f"*(uint64 *)uptr($u + {offset})" for offset in (8, 16, 24))
        return (
            f"{bundle}$u = *(uint64 *)($b + {request.command}); "
            f'printf("A|%d|%lld|%llx|%lld|%llx|%lld|-1|-", tid, nsecs, {values}, '
            "(uint64)(*(uint32 *)uptr($u + 36))); "
        )
    places = [
        f"*(uint64 *)($b + {request.attributes + request.size * attribute_index(item)})"
        for item in REQUESTS[function.name]
    ]
    return (
        f'{bundle}printf("A|%d|%lld|%llx|%lld|%llx|%lld|%lld|%llx", tid, nsecs, {", ".join(places)}, '
        f"*(uint64 *)($b + {request.present})); "
    )


def _driver(make: _Maker, function: Function, *, account: bool, asked: bool) -> None:
    number = make.number(function.name)
    if asked and not account and not function.by_trampoline and "dmabuf" not in function.name:
        # What it was given the request's A tells; to keep it at the entry is what costs.
        make.add(
            f"{make.place(function, leaving=True)} {{ if ({_POINTER_FAILED}) {{ {_pointer(function)}"
            f'printf("I|%d|%lld|{number}|%d", tid, nsecs, (int32)$r); }} }}'
        )
        return
    positions = [1, 2, 3, access_position(function.name)]
    start, length, iova, access = make.at_return(function, positions, "", f"d{number}")
    succeeded = ""
    if account:
        kind = "2" if "dmabuf" in function.name else "@in[tid].1 ? 1 : 3"
        succeeded = (
            f" else {{ $k = (uint64)({kind}); @count[{number}, $k, pid, comm] = count(); "
            f"@bytes[{number}, $k, pid, comm] = sum({length}); @sizes[{number}, $k] = hist({length}); }}"
        )
    make.add(
        f"{make.place(function, leaving=True)} {{ if ({_POINTER_FAILED}) {{ {_pointer(function)}"
        f'printf("D|%d|%lld|{number}|%d|%llx|%lld|%llx|%lld", tid, nsecs, (int32)$r, {start}, '
        f"{length}, {iova}, (uint64)(uint32){access}); }}{succeeded}{make.forget(function, f'd{number}')} }}"
    )


def _pin(make: _Maker, function: Function) -> None:
    number = make.number(function.name)
    start, pages, flags = make.at_return(function, [0, 1, 2], "/@in[tid].0/", f"p{number}")
    make.add(
        f"{make.place(function, leaving=True)} {{ $i = @in[tid]; if ($i.0) {{ if ((int32)retval < 0) "
        f'{{ printf("G|%d|%lld|{number}|%d|%llx|%d|%llx", tid, nsecs, (int32)retval, {start}, {pages}, '
        f"(uint64)(uint32){flags}); @in[tid] = ($i.0, (uint64)($i.1 + ((uint64)1 << 40))); }} "
        f"else {{ @in[tid] = ($i.0, (uint64)($i.1 + ((uint64)1 << 40) + (uint64)retval)); }} }}"
        f"{make.forget(function, f'p{number}')} }}"
    )


def _inner(make: _Maker, function: Function) -> None:
    number = make.number(function.name)
    first, failed, value = "", "(int32)retval < 0", "retval"
    if function.name in of_family(Family.UNPINNABLE):
        failed += f" && (int32)retval != -{errno.EAGAIN}"  # the pages moved, and the pin is tried again
    if function.returns is Returns.POINTER:
        first, failed, value = _pointer(function), _POINTER_FAILED, "$r"
    make.add(
        f"{make.place(function, leaving=True)} {{ if ({failed}) {{ if (@in[tid].0) {{ {first}"
        f'printf("I|%d|%lld|{number}|%d", tid, nsecs, (int32){value}); }} }} }}'
    )


def _pointer(function: Function) -> str:
    """Return what makes a number of a returned pointer. What a trampoline gives loses its type in a map."""
    if not function.by_trampoline:
        return "$r = (int64)retval; "
    return "@ret[tid] = (uint64)retval; $r = (int64)@ret[tid]; delete(@ret[tid]); "


def _migrate(make: _Maker, function: Function, offsets: PageOffsets | None, reasons: Sequence[int]) -> None:
    """After a failure the pages that stayed are on the list that was given (migrate_pages, mm/migrate.c).

    `reasons`: those of pins (enum migrate_reason), as compaction fails to move pages all day long; empty: not
    known.
    """

    def pinning(reason: str) -> str:
        return " || ".join(f"{reason} == {value}" for value in reasons)

    guard = f"/@in[tid].0 && ({pinning('arg5')})/" if reasons else "/@in[tid].0/"
    source, reason = make.at_return(function, [0, 5], guard, "m")
    told = "@in[tid].0"
    if not function.by_trampoline:
        told = source  # nothing was kept of one that is none of a pin
    elif reasons:
        told += f" && ({pinning(reason)})"
    pages = ""
    if offsets is not None:
        at = f"($n - {offsets.lru})"
        pages = (
            f" if ((int32)retval > 0) {{ $h = (uint64){source}; $n = *(uint64 *)$h; unroll({STUCK_PAGES}) {{ "
            "if ($n != $h && $n != 0) { "
            f'printf("S|%d|%lld|%llx|%d|%d|%d|%llx", tid, nsecs, {at}, '
            f"*(int32 *)({at} + {offsets.refcount}), *(int32 *)({at} + {offsets.mapcount}), "
            f"*(int32 *)({at} + {offsets.pincount}), *(uint64 *)({at} + {offsets.flags})); "
            "$n = *(uint64 *)$n; } } }"
        )
    make.add(
        f"{make.place(function, leaving=True)} {{ if ((int32)retval != 0) {{ if ({told}) "
        f'{{ printf("M|%d|%lld|%d|%d", tid, nsecs, (int32)retval, {reason});{pages} }} }}'
        f"{make.forget(function, 'm')} }}"
    )


def _plain_pin(make: _Maker, function: Function, longterm: int) -> None:
    number = make.number(function.name)
    first = 1 if function.name.endswith("_remote") else 0
    start, pages, flags = make.at_return(function, [first, first + 1, first + 2], "", f"q{number}")
    make.add(
        f"{make.place(function, leaving=True)} {{ if ((int64)retval > 0 && ({flags} & {longterm}) == 0) "
        f'{{ printf("P|%d|%d|%lld|{number}|%llx|%lld|%llx|%s", tid, pid, nsecs, {start}, {pages}, '
        f"(uint64)(uint32){flags}, kstack(12)); }}{make.forget(function, f'q{number}')} }}"
    )
