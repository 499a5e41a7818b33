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

from regrepro.explain.formats import GPU, HOST, Failure
from regrepro.explain.text import ERRNO_NUMBERS, signed
from regrepro.kernel_functions import DRIVER, FUNCTIONS, REASONS, Family, of_family

GUP_PIN = (Family.GUP, Family.TAKES_PINS, Family.GUP_PATH)
GUP_LONGTERM = (Family.LONGTERM, Family.UNPINNABLE)
OUTERMOST = frozenset(of_family(Family.REQUEST, Family.UVERBS, Family.SYSTEM_CALL))
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
        name = _base(match["fn"])
        value = _RET_ARGUMENT.search(match["arguments"])
        if not _matters(name) or value is None:
            return None
        number = signed(value["ret"] or value["any"])
        if number is None:
            return None
        return Return(name, number, task, caller=match["caller"])
    match = _GRAPH_RETURN.search(text)
    if match:
        name = _base(match["fn"] or match["leaf"])
        number = _hex_or_int(match["ret"] or match["leafret"])
        if _matters(name) and number is not None:
            return Return(name, number, task, tool="function_graph")
        return None
    match = _RETSNOOP.search(text)
    if match:
        name = _base(match["fn"] or match["cfn"])
        word = match["ret"] or match["cret"]
        if not _matters(name):
            return None
        number = _ERRNO_NAME.get(
            word,
            signed(word) if re.match(r"-?\d|0x", word) else 0 if word in ("NULL", "null", "false") else 1,
        )
        return None if number is None else Return(name, number, "retsnoop", tool="retsnoop")
    for match in _GENERIC.finditer(text):
        name = _base(match["fn"])
        number = signed(match["ret"])
        if _matters(name) and number is not None:
            return Return(name, number, task or _bpf_task(text), tool="bpftrace")
    return None


def _hex_or_int(word: str) -> int | None:
    """function_graph prints hexadecimal without 0x where funcgraph-retval-hex is set."""
    if re.fullmatch(r"[0-9a-f]{8,16}", word) and re.search(r"[a-f]", word):
        return signed("0x" + word)
    return signed(word)


def _base(name: str) -> str:
    """Take off what a compiler adds: foo.isra.0, foo.constprop.0, foo.part.0."""
    return name.split(".", 1)[0]


def _matters(name: str) -> bool:
    return name in KNOWN or DRIVER.match(name) is not None


def _task(text: str) -> str:
    match = _TASK.search(text)
    if match:
        return f"{match['task']}-{match['pid']}"
    match = _GRAPH_TASK.search(text)
    if match:
        return match["task"] or f"cpu{match['cpu']}"
    return ""


def _bpf_task(text: str) -> str:
    match = re.search(r"\b(?:pid|tid)[ =:]{1,2}(\d{1,10})\b", text[:200])
    return f"pid-{match[1]}" if match else ""


@dataclass
class Session:
    """The returns of one call of one task, innermost first, as far as the text shows them."""

    task: str
    tool: str
    number: int
    returns: list[Return] = field(default_factory=list)
    text: str = ""

    def of(self, families: Iterable[Family]) -> list[int]:
        """Return values of these functions, in order."""
        wanted = of_family(*families)
        return [one.value for one in self.returns if one.function in wanted]

    def failed(self, families: Iterable[Family]) -> int | None:
        """The last of them that is an errno, or None."""
        values = [value for value in self.of(families) if -4096 < value < 0]
        return values[-1] if values else None

    def driver(self) -> list[int]:
        """Return values of the provider's reg_user_mr."""
        return [one.value for one in self.returns if DRIVER.match(one.function)]


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


@dataclass(frozen=True)
class Decision:
    """The layer that a trace decides, or None and what remains; `excluded` says what it is not, and why."""

    layer: str | None
    why: str
    remaining: frozenset[str] | None = None
    excluded: dict[str, str] = field(default_factory=dict)


BEFORE_PIN = ("memlock-accounting", "arguments")
AFTER_PIN = ("mkey", "device", "dma-map")


