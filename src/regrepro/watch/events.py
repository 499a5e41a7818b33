"""Lines of the program → failures, each once.

The kernel's account of a failing request comes before the word of libibverbs about it. A failure is handed
out with the kernel's word, so that the process can be looked at while it still has the mapping, and is
complete with the library's, or when that does not come in time.
"""

from __future__ import annotations

import errno as errnos
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from regrepro.errors import errno_name
from regrepro.watch.program import VERBS

USER_WAIT = 1.0  # seconds that the library's word may take after the kernel's
_STALE_NS = 5_000_000_000  # inner failures of a thread that are older belong to a request that went on well
_PINS_BITS = 40
_INNER_LIMIT = 256  # lines kept for one thread


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
    since: float = 0.0  # time.monotonic() of its arrival
    wait_until: float = 0.0  # for the library's word

    @property
    def dmabuf(self) -> bool:
        """Whether a dma-buf was to be registered."""
        return "DMABUF" in self.function or "dmabuf" in self.verb

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
class PlainPin:
    """A pin without FOLL_LONGTERM by somebody else's driver."""

    ns: int
    tid: int
    pid: int
    function: str
    start: int
    pages: int
    flags: int
    stack: list[str]


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
        self._inner: dict[int, list[Inner]] = {}
        self._stuck: dict[int, list[StuckPage]] = {}
        self._carrier: dict[int, tuple[int, int]] = {}
        self._waiting: dict[int, Failure] = {}
        self.accepts: Callable[[int], bool] = lambda _ns: True
        self.on_open: Callable[[int], None] = lambda _pid: None
        self.on_pin: Callable[[PlainPin], None] = lambda _pin: None
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

    def _add(self, tid: int, inner: Inner) -> None:
        kept = self._inner.setdefault(tid, [])
        if len(kept) < _INNER_LIMIT:
            kept.append(inner)

    def _heartbeat(self, rest: str) -> None:
        self.counts.heartbeats += 1
        if self.counts.heartbeats % 6 == 0:
            self._forget_stale(int(rest))

    def _forget_stale(self, ns: int) -> None:
        """Drop inner failures of requests that went on well: nobody will ask for them."""
        for tid in [tid for tid, kept in self._inner.items() if kept[-1].ns < ns - _STALE_NS]:
            del self._inner[tid]
            self._stuck.pop(tid, None)
        for tid in [tid for tid, (at, _) in self._carrier.items() if at < ns - _STALE_NS]:
            del self._carrier[tid]

    def _opened(self, rest: str) -> None:
        self.on_open(int(rest.partition("|")[0]))

    def _driver(self, rest: str) -> None:
        tid, ns, number, ret, start, length, iova, access = rest.split("|")
        args = {
            "start": int(start, 16),
            "length": int(length),
            "iova": int(iova, 16),
            "access": int(access),
        }
        self._add(int(tid), Inner(int(ns), self._name(number), int(ret), args))

    def _pin_failed(self, rest: str) -> None:
        tid, ns, number, ret, start, pages, flags = rest.split("|")
        args = {"start": int(start, 16), "nr_pages": int(pages), "gup_flags": int(flags, 16)}
        self._add(int(tid), Inner(int(ns), self._name(number), int(ret), args))

    def _inner_failed(self, rest: str) -> None:
        tid, ns, number, ret = rest.split("|")
        self._add(int(tid), Inner(int(ns), self._name(number), int(ret)))

    def _migration(self, rest: str) -> None:
        tid, ns, ret, reason = rest.split("|")
        name = self._reasons.get(int(reason), reason)
        self._add(int(tid), Inner(int(ns), "migrate_pages", int(ret), {"reason": name}))
        self._stuck[int(tid)] = []

    def _stuck_page(self, rest: str) -> None:
        tid, _, page, refcount, mapcount, pincount, flags = rest.split("|")
        self._stuck.setdefault(int(tid), []).append(
            StuckPage(int(page, 16), int(refcount), int(mapcount), int(pincount), int(flags, 16))
        )

    def _request_failed(self, rest: str) -> None:
        tid_, pid, ns_, since, number, ret, pins, user, uid, start, memlock, pinned, comm = rest.split(
            "|", 12
        )
        tid, ns = int(tid_), int(ns_)
        inner = sorted(self._inner.pop(tid, []), key=lambda item: item.ns)
        # What came before belongs to a request that went on well.
        inner = [item for item in inner if int(since) <= item.ns <= ns]
        stuck = self._stuck.pop(tid, [])
        if not self.accepts(ns):
            return
        calls = int(pins) >> _PINS_BITS
        failure = Failure(
            tid,
            int(pid),
            comm,
            ns,
            self._name(number),
            int(ret),
            pin_calls=calls,
            pinned=int(pins) & ((1 << _PINS_BITS) - 1),
            uid=int(uid),
            process_start=int(start) if start != "-" else None,
            limits=_limits(memlock, pinned),
            inner=inner,
            stuck=stuck,
            awaits_user=int(user) != 0,
            since=self._now(),
        )
        driver = next((item for item in reversed(inner) if "access" in item.args), None)
        if driver is not None:
            failure.address, failure.length = driver.args["start"], driver.args["length"]
            failure.iova, failure.access = driver.args["iova"], driver.args["access"]
        self._on_failure(failure)
        if failure.awaits_user:
            before = self._waiting.pop(tid, None)
            if before is not None:  # its word never came, and the thread went on
                self._give_up(before)
            failure.wait_until = self._now() + USER_WAIT  # looking at the process takes its time
            self._waiting[tid] = failure
        else:
            self._on_complete(failure)

    def _carrier_failed(self, rest: str) -> None:
        tid, ns, _, ret = rest.split("|")
        self._carrier[int(tid)] = int(ns), int(ret)

    def _library(self, rest: str) -> None:
        tid_, pid, ns_, verb, address, length, iova, access, fd, comm = rest.split("|", 9)
        tid, ns = int(tid_), int(ns_)
        carrier = self._carrier.pop(tid, None)
        failure = self._waiting.pop(tid, None)
        new = failure is None
        if failure is None:
            if not self.accepts(ns):
                return
            failure = Failure(tid, int(pid), comm, ns, since=self._now())
            # A request that no handler saw: the core refused it, or the library never made it.
            if carrier is not None and ns - carrier[0] < _STALE_NS:
                failure.ret = carrier[1]
            failure.inner = []
        failure.verb = VERBS.get(int(verb), "")
        failure.address, failure.length = int(address, 16), int(length)
        failure.iova, failure.access = int(iova, 16), int(access)
        failure.fd = int(fd) if failure.dmabuf else None
        failure.awaits_user = False
        if new:
            if failure.ret == 0 and failure.dmabuf:
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
        failure.awaits_user = False
        failure.user_missing = True
        self._on_complete(failure)

    def flush(self) -> None:
        """Complete all: the engine has ended."""
        self.overdue(float("inf"))


def _limits(memlock: str, pinned: str) -> dict[str, int | None]:
    """Return what the kernel told, as `Process.limits` has it; empty where it could not be told."""
    if memlock == "-":
        return {}
    soft = int(memlock)
    return {"memlock_soft": soft if soft >= 0 else None, "vmpin": int(pinned) * os.sysconf("SC_PAGE_SIZE")}


_HANDLERS: dict[str, Callable[[Correlator, str], None]] = {
    "H": Correlator._heartbeat,
    "O": Correlator._opened,
    "D": Correlator._driver,
    "G": Correlator._pin_failed,
    "I": Correlator._inner_failed,
    "M": Correlator._migration,
    "S": Correlator._stuck_page,
    "K": Correlator._request_failed,
    "C": Correlator._carrier_failed,
    "U": Correlator._library,
    "P": Correlator._plain_pin,
}
