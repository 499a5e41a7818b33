"""Kernel traces in a log: which function returned what during a failing call, and so which layer failed.

Reads the text of ftrace (probe events, function_graph with return values), trace-cmd, bpftrace and
retsnoop. The layer is decided by the rules of the judge (judge/layers.py) as far as a text can carry
them: by the return of `migrate_pages`, never by the errno alone; and what a text does not show is left
open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from regrepro.explain.formats import GPU, HOST, Failure
from regrepro.explain.text import ERRNO_NUMBERS, signed
from regrepro.judge.tracefacts import Trace, read_trace
from regrepro.kernel_functions import DRIVER, FUNCTIONS, Family, of_family

_INNER = (
    (Family.UMEM, Family.IO_PIN),
    (Family.GUP, Family.TAKES_PINS, Family.GUP_PATH),
    (Family.MKEY,),
    (Family.DMABUF,),
    (Family.PEER,),
    (Family.LONGTERM, Family.UNPINNABLE),
)
_NO_CALLER = "gup"  # a log without callers may be of compaction, but who pastes it asks for a pin
OUTERMOST = frozenset(of_family(Family.REQUEST, Family.IO_URING, Family.UVERBS, Family.SYSTEM_CALL))
KNOWN = frozenset(name for row in FUNCTIONS if row.families for name in row.names)
NEEDLES: tuple[bytes, ...] = tuple(
    word.encode() for word in ("_reg_user_mr", "_reg_mr", "TID/PID", *sorted(KNOWN))
)

_NUMBER = r"-?(?:0[xX])?[0-9a-fA-F]{1,20}"
_ERRNO_NAME = {f"-{name}": -number for number, name in ERRNO_NUMBERS.items()}


@dataclass(frozen=True)
class Return:
    """One return that a trace shows. `task` parts what ran at the same time; `fields` are a
    tracepoint's.
    """

    function: str
    value: int
    task: str = ""
    caller: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    tool: str = "ftrace"
    start: bool = False


_PROBE = re.compile(
    r"(?P<event>[\w:.]{1,80}):\s{1,20}\((?P<caller>[\w.]{1,80}(?:\+0x[0-9a-f]{1,8}(?:/0x[0-9a-f]{1,8})?)?(?: "
    r"\[\w{1,40}\])?) <- "
    r"(?P<fn>[\w.]{1,80})(?: \[\w{1,40}\])?\)(?P<arguments>.*)$"
)
_TASK = re.compile(
    r"^\s{0,20}(?P<task>\S.{0,40}?)-(?P<pid>\d{1,10})\s{1,10}(?:\(\s{0,4}[\d-]{1,10}\)\s{1,4})?\["
    r"(?P<cpu>\d{1,5})\]"
)
_GRAPH_TASK = re.compile(
    r"^\s{0,10}(?:[\d.]{3,20}\s{1,4}\|\s{1,4})?(?P<cpu>\d{1,5})\)\s{1,4}(?:"
    r"(?P<task>\S{1,40}-\d{1,10})\s{1,4}\|)?"
)
_TRACEPOINT = re.compile(r"mm_migrate_pages: (?P<fields>nr_succeeded=.{0,300})$")
_GRAPH_RETURN = re.compile(
    rf"\}} /\* (?P<fn>[\w.]{{1,80}})(?: \[\w{{1,40}}\])?,? (?:ret ?)?= ?(?P<ret>{_NUMBER}) ?\*/"
    rf"|(?P<leaf>[\w.]{{1,80}})(?: \[\w{{1,40}}\])?\([^()]{{0,200}}\); /\* (?:[\w.]{{1,80}},? )?(?:ret "
    rf"?)?= ?(?P<leafret>{_NUMBER}) ?\*/"
)
_RETSNOOP_HEAD = re.compile(r"TID/PID (?P<tid>\d{1,10})/(?P<pid>\d{1,10}) \((?P<task>[^)]{0,60})\)")
_RETSNOOP = re.compile(
    r"^[!*\s]{0,12}(?:\d{1,10}(?:us|ms|ns)\s{1,4})?\[(?P<ret>-E[A-Z]{2,15}|-?\d{1,10}|0x[0-9a-f]{1,16}"
    r"|NULL|null|true|false|void)\]"
    r"\s{1,20}(?:\. ?)?(?P<fn>[\w.]{1,80})(?:\+0x[0-9a-f]{1,8})?"
    r"|[←↔]\s{1,4}(?P<cfn>[\w.]{1,80})\s{1,60}\[(?P<cret>-E[A-Z]{2,15}|-?\d{1,10}|0x[0-9a-f]{1,16}"
    r"|NULL|true|false)\]"
)
_GENERIC = re.compile(
    r"\b(?:(?:kretprobe|kretfunc|fexit|kprobe|kfunc):(?:\w{1,40}:)?)?(?P<fn>[A-Za-z_]\w{3,60})(?:\+0)?"
    r"(?:\(\))?"
    r"(?:\s{0,40}(?:->|:|=|,|\bretval\b|\bret\b|\breturned\b|\breturns\b|\brc\b|\berr\b)){1,4}\s{0,4}"
    r"(?P<ret>-\d{1,5}|0x[fF]{4,13}[0-9a-fA-F]{1,4}|4294967[0-9]{3}|1844674407370955\d{4}|\d{1,7})(?![\w.])"
)
_RET_ARGUMENT = re.compile(
    rf"\b(?:ret|retval|rc|arg1|\$retval|r)\s?=\s?(?P<ret>{_NUMBER})\b|=(?P<any>{_NUMBER})\b"
)


def parse_line(text: str) -> Return | None:
    """Read one line of a trace; None where it shows no return of a function that matters."""
    match = _RETSNOOP_HEAD.search(text)
    if match:
        return Return("", 0, f"{match['task']}-{match['tid']}", tool="retsnoop", start=True)
    task = _task(text)
    match = _TRACEPOINT.search(text)
    if match:
        fields = dict(re.findall(r"(\w{1,40})=(\S{1,60})", match["fields"]))
        failed = signed(fields.get("nr_failed", ""))
        return Return("mm_migrate_pages", failed or 0, task, fields=fields)
    match = _PROBE.search(text)
    if match:
        value = _RET_ARGUMENT.search(match["arguments"])
        number = signed(value["ret"] or value["any"]) if value else None
        return _returned(match["fn"], number, task, caller=match["caller"])
    match = _GRAPH_RETURN.search(text)
    if match:
        # function_graph prints hexadecimal without 0x where funcgraph-retval-hex is set.
        word = match["ret"] or match["leafret"]
        bare = re.fullmatch(r"[0-9a-f]{8,16}", word) and re.search(r"[a-f]", word)
        number = signed(f"0x{word}" if bare else word)
        return _returned(match["fn"] or match["leaf"], number, task, tool="function_graph")
    match = _RETSNOOP.search(text)
    if match:
        word = match["ret"] or match["cret"]
        other = signed(word) if re.match(r"-?\d|0x", word) else int(word not in ("NULL", "null", "false"))
        number = _ERRNO_NAME.get(word, other)
        return _returned(match["fn"] or match["cfn"], number, "retsnoop", tool="retsnoop")
    for match in _GENERIC.finditer(text):
        pid = re.search(r"\b(?:pid|tid)[ =:]{1,2}(\d{1,10})\b", text[:200])
        task = task or (f"pid-{pid[1]}" if pid else "")
        found = _returned(match["fn"], signed(match["ret"]), task, tool="bpftrace")
        if found is not None:
            return found
    return None


def _returned(
    name: str, value: int | None, task: str, *, caller: str = "", tool: str = "ftrace"
) -> Return | None:
    """Return it where the function matters, without what a compiler adds: foo.isra.0, foo.constprop.0."""
    name = name.split(".", 1)[0]
    matters = name in KNOWN or DRIVER.match(name) is not None
    return Return(name, value, task, caller, tool=tool) if matters and value is not None else None


def _task(text: str) -> str:
    match = _TASK.search(text)
    if match:
        return f"{match['task']}-{match['pid']}"
    match = _GRAPH_TASK.search(text)
    return (match["task"] or f"cpu{match['cpu']}") if match else ""


@dataclass
class Session:
    """The returns of one call of one task, innermost first, as far as the text shows them."""

    task: str
    tool: str
    number: int
    returns: list[Return] = field(default_factory=list)
    text: str = ""

    @property
    def fails(self) -> bool:
        """Whether anything in it failed, or tells of NVIDIA's own pin, whose failures are no errnos."""
        locks = of_family(Family.GPU_PIN)
        return any(-4096 < one.value < 0 or one.function in locks for one in self.returns)

    def trace(self, in_sight: Iterable[str]) -> Trace:
        """Return it as a trace for the judge: a spoiled one, in which absence proves nothing."""
        events: list[dict[str, Any]] = []
        for one in self.returns:
            if one.fields:
                told = {name: signed(word) if word.isdigit() else word for name, word in one.fields.items()}
                events.append({"tracepoint": one.function, "fields": told})
            else:
                # A pointer may be cut off anywhere.
                value = one.value if one.value > -4096 else 1
                events.append({"fn": one.function, "ret": value, "caller": one.caller or _NO_CALLER})
        trace = {"status": "spoiled", "why": "it is a log's", "events": events, "probed": [*in_sight]}
        return read_trace(trace, "the text", [])