def decide(session: Session, in_sight: set[str]) -> Decision:
    """Decide the deepest failing layer of one call.

    `in_sight` are the functions that the whole text shows: one that is never shown anywhere may not be
    traced at all, so its absence proves nothing.
    """
    failed = session.failed((Family.DMABUF,))
    if failed is not None:
        return Decision("dma-buf", f"the dma-buf could not be had, attached or mapped ({_name(failed)})")
    failed = session.failed((Family.PEER,))
    if failed is not None:
        return Decision("peer-memory", f"the peer-memory driver returned {_name(failed)}")
    if session.failed((Family.ACCESS_CHECK,)) is not None:
        return Decision("arguments", "ib_check_mr_access refused the access flags")
    pin = session.failed(GUP_PIN)
    if pin is None:
        pin = session.failed(GUP_LONGTERM)
    locks = session.of((Family.GPU_PIN,))
    if locks and locks[-1] != 0:
        return Decision(
            "cuda-pin", f"os_lock_user_pages returned {locks[-1]:#x}: the driver's own pin failed"
        )
    if session.failed((Family.CGROUP,)) is not None and pin is not None:
        return Decision("memory-cgroup", "the page could not be charged to the memory cgroup")
    if pin is not None:
        return _in_pin(session, pin)
    pinned = any(value > 0 for value in session.of(GUP_PIN))
    umem = session.failed((Family.UMEM,))
    if umem is not None:
        return _in_umem(session, umem, pinned, in_sight)
    mkey = session.failed((Family.MKEY,))
    if mkey is not None:
        return Decision("mkey", f"the memory was there, and the MKey could not be made ({_name(mkey)})")
    if session.of((Family.UMEM,)) and any(-4096 < value < 0 for value in session.driver()):
        why = "the memory was pinned and mapped; what failed came after"
        gone = dict.fromkeys(
            (
                "memlock-accounting",
                "page-migration",
                "migration-target",
                "page-fault",
                "longterm-refused",
                "dma-map",
                "memory-cgroup",
            ),
            "ib_umem_get succeeded in the trace",
        )
        return Decision(None, why, frozenset({"mkey", "device", "umem-alloc"}), gone)
    return Decision(None, "the trace shows that the call failed, not where")


def _in_pin(session: Session, pin: int) -> Decision:
    excluded = dict.fromkeys(BEFORE_PIN, "the trace shows that pinning began, which comes after it")
    excluded.update(dict.fromkeys(AFTER_PIN, "the trace shows that pinning failed, which comes before it"))
    excluded.update(
        dict.fromkeys(("peer-memory", "dma-buf"), "the trace shows that host pages were being pinned")
    )
    large = any(
        (signed(one.fields.get("nr_thp_failed", "0")) or 0) > 0
        or (signed(one.fields.get("nr_large_folio_failed", "0")) or 0) > 0
        for one in session.returns
        if one.function == "mm_migrate_pages"
    )
    migrations = [one for one in session.returns if one.function == "migrate_pages" and _for_a_pin(one)]
    points = [
        one
        for one in session.returns
        if one.function == "mm_migrate_pages" and one.fields.get("reason") in (*REASONS.values(), None)
    ]
    if pin == -12 and migrations:
        last = migrations[-1].value
        if last > 0:
            why = (
                f"migrate_pages left {last} behind: something held these pages, and the text does not "
                f"say what"
            )
            return Decision("page-migration", why, None, excluded)
        if last == -12 and not large:
            return Decision(
                "migration-target",
                "migrate_pages returned -ENOMEM: there was no page to move to",
                None,
                excluded,
            )
        if last == -12:
            why = "migrate_pages returned -ENOMEM on a huge page: held, or nothing to move to"
            return Decision(None, why, frozenset({"page-migration", "migration-target"}), excluded)
    if session.failed((Family.TARGET,)) is not None:
        return Decision("migration-target", "no page to move to could be allocated", None, excluded)
    if pin == -12 and any((signed(one.fields.get("nr_failed", "0")) or 0) > 0 for one in points):
        why = (
            "pages could not be migrated; the return of migrate_pages would tell why, and is not in the text"
        )
        return Decision(None, why, frozenset({"page-migration", "migration-target"}), excluded)
    if pin == -12 and session.of(GUP_LONGTERM) and session.failed(GUP_LONGTERM) is not None:
        why = "the long-term check failed; the return of migrate_pages would tell why, and is not in the text"
        return Decision(
            None, why, frozenset({"page-migration", "migration-target", "memory-cgroup"}), excluded
        )
    if pin == -14:
        flags = session.failed((Family.MAPPING_CHECK,))
        excluded.update(
            dict.fromkeys(
                ("page-migration", "migration-target", "umem-alloc", "memory-cgroup"),
                "EFAULT out of the pin is no migration",
            )
        )
        if flags is not None:
            why = "check_vma_flags refused the mapping: a file that is written, or a mapping of a device"
            return Decision(None, why, frozenset({"longterm-refused", "bar-map", "page-fault"}), excluded)
        return Decision(
            None,
            "the pages could not be had at that address",
            frozenset({"page-fault", "longterm-refused", "bar-map"}),
            excluded,
        )
    if pin == -12:
        why = "pinning failed; what inside it failed is not in the text"
        return Decision(
            None,
            why,
            frozenset({"page-migration", "migration-target", "memory-cgroup", "umem-alloc"}),
            excluded,
        )
    return Decision(None, f"pinning failed with {_name(pin)}", None, excluded)


