"""The engine of kernels that have BTF of their modules: BPF programs of our own, without bpftrace.

What they are and why is said in request_programs.py. They hang on file descriptors of this process, so
nothing stays attached once it is dead.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from regrepro.core import bpf
from regrepro.core.uprobes import REGISTERS, attach_to_code, attach_to_function, registers_in_context
from regrepro.kernel import kallsyms
from regrepro.kernel_functions import Family, of_family
from regrepro.watch import request_programs as programs
from regrepro.watch.correlate import Correlator
from regrepro.watch.failed_registration import (
    Asked,
    Ended,
    Inner,
    LibraryWord,
    ShortTermPin,
    StuckPage,
    limits_of,
)
from regrepro.watch.functions import Function, Functions
from regrepro.watch.libraries import Copy
from regrepro.watch.process import kernel_boottime
from regrepro.watch.program import ACCOUNT_SECONDS, Layout
from regrepro.watch.registrations import KEY, SIZE_KEY, Account
from regrepro.watch.request_programs import Context, Maps

RING_BYTES = 8 << 20  # of all CPUs: some 16,000 failures
_THREADS = 16384  # of which the kernel remembers that they are in a request; the others' is doubted
_TURNS = 2  # of some 64 KiB that are taken at once
_FORGET_SECONDS = 60.0
_SYMBOLS_SECONDS = 10.0  # in which symbols are read once at most
# Registers of an architecture that have a function's parameters, and what it returned.
_CALLS = {
    "x86_64": (("rdi", "rsi", "rdx", "rcx", "r8", "r9"), "rax"),
    "aarch64": (("x0", "x1", "x2", "x3", "x4", "x5"), "x0"),
}


def _lives(pid: int, known: dict[int, bool]) -> bool:
    """Return whether a process is there; `known`: of whom that was asked already."""
    if pid not in known:
        known[pid] = Path(f"/proc/{pid}").exists()
    return known[pid]


Told = Callable[[int, int, int, Sequence[int]], None]
"""Takes a record: thread, process, ns, and the words behind."""


class BpfEngine:
    """Follows registrations from its beginning until `stop`.

    Functions that only add to what is known of a failure, and that nobody can follow, are moved to
    `functions.missing`. Raises OSError where it does not take the others; nothing is left behind then.
    """

    def __init__(
        self,
        functions: Functions,
        correlator: Correlator,
        layout: Layout,
        *,
        plain_pins: Sequence[str] = (),
        longterm: int = 0,
        unpins: bool = False,
        account: Account | None = None,
    ) -> None:
        self.correlator = correlator
        self._layout = layout
        self._account = account
        self._unpins = unpins
        self._account_at = time.monotonic() + ACCOUNT_SECONDS
        self._counted: tuple[dict[bytes, bytes], dict[bytes, bytes]] = {}, {}
        self._gone: set[bytes] = set()  # entries of processes that had ended the last time
        self._drivers = [function.name for function in functions.drivers]
        self.started = time.monotonic()
        self.errors: list[str] = []
        self.by_kprobe: list[str] = []
        self.ended = False
        self._told: list[tuple[int, Told]] = []
        self._requests: set[int] = set()  # numbers of programs that tell of failed requests
        self._taken: deque[bytes] = deque()  # records that were not handed on yet
        self._last_ns = 0  # of the last record that was
        self._fds: list[int] = []  # of programs and of what they are attached to
        self._programs: list[int] = []
        self._modules: dict[str, int] = {}
        self._refused: dict[str, str] = {}  # functions that could not be followed → their modules
        self._copies: dict[tuple[int, int], list[int]] = {}
        self._symbols: dict[int, str] = {}
        self._symbols_read = float("-inf")
        self._forget_at = self.started + _FORGET_SECONDS
        self._lost = 0
        self._missed = 0  # by programs that are gone
        self._counter: bpf.Counter | None = None
        self._uncounted: bpf.Counter | None = None
        self._ring: bpf.Ring | None = None
        self._maps = Maps(-1, -1, -1, -1, -1)
        calls = _CALLS.get(os.uname().machine)
        if calls is None or not REGISTERS:
            raise OSError(errno.ENOSYS, f"calls of {os.uname().machine} are not known here")
        context = registers_in_context()
        self._registers = Context([context[name] for name in calls[0]], context[calls[1]])
        try:
            self._open_maps()
            self._attach(functions, plain_pins, longterm)
        except BaseException:
            self.stop()
            raise
        finally:
            self._close_modules()

    def _open_maps(self) -> None:
        self._ring = bpf.Ring(RING_BYTES)
        self._counter = bpf.Counter("regrepro_lost")
        for name, size in (
            ("regrepro_req", programs.STATE_BYTES),
            ("regrepro_call", programs.CALL_BYTES),
            ("regrepro_pin", programs.PIN_BYTES),
        ):
            fd = bpf.open_map(bpf.MAP_LRU_HASH, name, value_size=size, entries=_THREADS)
            self._fds.append(fd)
        if self._account is not None:
            for name, key_size, size in (
                ("regrepro_count", KEY.size, 16),
                ("regrepro_sizes", SIZE_KEY.size, 8),
            ):
                fd = bpf.open_map(bpf.MAP_HASH, name, key_size=key_size, value_size=size, entries=_THREADS)
                self._fds.append(fd)
            self._uncounted = bpf.Counter("regrepro_uncount")
        counted = (self._uncounted.fd,) if self._uncounted is not None else ()
        self._maps = Maps(self._ring.fd, self._counter.fd, *self._fds, *counted)
        if self._unpins:
            fd = bpf.open_map(bpf.MAP_LRU_HASH, "regrepro_pinner", value_size=8, entries=_THREADS)
            self._fds.append(fd)
            self._maps = replace(self._maps, pinners=fd)

    # Attaching

    def _attach(self, functions: Functions, plain_pins: Sequence[str], longterm: int) -> None:
        """Requests come last, and their beginning last of all: of one that is under way then, it is said that
        nobody saw it begin.
        """
        for group in (functions.inner, functions.drivers if self._account is None else []):
            for function in list(group):
                if not self._follow(functions, function, self._follow_failures):
                    group.remove(function)
        if self._account is not None:
            for driver, function in enumerate(functions.drivers):
                self._follow_registrations(driver, function)
        follow = partial(self._follow_migrations, reasons=sorted(functions.reasons))
        if functions.migrate is not None and not self._follow(functions, functions.migrate, follow):
            functions.migrate = None
        for function in functions.pins:
            number = self._number(partial(self._pin_failed, function.name), 4)
            self._at_exit(function, lambda c, n=number: programs.pin(self._maps, c, n))  # type: ignore[misc]
        for function in functions.plain_pins:
            if function.name in plain_pins and longterm:
                self._follow_plain_pins(function, longterm)
        for function in list(functions.unpins) if self._unpins else []:
            if not self._follow(functions, function, self._follow_unpins):
                functions.unpins.remove(function)
        if functions.open is not None:
            number = self._number(self._opened, 0)
            self._at_exit(functions.open, lambda c: programs.opened(self._maps, c, number))
        for function in functions.entries:
            number = self._number(partial(self._request_failed, function.name), len(programs.REQUEST_WORDS))
            self._requests.add(number)
            self._at_exit(
                function,
                lambda c, n=number, f=function: programs.end_request(  # type: ignore[misc]
                    self._maps, c, n, f.name, self._layout
                ),
            )
        for function in functions.entries:
            self._trampoline(function, bpf.TRACE_FENTRY, lambda c: programs.begin_request(self._maps, c))

    def _number(self, told: Told, words: int) -> int:
        """Return the number of a program whose records have so many words behind the header."""
        self._told.append((words, told))
        return len(self._told) - 1

    def follow_new(self, functions: Functions, found: Functions) -> list[str]:
        """Follow functions of modules that were loaded since, and add them to `functions`; return names."""
        new = []
        for group, others in ((functions.inner, found.inner), (functions.drivers, found.drivers)):
            how = self._follow_failures
            if group is functions.drivers and self._account is not None:
                how = self._follow_new_registrations
            known = {function.name for function in group} | functions.missing.keys()
            for function in others:
                if function.name not in known and self._follow(functions, function, how):
                    group.append(function)
                    new.append(function.name)
        self._close_modules()
        if functions.drivers:
            functions.missing.pop("reg_user_mr", None)
        return new

    def forget_modules(self, functions: Functions, gone: Collection[str]) -> None:
        """Forget functions of modules that have been unloaded, which those that are followed by trampolines
        never are: when they come again they are to be followed again.
        """
        for group in (functions.inner, functions.drivers if self._account is None else []):
            for function in [item for item in group if item.module in gone]:
                group.remove(function)
                if function.name in self.by_kprobe:
                    self.by_kprobe.remove(function.name)
        for name in [name for name, module in self._refused.items() if module in gone]:
            functions.missing.pop(name, None)
            del self._refused[name]

    def _follow_new_registrations(self, function: Function) -> None:
        self._follow_registrations(len(self._drivers), function)
        self._drivers.append(function.name)

    def _close_modules(self) -> None:
        while self._modules:
            os.close(self._modules.popitem()[1])

    def _follow(self, functions: Functions, function: Function, how: Callable[[Function], None]) -> bool:
        """Follow a function if the kernel lets anybody do so; say in `missing` why not."""
        try:
            how(function)
        except OSError as error:
            functions.missing[function.name] = f"it cannot be followed: {error.strerror}"
            self._refused[function.name] = function.module
            return False
        return True

    def _follow_failures(self, function: Function) -> None:
        number = self._number(partial(self._failed_inside, function.name), 1)
        # EAGAIN: the pages moved, and the pin is tried again.
        again = function.name in of_family(Family.UNPINNABLE)

        def make(context: Context) -> bytes:
            never = errno.EAGAIN if again else 0
            return programs.failed(self._maps, context, number, function.returns, never=never)

        self._at_exit_or_return(function, make)

    def _follow_registrations(self, driver: int, function: Function) -> None:
        number = self._number(partial(self._failed_inside, function.name), 1)

        def make(context: Context) -> bytes:
            dmabuf = "dmabuf" in function.name
            return programs.registered(self._maps, context, number, driver, dmabuf=dmabuf)

        self._at_exit_or_return(function, make, lambda c: programs.keep_length(self._maps, c))

    def _follow_migrations(self, function: Function, reasons: Sequence[int]) -> None:
        number = self._number(self._migration_failed, programs.MIGRATION_WORDS)

        def make(context: Context) -> bytes:
            return programs.migration(self._maps, context, number, self._layout.pages, reasons)

        self._at_exit_or_return(function, make, lambda c: programs.keep_migration(self._maps, c))

    def _follow_plain_pins(self, function: Function, longterm: int) -> None:
        number = self._number(partial(self._plain_pin, function.name), programs.PLAIN_PIN_WORDS)
        first = 1 if function.name.endswith("_remote") else 0  # behind the mm

        def make(context: Context) -> bytes:
            return programs.plain_pin(self._maps, context, number, first, longterm)

        self._at_exit_or_return(function, make, lambda c: programs.keep_pin(self._maps, c, first))

    def _follow_unpins(self, function: Function) -> None:
        number = self._number(self._unpinned, 1)
        many = "_pages" in function.name  # an array of pages, and no page

        def make(context: Context) -> bytes:
            return programs.unpin(self._maps, context, number, many=many)

        try:
            self._trampoline(function, bpf.TRACE_FENTRY, make)
        except OSError:
            self._by_kprobe(function, make, at_return=False)

    def _at_exit_or_return(
        self,
        function: Function,
        make: Callable[[Context], bytes],
        keep: Callable[[Context], bytes] | None = None,
    ) -> None:
        """Attach a program by a trampoline, or where there is none by a kprobe; `keep` makes the one at the
        function's beginning that keeps the parameters for it. Raises OSError.
        """
        try:
            self._at_exit(function, make)
        except OSError:
            if keep is not None:  # first, as it says nothing by itself
                self._by_kprobe(function, keep, at_return=False)
            self._by_kprobe(function, make, at_return=True)

    def _at_exit(self, function: Function, make: Callable[[Context], bytes]) -> None:
        self._trampoline(function, bpf.TRACE_FEXIT, make)

    def _trampoline(self, function: Function, when: int, make: Callable[[Context], bytes]) -> None:
        """Attach a program by a trampoline. Raises OSError."""
        if function.parameters is None:
            raise OSError(errno.ENOENT, "it is not in BTF", function.name)
        module = 0
        if function.module:
            if function.module not in self._modules:
                self._modules[function.module] = bpf.open_btf(function.module)
            module = self._modules[function.module]
        insns = make(programs.by_trampoline(len(function.parameters)))
        program = bpf.load_program(
            insns, bpf.PROG_TRACING, function.name[:15], attach=when, btf_id=function.type_id, btf_fd=module
        )
        self._keep(program, lambda: bpf.attach_program(program, function.name), self._fds)

    def _by_kprobe(self, function: Function, make: Callable[[Context], bytes], *, at_return: bool) -> None:
        """Attach a program by a kprobe, where the parameters are not there at the return. Raises OSError."""
        registers = self._registers
        context = Context(None, registers.returned) if at_return else Context(registers.parameters, None)
        program = bpf.load_program(make(context), bpf.PROG_KPROBE, function.name[:15])
        self._keep(
            program, lambda: attach_to_function(function.name, program, at_return=at_return), self._fds
        )
        if at_return:
            self.by_kprobe.append(function.name)

    def _keep(self, program: int, attach: Callable[[], int], where: list[int]) -> None:
        try:
            where.append(attach())
        except OSError:
            os.close(program)
            raise
        where.append(program)
        self._programs.append(program)

    def follow(self, copy: Copy) -> None:
        """Follow the verbs of a copy of libibverbs at entry and return.

        Raises OSError, with what was attached of that copy taken away again.
        """
        mine = self._copies.setdefault(copy.key, [])
        try:
            for verb, offset in copy.offsets.items() if not mine else ():
                number = self._number(partial(self._library_failed, verb), programs.CALL_BYTES // 8)
                for at_return in (True, False):
                    context = self._registers
                    code = (
                        programs.library_return(self._maps, context, number)
                        if at_return
                        else programs.library_call(self._maps, context)
                    )
                    program = bpf.load_program(code, bpf.PROG_KPROBE, verb[:15])
                    place = copy.path, offset, program
                    self._keep(program, partial(attach_to_code, *place, at_return=at_return), mine)
        except OSError:
            self.forget([copy.key])
            raise

    def forget(self, keys: Sequence[tuple[int, int]]) -> None:
        """Take the probes away of copies that are gone."""
        for key in keys:
            self._close(self._copies.pop(key, []))

    def _close(self, fds: list[int]) -> None:
        for fd in fds:
            if fd in self._programs:
                self._missed += bpf.missed_runs(fd) or 0
                self._programs.remove(fd)
        while fds:
            os.close(fds.pop())

    # What watch asks of an engine

    @property
    def attached(self) -> bool:
        """It follows all from the beginning."""
        return not self.ended

    @property
    def probes(self) -> int:
        """How many programs are attached."""
        return len(self._programs)

    @property
    def last_line(self) -> float:
        """When it gave a sign of life: always now, as there is nobody who could hang."""
        return time.monotonic()

    @property
    def lost(self) -> int:
        """Records that found no room in the ring, or that are not as they must be."""
        lost = self._counter.value if self._counter is not None else self._lost
        return lost + self.correlator.counts.malformed

    @property
    def waits(self) -> bool:
        """Whether there are records that are waiting for a later turn."""
        return bool(self._taken)

    def follows(self, copy: Copy) -> bool:
        """Whether it follows this copy at entry and return."""
        return bool(self._copies.get(copy.key))

    @property
    def follows_libraries(self) -> bool:
        """Whether it follows copies of libibverbs at entry and return."""
        return any(self._copies.values())

    def fds(self) -> list[int]:
        """File descriptors to poll."""
        return [self._ring.fd] if self._ring is not None else []

    def missed(self) -> int | None:
        """Return how many runs of its programs the kernel says it passed over; None where it does not say."""
        told = [found for fd in self._programs if (found := bpf.missed_runs(fd)) is not None]
        return self._missed + sum(told) if told else None

    def why(self) -> str:
        """What went wrong."""
        return self.errors[0] if self.errors else "it ended"

    def take(self, until: int, before: Callable[[int], None] = lambda _ns: None) -> bool:
        """Hand on what the programs told before `until` (ns of boottime), but not for ever where more keeps
        coming; return whether that was all of it. `before` is called with the time of each failed request
        that is about to be handed on.
        """
        done = False
        for _ in range(_TURNS):
            done = self._hand_on(until, before)
            if done or not self._fill():
                break
        now = time.monotonic()
        if now > self._account_at:
            self._take_account()
        if now > self._forget_at:
            self._forget_at = now + _FORGET_SECONDS
            self.correlator.forget_stale(kernel_boottime() if done else self._last_ns)
        return done

    def _fill(self) -> bool:
        """Take out of the ring; return whether there was anything."""
        try:
            some = list(self._ring.take()) if self._ring is not None else []
        except OSError as error:
            self.errors.append(str(error))
            self.ended = True
            return False
        self._taken.extend(some)
        return bool(some)

    def _hand_on(self, until: int, before: Callable[[int], None]) -> bool:
        """Hand on what was taken; return whether nothing from before `until` is left, in the ring neither.

        Of two records the one that comes first may say a later time, if their threads were on different CPUs.
        But what happened before `until` as a consequence of a record was told of after it: so all of those
        come before the first that says `until` or later.
        """
        while self._taken:
            try:
                number, task, ns, *words = struct.unpack(f"={len(self._taken[0]) // 8}Q", self._taken[0])
                expected, told = self._told[number]
                if len(words) != expected:
                    raise ValueError(f"{len(words)} words")
            except (struct.error, ValueError, IndexError):
                self.correlator.counts.malformed += 1
                self._taken.popleft()
                continue
            if ns >= until:
                return True
            self._taken.popleft()
            if number in self._requests:
                before(ns)
            told(task & 0xFFFFFFFF, task >> 32, ns, words)
            self._last_ns = ns
        return self._ring is None or self._ring.empty

    def _take_account(self) -> None:
        """Hand on what was counted since the last time, and let go of processes that have ended."""
        self._account_at = time.monotonic() + ACCOUNT_SECONDS
        if self._account is None or self._maps.sizes < 0:
            return
        before_rows, before_sizes = self._counted
        rows = bpf.read_map(self._maps.counts, KEY.size, 16)
        sizes = bpf.read_map(self._maps.sizes, SIZE_KEY.size, 8)
        nothing = bytes(16)
        new_rows = {}
        gone = set()
        living: dict[int, bool] = {}
        for key, value in list(rows.items()):
            count, size = struct.unpack("=QQ", value)
            old_count, old_size = struct.unpack("=QQ", before_rows.get(key, nothing))
            if count != old_count:
                new_rows[key] = count - old_count, size - old_size
            elif not _lives(KEY.unpack(key)[2], living):
                # Not yet where it may have counted between the reading of the map and its end.
                gone.add(key)
                if key in self._gone:
                    bpf.remove_from_map(self._maps.counts, key)
                    del rows[key]
        new_sizes = {
            key: int.from_bytes(value, sys.byteorder)
            - int.from_bytes(before_sizes.get(key, nothing[:8]), sys.byteorder)
            for key, value in sizes.items()
            if value != before_sizes.get(key)
        }
        self._counted, self._gone = (rows, sizes), gone
        self._account.take_counted(new_rows, new_sizes, self._drivers)
        if self._uncounted is not None:
            uncounted, self._account.uncounted = self._account.uncounted, self._uncounted.value
            self._account.changed |= uncounted != self._account.uncounted

    def stop(self) -> None:
        """Take all programs away. What they had still to say is read."""
        if not self.ended:
            with suppress(OSError):
                self._take_account()
        self.ended = True
        for key in list(self._copies):
            self.forget([key])
        self._close(self._fds)
        with suppress(OSError):
            while self._hand_on(1 << 64, lambda _ns: None) is False and self._fill():
                pass
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._counter is not None:
            self._lost = self._counter.value
            self._counter.close()
            self._counter = None
        if self._uncounted is not None:
            self._uncounted.close()
            self._uncounted = None

    # Records

    def _opened(self, _tid: int, pid: int, _ns: int, _words: Sequence[int]) -> None:
        if pid != os.getpid():
            self.correlator.on_open(pid)

    def _failed_inside(self, function: str, tid: int, _pid: int, ns: int, words: Sequence[int]) -> None:
        self.correlator.failed_inside(tid, Inner(ns, function, programs.signed_int(words[0])))

    def _pin_failed(self, function: str, tid: int, _pid: int, ns: int, words: Sequence[int]) -> None:
        ret, start, pages, flags = words
        args = {"start": start, "nr_pages": pages, "gup_flags": flags}
        self.correlator.failed_inside(tid, Inner(ns, function, programs.signed_int(ret), args))

    def _migration_failed(self, tid: int, _pid: int, ns: int, words: Sequence[int]) -> None:
        self.correlator.migration_failed(tid, ns, programs.signed_int(words[0]), words[1])
        for page in programs.migration_pages(words):
            self.correlator.page_stayed(tid, StuckPage(*page))

    def _request_failed(self, function: str, tid: int, pid: int, ns: int, words: Sequence[int]) -> None:
        has_task = self._layout.task is not None
        told = dict(zip(programs.REQUEST_WORDS, words, strict=True))
        comm = struct.pack("=2Q", told["comm"], told["comm_end"]).partition(b"\0")[0]
        present = told["present"]
        if present != programs.NOTHING:
            some = present != programs.ALL
            asked = Asked(
                ns,
                told["asked_start"],
                told["asked_length"],
                told["asked_iova"],
                told["asked_access"] & 0xFFFFFFFF,
                told["asked_fd"] & 0xFFFFFFFF if some else None,
                present if some else None,
            )
            self.correlator.asked(tid, asked)
        memlock = told["memlock"]
        self.correlator.request_failed(
            Ended(
                tid,
                pid,
                comm.decode("utf-8", "replace"),
                ns,
                told["since"],
                function,
                programs.signed_int(told["ret"]),
                told["uid"],
                pin_calls=told["calls"],
                pinned=told["pages"],
                process_start=told["start"] if has_task else None,
                limits=limits_of(-1 if memlock >> 63 else memlock, told["pinned"]) if has_task else {},
            )
        )

    def _library_failed(self, verb: str, tid: int, pid: int, ns: int, words: Sequence[int]) -> None:
        # As _library() of program.py has them.
        address, length, third, fourth, fifth = words[1:6]
        given = {"address": address, "length": length}
        if verb == "ibv_reg_mr":
            given |= {"iova": address, "access": third & 0xFFFFFFFF}
        elif verb == "ibv_reg_mr_iova2":
            given |= {"iova": third, "access": fourth & 0xFFFFFFFF}
        else:
            given |= {"iova": third, "fd": fourth & 0xFFFFFFFF, "access": fifth & 0xFFFFFFFF}
        self.correlator.library_failed(LibraryWord(tid, pid, ns, verb, given))

    def _plain_pin(self, function: str, tid: int, pid: int, ns: int, words: Sequence[int]) -> None:
        start, pages, flags, page, length, *stack = words
        length = programs.signed_int(length)
        frames = stack[: length // 8 if length > 0 else 0]
        names = self._names(frames)
        self.correlator.on_pin(ShortTermPin(ns, tid, pid, function, start, pages, flags, names, page=page))

    def _unpinned(self, _tid: int, pid: int, ns: int, words: Sequence[int]) -> None:
        self.correlator.on_unpin(pid, ns, words[0])

    def _names(self, addresses: Sequence[int]) -> list[str]:
        """Return frames as NAME+OFFSET; an address where the kernel does not say."""
        new = [address for address in addresses if address not in self._symbols]
        if new and time.monotonic() - self._symbols_read > _SYMBOLS_SECONDS:
            self._symbols_read = time.monotonic()
            if len(self._symbols) > 10_000:
                self._symbols.clear()
            with suppress(OSError):
                self._symbols |= kallsyms.names_of(addresses)
        return [self._symbols.get(address, hex(address)) for address in addresses]
