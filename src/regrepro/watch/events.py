"""Lines of the program → failures, each once.

The kernel's account of a failing request comes before the word of libibverbs about it. A failure is handed
out with the kernel's word, so that the process can be looked at while it still has the mapping, and is
complete with the library's, or when that does not come in time.

The library's word can come by a way of its own (`library_failed`), and overtake the kernel's. Such a word
waits until it is sure that the kernel has none to add: `settle`.
"""

from __future__ import annotations

import errno as errnos
import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrepro.errors import errno_name
from regrepro.watch.process import comm_of, kernel_boottime
from regrepro.watch.program import REQUESTS, VERBS, attribute_index

USER_WAIT = 1.0  # seconds that the library's word may take after the kernel's
# Inner failures of a thread that are older belong to a request that went on well; no request takes so long
# between the failure and its end.
_STALE_NS = 120_000_000_000
_PINS_BITS = 40
_INNER_LIMIT = 256  # lines kept for one thread, the newest
_MANY_INNER = f"only the last {_INNER_LIMIT} of what failed inside of this request are known"
_SILENT_LIMIT = 1024  # failures of one thread that wait for a late word
_NO_BEGIN = "nobody saw this request begin: what failed in it is not told from what came before"
# So long after the kernel's word the library's of the same thread is of the same call, whatever it names.
_SAME_CALL_NS = 100_000_000


@dataclass
class Inner:
    """One return inside of the kernel during a request. `ns`: boottime clock."""

    ns: int
    function: str
    ret: int
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class StuckPage:
    """A page that migrate_pages left behind, at that moment. `address`: of its struct page."""

    address: int
    refcount: int
    mapcount: int
    pincount: int
    flags: int


@dataclass
class Failure:
    """A registration that failed. None where neither the kernel nor the library said it.

    `function`: the kernel's handler, "" where no handler ran. `verb`: the library's, "" where its copy was
    not followed. `pin_calls`, `pinned`: pins inside of the request, and the pages of those that succeeded.
    `process_start`: of its process, ns of boottime, None where unknown; `limits`: at that moment, bytes.
    """

    tid: int
    pid: int
    comm: str
    ns: int
    function: str = ""
    ret: int = 0
    verb: str = ""
    address: int | None = None
    length: int | None = None
    iova: int | None = None
    access: int | None = None
    fd: int | None = None
    uid: int | None = None
    process_start: int | None = None
    limits: dict[str, int | None] = field(default_factory=dict)
    pin_calls: int = 0
    pinned: int = 0
    inner: list[Inner] = field(default_factory=list)
    stuck: list[StuckPage] = field(default_factory=list)
    awaits_user: bool = False
    user_missing: bool = False  # the library's word was due and did not come
    errno_inferred: bool = False
    doubt: str = ""  # why the kernel's part may not be whole
    since: float = 0.0  # time.monotonic() of its arrival
    late: float = 0.0  # seconds that it arrived after it happened
    wait_until: float = 0.0  # for the library's word

    @property
    def dmabuf(self) -> bool:
        """Whether a dma-buf was to be registered."""
        return "DMABUF" in self.function or "dmabuf" in self.verb or self.fd is not None

    @property
    def errno(self) -> str | None:
        """The errno's name; None where nobody said it."""
        return errno_name(-self.ret) if self.ret < 0 else None

    @property
    def errno_how(self) -> str:
        """How the errno is known."""
        if self.errno_inferred:
            return "inferred"
        return "observed" if self.ret < 0 else "missing"

    @property
    def shown_verb(self) -> str:
        """The verb, or what the kernel's handler serves."""
        if self.verb:
            return self.verb
        return "ibv_reg_dmabuf_mr" if self.dmabuf else "ibv_reg_mr"

    def key(self) -> tuple[Any, ...]:
        """What is the same of failures that say the same again."""
        last = self.inner[-1] if self.inner else None
        return self.pid, self.ret, self.function, last.function if last else ""


