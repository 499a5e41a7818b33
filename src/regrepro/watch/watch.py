"""`regrepro watch`: bpftrace's lines in, judged records of failures out, until it is told to stop."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import select
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from regrepro.errors import EnvironmentProblem, RegreproError
from regrepro.kernel import leftovers, trace_flags
from regrepro.kernel.btf import Btf, BtfError
from regrepro.kernel.node import node_facts
from regrepro.kernel.release import kernel_series
from regrepro.record import SCHEMA, Record, RecordProblem
from regrepro.watch import evidence as look
from regrepro.watch.again import EVENT, Again, Waiting, no_look
from regrepro.watch.bpf_engine import BpfEngine
from regrepro.watch.copies import Copies, Copy, devices_are_gone, system_copies
from regrepro.watch.engine import Engine, find_bpftrace, require_rights
from regrepro.watch.events import Correlator, Failure, LibraryWord
from regrepro.watch.evidence import Evidence, Observer
from regrepro.watch.functions import (
    KALLSYMS,
    MODULES,
    BtfFunctions,
    Functions,
    find_functions,
    loaded_modules,
    without_coming,
)
from regrepro.watch.library_probes import LibraryProbes
from regrepro.watch.limiter import Limiter
from regrepro.watch.lock import Lock
from regrepro.watch.marker import Marker
from regrepro.watch.metrics import Metrics
from regrepro.watch.output import Output
from regrepro.watch.process import kernel_boottime
from regrepro.watch.program import Dialect, Layout, PageOffsets, RequestOffsets, TaskOffsets, make_program
from regrepro.watch.registrations import Account

_MODULE_BTF = (5, 11)  # BTF of modules; before, bpftrace cannot load programs for trampolines of either
_ATTACH_SECONDS = 180.0  # until which bpftrace must have attached everything
_SILENCE_SECONDS = 30.0  # without a heartbeat: it hangs
_METRICS_SECONDS = 15.0
_COPY_SECONDS = 1.0  # that new copies of libibverbs are waited for together
_TAKE_OVER_NS = 1_000_000_000
_FAST_TIMES, _FAST_SECONDS = 4, 0.1
_TURNS = 2  # of taking what came while the last was taken
_BREATH_SECONDS = 0.001
_LOST_NEAR = "events were lost near this failure"
_OPENED_KEPT, _OPENED_SECONDS = 4096, 1.0  # in which a process that opens devices is looked at once
_TOGETHER_SECONDS = 0.02  # in which failures that come fast are gathered
_SUPPRESSED_SECONDS = 10.0
_IDLE_SECONDS = 10.5  # a little more than between two heartbeats
_LOST_NEAR_SECONDS = 2.0
_LOST_SAID_SECONDS = 10.0
_ALONE_SECONDS = 0.05  # that the library's word waits for the kernel's before bpftrace is asked
PINS: dict[str, tuple[str, ...]] = {
    "off": (),
    "driver": ("pin_user_pages",),
    "all": ("pin_user_pages", "pin_user_pages_remote"),
    "unpins": ("pin_user_pages", "pin_user_pages_remote"),
}


@dataclass
class Options:
    """What the command line asks for."""

    out: Path
    pins: str = "driver"
    registrations: bool = False
    libraries: bool = True
    rate: float = 10.0
    burst: int = 50
    each: int = 5
    window: float = 60.0
    rotate: int = 16 << 20
    quota: int = 256 << 20
    metrics: Path | None = None
    as_json: bool = False
    quiet: bool = False
    limit: int = 0  # failures after which to stop; 0: never
    duration: float = 0.0
    trampolines: bool = True
    engine: str = "auto"


class Lately:
    """What was counted between two looks, some time ago; `reach`: seconds around it that count, too."""

    def __init__(self, reach: float) -> None:
        self._reach = reach
        self._looked = time.monotonic()
        self._kept: deque[tuple[float, float, int]] = deque(maxlen=1000)  # from, to, how many

    def add(self, now: float, count: int) -> None:
        """Keep what was counted since the last look."""
        if count:
            self._kept.append((self._looked, now, count))
        self._looked = now

    def near(self, *moments: float) -> int:
        """Return how many were counted around any of these moments (time.monotonic())."""
        return sum(
            count
            for begin, end, count in self._kept
            if any(begin - self._reach < moment < end + self._reach for moment in moments)
        )


class Watch:
    """One watch of this node. `run()` returns how many failures there were."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self.options = options
        self._say = say
        self.metrics = Metrics(started=time.time())
        self._metrics_problem = ""
        self._stop = 0
        self._rotate_asked = False
        self._engine: Engine | BpfEngine | None = None
        self._words: deque[LibraryWord] = deque()  # that were read and not yet handed on, in time order
        self._bpftrace: tuple[str, tuple[int, int]] | None = None  # its path and version, once it is needed
        self._next: Engine | None = None
        self._cut_ns = 0
        self._cut_at = 0.0
        self._copies = Copies()
        self._library_probes = LibraryProbes()
        self._copies.on_new = self._library_probes.follow
        self._marker = Marker(self._sure)
        self._copies_due = 0.0
        self._opened_at: dict[int, float] = {}  # when a process that opened a device was looked at
        self._opened_again: set[int] = set()  # those that opened another soon after
        self._more = False  # bpftrace had something to say the last time
        # When the library's word was taken the last few times. Where failures come fast, to be woken for each
        # costs more than they do.
        self._taken_at = deque([float("-inf")] * _FAST_TIMES, maxlen=_FAST_TIMES)
        self._functions = Functions()
        self._modules: frozenset[str] = frozenset()  # that are loaded
        self._number = 0
        self._text = ""  # of the program that runs
        self._launched: list[str] = []  # the copies that the latest engine follows
        self._evidence: dict[int, Evidence] = {}
        self._done: list[tuple[Failure, Evidence]] = []
        self._again = Again()
        self._layers: dict[Any, tuple[str, str]] = {}
        self._suppressed: dict[tuple[str, str, str], int] = {}
        self._unjudged: dict[
            Any, tuple[Failure, int]
        ] = {}  # counted before the first of their kind was judged
        self._missed_seen: int | None = None
        self._misses = Lately(_LOST_NEAR_SECONDS)
        self._missed_due = 0.0
        self._lost_seen = 0
        self._lost_total = 0
        self._losses = Lately(_LOST_NEAR_SECONDS)
        self._lost_told, self._lost_said = 0, float("-inf")  # how many were said to be lost, and when
        self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._account = Account()
        self._limiter = Limiter(options.rate, options.burst, options.each, options.window, time.monotonic)

    # Setting up

    def run(self) -> int:
        """Watch until a signal, the limit or the duration. Raises EnvironmentProblem, RecordProblem."""
        require_rights()
        self._check_engine()
        lock = Lock(self.options.out)
        previous = {
            number: signal.signal(number, self._signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        wakeup = signal.set_wakeup_fd(self._waker[1], warn_on_full_buffer=False)
        try:
            for sentence in leftovers.reclaim():
                self._say(sentence)
            with leftovers.Journal() as self._journal:
                self._run()
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            lock.release()
        return self.metrics.total

    def _check_engine(self) -> None:
        """Say before anything else what cannot be. Raises EnvironmentProblem."""
        options = self.options
        if options.engine == "bpf" and not options.trampolines:
            raise EnvironmentProblem("--engine bpf cannot do --no-trampolines", hint="leave one of them out")
        if options.engine == "bpftrace" or not options.trampolines:
            self._bpftrace = find_bpftrace()

    def _run(self) -> None:
        self._flags = trace_flags.of_running_kernel()
        self._read_kernel()
        self._observer = Observer(self._functions, self._flags)
        self._output = Output(
            self.options.out, self._header, rotate=self.options.rotate, quota=self.options.quota
        )
        self._output.on_begin = self._begin_record
        self._output.on_end = self._end_record
        for path in system_copies() if self.options.libraries else []:
            self._copies.add_file(path, str(path))
        if self.options.libraries:
            self._copies.look_everywhere()
        try:
            self._engine = self._start_bpf()
            self._output.begin()
            if self._engine is None:
                self._engine = self._start_bpftrace()
            self._loop()
        finally:
            self._finish()

    def _read_kernel(self) -> None:
        kallsyms = KALLSYMS.read_bytes()
        self._modules = loaded_modules()
        modules = dict.fromkeys(self._modules, True)
        btf = BtfFunctions()
        if (kernel_series(os.uname().release) or (0, 0)) < _MODULE_BTF:
            self.options.trampolines = False
        self._functions = without_coming(
            find_functions(btf, kallsyms, modules, trampolines=self.options.trampolines), self._modules
        )
        if not self._functions.entries:
            raise EnvironmentProblem(
                "this kernel has no function of ib_uverbs to be followed",
                why="the module is not loaded, or its symbols are hidden",
                hint="modprobe ib_uverbs; sysctl kernel.kptr_restrict must not be 2",
            )
        pages = task = request = None
        with suppress(BtfError):
            if btf.kernel is not None:
                pages, task = page_offsets(btf.kernel), task_offsets(btf.kernel)
            bundle = btf.of_module(self._functions.entries[0].module)
            if bundle is not None:
                request = request_offsets(bundle)
        self._layout = Layout(pages, task, request)

    def _start_bpf(self) -> BpfEngine | None:
        """Start the engine of our own; None where bpftrace has to do it. Raises EnvironmentProblem."""
        if self._bpftrace is not None:
            return None
        try:
            return self._launch_bpf()
        except OSError as error:
            self.metrics.attach_failures += 1
            why = ": ".join(str(part) for part in (error.filename, error.strerror) if part)
            if self.options.engine == "bpf":
                raise EnvironmentProblem(
                    "this kernel does not take watch's own programs", why=why, hint="--engine bpftrace may do"
                ) from None
            self._say(f"this kernel does not take watch's own programs ({why}): bpftrace is used")
            self._bpftrace = find_bpftrace()
            self._read_kernel()  # anew: it may follow what could not be
            self._observer = Observer(self._functions, self._flags)
        return None

    def _launch_bpf(self) -> BpfEngine:
        """Raises OSError."""
        if not self.options.trampolines:  # before Linux 5.11
            raise OSError(errno.ENOSYS, "it has no BTF of modules")
        engine = BpfEngine(
            self._functions,
            self._correlator([function.name for function in self._functions.all()]),
            self._layout,
            plain_pins=PINS[self.options.pins],
            longterm=self._flags.values.get("FOLL_LONGTERM", 0),
            unpins=self.options.pins == "unpins",
            account=self._account if self.options.registrations else None,
        )
        try:
            for copy in list(self._copies.known.values()):
                self._follow_at_return(engine, copy)
        except BaseException:
            engine.stop()
            raise
        engine.correlator.library_speaks = self._library_speaks(engine)
        return engine

    def _follow_at_return(self, engine: BpfEngine, copy: Copy) -> None:
        """Follow what of a copy is not followed where it fails; say why if it cannot be."""
        try:
            engine.follow(copy)
        except OSError as error:
            self._copies.problems[copy.shown] = f"{error.strerror} ({error.filename})"
            self.metrics.attach_failures += 1

    def _start_bpftrace(self) -> Engine:
        """Start bpftrace; where its program cannot be attached, do without what is in the way."""
        trampolines = self.options.trampolines
        while True:
            engine = self._launch()
            deadline = time.monotonic() + _ATTACH_SECONDS
            while not engine.attached and not engine.ended and not self._stop:
                self._wait([engine], 0.5)
                if time.monotonic() > deadline:
                    break
            if engine.attached or self._stop:
                return engine
            engine.stop()
            self.metrics.attach_failures += 1
            why = engine.why()
            self._say(f"bpftrace could not attach: {why}")
            if not self._drop(why):
                if not trampolines:
                    raise EnvironmentProblem(
                        "bpftrace cannot follow this kernel",
                        why=why,
                        hint=f"its program is {engine_file(self._output)}",
                    )
                trampolines = False
                self.options.trampolines = False
                self._say("trying again with kprobes in the place of trampolines, which cost more")
                self._read_kernel()
                self._observer = Observer(self._functions, self._flags)

    def _drop(self, why: str) -> bool:
        """Follow what an error names by a kprobe, or do without it; False where it names nothing of that."""
        for copy in list(self._copies.known.values()):
            if re.search(rf"{re.escape(copy.library.path)}(?!\d)", why):
                self._copies.problems[copy.shown] = why
                copy.close()
                del self._copies.known[copy.key]
                return True
        return self._functions.do_without(why)

    def _correlator(self, names: list[str]) -> Correlator:
        correlator = Correlator(
            names, self._failed, self._complete, reasons=self._functions.reasons, now=time.monotonic
        )
        correlator.library_speaks = self._library_probes.some
        correlator.on_open = self._opened
        correlator.device_is_gone = devices_are_gone
        correlator.on_pin = self._observer.remember
        correlator.on_unpin = self._observer.unpinned
        return correlator

    def _launch(self) -> Engine:
        assert self._bpftrace is not None
        path, version = self._bpftrace
        if self.options.pins == "unpins":
            self._functions.missing |= {
                item.name: "bpftrace follows no unpins" for item in self._functions.unpins
            }
        program = make_program(
            self._functions,
            self._copies.libraries(),
            dialect=Dialect.of(version),
            offsets=self._layout.pages,
            task=self._layout.task,
            request=self._layout.request,
            plain_pins=PINS[self.options.pins],
            longterm=self._flags.values.get("FOLL_LONGTERM", 0),
            account=self.options.registrations,
        )
        self._text = program.text
        self._launched = [copy.shown for copy in self._copies.known.values()]
        correlator = self._correlator(program.names)
        engine = Engine(path, program, correlator, engine_file(self._output), self._journal)
        correlator.on_marker = partial(self._marked, engine)
        correlator.on_account = partial(self._account.take, names=program.names)
        correlator.accepts = lambda ns: self._accepts(engine, ns)
        return engine

    def _accepts(self, engine: Engine | BpfEngine, ns: int) -> bool:
        """Two engines overlap while one takes over; each event counts with one of them."""
        if self._next is None:
            return True
        if engine is self._next:
            return bool(self._cut_ns) and ns >= self._cut_ns
        return not self._cut_ns or ns < self._cut_ns

    # Going on

    def _signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._rotate_asked = True
        else:
            self._stop = number

    def _engines(self) -> list[Engine | BpfEngine]:
        return [item for item in (self._engine, self._next) if item is not None]

    def _wait(self, engines: Sequence[Engine | BpfEngine], seconds: float) -> None:
        """Wait for lines, and take them."""
        poll = select.poll()
        poll.register(self._waker[0], select.POLLIN)
        for engine in engines:
            for fd in engine.fds():
                poll.register(fd, select.POLLIN)
        for fd in self._library_probes.fds():
            poll.register(fd, select.POLLIN)
        if self._more and isinstance(self._engine, BpfEngine):
            seconds = 0.0
        with suppress(InterruptedError):
            poll.poll(seconds * 1000)
        with suppress(BlockingIOError):
            while os.read(self._waker[0], 512):
                pass
        if not self._more and time.monotonic() - self._taken_at[0] < _FAST_SECONDS:
            time.sleep(_TOGETHER_SECONDS)
        if isinstance(self._engine, BpfEngine):
            self._take_in_order(self._engine)
            return
        if self._library_probes.take(partial(self._library_failed, engines)):
            self._taken_at.append(time.monotonic())
        self._more = False
        for engine in engines:
            if isinstance(engine, Engine):
                self._more = engine.take() or self._more

    def _take_in_order(self, engine: BpfEngine) -> None:
        """Take the library's words and the kernel's, each failure's together: the kernel's is first there."""
        for _ in range(_TURNS):
            until = kernel_boottime()
            if self._take_words():
                self._taken_at.append(time.monotonic())
            hand_on = partial(self._hand_on, engine.correlator)
            self._more = not engine.take(until, hand_on)
            if not self._more:
                hand_on(until)
                self._more = bool(self._words) or engine.waits
            if not self._more or self._stop:
                return
        time.sleep(_BREATH_SECONDS)  # who writes a record may wait for this CPU

    def _take_words(self) -> int:
        """Read the library's words, and keep them in time order; return how many there were."""
        taken = self._library_probes.take(self._words.append)
        if taken:
            self._words = deque(sorted(self._words, key=lambda word: word.ns))
        return taken

    def _hand_on(self, correlator: Correlator, ns: int) -> None:
        """Hand on the library's words from before a moment, of which the kernel has said what it has to say:
        its record of the same call was begun before the library's word, so before any that says `ns`.
        """
        while self._words and self._words[0].ns < ns:
            correlator.library_failed(self._words.popleft())
        if correlator.alone:
            correlator.settle(ns, _LOST_NEAR if self._lost_near(time.monotonic()) else "")

    def _library_failed(self, engines: Sequence[Engine | BpfEngine], word: LibraryWord) -> None:
        """A copy of libibverbs gave NULL: the engine whose events count then has the kernel's part."""
        for engine in engines:
            if self._accepts(engine, word.ns):
                engine.correlator.library_failed(word)
                return

    def _ask_for_the_kernels_word(self, now: float) -> None:
        """The library's word stands alone once it is sure that the kernel has none."""
        if isinstance(self._engine, BpfEngine):
            return
        engines = self._engines()
        alone = [engine.correlator.alone[0].arrived for engine in engines if engine.correlator.alone]
        self._marker.wait_no_longer(now, max((engine.last_line for engine in engines), default=now))
        if alone and now - min(alone) > _ALONE_SECONDS:
            self._marker.ask(now)

    def _sure(self, ns: int, doubt: str) -> None:
        if self._engine is not None:
            self._engine.correlator.settle(ns, doubt)

    def _marked(self, engine: Engine, ns: int, cpu: int) -> None:
        if engine is self._engine:
            self._marker.told(ns, cpu)

    def _loop(self) -> None:
        begin = time.monotonic()
        metrics_due = suppressed_due = 0.0
        assert self._engine is not None
        self._say(self._told_start())
        self.metrics.watching = 1
        while not self._stop:
            engines = self._engines()
            due = [time.monotonic() + _IDLE_SECONDS]
            if self._copies_due or self._opened_again or self._next is not None:
                due.append(time.monotonic() + _COPY_SECONDS)
            if self.options.metrics is not None:
                due.append(metrics_due)
            if self._suppressed or self._unjudged:
                due.append(suppressed_due)
            if self._again.next_due is not None:
                due.append(self._again.next_due)
            if self.options.duration:
                due.append(begin + self.options.duration)
            idle = max(0.0, min(due) - time.monotonic())
            self._wait(engines, 0.05 if self._busy() else idle)
            now = time.monotonic()
            for engine in engines:
                engine.correlator.overdue(now)
            self._ask_for_the_kernels_word(now)
            self._settle(now)
            self._look_again(now)
            self._count_lost()
            self._watch_engines(now)
            self._follow_copies(now)
            if not self._busy():
                self._observer.refresh_if_old()
            for pid in list(self._opened_again):
                self._opened(pid)
            if now >= metrics_due:
                self._library_probes.follow_cpus()
                self._follow_modules()
                self._write_metrics()
                metrics_due = now + _METRICS_SECONDS
            if now >= suppressed_due:
                self._tell_suppressed()
                suppressed_due = now + _SUPPRESSED_SECONDS
            if self._rotate_asked or self._output.due():
                self._rotate_asked = False
                self._begin_next()
            enough = bool(self.options.limit) and self.metrics.total >= self.options.limit
            if enough and not self._again.waiting:
                break
            if self.options.duration and now - begin >= self.options.duration:
                break

    def _busy(self) -> bool:
        correlator = self._engine.correlator if self._engine is not None else None
        waiting = correlator is not None and bool(correlator._waiting or correlator.alone)
        return waiting or bool(self._done) or bool(self._cut_ns)

    def _watch_engines(self, now: float) -> None:
        engine = self._engine
        assert engine is not None
        if engine.ended or now - engine.last_line > _SILENCE_SECONDS:
            why = engine.why() if engine.ended else "it gave no sign of life"
            self.metrics.watching = 0
            name = self._engine_name()
            self._say(f"what follows the kernel ended ({why}); starting it anew")
            self._tell("engine-ended", why=why)
            engine.stop()
            self._flush(engine)
            self._lost_total += engine.lost
            self._engine = None  # its losses are counted once
            self._drop_next()
            self._write_metrics()
            if now - engine.started < 10:
                time.sleep(1)
            self.metrics.engine_restarts += 1
            self._engine = self._start_bpf() or self._start_bpftrace()
            self._missed_seen = None
            if self._engine_name() != name:
                self._begin_next()
            self.metrics.watching = int(self._engine.attached)
        if self._next is not None:
            if self._next.ended:
                why = self._next.why()
                self.metrics.attach_failures += 1
                self._say(f"a new copy of libibverbs could not be followed: {why}")
                self._tell("copies-not-followed", why=why)
                again = self._drop(why)
                self._drop_next()
                if again:  # other new ones wait for the same start
                    self._copies_due = now
            elif not self._cut_ns and self._next.attached:
                # The new one follows everything; a moment ahead, so that no event falls to both or neither.
                self._cut_ns = kernel_boottime() + _TAKE_OVER_NS
                self._cut_at = now + 2 * _TAKE_OVER_NS / 1e9
            elif self._cut_ns and now >= self._cut_at:
                engine.stop()
                engine.correlator.flush()
                self._lost_total += engine.lost
                self._engine, self._next, self._cut_ns = self._next, None, 0
                self._missed_seen = None
                self._following(self._launched)  # not those that have come since

    def _flush(self, engine: Engine | BpfEngine) -> None:
        """Complete all that an engine that was stopped has told, and the library's words that are left."""
        while self._words:
            engine.correlator.library_failed(self._words.popleft())
        engine.correlator.flush()

    def _drop_next(self) -> None:
        if self._next is not None:
            self._next.stop()
            self._lost_total += self._next.lost
        self._next, self._cut_ns = None, 0

    def _opened(self, pid: int) -> None:
        """A process opened an RDMA device: it has libibverbs mapped, and has not registered anything yet."""
        now = time.monotonic()
        if now - self._opened_at.get(pid, float("-inf")) < _OPENED_SECONDS:
            self._opened_again.add(pid)
            return
        if len(self._opened_at) > _OPENED_KEPT:
            self._opened_at.clear()
        self._opened_at[pid] = now
        self._opened_again.discard(pid)
        self._observer.meet(pid)
        before = set(self._copies.known)
        if not self.options.libraries or not self._copies.look_at(pid):
            return
        new = [copy for key, copy in self._copies.known.items() if key not in before]
        engine = self._engine
        if isinstance(engine, BpfEngine):
            for copy in new:
                self._follow_at_return(engine, copy)
        if isinstance(engine, BpfEngine) or all(copy.at_failure.issuperset(copy.verbs()) for copy in new):
            self._forget_unused()
            self._following([copy.shown for copy in self._copies.known.values()])
        else:  # bpftrace has to follow some of it
            self._copies_due = time.monotonic() + _COPY_SECONDS

    def _follow_modules(self) -> None:
        """Follow drivers, too, that were loaded since."""
        loaded = loaded_modules()
        new, gone = (loaded - self._modules) & MODULES, self._modules - loaded
        self._modules = loaded
        if not isinstance(self._engine, BpfEngine):
            return
        if gone:
            self._engine.forget_modules(self._functions, gone)
        if not new:
            return
        found = find_functions(BtfFunctions(), KALLSYMS.read_bytes(), dict.fromkeys(loaded, True))
        without_coming(found, loaded)
        functions = self._engine.follow_new(self._functions, found)
        self._tell("modules", modules=sorted(new), functions=functions, missing=self._functions.missing)
        self._say(
            f"loaded since: {', '.join(sorted(new))}; following {', '.join(functions) or 'nothing of it'}"
        )

    def _forget_unused(self) -> None:
        gone = self._copies.forget_unused()
        if gone and isinstance(self._engine, BpfEngine):
            self._take_words()  # what they had still to say
        elif gone:
            self._library_probes.take(partial(self._library_failed, self._engines()))
        self._library_probes.forget(gone)
        if isinstance(self._engine, BpfEngine):
            self._engine.forget(gone)

    def _library_speaks(self, engine: Engine | BpfEngine) -> bool:
        """Whether copies of libibverbs say by a way of their own when they give NULL."""
        speaks = isinstance(engine, BpfEngine) and engine.follows_libraries
        return speaks or self._library_probes.some

    def _following(self, shown: list[str]) -> None:
        for engine in self._engines():
            engine.correlator.library_speaks = self._library_speaks(engine)
        self._tell("copies", copies=shown, followed=self._how_followed())
        self._say(f"following {len(shown)} copies of libibverbs: {', '.join(shown)}")

    def _follow_copies(self, now: float) -> None:
        if self._copies_due and now >= self._copies_due and self._next is None:
            self._copies_due = 0.0
            self._forget_unused()
            self._next = self._launch()  # never with programs of our own: they follow copies at once
            self.metrics.engine_restarts += 1

    # Failures

    def _failed(self, failure: Failure) -> None:
        """The kernel's word has come: look at the process at once, if it is to be recorded in full."""
        self.metrics.last_failure = time.time()
        if self._limiter.allows(failure.key()) and self._output.room():
            self._evidence[id(failure)] = self._observer.look(failure)

    def _complete(self, failure: Failure) -> None:
        seen = self._evidence.pop(id(failure), None)
        if seen is None:
            self._suppress(failure)
            return
        self._done.append((failure, seen))

    def _suppress(self, failure: Failure) -> None:
        key = failure.key()
        if key in self._layers:
            self._count(failure, *self._layers[key], 1)
        else:
            _, before = self._unjudged.get(key, (failure, 0))
            self._unjudged[key] = failure, before + 1

    def _count(self, failure: Failure, layer: str, kind: str, number: int) -> None:
        self.metrics.failed(layer, kind, number)
        self.metrics.suppressed += number
        key = (layer, failure.errno or look.UNKNOWN_ERRNO, failure.comm)
        self._suppressed[key] = self._suppressed.get(key, 0) + number

    def _count_unjudged(self) -> None:
        """Count failures that came before the first of their kind was judged, once it is or none will be."""
        coming = {failure.key() for failure, _ in self._done}
        coming |= {evidence.failure.key() for evidence in self._evidence.values()}
        for key in [key for key in self._unjudged if key in self._layers or key not in coming]:
            failure, number = self._unjudged.pop(key)
            self._count(failure, *self._layers.get(key, ("not-judged", "")), number)

    def _settle(self, now: float, *, all_of_them: bool = False) -> None:
        """Write failures whose pages have been looked at a second time, or had none."""
        for item in list(self._done):
            failure, seen = item
            if not all_of_them and seen.pages is not None and seen.stuck_or_enomem and now < seen.lasting_due:
                continue
            self._done.remove(item)
            if seen.pages is not None and seen.stuck_or_enomem:
                self._observer.look_again(seen)
            self._observer.complete(seen)
            self._record(failure, seen)

    def _record(self, failure: Failure, seen: Evidence) -> None:
        self._number += 1
        name = f"failure-{self._number}"
        self._count_missed(now=True)
        happened = failure.since - max(0.0, failure.late)
        lost = self._lost_near(happened, failure.since)
        missed = None if self._missed_seen is None else self._misses.near(happened, failure.since)
        trace = self._observer.trace(failure, lost, missed)
        item = Waiting(failure, seen, trace, name)
        if self._write(item.events()):
            self._output.written += 1
        verdict = self._judge(item)
        layer = str(verdict.get("layer") or "unknown")
        bug = verdict.get("class") or {}
        kind = f"{bug.get('name')} {bug.get('state')}" if bug else ""
        if len(self._layers) > 10_000:
            self._layers.clear()
        self._layers[failure.key()] = layer, kind
        self._count_unjudged()
        self.metrics.failed(layer, kind)
        self._show(item, verdict)
        if bug and seen.frames is not None:
            why = self._again.take(item)
            if why:
                self._write([item.add(no_look(why))])

    def _write(self, events: Iterable[tuple[str, dict[str, Any]]]) -> bool:
        """Write events into the record; whether that could be done."""
        try:
            for kind, keys in events:
                self._output.event(kind, **keys)
        except RecordProblem as problem:
            self.metrics.record_problems += 1
            self._say(str(problem))
            return False
        return True

    def _look_again(self, now: float) -> None:
        """Look again at frames that were left behind; after the last look say whether class B is proven."""
        for item in self._again.due(now):
            self._write([item.add(self._observer.look_at_frames(item.evidence))])
            if not item.looks[-1]["ended"] and len(item.looks) < len(look.LOOKS):
                continue
            self._again.waiting.remove(item)
            verdict = self._judge(item)
            if (verdict.get("class") or {}).get("state") == "proven":
                self.metrics.proven += 1
                self._show(item, verdict)

    def _begin_next(self) -> None:
        """Begin a new record. What is not decided in the one that is completed goes on in the new one."""
        waiting = self._again.waiting
        for item in waiting:
            item.add(no_look("this record was completed before; the next one has this failure, too"))
            self._write([(EVENT, item.looks.pop())])
        self._output.begin()
        for item in waiting:
            self._write(item.events())

    def _judge(self, item: Waiting) -> dict[str, Any]:
        from regrepro import judge

        events = [
            ("memory-map", self._observer.memory_map.as_record()),
            *item.events(),
            ("run-end", {"outcome": "finished"}),
        ]
        made = [{"seq": seq, "t": 0.0, "event": kind, **keys} for seq, (kind, keys) in enumerate(events)]
        plain = json.loads(json.dumps(made, default=_plain))
        verdicts = judge.judge_record(Record(self._last_header, plain))["verdicts"]
        return verdicts[0] if verdicts else {}

    def _show(self, item: Waiting, verdict: dict[str, Any]) -> None:
        failure, seen, name = item.failure, item.evidence, item.name
        if self.options.as_json:
            line = {
                "record": str(self._output.path),
                "failure": name,
                "pid": failure.pid,
                "comm": failure.comm,
                "rank": seen.process.facts.get("rank"),
                "container": seen.process.facts.get("container"),
                "verb": failure.shown_verb,
                "errno": failure.errno,
                "address": failure.address,
                "length": failure.length,
                "layer": verdict.get("layer"),
                "class": verdict.get("class"),
                "looked_for_seconds": item.looks[-1]["after_seconds"] if item.looks else seen.again_after,
                "reason": verdict.get("reason"),
            }
            print(json.dumps(line), flush=True)
        elif not self.options.quiet:
            rank = seen.process.facts.get("rank") or {}
            number = rank.get("RANK") or rank.get("OMPI_COMM_WORLD_RANK") or rank.get("SLURM_PROCID")
            who = f"{printable(failure.comm)} ({failure.pid}{f', rank {number}' if number else ''})"
            place = f"{self._output.path.name}/{name}"
            print(f"{time.strftime('%H:%M:%S')} {who}: {verdict.get('reason')} [{place}]", flush=True)

    # Records

    def _header(self) -> dict[str, Any]:
        self._last_header: dict[str, Any] = {
            "schema": SCHEMA,
            "run": {
                "profile": look.SCENARIO,
                "names": [],
                "cuda": "auto",
                "rdma_device": None,
                "trace": "on",
                "place": "as-allocated",
                "expect": None,
                "watch": {
                    "engine": self._engine_name(),
                    "pins": self.options.pins,
                    "rate": self.options.rate,
                    "trampolines": self.options.trampolines,
                },
            },
            "node": node_facts(),
            "lab": None,
            "stand_ins": _stand_ins(),
        }
        return self._last_header

    def _engine_name(self) -> str:
        if self._bpftrace is None:
            return "bpf"
        return f"bpftrace {'.'.join(map(str, self._bpftrace[1]))}"

    def _begin_record(self) -> None:
        if self._text:
            engine_file(self._output).write_text(self._text, encoding="utf-8")
        self._output.event("memory-map", **self._observer.memory_map.as_record())
        self._tell(
            "started",
            functions=[item.name for item in self._functions.all()],
            engine=self._engine_name(),
            by_kprobe=self._by_kprobe(),
            missing=self._functions.missing,
            copies=[copy.shown for copy in self._copies.known.values()],
            followed=self._how_followed(),
            not_followed=self._copies.problems,
        )

    def _by_kprobe(self) -> list[str]:
        """Names of functions that are followed by kprobes, not by trampolines."""
        if isinstance(self._engine, BpfEngine):
            return self._engine.by_kprobe
        return [item.name for item in self._functions.all() if not item.by_trampoline]

    def _how_followed(self) -> list[dict[str, str]]:
        engine = self._engine
        rows: list[dict[str, str]] = []
        for copy in self._copies.known.values():
            at_return = not isinstance(engine, BpfEngine) or engine.follows(copy)
            rows += self._library_probes.how(copy, at_return=at_return)
        return rows

    def _tell(self, what: str, **keys: Any) -> None:
        try:
            self._output.event("watch", what=what, **keys)
        except RecordProblem as problem:
            self.metrics.record_problems += 1
            self._say(str(problem))

    def _end_record(self, path: Path) -> None:
        """Judge a record that is complete, so that its directory is like any other run's."""
        from regrepro import judge
        from regrepro.record import read_record

        with suppress(RegreproError, OSError):
            verdicts = judge.judge_record(read_record(path))
            (path / "verdicts.json").write_text(json.dumps(verdicts, indent=2) + "\n", encoding="utf-8")

    def _lost_now(self) -> int:
        engines = self._engines()
        return self._lost_total + self._library_probes.lost + sum(item.lost for item in engines)

    def _lost_near(self, *moments: float) -> int:
        """Events that were lost around moments: one of them may have been of that failure."""
        return self._losses.near(*moments) + self._lost_now() - self._lost_seen

    def _count_lost(self) -> None:
        lost, now = self._lost_now(), time.monotonic()
        self._losses.add(now, max(0, lost - self._lost_seen))
        if lost > self._lost_seen:
            self._tell("lost", events=lost - self._lost_seen)
            self._lost_seen = lost
        if lost > self._lost_told and now - self._lost_said > _LOST_SAID_SECONDS:
            self._say(
                f"{lost - self._lost_told} events were lost: more came at once than could be told, or from a "
                "CPU that had just come online"
            )
            self._lost_told, self._lost_said = lost, now

    def _count_missed(self, *, now: bool = False) -> None:
        """Look how often the kernel passed the probes over: at most once a second, or at once."""
        at = time.monotonic()
        if self._engine is None or (at < self._missed_due and not now):
            return
        self._missed_due = at + 1.0
        missed, before = self._engine.missed(), self._missed_seen
        new = max(0, (missed or 0) - (before or 0))
        self._missed_seen = missed
        self._misses.add(at, new)
        if new:
            self.metrics.missed += new
            self._tell("missed", hits=new)
            self._say(f"the kernel missed {new} hits of probes")

    def _tell_suppressed(self) -> None:
        self._count_unjudged()
        if self._suppressed:
            told = [
                {"layer": layer, "errno": errno, "comm": comm, "count": count}
                for (layer, errno, comm), count in sorted(self._suppressed.items())
            ]
            self._suppressed.clear()
            self._tell("suppressed", failures=told)
        if self._account.changed and self.options.registrations:
            self._tell("registrations", missed=self.metrics.missed, **self._account.as_record())
            self._account.changed = False

    def _write_metrics(self) -> None:
        self._count_missed()
        self.metrics.lost = self._lost_now()
        self.metrics.copies = len(self._copies.known)
        self.metrics.copies_not_followed = len(self._copies.problems)
        self.metrics.registrations = self._account.totals()
        self.metrics.not_looked_at = self._again.left_out
        if self.options.metrics is not None:
            try:
                self.metrics.write(self.options.metrics)
                problem = ""
            except OSError as error:
                problem = f"cannot write {self.options.metrics}: {error.strerror}"
            if problem and problem != self._metrics_problem:  # and not every fifteen seconds
                self._say(problem)
            self._metrics_problem = problem

    def _finish(self) -> None:
        if isinstance(self._engine, BpfEngine):
            self._take_in_order(self._engine)
        for engine in (self._engine, self._next):
            if engine is not None:
                engine.stop()
                self._flush(engine)
        self._settle(time.monotonic(), all_of_them=True)
        for item in self._again.waiting:
            self._write([item.add(no_look("watch ended before"))])
        self._again.waiting.clear()
        self.metrics.watching = 0
        if self._engine is not None or self.metrics.engine_restarts:  # it watched
            self._count_lost()
            self._tell_suppressed()
            self._tell("stopped", failures=self.metrics.total, suppressed=self.metrics.suppressed)
            self._write_metrics()
        self._output.end("interrupted" if self._stop == signal.SIGINT else "finished")
        self._library_probes.close()
        self._copies.close()

    def _told_start(self) -> str:
        functions = self._functions
        every = functions.all()
        slow = len(self._by_kprobe())
        assert self._engine is not None
        text = (
            f"watching: {len(every)} kernel functions ({len(every) - slow} by trampoline, {slow} by kprobe), "
            f"{len(self._copies.known)} copies of libibverbs ({self._engine.probes} probes of "
            f"{self._engine_name()}); records go to {self._output.path}"
        )
        missing = "; ".join(f"{name}: {why}" for name, why in functions.missing.items())
        return f"{text}; not seen: {missing}" if missing else text


def engine_file(output: Output) -> Path:
    """Return where the program lies: beside the record that it makes."""
    return output.path / "program.bt"


def page_offsets(btf: Btf) -> PageOffsets | None:
    """Return where struct page has what is told of a page that would not move; None where BTF lacks it."""
    lru = btf.offset("page", "lru")
    if lru is None:
        lru = btf.offset("folio", "lru")
    flags, refcount, mapcount = (btf.offset("page", name) for name in ("flags", "_refcount", "_mapcount"))
    if lru is None or flags is None or refcount is None or mapcount is None:
        return None
    pincount = btf.offset("folio", "_pincount")
    return PageOffsets(lru, flags, refcount, mapcount, pincount if pincount is not None else refcount)


def task_offsets(btf: Btf) -> TaskOffsets | None:
    """Return where the kernel has what is told of a process whose request failed; None before 5.5, where
    start_boottime has another name.
    """
    leader, start, its_signal, mm = (
        btf.offset("task_struct", name) for name in ("group_leader", "start_boottime", "signal", "mm")
    )
    limits, pinned = btf.offset("signal_struct", "rlim"), btf.offset("mm_struct", "pinned_vm")
    if leader is None or start is None or its_signal is None:
        return None
    if mm is None or limits is None or pinned is None:
        return None
    # struct rlimit has two unsigned longs (include/uapi/linux/resource.h).
    memlock = limits + resource.RLIMIT_MEMLOCK * 2 * struct.calcsize("L")
    return TaskOffsets(leader, start, its_signal, memlock, mm, pinned)


def request_offsets(btf: Btf) -> RequestOffsets | None:
    """Return where the kernel has what a request asked for; None where BTF does not describe it as it is
    read here: of an attribute the first eight bytes.
    """
    bundle = "uverbs_attr_bundle"
    ucore, present, attributes = (btf.offset(bundle, name) for name in ("ucore", "attr_present", "attrs"))
    inbuf, size = btf.offset("ib_udata", "inbuf"), btf.size("uverbs_attr")
    if ucore is None or present is None or attributes is None or inbuf is None or size is None:
        return None
    if btf.offset("uverbs_attr", "ptr_attr") != 0 or btf.offset("uverbs_ptr_attr", "data") != 0:
        return None
    return RequestOffsets(ucore + inbuf, present, attributes, size)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _stand_ins() -> list[dict[str, str]]:
    if not Path("/sys/module/rdma_rxe").exists():
        return []
    return [
        {
            "name": "rdma_rxe",
            "replaces": "an RDMA card",
            "what": "soft-RoCE is loaded: failures of its devices are none of a card's",
        }
    ]


def say_on_stderr(text: str) -> None:
    """Tell a person, and the journal of systemd, what goes on."""
    with suppress(OSError):
        print(f"regrepro watch: {printable(text)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return a text without what would do anything to a terminal: names are anybody's."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
