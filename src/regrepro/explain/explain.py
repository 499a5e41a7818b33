"""From the lines of a log to groups of the same failure, and what each can be.

Lines are taken one by one (scan.py), each failure is parsed (formats.py, traces.py), joined with what
another line says of it, and counted in a group. Memory depends on the number of different failures,
never on the log's length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar

from regrepro import __version__
from regrepro.explain import causes, closest, formats, said, traces
from regrepro.explain.formats import GPU, Failure, Remark
from regrepro.explain.scan import Found, Needles, read
from regrepro.explain.text import Where, decode, errno_of, peel, where
from regrepro.judge.narrowing import Decision

_Name = TypeVar("_Name", int, str)

SCHEMA = "regrepro.explain/1"
MAX_GROUPS = 256
MAX_NAMES = 4096
MAX_SAMPLES = 3
SAMPLE_WIDTH = 400
MAX_PENDING = 256
NEAR = 12
"""Lines within which a second line can speak of the same failure."""
MAX_SESSIONS = 512
JOIN = 2
"""Lines that are joined to a wrapped one at most."""

_WORDS = frozenset((*formats.NEEDLES, *traces.NEEDLES, *closest.NEEDLES, *said.NEEDLES))
NEEDLES = tuple(sorted(word for word in _WORDS if not any(one in word for one in _WORDS - {word})))
"""A word that holds another is found by that one."""


@dataclass
class Group:
    """One kind of failure, and where it was seen."""

    call: str
    errno: str | None
    buffer: str | None
    decision: Decision
    count: int = 0
    tools: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)
    hints: dict[str, None] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None


@dataclass
class Pending:
    """A failure that a line further on may still say more of."""

    failure: Failure
    place: Where
    number: int


class Explainer:
    """Collects what a number of texts say. Feed `read_file`, then ask for `result`."""

    def __init__(self, audit: dict[str, Any] | None = None, *, use_core: bool = True) -> None:
        self.audit = audit
        self._needles = Needles(NEEDLES, use_core=use_core)
        self._groups: dict[tuple[Any, ...], Group] = {}
        self._remarks: dict[str, dict[str, Any]] = {}
        self._closest = closest.Closest()
        self._said = said.Said()
        self._files: list[str] = []
        self._more = 0
        self._pending: list[Pending] = []
        self._sessions: list[tuple[str, traces.Session]] = []
        self._file = ""
        self._gpu_buffer = False
        self._dmabuf = False
        self._consumed = 0

    def read_file(self, name: str, file: BinaryIO) -> None:
        """Read one text to its end."""
        self._file = name
        self._files.append(name)
        self._gpu_buffer = self._dmabuf = False
        self._consumed = 0
        sessions = traces.Sessions()
        for found in read(file, self._needles):
            if found.number > self._consumed:
                self._line(found, sessions)
        for session in sessions.rest():
            self._session(session, sessions.in_sight)
        for place, session in self._sessions:
            failure = traces.failure_of(session, sessions.in_sight)
            if failure is not None:
                self._add(failure, Where(), session.number, file=place)
        self._sessions.clear()
        self._flush(None)

    def _line(self, found: Found, sessions: traces.Sessions) -> None:
        raw = decode(found.line)
        if self._context(raw):
            return
        text = peel(raw)
        if self._said.look_at(text):
            return
        parsed, lines = self._parse(text, found)
        parsed = parsed or formats.page_dump(text, map(decode, reversed(found.before)))
        if parsed is None:
            step = traces.parse_line(raw)
            if step is not None:
                ended = sessions.add(step, found.number, raw.strip()[:SAMPLE_WIDTH])
                if ended is not None:
                    self._session(ended, sessions.in_sight)
            elif not self._groups:
                self._closest.look_at(text, self._file, found.number, SAMPLE_WIDTH)
            return
        if lines > 0:
            self._consumed = found.number + lines
        if isinstance(parsed, Remark):
            self._remark(parsed, found.number)
            return
        before = decode(found.before[-1]) if found.before else ""
        self._failure(parsed, where(raw), found.number, echo=_is_echo(raw, before))

    def _parse(self, text: str, found: Found) -> tuple[formats.Parsed | None, int]:
        """Parse a line, joined with its neighbours where it is wrapped: (what it says, lines after it
        that it took).
        """
        parsed = formats.parse_line(text)
        whole = isinstance(parsed, Remark) or (
            isinstance(parsed, Failure) and (parsed.errno is not None or not formats.is_open(text))
        )
        if whole:
            return parsed, 0
        best = parsed
        taken = 0
        for glue in ("", " "):
            joined = text
            for count, line in enumerate(found.after[:JOIN], 1):
                more = peel(decode(line))
                joined = joined.rstrip() + glue + more.strip() if glue else joined + more.lstrip()
                again = formats.parse_line(joined)
                if _says_more(again, best) and formats.is_open(text):
                    best, taken = again, count
                    break
            if isinstance(best, Failure) and best.errno is not None:
                return best, taken
        if best is None and found.before:
            before = peel(decode(found.before[-1]))
            if formats.is_open(before) and formats.parse_line(before) is None:
                for glue in ("", " "):
                    again = formats.parse_line(before + glue + text.lstrip())
                    if again is not None:
                        return again, 0
        return best, taken

    def _context(self, text: str) -> bool:
        """Take note of lines that say something of others; True where that is all they do."""
        if "GPU buffer" in text or "cuMemAlloc()" in text:
            self._gpu_buffer = True
            if "DMA-BUF" in text or "dmabuf" in text:
                self._dmabuf = True
            return "register" not in text and "MR" not in text
        if text.startswith("ERRNO:"):
            for one in reversed(self._pending):
                if one.failure.tool == "perftest" and one.failure.errno is None:
                    one.failure.errno = errno_of(text)
                    break
            return True
        return False

    def _failure(self, failure: Failure, place: Where, number: int, *, echo: bool) -> None:
        self._flush(number)
        if failure.tool == "perftest" and self._gpu_buffer:
            failure.buffer = GPU
            if self._dmabuf:
                failure.call = "ibv_reg_dmabuf_mr"
        if echo:
            told: list[Group | Failure] = [*self._groups.values(), *(one.failure for one in self._pending)]
            if any((one.call, one.errno) == (failure.call, failure.errno) for one in told):
                return  # PyTorch prints the last error of NCCL again
            failure.tool = "PyTorch"
        for one in reversed(self._pending):
            if self._same(one, failure, place, number):
                _merge(one.failure, failure)
                return
        known = {(one.failure.tool, one.failure.address) for one in self._pending}
        if failure.consequence and failure.address and (failure.tool, failure.address) in known:
            return
        self._pending.append(Pending(failure, place, number))
        if len(self._pending) > MAX_PENDING:
            self._flush_one()

    @staticmethod
    def _same(one: Pending, failure: Failure, place: Where, number: int) -> bool:
        """Tell whether two lines speak of the same failure of the same process."""
        if number - one.number > NEAR:
            return False
        if None not in (place.pid, one.place.pid) and place.pid != one.place.pid:
            return False
        earlier = one.failure
        if failure.consequence:
            return earlier.tool == failure.tool and failure.address in (earlier.address, None)
        if failure.tool == "libfabric" and earlier.tool == "libfabric":
            # efa_mr_reg_impl() and efa_mr_regattr() both say it; so do a provider and the core above it.
            same_errno = failure.errno == earlier.errno
            return failure.call != earlier.call and same_errno and place.pid == one.place.pid
        if failure.tool == "aws-ofi-nccl":
            return earlier.tool == "libfabric" and failure.errno in (earlier.errno, None)
        return False

    def _flush(self, number: int | None) -> None:
        """Count the pending failures that no later line can speak of any more."""
        while self._pending and (number is None or number - self._pending[0].number > NEAR):
            self._flush_one()

    def _flush_one(self) -> None:
        one = self._pending.pop(0)
        self._add(one.failure, one.place, one.number)

    def _session(self, session: traces.Session, in_sight: set[str]) -> None:
        if not session.fails:
            return
        if len(self._sessions) < MAX_SESSIONS:
            self._sessions.append((self._file, session))  # decided when all that is in sight is known
            return
        failure = traces.failure_of(session, in_sight)
        if failure is not None:
            self._add(failure, Where(), session.number)

    def _add(self, failure: Failure, place: Where, number: int, file: str | None = None) -> None:
        decision = failure.decide()
        hints = [hint for hint in failure.hints if hint != "memlock-finite"]
        key = (
            failure.call,
            failure.errno,
            failure.buffer,
            decision.layer and decision.layer.name,
            decision.candidates,
            "memlock-finite" in failure.hints,
        )
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                self._more += 1
                return
            group = self._groups[key] = Group(failure.call, failure.errno, failure.buffer, decision)
            if "memlock-finite" in failure.hints:
                group.hints["memlock-finite"] = None
        group.count += 1
        group.tools.add(failure.tool)
        for hint in hints:
            if len(group.hints) < 16:
                group.hints[hint] = None
        _note(group.ranks, place.rank)
        _note(group.hosts, place.host)
        _note(group.devices, failure.device)
        _note(group.lengths, failure.length)
        spot = {"file": file or self._file, "line": number, "time": place.time}
        if group.first is None:
            group.first = spot
        group.last = spot
        if len(group.samples) < MAX_SAMPLES:
            group.samples.append({**spot, "text": failure.text.strip()[:SAMPLE_WIDTH]})

    def _remark(self, remark: Remark, number: int) -> None:
        told = {"kind": remark.kind, "count": 0, "supports": remark.supports, "why": remark.why}
        sample = {"file": self._file, "line": number, "text": remark.text.strip()[:SAMPLE_WIDTH]}
        key = f"{remark.kind} {remark.supports} {remark.why}"
        self._remarks.setdefault(key, told | {"sample": sample})["count"] += 1

    def result(self) -> dict[str, Any]:
        """Return everything as plain JSON values in the shape of schema/explain-1.json."""
        groups = sorted(self._groups.values(), key=lambda group: (-group.count, group.call))
        return {
            "schema": SCHEMA,
            "version": __version__,
            "files": self._files,
            "audited": self.audit is not None,
            "groups": [self._group(group) for group in groups],
            "remarks": sorted(self._remarks.values(), key=lambda one: -int(one["count"])),
            "more_groups": self._more,
            "closest": [] if groups else self._closest.lines,
        }

    def _supports(self, group: Group) -> dict[str, str]:
        """What elsewhere in the text speaks for a cause of this group."""
        supports = self._said.supports()
        for remark in self._remarks.values():
            if remark["supports"]:
                why = f"{remark['why']} (said {remark['count']} times in the same text)"
                supports.setdefault(remark["supports"], why)
        for other in self._groups.values():
            layer = other.decision.layer
            if other is not group and layer is not None:
                supports[layer.name] = f"in the same text {other.call} failed there: {layer.why}"
        if "memlock-finite" in group.hints:
            why = "UCX says that the limit is finite, and the call failed with ENOMEM"
            supports["memlock-accounting"] = why
        return supports

    def _group(self, group: Group) -> dict[str, Any]:
        weighed = causes.weigh(
            group.decision,
            group.errno,
            group.buffer,
            supports=self._supports(group),
            excludes=self._said.excludes(),
            audit=self.audit,
        )
        return {
            "call": group.call,
            "errno": group.errno,
            "buffer": group.buffer,
            "layer": group.decision.layer and group.decision.layer.name,
            "count": group.count,
            "tools": sorted(group.tools),
            "ranks": sorted(group.ranks),
            "hosts": sorted(group.hosts),
            "devices": sorted(group.devices),
            "lengths": sorted(group.lengths)[:16],
            "first": group.first,
            "last": group.last,
            "samples": group.samples,
            "notes": [hint for hint in group.hints if hint != "memlock-finite"],
            "causes": weighed,
        }


def _note(names: set[_Name], value: _Name | None) -> None:
    if value is not None and len(names) < MAX_NAMES:
        names.add(value)


def _says_more(again: formats.Parsed | None, best: formats.Parsed | None) -> bool:
    if again is None:
        return False
    if best is None:
        return True
    if not isinstance(again, Failure) or not isinstance(best, Failure):
        return False
    return best.errno is None and again.errno is not None


def _is_echo(text: str, before: str) -> bool:
    return "NCCL WARN" not in text and ("Last error" in before or "Last error" in text)


def _merge(earlier: Failure, later: Failure) -> None:
    """Add what a second line says of the same failure."""
    earlier.device = earlier.device or later.device
    earlier.buffer = earlier.buffer or later.buffer
    earlier.length = earlier.length or later.length
    earlier.errno = earlier.errno or later.errno
    earlier.hints += later.hints


def explain(
    files: Iterable[tuple[str, BinaryIO]], audit: dict[str, Any] | None = None, *, use_core: bool = True
) -> dict[str, Any]:
    """Explain texts: `files` are (name, open binary file). See `Explainer`."""
    explainer = Explainer(audit, use_core=use_core)
    for name, file in files:
        explainer.read_file(name, file)
    return explainer.result()