def _in_umem(session: Session, umem: int, pinned: bool, in_sight: set[str]) -> Decision:
    excluded = dict.fromkeys(
        ("mkey", "device"), "the trace shows that ib_umem_get failed, which comes before it"
    )
    excluded.update(dict.fromkeys(("dma-buf", "peer-memory"), "ib_umem_get is the path of host memory"))
    if pinned:
        excluded.update(
            dict.fromkeys(
                (
                    "memlock-accounting",
                    "page-migration",
                    "migration-target",
                    "page-fault",
                    "longterm-refused",
                    "memory-cgroup",
                ),
                "the trace shows that pinning succeeded",
            )
        )
        maps = session.of((Family.DMA_MAP,))
        if maps and (maps[-1] < 0 or maps[-1] == 0) and session.failed((Family.DMA_MAP,)) is not None:
            return Decision(
                "dma-map",
                f"DMA mapping failed ({_name(maps[-1])}) after the pages were pinned",
                None,
                excluded,
            )
        if session.failed((Family.SG_TABLE,)) is not None:
            return Decision("umem-alloc", "the scatter list could not be allocated", None, excluded)
        return Decision(
            None,
            "the pages were pinned; what failed came after",
            frozenset({"dma-map", "umem-alloc"}),
            excluded,
        )
    if umem == -1:
        can = session.of((Family.MLOCK,))
        if can and can[-1] == 0:
            return Decision(
                "memlock-accounting",
                "can_do_mlock said no: RLIMIT_MEMLOCK is 0 without CAP_IPC_LOCK",
                None,
                excluded,
            )
        return Decision(
            None, "ib_umem_get refused before pinning", frozenset({"memlock-accounting"}), excluded
        )
    if in_sight & set(of_family(*GUP_PIN)):
        # The pinning function is traced (it shows elsewhere) and was not called here.
        gone = "pin_user_pages_fast is traced in this text and was not called here"
        excluded.update(
            dict.fromkeys(
                (
                    "page-migration",
                    "migration-target",
                    "page-fault",
                    "longterm-refused",
                    "memory-cgroup",
                    "dma-map",
                ),
                gone,
            )
        )
        left = frozenset({"memlock-accounting", "umem-alloc"}) if umem == -12 else frozenset({"arguments"})
        return Decision(None, "ib_umem_get failed before it pinned anything", left, excluded)
    return Decision(None, "ib_umem_get failed; whether it got to pin is not in the text", None, excluded)


def _for_a_pin(one: Return) -> bool:
    """Compaction and NUMA balancing call migrate_pages, too; the caller tells where it is given."""
    if not one.caller:
        return True
    return any(part in one.caller for part in ("longterm", "check_and_migrate", "gup", "pin_user_pages"))


def _name(value: int) -> str:
    name = ERRNO_NUMBERS.get(-value)
    return f"-{name}" if name else str(value)


def failure_of(session: Session, in_sight: set[str]) -> Failure | None:
    """Make a failure of a call that failed; None for one that did not, or that is no registration."""
    driver = session.driver()
    outer = (
        driver[-1] if driver and -4096 < driver[-1] < 0 else session.failed((Family.REQUEST, Family.UVERBS))
    )
    inner = [
        value
        for names in ((Family.UMEM,), GUP_PIN, (Family.MKEY,), (Family.DMABUF,), (Family.PEER,), GUP_LONGTERM)
        if (value := session.failed(names)) is not None
    ]
    if driver and driver[-1] >= 0 and not -4096 < driver[-1] < 0:
        return None  # the registration succeeded in the end
    if outer is None and driver and not inner:
        return None
    if outer is None and not inner:
        return None
    locks = session.of((Family.GPU_PIN,))
    value = outer if outer is not None else inner[0]
    names = [
        one.function
        for one in session.returns
        if DRIVER.match(one.function) or one.function in of_family(Family.REQUEST)
    ]
    call = (
        names[-1]
        if names
        else next(
            one.function
            for one in (session.returns if session.tool == "retsnoop" else reversed(session.returns))
            if -4096 < one.value < 0
        )
    )
    decision = decide(session, in_sight)
    if (
        not locks
        and not names
        and decision.layer is None
        and decision.remaining is None
        and call not in of_family(Family.UMEM, *GUP_PIN)
    ):
        return None
    return Failure(
        session.tool,
        call,
        ERRNO_NUMBERS.get(-value),
        session.text,
        buffer=GPU if decision.layer in ("peer-memory", "dma-buf") else HOST if session.of(GUP_PIN) else None,
        layer=decision.layer,
        layer_why=decision.why,
        remaining=decision.remaining,
        excluded=decision.excluded,
    )
