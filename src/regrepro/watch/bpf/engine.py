"""Follows registrations by BPF programs (csrc/bpf/registrations.bpf.c), and reads what they tell.

What is attached hangs on file descriptors of this process, so that nothing stays once it is dead. A function
is followed by a trampoline (fentry, fexit) where the kernel has one for it, by kprobes where it has not:
which of them is found out by trying. A record is words of 8 bytes: the number that the function's cookie has,
process and thread, ns of boottime, and then

    opened          nothing
    end_request     `REQUEST_WORDS`
    failed          ret
    pin             ret, start, pages, flags
    migration       ret, reason; of STUCK_PAGES pages: address, refcount, mapcount, pincount, flags
    short_term_pin  start, pages, flags, first page, length of the stack in bytes, its addresses
    unpin           the first page
    library_return  the six parameters
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from regrepro.core import bpf
from regrepro.kernel import kallsyms
from regrepro.kernel_functions import Family, Returns, of_family
from regrepro.watch.bpf.loader import Attached, Loader
from regrepro.watch.correlate import Correlator
from regrepro.watch.failed_registration import (
    REQUESTS,
    Asked,
    Ended,
    Inner,
    LibraryWord,
    ShortTermPin,
    StuckPage,
    attribute_index,
    limits_of,
)
from regrepro.watch.functions import Function, Functions
from regrepro.watch.libraries import Copy
from regrepro.watch.process import kernel_boottime
from regrepro.watch.registrations import KEY, SIZE_KEY, Account

ACCOUNT_SECONDS = 15
RING_BYTES = 8 << 20  # as in registrations.bpf.c: some 16,000 failures
_TURNS = 2  # of some 64 KiB that are taken at once
_FORGET_SECONDS = 60.0
_SYMBOLS_SECONDS = 10.0  # in which symbols are read once at most

# As in registrations.bpf.c.
_POINTER, _NOT_EAGAIN, _DMABUF, _BEHIND_MM, _ARRAY, _COMMAND, _ALWAYS = (1 << bit for bit in range(32, 39))
_DRIVER_SHIFT = 40
_CONFIG = struct.Struct("=Q2I5I10II")
_NO_REASON = 0xFFFFFFFF
_STUCK_PAGES, _STACK_FRAMES, _PARAMETERS = 4, 16, 6
_NOTHING = 0xFFFFFFFFFFFFFFFF
_ALL = _NOTHING - 1
_SHARED = ("ring", "requests", "calls", "pinners", "counts", "sizes", ".bss")
_COMMAND_HANDLER = "ib_uverbs_reg_mr"
_TARGET = "pin_user_pages"  # of the kernel itself; any function will do to load what is for trampolines
REQUEST_WORDS = (
    *("ret", "since", "calls", "pages", "uid", "start", "memlock", "pinned", "comm", "comm_end"),
    *("asked_start", "asked_length", "asked_iova", "asked_access", "asked_fd", "present"),
)


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


def config(request: RequestOffsets | None, longterm: int, reasons: Sequence[int], *, unpins: bool) -> bytes:
    """Return struct config of the programs. `reasons`: those of pins (enum migrate_reason), if known."""
    indices = [attribute_index(number) for handler in REQUESTS.values() for number in handler]
    both = [*reasons, *reasons][:2] or [_NO_REASON, _NO_REASON]
    offsets = (request.command, request.present, request.attributes, request.size) if request else (0,) * 4
    return _CONFIG.pack(longterm, *both, request is not None, *offsets, *indices, unpins)


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
        request: RequestOffsets | None,
        *,
        files: tuple[Path, Path],
        short_term_pins: Sequence[str] = (),
        longterm: int = 0,
        unpins: bool = False,
        account: Account | None = None,
    ) -> None:
        self.correlator = correlator
        self._files = files
        self._config = config(request, longterm, sorted(functions.reasons), unpins=unpins)
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
        self._maps: dict[str, int] = {}
        self._attached: dict[str, list[Attached]] = {}  # by name of the function
        self._refused: dict[str, str] = {}  # functions that could not be followed → their modules
        self._copies: dict[tuple[int, int], list[Attached]] = {}
        self._verbs: dict[str, int] = {}  # numbers of their records
        self._symbols: dict[int, str] = {}
        self._symbols_read = float("-inf")
        self._forget_at = self.started + _FORGET_SECONDS
        self._missed: dict[int, int] = {}  # by number of the program
        self._ring: bpf.Ring | None = None
        self._counters: bpf.Counters | None = None
        self._lost = 0
        self._trampolines = True
        try:
            with self._open_loader() as loader:
                self._attach(loader, functions, short_term_pins if longterm else ())
        except BaseException:
            self.stop()
            raise

    def _open_loader(self) -> Loader:
        """Return a loader that has loaded the programs, with the maps of those before it. Raises OSError."""
        for trampolines in (True, False) if self._trampolines else (False,):
            loader = Loader(*self._files)
            try:
                loader.configure(self._config)
                for name, fd in self._maps.items():
                    loader.share(name, fd)
                loader.load(_TARGET if trampolines else "")
            except OSError:
                loader.close()
                if not trampolines:
                    raise
                continue
            except BaseException:
                loader.close()
                raise
            self._trampolines = trampolines
            break
        if not self._maps:
            try:
                for name in _SHARED:
                    self._maps[name] = loader.map(name)
                self._ring = bpf.Ring(self._maps["ring"], RING_BYTES)
                self._counters = bpf.Counters(self._maps[".bss"])
            except BaseException:
                loader.close()
                raise
        return loader

    # Attaching

    def _attach(self, loader: Loader, functions: Functions, short_term_pins: Sequence[str]) -> None:
        """Requests come last, and their beginning last of all: of one that is under way then, it is said that
        nobody saw it begin.
        """
        for group in (functions.inner, functions.drivers if self._account is None else []):
            group[:] = [item for item in group if self._can_follow(loader, functions, item, self._failures)]
        if self._account is not None:
            for number, function in enumerate(functions.drivers):
                self._registrations(loader, function, number)
        migrate = functions.migrate
        if migrate is not None and not self._can_follow(loader, functions, migrate, self._migrations):
            functions.migrate = None
        for function in functions.pins:
            told = partial(self._pin_failed, function.name)
            self._at_return(loader, "pin", function, self._number(told, 4), keep=True)
        for function in functions.plain_pins:
            if function.name in short_term_pins:
                self._short_term_pins(loader, function)
        if self._unpins:
            group = functions.unpins
            group[:] = [item for item in group if self._can_follow(loader, functions, item, self._unpinnings)]
        if functions.open is not None:
            self._at_return(loader, "opened", functions.open, self._number(self._opened, 0))
        for function in functions.entries:
            number = self._number(partial(self._request_failed, function.name), len(REQUEST_WORDS))
            self._requests.add(number)
            special = _COMMAND if function.name == _COMMAND_HANDLER else 0
            special |= _DMABUF if "DMABUF" in function.name else 0
            self._at_return(loader, "end_request", function, number | special)
        for function in functions.entries:
            self._at_entry(loader, "begin_request", function, 0)

    def _number(self, told: Told, words: int) -> int:
        """Return the number of records that have so many words behind the header."""
        self._told.append((words, told))
        return len(self._told) - 1

    def follow_new(self, functions: Functions, found: Functions) -> list[str]:
        """Follow functions of modules that were loaded since, and add them to `functions`; return names."""
        new: list[str] = []
        groups = ((functions.inner, found.inner), (functions.drivers, found.drivers))
        known = {function.name for group, _ in groups for function in group} | functions.missing.keys()
        wanted = [(group, item) for group, others in groups for item in others if item.name not in known]
        if not wanted:
            return new
        try:
            loader = self._open_loader()
        except OSError as error:
            for _, function in wanted:
                self._not_followed(functions, function, error)
            return new
        with loader:
            for group, function in wanted:
                how = self._failures
                if group is functions.drivers and self._account is not None:
                    how = self._new_registrations
                if self._can_follow(loader, functions, function, how):
                    group.append(function)
                    new.append(function.name)
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
                self._detach(self._attached.pop(function.name, []))
                if function.name in self.by_kprobe:
                    self.by_kprobe.remove(function.name)
        for name in [name for name, module in self._refused.items() if module in gone]:
            functions.missing.pop(name, None)
            del self._refused[name]

    def _can_follow(
        self,
        loader: Loader,
        functions: Functions,
        function: Function,
        how: Callable[[Loader, Function], None],
    ) -> bool:
        """Follow a function if the kernel lets anybody do so; say in `missing` why not."""
        try:
            how(loader, function)
        except OSError as error:
            self._not_followed(functions, function, error)
            return False
        return True

    def _not_followed(self, functions: Functions, function: Function, error: OSError) -> None:
        functions.missing[function.name] = f"it cannot be followed: {error.strerror}"
        self._refused[function.name] = function.module

    def _failures(self, loader: Loader, function: Function) -> None:
        number = self._number(partial(self._failed_inside, function.name), 1)
        special = _POINTER if function.returns is Returns.POINTER else 0
        if function.name in of_family(Family.UNPINNABLE):
            special |= _NOT_EAGAIN
        self._at_return(loader, "failed", function, number | special)

    def _new_registrations(self, loader: Loader, function: Function) -> None:
        self._registrations(loader, function, len(self._drivers))
        self._drivers.append(function.name)

    def _registrations(self, loader: Loader, function: Function, driver: int) -> None:
        number = self._number(partial(self._failed_inside, function.name), 1)
        special = driver << _DRIVER_SHIFT | (_DMABUF if "dmabuf" in function.name else 0)
        self._at_return(loader, "registered", function, number | special, keep=True)

    def _migrations(self, loader: Loader, function: Function) -> None:
        number = self._number(self._migration_failed, 2 + 5 * _STUCK_PAGES)
        self._at_return(loader, "migration", function, number, keep=True)

    def _short_term_pins(self, loader: Loader, function: Function) -> None:
        number = self._number(partial(self._pinned_short_term, function.name), 5 + _STACK_FRAMES)
        special = _ALWAYS | (_BEHIND_MM if function.name.endswith("_remote") else 0)
        self._at_return(loader, "short_term_pin", function, number | special, keep=True)

    def _unpinnings(self, loader: Loader, function: Function) -> None:
        number = self._number(self._unpinned, 1)
        special = _ARRAY if "_pages" in function.name else 0
        self._at_entry(loader, "unpin", function, number | special)

    def _at_entry(self, loader: Loader, program: str, function: Function, cookie: int) -> None:
        if not self._by_trampoline(loader, f"fentry_{program}", function, cookie):
            made = loader.kprobe(f"kprobe_{program}", function.name, cookie, at_return=False)
            self._keep(function, [made])

    def _at_return(
        self, loader: Loader, program: str, function: Function, cookie: int, *, keep: bool = False
    ) -> None:
        """Attach to a function's return; `keep`: by kprobes its parameters are kept. Raises OSError."""
        if self._by_trampoline(loader, f"fexit_{program}", function, cookie):
            return
        mine = []
        try:
            if keep:
                mine.append(loader.kprobe("kprobe_keep", function.name, cookie, at_return=False))
            mine.append(loader.kprobe(f"kretprobe_{program}", function.name, cookie, at_return=True))
        except OSError:
            for item in mine:
                item.close()
            raise
        self._keep(function, mine)
        self.by_kprobe.append(function.name)

    def _by_trampoline(self, loader: Loader, program: str, function: Function, cookie: int) -> bool:
        """Attach by a trampoline; return False where the kernel has none for this function."""
        if not self._trampolines:
            return False
        try:
            made = loader.trampoline(program, function.name, function.module, cookie)
        except OSError:
            return False
        self._keep(function, [made])
        return True

    def _keep(self, function: Function, made: list[Attached]) -> None:
        self._attached.setdefault(function.name, []).extend(made)

    def follow(self, copies: Iterable[Copy]) -> list[tuple[Copy, OSError]]:
        """Follow the verbs of copies of libibverbs at entry and return.

        Return those that cannot be, with why; nothing is attached of them then.
        """
        new = [copy for copy in copies if copy.key not in self._copies]
        if not new:
            return []
        try:
            loader = self._open_loader()
        except OSError as error:
            return [(copy, error) for copy in new]
        refused = []
        with loader:
            for copy in new:
                mine = self._copies[copy.key] = []
                try:
                    self._follow_verbs(loader, copy, mine)
                except OSError as error:
                    self.forget([copy.key])
                    refused.append((copy, error))
        return refused

    def _follow_verbs(self, loader: Loader, copy: Copy, mine: list[Attached]) -> None:
        for verb, offset in copy.offsets.items():
            if verb not in self._verbs:
                self._verbs[verb] = self._number(partial(self._library_failed, verb), _PARAMETERS)
            number = self._verbs[verb]
            for program, at_return in (("library_return", True), ("library_entry", False)):
                mine.append(loader.uprobe(program, copy.path, offset, number, at_return=at_return))

    def forget(self, keys: Sequence[tuple[int, int]]) -> None:
        """Take the probes away of copies that are gone."""
        for key in keys:
            self._detach(self._copies.pop(key, []))

    def _detach(self, items: list[Attached]) -> None:
        for item in items:
            self._count_missed(item)
            item.close()
        items.clear()

    # What watch asks of an engine

    def _every(self) -> Iterator[Attached]:
        for group in (self._attached, self._copies):
            for items in group.values():
                yield from items

    @property
    def probes(self) -> int:
        """How many programs are attached."""
        return sum(1 for _ in self._every())

    @property
    def lost(self) -> int:
        """Records that found no room in the ring, or that are not as they must be."""
        lost = self._counters.value(0) if self._counters is not None else self._lost
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
        for item in self._every():
            self._count_missed(item)
        return sum(self._missed.values()) if self._missed else None

    def _count_missed(self, item: Attached) -> None:
        """Keep what the kernel says of a program, which may be attached more than once."""
        told = bpf.missed_runs(item.program)
        if told is not None:
            number, missed = told
            self._missed[number] = missed

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
        if self._account is None or self._counters is None:
            return
        before_rows, before_sizes = self._counted
        rows = bpf.read_map(self._maps["counts"], KEY.size, 16)
        sizes = bpf.read_map(self._maps["sizes"], SIZE_KEY.size, 8)
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
                    bpf.remove_from_map(self._maps["counts"], key)
                    del rows[key]
        new_sizes = {
            key: int.from_bytes(value, sys.byteorder)
            - int.from_bytes(before_sizes.get(key, nothing[:8]), sys.byteorder)
            for key, value in sizes.items()
            if value != before_sizes.get(key)
        }
        self._counted, self._gone = (rows, sizes), gone
        self._account.take_counted(new_rows, new_sizes, self._drivers)
        uncounted, self._account.uncounted = self._account.uncounted, self._counters.value(1)
        self._account.changed |= uncounted != self._account.uncounted

    def stop(self) -> None:
        """Take all programs away. What they had still to say is read."""
        if not self.ended:
            with suppress(OSError):
                self._take_account()
        self.ended = True
        self.forget(list(self._copies))
        while self._attached:
            self._detach(self._attached.popitem()[1])
        with suppress(OSError):
            while self._hand_on(1 << 64, lambda _ns: None) is False and self._fill():
                pass
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._counters is not None:
            self._lost = self._counters.value(0)
            self._counters.close()
            self._counters = None
        while self._maps:
            os.close(self._maps.popitem()[1])

    # Records

    def _opened(self, _tid: int, pid: int, _ns: int, _words: Sequence[int]) -> None:
        if pid != os.getpid():
            self.correlator.on_open(pid)

    def _failed_inside(self, function: str, tid: int, _pid: int, ns: int, words: Sequence[int]) -> None:
        self.correlator.failed_inside(tid, Inner(ns, function, _signed_int(words[0])))

    def _pin_failed(self, function: str, tid: int, _pid: int, ns: int, words: Sequence[int]) -> None:
        ret, start, pages, flags = words
        args = {"start": start, "nr_pages": pages, "gup_flags": flags}
        self.correlator.failed_inside(tid, Inner(ns, function, _signed_int(ret), args))

    def _migration_failed(self, tid: int, _pid: int, ns: int, words: Sequence[int]) -> None:
        self.correlator.migration_failed(tid, ns, _signed_int(words[0]), words[1])
        for page in _stuck_pages(words):
            self.correlator.page_stayed(tid, StuckPage(*page))

    def _request_failed(self, function: str, tid: int, pid: int, ns: int, words: Sequence[int]) -> None:
        told = dict(zip(REQUEST_WORDS, words, strict=True))
        comm = struct.pack("=2Q", told["comm"], told["comm_end"]).partition(b"\0")[0]
        present = told["present"]
        if present != _NOTHING:
            some = present != _ALL
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
                _signed_int(told["ret"]),
                told["uid"],
                pin_calls=told["calls"],
                pinned=told["pages"],
                process_start=told["start"],
                limits=limits_of(-1 if memlock >> 63 else memlock, told["pinned"]),
            )
        )

    def _library_failed(self, verb: str, tid: int, pid: int, ns: int, words: Sequence[int]) -> None:
        address, length, third, fourth, fifth = words[1:6]
        given = {"address": address, "length": length}
        if verb == "ibv_reg_mr":
            given |= {"iova": address, "access": third & 0xFFFFFFFF}
        elif verb == "ibv_reg_mr_iova2":
            given |= {"iova": third, "access": fourth & 0xFFFFFFFF}
        else:
            given |= {"iova": third, "fd": fourth & 0xFFFFFFFF, "access": fifth & 0xFFFFFFFF}
        self.correlator.library_failed(LibraryWord(tid, pid, ns, verb, given))

    def _pinned_short_term(self, function: str, tid: int, pid: int, ns: int, words: Sequence[int]) -> None:
        start, pages, flags, page, length, *stack = words
        length = _signed_int(length)
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


def _stuck_pages(words: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield of a record of a migration: address, refcount, mapcount, pincount, flags."""
    for index in range(_STUCK_PAGES):
        page, *counts, flags = words[2 + 5 * index : 7 + 5 * index]
        if page:
            refcount, mapcount, pincount = map(_signed_int, counts)
            yield page, refcount, mapcount, pincount, flags


def _signed_int(word: int) -> int:
    """Return a word's low half as an int."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