@dataclass
class Asked:
    """What a failed request had asked for, as the kernel was told. None where it was not."""

    ns: int
    start: int | None
    length: int | None
    iova: int | None
    access: int | None
    fd: int | None
    present: int | None  # bits of attributes; None: those of struct ib_uverbs_reg_mr, which has them all

    def of(self, handler: str) -> Asked:
        """Return it without what the request of this handler did not have."""
        if self.present is None or handler not in REQUESTS:
            return self
        given = (self.start, self.length, self.iova, self.access, self.fd)
        start, length, iova, access, fd = (
            value if self.present >> attribute_index(identifier) & 1 else None
            for value, identifier in zip(given, REQUESTS[handler], strict=True)
        )
        return Asked(self.ns, start, length, iova, access, fd, self.present)


@dataclass
class LibraryWord:
    """libibverbs gave NULL. `verb`: its number in VERBS; `given`: those of its parameters that are known, by
    the names of `Failure`.
    """

    tid: int
    pid: int
    ns: int
    verb: int
    given: dict[str, int]
    comm: str | None = None  # to be looked up where the kernel has not said it
    arrived: float = 0.0  # time.monotonic()

    def is_of(self, failure: Failure) -> bool:
        """Whether the kernel's failure is of the call that this is the end of."""
        if failure.tid != self.tid or failure.ns > self.ns:
            return False
        pairs = ((failure.address, self.given.get("address")), (failure.length, self.given.get("length")))
        if all(one == other for one, other in pairs if one is not None and other is not None):
            return True
        return self.ns - failure.ns < _SAME_CALL_NS


@dataclass
class Ended:
    """A request that failed, as the kernel says at its end. `since`: when it began, 0 where nobody saw that;
    `pin_calls`, `pinned`, `process_start`, `limits`: as `Failure` has them.
    """

    tid: int
    pid: int
    comm: str
    ns: int
    since: int
    function: str
    ret: int
    uid: int
    pin_calls: int = 0
    pinned: int = 0
    process_start: int | None = None
    limits: dict[str, int | None] = field(default_factory=dict)
    awaits_user: bool = False


@dataclass
class PlainPin:
    """A pin without FOLL_LONGTERM by somebody else's driver. `frames`: PFNs of its pages when it was told, 0
    where there was none; None where they were not read. `ended`: its unpin was seen. `page`: the struct of
    the first that was pinned, 0 where it is not known.
    """

    ns: int
    tid: int
    pid: int
    function: str
    start: int
    pages: int
    flags: int
    stack: list[str]
    frames: NDArray[np.int64] | None = None
    ended: bool = False
    page: int = 0


@dataclass
class Counts:
    """What was seen of the program itself."""

    lost: int = 0  # events that bpftrace counted as lost
    malformed: int = 0
    heartbeats: int = 0
    attached: int | None = None