MAX_RETURNS = 400
MAX_SESSIONS = 256


class Sessions:
    """Collect returns into calls: one ends when its outermost function returns, or when another begins."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self.in_sight: set[str] = set()

    def add(self, one: Return, number: int, text: str) -> Session | None:
        """Take one return; give back the call that it ends, or None."""
        if one.start or one.tool == "retsnoop":
            return self._retsnoop(one, number, text)
        self.in_sight.add(one.function)
        ended = None
        session = self._open.get(one.task)
        if session is None:
            if len(self._open) >= MAX_SESSIONS:
                ended = self._open.pop(next(iter(self._open)))
            session = self._open[one.task] = Session(one.task, one.tool, number, text=text)
        session.returns.append(one)
        is_outer = one.function in OUTERMOST or DRIVER.match(one.function) is not None
        if is_outer or len(session.returns) >= MAX_RETURNS:
            del self._open[one.task]
            return session
        return ended

    def _retsnoop(self, one: Return, number: int, text: str) -> Session | None:
        """A block begins with its head; its frames may stand outermost first (stack) or as they return."""
        ended = None
        if one.start:
            ended = self._open.pop("retsnoop", None)
            self._open["retsnoop"] = Session(one.task, "retsnoop", number, text=text)
            return ended
        self.in_sight.add(one.function)
        session = self._open.setdefault("retsnoop", Session("", "retsnoop", number, text=text))
        if len(session.returns) < MAX_RETURNS:
            session.returns.append(one)
        return None

    def rest(self) -> list[Session]:
        """Return the calls that the text leaves open."""
        rest = list(self._open.values())
        self._open.clear()
        return rest


def failure_of(session: Session, in_sight: Iterable[str]) -> Failure | None:
    """Make a failure of a call that failed; None for one that did not, or that is no registration.

    `in_sight`: functions that the whole text shows. One that it never shows may not be traced at all, so that
    its absence proves nothing.
    """
    trace = session.trace(in_sight)
    driver = trace.driver()
    outer = driver[-1] if driver else trace.failed(Family.REQUEST, Family.UVERBS, Family.IO_URING)
    inner = [value for families in _INNER if (value := trace.failed(*families)) is not None]
    if outer is not None and outer >= 0:
        return None  # the registration succeeded in the end
    if outer is None and not inner:
        return None
    entered = of_family(Family.REQUEST, Family.IO_URING)
    names = [name for name, _ in trace.returns if DRIVER.match(name) or name in entered]
    deepest = trace.returns if session.tool == "retsnoop" else [*reversed(trace.returns)]
    call = names[-1] if names else next(name for name, value in deepest if value < 0)
    errno = ERRNO_NUMBERS.get(-(outer if outer is not None else inner[0]))
    failure = Failure(session.tool, call, errno, session.text, trace=trace)
    decision = failure.decide()
    told = names or decision.layer or len(decision.candidates) < 3 or trace.of(Family.GPU_PIN)
    if not told and call not in of_family(Family.UMEM, *_INNER[1]):
        return None
    if decision.layer is not None and decision.layer.name in ("peer-memory", "dma-buf"):
        failure.buffer = GPU
    elif trace.of(*_INNER[1]) and trace.failed(*_INNER[1]) != -14:
        failure.buffer = HOST  # of a GPU's address GUP says EFAULT
    return failure
