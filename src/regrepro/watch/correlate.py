"""What the engine tells, thread by thread → failures, each once.

The kernel's account of a failing request comes before the word of libibverbs about it. A failure is handed
out with the kernel's word, so that the process can be looked at while it still has the mapping, and is
complete with the library's, or when that does not come in time. The library's word of a call comes out of
the same ring after the kernel's: one that finds no failure waiting is of a call of which no handler of the
kernel ran, and is a failure of its own.
"""

from __future__ import annotations

import errno as errnos
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from regrepro.watch.failed_registration import (
    Asked,
    Ended,
    FailedRegistration,
    Inner,
    LibraryWord,
    ShortTermPin,
    StuckPage,
)
from regrepro.watch.process import comm_of, kernel_boottime

USER_WAIT = 1.0  # seconds that the library's word may take after the kernel's
# Inner failures of a thread that are older belong to a request that went on well; no request takes so long
# between the failure and its end.
_STALE_NS = 120_000_000_000
_INNER_LIMIT = 256  # lines kept for one thread, the newest
_MANY_INNER = f"only the last {_INNER_LIMIT} of what failed inside of this request are known"
_SILENT_LIMIT = 1024  # failures of one thread that wait for a late word
_NO_BEGIN = "nobody saw this request begin: what failed in it is not told from what came before"


@dataclass
class EngineCounts:
    """What was seen of the engine itself. `malformed`: records that are not as they must be."""

    malformed: int = 0


class Correlator:
    """Takes what one engine tells; hands out failures by `on_failure` (at once) and `on_complete`."""

    def __init__(
        self,
        on_failure: Callable[[FailedRegistration], None],
        on_complete: Callable[[FailedRegistration], None],
        *,
        reasons: dict[int, str] | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._on_failure = on_failure
        self._on_complete = on_complete
        self._reasons = reasons or {}
        self._now = now
        self._inner: dict[int, deque[Inner]] = {}
        self._stuck: dict[int, list[StuckPage]] = {}
        self._asked: dict[int, Asked] = {}
        self._waiting: dict[int, FailedRegistration] = {}
        self._silent: dict[int, deque[FailedRegistration]] = {}  # complete without the library's word
        self.library_speaks = False  # copies of libibverbs are followed
        self.on_open: Callable[[int], None] = lambda _pid: None
        self.device_is_gone: Callable[[int], bool] = lambda _pid: False
        self.doubt: Callable[[], str] = lambda: ""  # why the kernel's word of a call may be lost now
        self.on_pin: Callable[[ShortTermPin], None] = lambda _pin: None
        self.on_unpin: Callable[[int, int, int], None] = lambda _pid, _ns, _page: None
        self.counts = EngineCounts()

    @property
    def waiting(self) -> bool:
        """Whether a failure waits for the library's word."""
        return bool(self._waiting)

    def forget_stale(self, ns: int) -> None:
        """Drop inner failures of requests that went on well: nobody will ask for them."""
        for tid in [tid for tid, kept in self._inner.items() if kept[-1].ns < ns - _STALE_NS]:
            del self._inner[tid]
            self._stuck.pop(tid, None)
        for tid in [tid for tid, told in self._silent.items() if told[-1].ns < ns - _STALE_NS]:
            del self._silent[tid]

    def failed_inside(self, tid: int, inner: Inner) -> None:
        """Take what failed inside of a thread's request, if it was one."""
        self._inner.setdefault(tid, deque(maxlen=_INNER_LIMIT)).append(inner)

    def migration_failed(self, tid: int, ns: int, ret: int, reason: int) -> None:
        """Take a migration that left pages behind; they follow. `reason`: of enum migrate_reason."""
        name = self._reasons.get(reason, str(reason))
        self.failed_inside(tid, Inner(ns, "migrate_pages", ret, {"reason": name}))
        self._stuck[tid] = []

    def page_stayed(self, tid: int, page: StuckPage) -> None:
        """Take a page that the thread's last migration left behind."""
        self._stuck.setdefault(tid, []).append(page)

    def asked(self, tid: int, asked: Asked) -> None:
        """Take what the thread's request had asked for, which has failed; its end follows."""
        self._asked[tid] = asked

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
        failure = FailedRegistration(
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
            doubt=doubt,
            since=self._now(),
            late=_late(ns),
        )
        asked = self._asked.pop(tid, None)
        if asked is not None and since <= asked.ns <= ns:
            asked = asked.of(failure.function)
            failure.address, failure.length = asked.start, asked.length
            failure.iova, failure.access, failure.fd = asked.iova, asked.access, asked.fd
        self._on_failure(failure)
        if not self.library_speaks:
            self._on_complete(failure)
            return
        before = self._waiting.pop(tid, None)
        if before is not None:  # its word never came, and the thread went on
            self._give_up(before)
        failure.wait_until = self._now() + USER_WAIT  # looking at the process takes its time
        self._waiting[tid] = failure

    def library_failed(self, word: LibraryWord) -> None:
        """Take the library's word of a call that gave NULL."""
        failure = self._waiting.get(word.tid)
        if failure is not None and word.is_of(failure):
            del self._waiting[word.tid]
            _fill_in(failure, word)
            self._on_complete(failure)
            return
        told, mine = self._silent.get(word.tid), None
        while told and told[0].ns <= word.ns:  # a thread's are in time order: the last before the word
            mine = told.popleft()
        if told is not None and not told:
            del self._silent[word.tid]
        if mine is None or not word.is_of(mine):  # else it has been told, and waited for this in vain
            self._report(word)

    def _report(self, word: LibraryWord) -> None:
        """Hand out a failure of which the kernel's handlers said nothing."""
        failure = FailedRegistration(
            word.tid,
            word.pid,
            comm_of(word.pid, word.tid),
            word.ns,
            doubt=self.doubt(),
            since=self._now(),
            late=_late(word.ns),
        )
        if self.device_is_gone(word.pid):
            # What every command is then answered with before any handler runs (ib_uverbs_write(),
            # ib_uverbs_ioctl()).
            failure.ret, failure.errno_inferred = -errnos.EIO, True
        _fill_in(failure, word)
        if failure.ret == 0 and failure.dmabuf and not failure.doubt:
            # What rdma-core's table of operations holds where the provider's library has no dma-buf.
            failure.ret, failure.errno_inferred = -errnos.EOPNOTSUPP, True
        self._on_failure(failure)
        self._on_complete(failure)

    def overdue(self, now: float) -> None:
        """Complete failures whose library has not said anything in time: the process may be dead."""
        for tid in [tid for tid, item in self._waiting.items() if now > item.wait_until]:
            self._give_up(self._waiting.pop(tid))

    def _give_up(self, failure: FailedRegistration) -> None:
        self._silent.setdefault(failure.tid, deque(maxlen=_SILENT_LIMIT)).append(failure)
        self._on_complete(failure)

    def flush(self) -> None:
        """Complete all: the engine has ended."""
        self.overdue(float("inf"))


def _fill_in(failure: FailedRegistration, word: LibraryWord) -> None:
    """Fill in what the library knows of a failure."""
    failure.verb = word.verb
    for name, value in word.given.items():
        if name != "fd" or failure.dmabuf:
            setattr(failure, name, value)


def _late(ns: int) -> float:
    return (kernel_boottime() - ns) / 1e9


def _dropped(inner: list[Inner], since: int) -> bool:
    """Whether there may have been more in this request than was kept."""
    return len(inner) == _INNER_LIMIT and inner[0].ns >= since