class Correlator:
    """Takes the lines of one engine; hands out failures by `on_failure` (at once) and `on_complete`.

    `accepts(ns)`: whether an event of this engine counts; two engines overlap while one takes over.
    """

    def __init__(
        self,
        names: list[str],
        on_failure: Callable[[Failure], None],
        on_complete: Callable[[Failure], None],
        *,
        reasons: dict[int, str] | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._names = names
        self._on_failure = on_failure
        self._on_complete = on_complete
        self._reasons = reasons or {}
        self._now = now
        self._inner: dict[int, deque[Inner]] = {}
        self._stuck: dict[int, list[StuckPage]] = {}
        self._asked: dict[int, Asked] = {}
        self._waiting: dict[int, Failure] = {}
        self._silent: dict[int, deque[Failure]] = {}  # that were complete without the library's word
        self._alone: deque[LibraryWord] = deque()  # of which the kernel has not said anything yet
        self.library_speaks = False  # some copies say by their own way when they give NULL
        self.accepts: Callable[[int], bool] = lambda _ns: True
        self.on_open: Callable[[int], None] = lambda _pid: None
        self.on_marker: Callable[[int, int], None] = lambda _ns, _cpu: None
        self.device_is_gone: Callable[[int], bool] = lambda _pid: False
        self.on_pin: Callable[[PlainPin], None] = lambda _pin: None
        self.on_unpin: Callable[[int, int, int], None] = lambda _pid, _ns, _page: None
        self.on_account: Callable[[dict[str, Any]], None] = lambda _maps: None
        self.on_error: Callable[[str], None] = lambda _text: None
        self.counts = Counts()

    def line(self, text: str) -> None:
        """Take one line of bpftrace's JSON output."""
        text = text.strip()
        if not text:
            return
        try:
            item = json.loads(text)
            kind, data = item["type"], item.get("data")
        except (ValueError, KeyError, TypeError):
            self.on_error(text)
            return
        if kind == "printf" and isinstance(data, str):
            for part in data.splitlines() if not data.startswith("P|") else [data]:
                try:
                    self._event(part)
                except (ValueError, IndexError):
                    self.counts.malformed += 1
        elif kind == "lost_events" and isinstance(data, dict):
            self.counts.lost += int(data.get("events", 0))
        elif kind == "attached_probes" and isinstance(data, dict):
            self.counts.attached = int(data.get("probes", 0))
        elif kind in ("map", "hist") and isinstance(data, dict):
            self.on_account(data)

    def _event(self, text: str) -> None:
        kind, _, rest = text.partition("|")
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, rest)

    def _name(self, number: str) -> str:
        return self._names[int(number)]

    def _heartbeat(self, rest: str) -> None:
        self.counts.heartbeats += 1
        if self.counts.heartbeats % 6 == 0:
            self.forget_stale(int(rest))

    def forget_stale(self, ns: int) -> None:
        """Drop inner failures of requests that went on well: nobody will ask for them."""
        for tid in [tid for tid, kept in self._inner.items() if kept[-1].ns < ns - _STALE_NS]:
            del self._inner[tid]
            self._stuck.pop(tid, None)
        for tid in [tid for tid, told in self._silent.items() if told[-1].ns < ns - _STALE_NS]:
            del self._silent[tid]

    def _opened(self, rest: str) -> None:
        pid, ns, cpu = rest.split("|")
        if int(pid) == os.getpid():
            self.on_marker(int(ns), int(cpu))  # see marker.py
        else:
            self.on_open(int(pid))

    def _driver(self, rest: str) -> None:
        tid, ns, number, ret, start, length, iova, access = rest.split("|")
        args = {
            "start": int(start, 16),
            "length": int(length),
            "iova": int(iova, 16),
            "access": int(access),
        }
        self.failed_inside(int(tid), Inner(int(ns), self._name(number), int(ret), args))

    def _pin_failed(self, rest: str) -> None:
        tid, ns, number, ret, start, pages, flags = rest.split("|")
        args = {"start": int(start, 16), "nr_pages": int(pages), "gup_flags": int(flags, 16)}
        self.failed_inside(int(tid), Inner(int(ns), self._name(number), int(ret), args))

    def _inner_failed(self, rest: str) -> None:
        tid, ns, number, ret = rest.split("|")
        self.failed_inside(int(tid), Inner(int(ns), self._name(number), int(ret)))

    def failed_inside(self, tid: int, inner: Inner) -> None:
        """Take what failed inside of a thread's request, if it was one."""
        self._inner.setdefault(tid, deque(maxlen=_INNER_LIMIT)).append(inner)

    def _migration(self, rest: str) -> None:
        tid, ns, ret, reason = rest.split("|")
        self.migration_failed(int(tid), int(ns), int(ret), int(reason))

    def migration_failed(self, tid: int, ns: int, ret: int, reason: int) -> None:
        """Take a migration that left pages behind; they follow. `reason`: of enum migrate_reason."""
        name = self._reasons.get(reason, str(reason))
        self.failed_inside(tid, Inner(ns, "migrate_pages", ret, {"reason": name}))
        self._stuck[tid] = []

    def _stuck_page(self, rest: str) -> None:
        tid, _, page, refcount, mapcount, pincount, flags = rest.split("|")
        self.page_stayed(
            int(tid), StuckPage(int(page, 16), int(refcount), int(mapcount), int(pincount), int(flags, 16))
        )

    def page_stayed(self, tid: int, page: StuckPage) -> None:
        """Take a page that the thread's last migration left behind."""
        self._stuck.setdefault(tid, []).append(page)

    def _told_asked(self, rest: str) -> None:
        tid, ns, start, length, iova, access, fd, present = rest.split("|")
        self.asked(
            int(tid),
            Asked(
                int(ns),
                int(start, 16),
                int(length),
                int(iova, 16),
                int(access) & 0xFFFFFFFF,
                int(fd) & 0xFFFFFFFF if present != "-" else None,
                int(present, 16) if present != "-" else None,
            ),
        )

    def asked(self, tid: int, asked: Asked) -> None:
        """Take what the thread's request had asked for, which has failed; its end follows."""
        self._asked[tid] = asked

    def _request_failed(self, rest: str) -> None:
        tid, pid, ns, since, number, ret, pins, user, uid, start, memlock, pinned, comm = rest.split("|", 12)
        self.request_failed(
            Ended(
                int(tid),
                int(pid),
                comm,
                int(ns),
                int(since),
                self._name(number),
                int(ret),
                int(uid),
                pin_calls=int(pins) >> _PINS_BITS,
                pinned=int(pins) & ((1 << _PINS_BITS) - 1),
                process_start=int(start) if start != "-" else None,
                limits=limits_of(int(memlock), int(pinned)) if memlock != "-" else {},
                awaits_user=int(user) != 0,
            )
        )

    def request_failed(self, ended: Ended) -> None:
        """Take the end of a request that failed: the kernel's word about it is complete."""
        tid, ns, since = ended.tid, ended.ns, ended.since
        kept = self._inner.pop(tid, ())
        inner = sorted(kept, key=lambda item: item.ns)
        doubt = _NO_BEGIN if since == 0 else _MANY_INNER if _dropped(inner, since) else ""
        # What came before belongs to a request that went on well.
        inner = [item for item in inner if 0 < since <= item.ns <= ns]
        stuck = self._stuck.pop(tid, [])
        if not any(item.function == "migrate_pages" for item in inner):
            stuck = []
        asked = self._asked.pop(tid, None)
        if not self.accepts(ns):
            return
        failure = Failure(
            tid,
            ended.pid,
            ended.comm,
            ns,
            ended.function,
            ended.ret,
            pin_calls=ended.pin_calls,
            pinned=ended.pinned,
            uid=ended.uid,
            process_start=ended.process_start,
            limits=ended.limits,
            inner=inner,
            stuck=stuck,
            awaits_user=ended.awaits_user,
            doubt=doubt,
            since=self._now(),
            late=self._late(ns),
        )
        if asked is not None and since <= asked.ns <= ns:
            asked = asked.of(failure.function)
            failure.address, failure.length = asked.start, asked.length
            failure.iova, failure.access, failure.fd = asked.iova, asked.access, asked.fd
        driver = next((item for item in reversed(inner) if "access" in item.args), None)
        if driver is not None:
            failure.address, failure.length = driver.args["start"], driver.args["length"]
            failure.iova, failure.access = driver.args["iova"], driver.args["access"]
        self._on_failure(failure)
        word = next((word for word in self._alone if word.is_of(failure)), None)
        if word is not None:
            self._alone.remove(word)
            self._conclude(failure, word)
        elif failure.awaits_user or self.library_speaks:
            before = self._waiting.pop(tid, None)
            if before is not None:  # its word never came, and the thread went on
                self._give_up(before)
            failure.wait_until = self._now() + USER_WAIT  # looking at the process takes its time
            self._waiting[tid] = failure
        else:
            self._on_complete(failure)

    def _library(self, rest: str) -> None:
        tid, pid, ns, verb, address, length, iova, access, fd, comm = rest.split("|", 9)
        given = {
            "address": int(address, 16),
            "length": int(length),
            "iova": int(iova, 16),
            "access": int(access),
            "fd": int(fd),
        }
        word = LibraryWord(int(tid), int(pid), int(ns), int(verb), given, comm)
        failure = self._waiting.pop(word.tid, None)
        if failure is not None:
            self._conclude(failure, word)
        elif self.accepts(word.ns):
            self._report(word)

    def library_failed(self, word: LibraryWord) -> None:
        """Take the word of a copy of libibverbs that came by its own way."""
        failure = self._waiting.get(word.tid)
        if failure is not None and word.is_of(failure):
            self._conclude(self._waiting.pop(word.tid), word)
            return
        told, mine = self._silent.get(word.tid), None
        while told and told[0].ns <= word.ns:  # a thread's are in time order: the last before the word
            mine = told.popleft()
        if told is not None and not told:
            del self._silent[word.tid]
        if mine is not None and word.is_of(mine):
            return  # it has been told, and waited for this in vain
        word.arrived = self._now()
        self._alone.append(word)

    def _late(self, ns: int) -> float:
        return (kernel_boottime() - ns) / 1e9

    @property
    def alone(self) -> deque[LibraryWord]:
        """Words of the library that the kernel may still have something to add to."""
        return self._alone

    def settle(self, ns: int, doubt: str = "") -> None:
        """All that the kernel said before `ns` has been taken, or will not come: the library's words from
        then stand alone. `doubt`: why that is not sure.
        """
        if not self._alone:
            return
        due = [word for word in self._alone if word.ns < ns]
        self._alone = deque(word for word in self._alone if word.ns >= ns)
        for word in due:
            self._report(word, doubt)

    def _conclude(self, failure: Failure, word: LibraryWord) -> None:
        """Fill in what the library knows of a failure that the kernel has told."""
        failure.verb = VERBS.get(word.verb, "")
        for name, value in word.given.items():
            if name != "fd" or failure.dmabuf:
                setattr(failure, name, value)
        failure.awaits_user = False
        self._on_complete(failure)

    def _report(self, word: LibraryWord, doubt: str = "") -> None:
        """Hand out a failure of which the kernel's handlers said nothing."""
        comm = word.comm if word.comm is not None else comm_of(word.pid, word.tid)
        failure = Failure(
            word.tid, word.pid, comm, word.ns, doubt=doubt, since=self._now(), late=self._late(word.ns)
        )
        if self.device_is_gone(word.pid):
            # What every command is then answered with before any handler runs (ib_uverbs_write(),
            # ib_uverbs_ioctl()).
            failure.ret, failure.errno_inferred = -errnos.EIO, True
        failure.verb = VERBS.get(word.verb, "")
        for name, value in word.given.items():
            if name != "fd" or failure.dmabuf:
                setattr(failure, name, value)
        if failure.ret == 0 and failure.dmabuf and not doubt:
            # What rdma-core's table of operations holds where the provider's library has no dma-buf.
            failure.ret = -errnos.EOPNOTSUPP
            failure.errno_inferred = True
        self._on_failure(failure)
        self._on_complete(failure)

    def _plain_pin(self, rest: str) -> None:
        tid, pid, ns, number, start, pages, flags, stack = rest.split("|", 7)
        frames = [line.strip() for line in stack.splitlines() if line.strip()]
        self.on_pin(
            PlainPin(
                int(ns),
                int(tid),
                int(pid),
                self._name(number),
                int(start, 16),
                int(pages),
                int(flags, 16),
                frames,
            )
        )

    def overdue(self, now: float) -> None:
        """Complete failures whose library has not said anything in time: the process may be dead."""
        for tid in [tid for tid, item in self._waiting.items() if now > item.wait_until]:
            self._give_up(self._waiting.pop(tid))

    def _give_up(self, failure: Failure) -> None:
        # Of a copy that speaks its own way nobody knows whether it was the one that was called.
        failure.user_missing = failure.awaits_user
        failure.awaits_user = False
        self._silent.setdefault(failure.tid, deque(maxlen=_SILENT_LIMIT)).append(failure)
        self._on_complete(failure)

    def flush(self) -> None:
        """Complete all: the engine has ended."""
        self.overdue(float("inf"))
        self.settle(1 << 63, "what follows the kernel ended before it was sure that it had told all")


def _dropped(inner: list[Inner], since: int) -> bool:
    """Whether there may have been more in this request than was kept."""
    return len(inner) == _INNER_LIMIT and inner[0].ns >= since


def limits_of(memlock: int, pinned: int) -> dict[str, int | None]:
    """Return what the kernel told, bytes (-1: unlimited) and pages, as `Process.limits` has it."""
    soft = memlock if memlock >= 0 else None
    return {"memlock_soft": soft, "vmpin": pinned * os.sysconf("SC_PAGE_SIZE")}


_HANDLERS: dict[str, Callable[[Correlator, str], None]] = {
    "H": Correlator._heartbeat,
    "O": Correlator._opened,
    "D": Correlator._driver,
    "G": Correlator._pin_failed,
    "I": Correlator._inner_failed,
    "M": Correlator._migration,
    "S": Correlator._stuck_page,
    "A": Correlator._told_asked,
    "K": Correlator._request_failed,
    "U": Correlator._library,
    "P": Correlator._plain_pin,
}
