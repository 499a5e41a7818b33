"""What the kernel said during one call: the record's trace, read for the judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regrepro.judge.pagestate import whole_number
from regrepro.kernel_functions import DRIVER, REASONS, Family, of_family


@dataclass(frozen=True)
class Migration:
    """One call of `migrate_pages` made for a long-term pin.

    `returned` is its return value: how many pages (folios) would not move, or a negative errno; None where
    only the tracepoint was seen (a tracer may record failures alone). `reason`, `succeeded`, `failed` come
    from the tracepoint, or are None; `large`: a huge page or large folio was among those that failed.
    """

    returned: int | None
    reason: str | None = None
    succeeded: int | None = None
    failed: int | None = None
    large: bool = False


@dataclass(frozen=True)
class Stop:
    """The call that pins pages and failed: the address at which it began, and whether it asked to write.

    GUP returns how many pages it took if it took any, and its caller goes on behind them
    (`__ib_umem_get_va`), so a call that fails does so at its first page. None: not recorded.
    """

    address: int | None
    write: bool | None


@dataclass
class Trace:
    """A trace of docs/record.md. `status` is `complete`, `spoiled`, `unavailable`, `off` or `absent`."""

    status: str = "absent"
    why: str = "the event holds no trace"
    returns: list[tuple[str, int]] = field(default_factory=list)
    migrations: list[Migration] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    probed: frozenset[str] | None = None
    probed_failures: frozenset[str] = frozenset()
    gup_calls: list[dict[str, Any]] = field(default_factory=list)
    stop: Stop | None = None
    tree: list[dict[str, Any]] = field(default_factory=list)
    flag_words: dict[int, frozenset[str]] = field(default_factory=dict)
    """What each value of `gup_flags` means, as the trace decodes it."""
    overstated: bool = False  # it calls itself complete, and counts what it lost
    unpaired: bool = False  # a return of migrate_pages without its tracepoint, or the reverse

    @property
    def complete(self) -> bool:
        """All that could be probed was seen, and nothing was lost."""
        return self.status == "complete"

    @property
    def in_sight(self) -> frozenset[str]:
        """The functions that the tracer says it had probed."""
        return (self.probed or frozenset()) | self.probed_failures

    def of(self, *families: Family) -> list[int]:
        """Return values of the functions of these families, in time order."""
        wanted = of_family(*families)
        return [value for name, value in self.returns if name in wanted]

    @property
    def last_migration(self) -> int | None:
        """What the last migration returned of which that was seen: pages left behind, or an errno."""
        return next((step.returned for step in reversed(self.migrations) if step.returned is not None), None)

    @property
    def left_behind(self) -> int:
        """How many pages (folios) it left behind; 0 where that was not seen."""
        return max(self.last_migration or 0, 0)

    @property
    def pinned(self) -> bool:
        """Whether a call that takes pins took some."""
        return any(value > 0 for value in self.of(Family.GUP, Family.TAKES_PINS, Family.GUP_PATH))

    def driver(self) -> list[int]:
        """Return values of the provider's `reg_user_mr` (`rxe_reg_user_mr`, `mlx5_ib_reg_user_mr`, …)."""
        return [value for name, value in self.returns if DRIVER.match(name)]

    def absent(self, family: Family) -> bool:
        """Whether none of these functions was called: nothing lost, every return in sight, none seen."""
        names = of_family(family)
        if not self.complete or self.of(family):
            return False
        if self.probed is not None:
            return self.probed.issuperset(names)
        return not any(self.hidden(name) for name in names)

    def fine(self, family: Family) -> bool:
        """Whether none of these functions failed: nothing lost, failures of one of them in sight, none seen.

        They are names that one function has had, or do one job.
        """
        names = of_family(family)
        if not self.complete or self.failed(family) is not None:
            return False
        if self.probed is not None:
            return any(name in self.probed | self.probed_failures for name in names)
        # A tracer names a missing function by the newest of its names, and none that it found by another.
        return not any(self.hidden(name) for name in names)

    def hidden(self, name: str) -> bool:
        """Whether this kernel does not let a function or tracepoint be seen."""
        return any(known == name or known.endswith(f":{name}") for known in self.missing)

    def failed(self, *families: Family) -> int | None:
        """The last return value of these functions if it is an errno, else None."""
        values = self.of(*families)
        return values[-1] if values and values[-1] < 0 else None


def read_trace(value: object, what: str, problems: list[str]) -> Trace:
    """Read a trace. What is malformed makes it `spoiled`: it then proves nothing."""
    if value is None:
        return Trace()
    if not isinstance(value, Mapping):
        problems.append(f"{what} has a malformed trace")
        return Trace("spoiled", "the trace is malformed")
    status = value.get("status")
    if status not in ("complete", "spoiled", "unavailable", "off"):
        problems.append(f"{what} has a trace of unknown status")
        return Trace("spoiled", "the trace has an unknown status")
    trace = Trace(str(status), value["why"] if isinstance(value.get("why"), str) else "")
    spoiled = _fill(trace, value)
    lost = [name for name in ("misses", "overrun") if (whole_number(value.get(name)) or 0) > 0]
    if trace.complete and (spoiled or lost):
        trace.status, trace.overstated = "spoiled", bool(lost)
        trace.why = spoiled or f"the kernel counted {' and '.join(lost)} during the call"
    return trace


