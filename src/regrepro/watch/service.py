"""`regrepro watch`: what the engine tells in, judged failures out to the sinks, until it is told to stop."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from regrepro.kernel import reclaim
from regrepro.kernel.node import node_facts
from regrepro.record import SCHEMA, Record, encode
from regrepro.watch import sinks
from regrepro.watch.attach import ENGINE, FollowedKernel, require_rights
from regrepro.watch.bpf.engine import BpfEngine
from regrepro.watch.correlate import Correlator
from regrepro.watch.counts import WatchCounts
from regrepro.watch.evidence import LOOKS, SCENARIO, Evidence
from regrepro.watch.failed_registration import FailedRegistration
from regrepro.watch.failure_trace import trace_of
from regrepro.watch.happenings import (
    Caught,
    Counted,
    Looked,
    Notice,
    Proven,
    RotationAsked,
    Sinks,
    Stopped,
    Surroundings,
)
from regrepro.watch.heartbeat import Heartbeat
from regrepro.watch.later_looks import CaughtFailure, LaterLooks, no_look
from regrepro.watch.libraries import Copies, system_copies
from regrepro.watch.lock import Lock
from regrepro.watch.losses import Losses
from regrepro.watch.observe import Observer
from regrepro.watch.open_devices import devices_are_gone
from regrepro.watch.process import kernel_boottime, owner_of
from regrepro.watch.registrations import Account
from regrepro.watch.run_directories import RunDirectories
from regrepro.watch.sinks import prometheus
from regrepro.watch.sinks.terminal import say_on_stderr
from regrepro.watch.suppression import Limiter, Suppression
from regrepro.watch.watch_settings import WatchSettings

_COUNTED_SECONDS = 15.0
_SUPPRESSED_SECONDS = 10.0
_IDLE_SECONDS = 10.5  # that nothing is waited for longer than
_OPENED_KEPT, _OPENED_SECONDS = 4096, 1.0  # in which a process that opens devices is looked at once
# Where failures come fast, to be woken for each costs more than they do: so many in so short a time are
# gathered for so long.
_FAST_TIMES, _FAST_SECONDS, _TOGETHER_SECONDS = 4, 0.1, 0.02
_BREATH_SECONDS = 0.001
_QUOTA_SHARES = 8  # of which one user or container fills one a day
_LOST_NEAR = "events were lost near this failure"


class Service:
    """One watch of this node. `run()` returns how many failures there were."""

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self.counts = WatchCounts(started=time.time())
        self._stop = 0
        self._rotate_asked = False
        self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._sinks: Sinks | None = None
        self._engine: BpfEngine | None = None
        self._more = False  # the engine had something to say the last time
        self._taken_at = deque([float("-inf")] * _FAST_TIMES, maxlen=_FAST_TIMES)  # the last failures
        self._copies = Copies()
        self._opened_at: dict[int, float] = {}  # when a process that opened a device was looked at
        self._opened_again: set[int] = set()  # those that opened another soon after
        self._number = 0
        self._evidence: dict[int, Evidence] = {}
        self._done: list[tuple[FailedRegistration, Evidence]] = []
        self._looks = LaterLooks()
        self._losses = Losses(self.counts)
        self._suppression = Suppression(self.counts)
        self._account = Account()
        self._heart = Heartbeat(self._stands_still, self._goes_on)
        self._limiter = Limiter(
            settings.rate,
            settings.burst,
            settings.each,
            settings.window,
            share=settings.quota // _QUOTA_SHARES,
            now=time.monotonic,
        )

    # Setting up

    def run(self) -> int:
        """Watch until a signal, the limit or the duration. Raises EnvironmentProblem, RecordProblem."""
        require_rights()
        lock = Lock(self.settings.out)
        umask = os.umask(0o077)  # what it writes tells of all users, and is for root
        previous = {
            number: signal.signal(number, self._signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        wakeup = signal.set_wakeup_fd(self._waker[1], warn_on_full_buffer=False)
        try:
            for sentence in reclaim.reclaim():
                self._say(sentence)
            self._run()
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            lock.release()
            os.umask(umask)
        return self.counts.total

    def _run(self) -> None:
        self._kernel = FollowedKernel.read()
        self._observer = Observer(self._kernel.flags)
        self._directories = RunDirectories(
            self.settings.out, self._header, rotate=self.settings.rotate, quota=self.settings.quota
        )
        if self.settings.libraries:
            for path in system_copies():
                self._copies.add_file(path, str(path))
            self._copies.look_everywhere()
        try:
            self._start_engine()
            self._sinks = Sinks(
                sinks.SINKS,
                Surroundings(self.settings, self.counts, self._directories, self._beginning, self._say),
            )
            self._loop()
        finally:
            self._finish()

    def _start_engine(self) -> None:
        """Raises EnvironmentProblem."""
        correlator = Correlator(
            self._failed, self._complete, reasons=self._kernel.functions.reasons, now=time.monotonic
        )
        correlator.on_open = self._opened
        correlator.device_is_gone = devices_are_gone
        correlator.doubt = lambda: _LOST_NEAR if self._losses.lost_near(time.monotonic()) else ""
        correlator.on_pin = self._observer.pins.remember
        correlator.on_unpin = self._observer.pins.unpinned
        account = self._account if self.settings.registrations else None
        self._engine = engine = self._kernel.start_engine(correlator, self.settings, account)
        self._losses.follow(engine)
        self._follow_copies(engine, self._copies.known)

    def _follow_copies(self, engine: BpfEngine, keys: Iterable[tuple[int, int]]) -> None:
        """Follow copies of libibverbs; keep why of those that cannot be."""
        for copy, error in engine.follow(self._copies.known[key] for key in keys):
            self._copies.problems[copy.shown] = f"{error.strerror} ({error.filename})"
            self.counts.attach_failures += 1
        engine.correlator.library_speaks = engine.follows_libraries

    # Going on

    def _signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._rotate_asked = True
        else:
            self._stop = number

    def _loop(self) -> None:
        begin = time.monotonic()
        counted_due = suppressed_due = 0.0
        self._say(self._told_start())
        self.counts.watching = 1
        self._heart.start()
        while not self._stop:
            self._heart.beat("its loop")
            due = [time.monotonic() + _IDLE_SECONDS, counted_due]
            if self._opened_again:
                due.append(time.monotonic() + _OPENED_SECONDS)
            if self._suppression.some:
                due.append(suppressed_due)
            if self._looks.next_due is not None:
                due.append(self._looks.next_due)
            if self.settings.duration:
                due.append(begin + self.settings.duration)
            self._wait(0.05 if self._busy() else max(0.0, min(due) - time.monotonic()))
            now = time.monotonic()
            if self._engine is not None:
                self._engine.correlator.overdue(now)
            self._settle(now)
            self._look_again(now)
            self._tell(*self._losses.look_for_lost())
            self._watch_engine()
            if not self._busy():
                self._observer.refresh_if_old()
            for pid in list(self._opened_again):
                self._opened(pid)
            if now >= counted_due:
                self._follow_modules()
                self._tell_counts()
                counted_due = now + _COUNTED_SECONDS
            if now >= suppressed_due:
                self._tell_suppressed()
                suppressed_due = now + _SUPPRESSED_SECONDS
            if self._rotate_asked and self._sinks is not None:
                self._rotate_asked = False
                self._sinks.take(RotationAsked())
            enough = bool(self.settings.limit) and self.counts.total >= self.settings.limit
            if enough and not self._looks.waiting:
                break
            if self.settings.duration and now - begin >= self.settings.duration:
                break

    def _stands_still(self, sentence: str) -> None:
        """Called by the heartbeat's thread: the loop does nothing meanwhile that this could disturb."""
        self.counts.watching = 0
        say_on_stderr(sentence)
        if self.settings.metrics is not None:
            with suppress(OSError):
                prometheus.write(self.settings.metrics, prometheus.text_of(self.counts))

    def _goes_on(self) -> None:
        self.counts.watching = 1
        self._say("it goes on")

    def _busy(self) -> bool:
        return bool(self._done) or (self._engine is not None and self._engine.correlator.waiting)

    def _wait(self, seconds: float) -> None:
        """Wait for what the engine tells, and take it."""
        assert self._engine is not None
        poll = select.poll()
        for fd in (self._waker[0], *self._engine.fds()):
            poll.register(fd, select.POLLIN)
        with suppress(InterruptedError):
            poll.poll(0 if self._more else seconds * 1000)
        with suppress(BlockingIOError):
            while os.read(self._waker[0], 512):
                pass
        if self._more:
            time.sleep(_BREATH_SECONDS)  # who writes a record may wait for this CPU
        elif time.monotonic() - self._taken_at[0] < _FAST_SECONDS:
            time.sleep(_TOGETHER_SECONDS)
        self._more = not self._engine.take(kernel_boottime()) or self._engine.waits

    def _watch_engine(self) -> None:
        """Start an engine anew that has ended. Raises EnvironmentProblem where that cannot be."""
        engine = self._engine
        assert engine is not None
        if not engine.ended:
            return
        why = engine.why()
        self.counts.watching = 0
        self._tell(
            Notice(f"what follows the kernel ended ({why}); starting it anew", "engine-ended", {"why": why})
        )
        engine.stop()
        engine.correlator.flush()
        self._losses.follow(None)
        self._engine = None
        self._tell_counts()
        if time.monotonic() - engine.started < 10:
            time.sleep(1)
        self.counts.engine_restarts += 1
        self._start_engine()
        self.counts.watching = 1

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
        self._heart.beat(f"a look at process {pid}")
        self._observer.meet(pid)
        before = set(self._copies.known)
        engine = self._engine
        if engine is None or not self.settings.libraries or not self._copies.look_at(pid):
            return
        engine.forget(self._copies.forget_unused())
        self._follow_copies(engine, self._copies.known.keys() - before)
        shown = [copy.shown for copy in self._copies.known.values()]
        self._tell(
            Notice(
                f"following {len(shown)} copies of libibverbs: {', '.join(shown)}",
                "copies",
                {"copies": shown, "followed": self._how_followed()},
            )
        )

    def _follow_modules(self) -> None:
        """Follow drivers, too, that were loaded since."""
        if self._engine is None:
            return
        modules, functions = self._kernel.follow_modules(self._engine)
        if modules:
            missing = self._kernel.functions.missing
            self._tell(
                Notice(
                    f"loaded since: {', '.join(modules)}; "
                    f"following {', '.join(functions) or 'nothing of it'}",
                    "modules",
                    {"modules": modules, "functions": functions, "missing": missing},
                )
            )

    # Failures

    def _failed(self, failure: FailedRegistration) -> None:
        """The kernel's word has come: look at the process at once, if it is to be recorded in full."""
        self.counts.last_failure = time.time()
        self._taken_at.append(time.monotonic())
        failure.owner = owner_of(failure.pid, failure.uid)
        if self._limiter.allows(failure.key(), failure.owner) and self._directories.room():
            self._heart.beat(f"a look at process {failure.pid}")
            self._evidence[id(failure)] = self._observer.look(failure)

    def _complete(self, failure: FailedRegistration) -> None:
        seen = self._evidence.pop(id(failure), None)
        if seen is None:
            self._suppression.suppress(failure)
        else:
            self._done.append((failure, seen))

    def _settle(self, now: float, *, all_of_them: bool = False) -> None:
        """Record failures whose pages have been looked at a second time, or had none."""
        for item in list(self._done):
            failure, seen = item
            again = seen.pages is not None and seen.stuck_or_enomem
            if again and now < seen.lasting_due and not all_of_them:
                continue
            self._done.remove(item)
            if again:
                self._observer.look_again(seen)
            self._observer.complete(seen)
            self._record(failure, seen)

    def _record(self, failure: FailedRegistration, seen: Evidence) -> None:
        self._number += 1
        self._tell(*self._losses.look_for_missed(at_once=True))
        moments = failure.since - max(0.0, failure.late), failure.since
        trace = trace_of(
            failure,
            self._kernel.functions,
            self._kernel.flags,
            self._losses.lost_near(*moments),
            self._losses.missed_near(*moments),
        )
        item = CaughtFailure(failure, seen, trace, f"failure-{self._number}")
        verdict = self._judge(item)
        layer, bug = str(verdict.get("layer") or "unknown"), verdict.get("class") or {}
        kind = f"{bug.get('name')} {bug.get('state')}" if bug else ""
        self._suppression.judged(failure, layer, kind)
        self._count_unjudged()
        self.counts.failed(layer, kind)
        looks = bool(bug) and seen.frames is not None
        why_not = self._looks.take(item) if looks else ""
        if self._sinks is not None:
            before = self.counts.recorded_bytes
            self._sinks.take(Caught(item, verdict, waits=looks and not why_not))
            self._limiter.spent(failure.owner, self.counts.recorded_bytes - before)
        if why_not:
            self._looked(item, no_look(why_not), last=True)

    def _looked(self, item: CaughtFailure, seen: dict[str, Any], *, last: bool) -> None:
        item.add(seen)
        if self._sinks is not None:
            self._sinks.take(Looked(item, last))

    def _look_again(self, now: float) -> None:
        """Look again at frames that were left behind; after the last look say whether class B is proven."""
        for item in self._looks.due(now):
            seen = self._observer.look_at_frames(item.evidence)
            last = bool(seen["ended"]) or len(item.looks) + 1 == len(LOOKS)
            self._looked(item, seen, last=last)
            if not last:
                continue
            self._looks.waiting.remove(item)
            verdict = self._judge(item)
            if (verdict.get("class") or {}).get("state") == "proven":
                self.counts.proven += 1
                if self._sinks is not None:
                    self._sinks.take(Proven(item, verdict))

    def _judge(self, item: CaughtFailure) -> dict[str, Any]:
        from regrepro import judge

        events = [
            ("memory-map", self._observer.memory_map.as_record()),
            *item.events(),
            ("run-end", {"outcome": "finished"}),
        ]
        made = [{"seq": seq, "t": 0.0, "event": kind, **keys} for seq, (kind, keys) in enumerate(events)]
        plain = json.loads(encode(made))
        verdicts = judge.judge_record(Record(dict(self._directories.made_header), plain))["verdicts"]
        return verdicts[0] if verdicts else {}

    # What is told

    def _tell(self, *notices: Notice) -> None:
        for notice in notices:
            if self._sinks is not None:
                self._sinks.take(notice)
            elif notice.sentence:  # there is nothing else yet
                say_on_stderr(notice.sentence)

    def _say(self, sentence: str) -> None:
        self._tell(Notice(sentence))

    def _count_unjudged(self) -> None:
        coming = {failure.key() for failure, _ in self._done}
        coming |= {evidence.failure.key() for evidence in self._evidence.values()}
        self._suppression.count_unjudged(coming)

    def _tell_suppressed(self) -> None:
        self._count_unjudged()
        told = self._suppression.take()
        if told:
            self._tell(Notice("", "suppressed", {"failures": told}))
        if self._account.changed and self.settings.registrations:
            keys = {"missed": self.counts.missed, **self._account.as_record()}
            self._tell(Notice("", "registrations", keys))
            self._account.changed = False

    def _tell_counts(self) -> None:
        self._tell(*self._losses.look_for_missed())
        self.counts.lost = self._losses.lost
        self.counts.copies = len(self._copies.known)
        self.counts.copies_not_followed = len(self._copies.problems)
        self.counts.registrations = self._account.totals()
        self.counts.not_looked_at = self._looks.left_out
        if self._sinks is not None:
            self._sinks.take(Counted())

    def _finish(self) -> None:
        self._heart.stop()
        engine = self._engine
        if engine is not None:
            engine.stop()
            engine.correlator.flush()
        if self._sinks is not None:
            self._settle(time.monotonic(), all_of_them=True)
            for item in self._looks.waiting:
                self._looked(item, no_look("watch ended before"), last=True)
            self._looks.waiting.clear()
            self.counts.watching = 0
            self._tell(*self._losses.look_for_lost())
            self._tell_suppressed()
            counts = {"failures": self.counts.total, "suppressed": self.counts.suppressed}
            self._tell(Notice("", "stopped", counts))
            self._tell_counts()
            self._sinks.take(Stopped("interrupted" if self._stop == signal.SIGINT else "finished"))
        self._copies.close()

    # Records

    def _header(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "run": {
                "profile": SCENARIO,
                "names": [],
                "cuda": "auto",
                "rdma_device": None,
                "trace": "on",
                "place": "as-allocated",
                "expect": None,
                "watch": {"engine": ENGINE, "pins": self.settings.pins, "rate": self.settings.rate},
            },
            "node": node_facts(),
            "lab": None,
            "stand_ins": _stand_ins(),
        }

    def _beginning(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield what each record begins with."""
        yield "memory-map", self._observer.memory_map.as_record()
        functions = self._kernel.functions
        yield (
            "watch",
            {
                "what": "started",
                "functions": [item.name for item in functions.all()],
                "engine": ENGINE,
                "by_kprobe": self._engine.by_kprobe if self._engine is not None else [],
                "missing": functions.missing,
                "copies": [copy.shown for copy in self._copies.known.values()],
                "followed": self._how_followed(),
                "not_followed": self._copies.problems,
            },
        )

    def _how_followed(self) -> list[dict[str, str]]:
        engine = self._engine
        return [
            {
                "copy": copy.shown,
                "verb": verb,
                "at": "return" if engine is not None and engine.follows(copy) else "nowhere",
                "why": self._copies.problems.get(copy.shown, ""),
            }
            for copy in self._copies.known.values()
            for verb in copy.offsets
        ]

    def _told_start(self) -> str:
        assert self._engine is not None
        functions, slow = self._kernel.functions, len(self._engine.by_kprobe)
        every = len(functions.all())
        text = (
            f"watching: {every} kernel functions ({every - slow} by fentry and fexit, {slow} by kprobe), "
            f"{len(self._copies.known)} copies of libibverbs ({self._engine.probes} probes of {ENGINE}); "
            f"records go to {self._directories.path}"
        )
        missing = "; ".join(f"{name}: {why}" for name, why in functions.missing.items())
        return f"{text}; not seen: {missing}" if missing else text


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