def _fill(trace: Trace, value: Mapping[str, Any]) -> str:
    """Fill in what the trace holds; return why it proves nothing, or an empty string."""
    spoiled = ""
    events = value.get("events")
    if not isinstance(events, list):
        events, spoiled = [], "the trace has no list of events"
    seen: list[Migration] = []  # every migration, whatever it was for
    ours: list[bool] = []
    for event in events:
        if not isinstance(event, Mapping):
            spoiled = "the trace holds a malformed event"
            continue
        name, ret = event.get("fn"), whole_number(event.get("ret"))
        if isinstance(name, str):
            if ret is None:
                continue  # a function that returns nothing, or one seen at its entry
            trace.returns.append((name, ret))
            _note_gup_call(trace, name, ret, event)
            if name in of_family(Family.GUP):
                trace.stop = _stop(event) if ret < 0 else None
            if name == "migrate_pages":
                # The tracepoint lies within the function, so it comes right before the return.
                within = seen[-1] if seen and seen[-1].returned is None else None
                if within is not None:
                    seen[-1] = replace(within, returned=ret)
                    ours[-1] = _for_a_pin(within, event.get("caller"))
                else:
                    seen.append(Migration(ret))
                    ours.append(_for_a_pin(None, event.get("caller")))
        elif event.get("tracepoint") == "mm_migrate_pages" and isinstance(event.get("fields"), Mapping):
            fields = event["fields"]
            reason = fields.get("reason")
            reason = reason if isinstance(reason, str) else None
            succeeded, failed = (whole_number(fields.get(f"nr_{word}")) for word in ("succeeded", "failed"))
            large = ("nr_thp_failed", "nr_large_folio_failed")
            is_large = any(whole_number(fields.get(name)) for name in large)
            seen.append(Migration(None, reason, succeeded, failed, is_large))
            ours.append(reason in REASONS.values())
    trace.migrations = [step for step, is_ours in zip(seen, ours, strict=True) if is_ours]
    missing = value.get("missing")
    for item in missing if isinstance(missing, list) else []:
        if isinstance(item, Mapping) and isinstance(item.get("fn"), str):
            trace.missing[item["fn"]] = item["why"] if isinstance(item.get("why"), str) else ""
    if isinstance(value.get("probed"), list):
        trace.probed = _names(value["probed"])
        trace.probed_failures = _names(value.get("probed_failures"))
    # Its tracepoint lies in `migrate_pages` (mm/migrate.c), on each way out of it.
    told = any(step.succeeded is not None for step in seen)
    trace.unpaired = any(
        step.succeeded is None if step.returned is not None else "migrate_pages" in (trace.probed or ())
        for step in seen
        if told
    )
    tree = value.get("tree")
    trace.tree = [dict(node) for node in tree if isinstance(node, Mapping)] if isinstance(tree, list) else []
    return spoiled


def _names(value: object) -> frozenset[str]:
    return frozenset(name for name in (value if isinstance(value, list) else []) if isinstance(name, str))


def _note_gup_call(trace: Trace, name: str, ret: int, event: Mapping[str, Any]) -> None:
    """Keep what a call that took references to user pages asked for: its flags, decoded for this kernel."""
    args = event["args"] if isinstance(event.get("args"), Mapping) else {}
    flags = args.get("flags")
    if not name.endswith(("user_pages", "user_pages_fast", "user_pages_remote", "user_pages_unlocked")):
        return
    if not isinstance(flags, list):
        return
    names = [flag for flag in flags if isinstance(flag, str)]
    bits = whole_number(args.get("gup_flags"))
    if bits is not None:
        trace.flag_words[bits] = frozenset(names)
    frames = [event.get("caller"), *(event["stack"] if isinstance(event.get("stack"), list) else [])]
    found = [re.search(r"\[(\w+)\]$", frame) for frame in frames if isinstance(frame, str)]
    trace.gup_calls.append(
        {
            "fn": name,
            "flags": names,
            "longterm": "FOLL_LONGTERM" in names,
            "caller": event["caller"] if isinstance(event.get("caller"), str) else None,
            "modules": list(dict.fromkeys(match[1] for match in found if match)),
            "ret": ret,
            "start": whole_number(args.get("start")) if isinstance(args, Mapping) else None,
        }
    )


def _stop(event: Mapping[str, Any]) -> Stop:
    args = event.get("args")
    args = args if isinstance(args, Mapping) else {}
    flags = args.get("flags")
    return Stop(whole_number(args.get("start")), "FOLL_WRITE" in flags if isinstance(flags, list) else None)


def _for_a_pin(tracepoint: Migration | None, caller: object) -> bool:
    """Whether a migrate_pages call was made for a long-term pin, and not by compaction or NUMA balancing.

    The tracepoint's reason says so; without it the caller does (mm/gup.c's functions, some of them inlined).
    """
    if tracepoint is not None and tracepoint.reason is not None:
        return tracepoint.reason in REASONS.values()
    if not isinstance(caller, str) or not caller:
        return tracepoint is None
    return any(part in caller for part in ("longterm", "check_and_migrate", "gup", "pin_user_pages"))
