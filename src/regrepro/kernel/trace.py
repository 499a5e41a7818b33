"""The kernel's own account of one call of ours: which function failed, and who pinned with which flags.

An instance of tracefs of our own, with return probes of our own (`trace_probes`), limited to the process that
is followed. Armed once a run; between calls nothing is read. The evidence is only as good as its gaps: hits
that a probe missed and events that were overwritten are looked at after every call and spoil it.
"""

from __future__ import annotations

import errno as errnos
import os
import re
import time
import weakref
from _thread import get_native_id
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from regrepro.errors import EnvironmentProblem, errno_name
from regrepro.kernel import procfs, trace_flags, trace_fs, trace_parse, trace_probes, trace_tree
from regrepro.kernel_functions import TRACEPOINTS, CallDepth, Family, KernelFunction

if TYPE_CHECKING:
    from regrepro.kernel.journal import Entry, Journal

PAGE_SIZE: int = os.sysconf("SC_PAGE_SIZE")

# For all CPUs together; an event takes 60 to 100 bytes (with its stack 250).
_BUFFER_TOTAL_KB = 8192
_BUFFER_CPU_KB = (64, 1024)
# Text of one call; more is not read and spoils the trace.
_TEXT_LIMIT = 64 << 20
# Files with the buffers' counters that are kept open; on a machine of more CPUs they are opened each time.
_KEPT_OPEN = 64
# Successful calls whose events nobody asked for before the buffer is emptied, and the most that is thrown
# away of one CPU's then: others may go on writing.
_UNREAD_CALLS = 64
_DISCARDED_PAGES = 1024
# What the parser relies on; a new instance inherits the options that someone set for the whole system.
_OPTIONS = {
    "event-fork": "1",  # threads and children of the followed process are followed too
    "sym-offset": "1",  # and with it a frame's module
    "context-info": "1",
    "irq-info": "1",
    "overwrite": "1",
    "stacktrace": "0",
    "userstacktrace": "0",
    "sym-addr": "0",
    "latency-format": "0",
    "record-tgid": "0",
    "verbose": "0",
    "fields": "0",
    "raw": "0",
    "hex": "0",
    "bin": "0",
    "block": "0",
}


# per_cpu/cpuN/stats: tracing_stats_read(), kernel/trace/trace.c.
_LOST_EVENTS = re.compile(rb"^(?:overrun|commit overrun|dropped events): (\d+)", re.MULTILINE)


class Token(NamedTuple):
    """One call that is being followed: since when (ns of the monotonic clock), and whether with stacks."""

    since: int
    stack: bool


class Tracer:
    """Follows the kernel's path of single calls. Never raises for what the node does not allow: `status()`.

    Usage: `arm()` once, `follow(pid)` for each process whose calls are wanted (its threads and children come
    with it), then `token = begin()`, the call, `end(token)`, in the process that made the call. A forked
    child uses what its parent armed; only the process that armed disarms.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._tracefs: Path | None = None
        self._mount: trace_fs.OwnMount | None = None
        self._owner = 0
        self._instance_name = self._group = ""
        self._entries: list[Entry] = []
        self._names: dict[str, tuple[str, str]] = {}
        self._probes: list[tuple[str, str]] = []  # function, condition under which a return is recorded
        self._missing: list[dict[str, str]] = []
        self._flags = trace_flags.FlagNames({}, "not looked up")
        self._why = "tracing was not armed"
        self._armed = False
        self._pipe = self._profile = self._stack_option = -1
        self._stats: list[int | Path] = []
        self._raw: list[int | Path] = []
        self._arguments_at_return = False
        self._baseline: tuple[int, dict[int, int]] = (0, {})
        self._stale = True
        self._unread = 0

    def __enter__(self) -> Tracer:
        self.arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.disarm()

    @property
    def instance(self) -> Path | None:
        """The trace instance's directory while armed."""
        return self._tracefs / "instances" / self._instance_name if self._armed and self._tracefs else None

    @property
    def flags(self) -> trace_flags.FlagNames:
        """The FOLL_* values of the running kernel and their source."""
        return self._flags

    @property
    def missing(self) -> list[dict[str, str]]:
        """Functions that this kernel does not let us see: `fn`, `why`."""
        return list(self._missing)

    def status(self) -> tuple[bool, str]:
        """Return whether calls can be followed, and a sentence: how, or why not.

        Before `arm()` it says what can be told without changing anything.
        """
        if self._armed:
            return True, self._why
        if self._owner:
            return False, self._why
        problem = _obstacle()
        return (False, problem) if problem else (True, "tracefs and kprobes are there; not armed yet")

    # Arming

    def arm(self) -> bool:
        """Make the instance and the probes; return whether tracing works. Again does nothing."""
        if self._armed:
            return True
        problem = _obstacle()
        self._owner = os.getpid()
        if problem:
            self._why = problem
            return False
        try:
            self._arm()
        except _Unusable as reason:
            self._why = str(reason)
        except EnvironmentProblem as reason:
            self._why = f"kernel tracing was not armed: {reason}"
        except OSError as error:
            self._why = f"the kernel refused to trace: {_said(error)}"
        if not self._armed:
            self._take_down()
        return self._armed

    def _arm(self) -> None:
        self._tracefs = trace_fs.mounted()
        if self._tracefs is None:
            try:
                self._mount = trace_fs.OwnMount()
            except OSError as error:
                raise _Unusable(f"tracefs is not mounted and cannot be: {_said(error)}") from None
            self._tracefs = self._mount.path
        if not (self._tracefs / "kprobe_events").exists():
            raise _Unusable("this kernel is built without CONFIG_KPROBE_EVENTS")
        trace_fs.reclaim(self._tracefs)
        self._instance_name, self._group = trace_fs.own_names(self._owner)
        # "  event   hits   misses" (kernel/trace/trace_kprobe.c, probes_profile_seq_show()).
        self._profile_line = re.compile(rb"_%d\s+\d+\s+(\d+)" % self._owner)
        instance = self._tracefs / "instances" / self._instance_name
        # Written down before they exist. The instance is given back first: it uses the probes.
        self._entries.append(self._journal.add("kprobe-group", group=self._group))
        self._entries.append(
            self._journal.add("tracefs-instance", name=self._instance_name, path=str(instance))
            if self._mount is None
            else self._journal.add("tracefs-instance", name=self._instance_name)
        )
        instance.mkdir()
        trace_fs.write(instance / "tracing_on", "0")
        trace_fs.write(instance / "trace_clock", "mono")  # the clock of time.monotonic_ns()
        cpus = os.cpu_count() or 1
        low, high = _BUFFER_CPU_KB
        trace_fs.write(instance / "buffer_size_kb", str(min(high, max(low, _BUFFER_TOTAL_KB // cpus))))
        for option, value in _OPTIONS.items():
            with suppress(FileNotFoundError):
                trace_fs.write(instance / "options" / option, value)
        self._flags = trace_flags.of_running_kernel()
        self._place_probes(instance)
        self._open(instance)
        self._armed = True
        _tracers.add(self)
        self.follow(self._owner)
        # A group directory of the instance appears with the first probe of the group.
        trace_fs.write(instance / "events" / self._group / "enable", "1")
        trace_fs.write(instance / "tracing_on", "1")
        self._prove()
        self._why = (
            f"{len(self._probes)} kernel functions are followed by return probes in an instance of tracefs; "
            f"FOLL_* flags from {self._flags.source}"
        )

    def _place_probes(self, instance: Path) -> None:
        assert self._tracefs is not None
        events = self._tracefs / "kprobe_events"
        self._arguments_at_return = trace_fs.return_probes_have_arguments(self._tracefs)
        for point in trace_probes.PROBED:
            if point.module and not Path("/sys/module", point.module).exists():
                if point.module != "nvidia" and Family.DRIVER not in point.families:
                    self._missing.append(
                        {"fn": point.names[0], "why": f"the module {point.module} is not loaded"}
                    )
                continue
            refused = []
            for name in point.names:
                why = self._place(events, instance, name, point)
                if why:
                    refused.append((name, why))
                else:
                    refused = []
                    break
            if refused:
                others = f" (nor has it {', '.join(name for name, _ in refused[1:])})" if refused[1:] else ""
                self._missing.append({"fn": refused[0][0], "why": refused[0][1] + others})
        if not any(point.depth is CallDepth.DRIVER for point in self._placed_points()):
            self._missing.append({"fn": "reg_user_mr", "why": "no RDMA driver that is known here is loaded"})
        for system, name in TRACEPOINTS:
            try:
                trace_fs.write(instance / "events" / system / name / "enable", "1")
                self._names[name] = name, "tracepoint"
            except OSError as error:
                self._missing.append({"fn": f"{system}:{name}", "why": _said(error)})
        if not self._probes:
            raise _Unusable("the kernel lets us probe none of the functions that matter")

    def _placed_points(self) -> list[KernelFunction]:
        placed = {name for name, _ in self._probes}
        return [point for point in trace_probes.PROBED if placed.intersection(point.names)]

    def _place(self, events: Path, instance: Path, name: str, point: KernelFunction) -> str:
        """Make a function's probe (and an entry probe where the return cannot tell arguments); "" or why
        not.
        """
        # kprobe_profile tells an event's name without its group: the PID keeps two runs apart there.
        event = f"{name}_{self._owner}"
        entry = f"{name}_in_{self._owner}"
        try:
            at_return = bool(point.arguments) and self._arguments_at_return
            line = trace_probes.return_probe(self._group, event, name, point, with_arguments=at_return)
            trace_fs.append(events, line + "\n")
            if point.arguments and not at_return:
                line = trace_probes.entry_probe(self._group, entry, name, point)
                trace_fs.append(events, line + "\n")
                self._names[entry] = name, "entry"
            if point.keep:
                trace_fs.write(instance / "events" / self._group / event / "filter", point.keep)
        except OSError as error:
            return _refusal(name, error)
        self._names[event] = name, "return"
        self._probes.append((name, point.keep))
        return ""

    def _open(self, instance: Path) -> None:
        assert self._tracefs is not None
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._pipe = os.open(instance / "trace_pipe", flags | os.O_NONBLOCK)
        self._profile = os.open(self._tracefs / "kprobe_profile", flags)
        self._stack_option = os.open(instance / "options" / "stacktrace", os.O_WRONLY | os.O_CLOEXEC)
        cpus = sorted((instance / "per_cpu").iterdir(), key=lambda path: int(path.name[3:]))
        for files, name, more in (
            (self._stats, "stats", 0),
            (self._raw, "trace_pipe_raw", os.O_NONBLOCK),
        ):
            for cpu in cpus:
                path = cpu / name
                files.append(path if len(cpus) > _KEPT_OPEN else os.open(path, flags | more))

    def _prove(self) -> None:
        """See one call whose arguments are known, or say that this kernel's tracing cannot be relied on.

        Reading a word of this process' own memory through /proc/self/mem takes a reference to its page
        (`get_user_pages_remote`, mm/memory.c:__access_remote_vm()).
        """
        if not any(name == "get_user_pages_remote" for name, _ in self._probes):
            return
        marker = bytearray(PAGE_SIZE)
        address = id(marker)  # CPython: where the object lies
        try:
            fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            token = self.begin()
            try:
                os.pread(fd, 8, address)
            except OSError:
                return
            finally:
                trace = self.end(token)
        finally:
            os.close(fd)
        for event in trace["events"]:
            args = event.get("args", {})
            if event.get("fn") == "get_user_pages_remote" and args.get("start", 0) == address:
                if args.get("nr_pages") == 1 and event.get("ret") == 1:
                    return
                raise _Unusable("a probe showed other arguments than the call had: unknown kernel signature")
        raise _Unusable("a probe that must have been hit left no event")

    # One call

    def follow(self, pid: int) -> None:
        """Record the events of process `pid`, its threads, and what they fork; of nobody else any more."""
        if not self._armed:
            return
        instance = self.instance
        assert instance is not None
        try:
            tids = " ".join(sorted(path.name for path in Path(f"/proc/{pid}/task").iterdir()))
            trace_fs.write(instance / "set_event_pid", tids or str(pid), os.O_TRUNC)
        except OSError as error:
            self._why = f"process {pid} cannot be followed: {_said(error)}"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the probes out of the kernel for the length of a `with` block, in which nothing is followed.

        For what would hit them so often that they only cost.
        """
        if not self._armed:
            yield
            return
        assert self.instance is not None
        switch = self.instance / "events" / self._group / "enable"
        trace_fs.write(switch, "0")
        try:
            yield
        finally:
            trace_fs.write(switch, "1")

    def begin(self, *, stack: bool = False) -> Token | None:
        """Start following a call; None where tracing is not available.

        A registration is made by the calling thread, and what other threads do meanwhile is left out. With
        `stack`, for a pin, every thread of the followed process counts, and each event comes with its kernel
        stack, which names the driver (some tens of microseconds an event).
        """
        if not self._armed:
            return None
        if stack or self._stale or self._unread >= _UNREAD_CALLS:
            try:
                self._prepare(stack)
            except OSError as error:
                self._broken(error)
                return None
        return Token(time.monotonic_ns(), stack)

    def _prepare(self, stack: bool) -> None:
        if self._stale:  # in a forked child: misses in its siblings are none of its own
            self._baseline = self._losses()
            self._stale = False
        if self._unread >= _UNREAD_CALLS:
            self._discard()
        if stack:
            os.write(self._stack_option, b"1")

    def end(self, token: Token | None, *, succeeded: bool = False) -> dict[str, Any]:
        """Return the trace of the call since `begin()` (docs/record.md, "Trace").

        For a registration, in the thread that made it. `succeeded`: it is known to have succeeded and its
        events are not wanted; then nothing is read, which is what keeps a traced registration cheap, and the
        trace's status is `off`. (A pin's trace is always read.)
        """
        if token is not None and self._armed:
            if succeeded and not token.stack:
                self._unread += 1
                return dict(_NOT_READ)
            try:
                if token.stack:
                    os.write(self._stack_option, b"0")
                return self._collect(token)
            except OSError as error:
                self._broken(error)
        return {**_EMPTY, "status": "unavailable", "why": self._why, "missing": self.missing}

    def _broken(self, error: OSError) -> None:
        """Someone has taken our instance away, or the kernel has stopped answering: no evidence any more."""
        self._armed = False
        self._why = f"tracing stopped working during the run: {_said(error)}"

    def _collect(self, token: Token) -> dict[str, Any]:
        text, since_us, tid = self._read(), token.since // 1000, get_native_id()
        parsed = trace_parse.parse(text, self._names, self._flags, since_us=since_us)
        before, after = self._baseline, self._losses()
        self._baseline = after
        # The buffer's counters cover everything since the last look; the pipe tells whether what was lost
        # can have belonged to this call.
        counted = sum(after[1].values()) - sum(before[1].values())
        overrun = sum(parsed.lost.values()) if counted else 0
        misses = after[0] - before[0]
        seen = [event for event in parsed.events if token.stack or event["tid"] == tid]
        events = trace_parse.merge_chunks(trace_parse.pair_entries(seen), PAGE_SIZE)
        tree = trace_tree.build(events, tid)
        for event in events:
            event["t"] = round((event.pop("us") - since_us) / 1e6, 6)
        spoiled = []
        if misses:
            spoiled.append(f"probes missed {misses} hits")
        if overrun:
            spoiled.append(f"{overrun} events were overwritten before they were read")
        if len(text) >= _TEXT_LIMIT:
            spoiled.append("there were more events than are read")
        return {
            "status": "spoiled" if spoiled else "complete",
            "why": f"{' and '.join(spoiled)}: what is absent here may have happened" if spoiled else "",
            "events": events,
            "tree": tree,
            "missing": self.missing,
            "probed": [name for name, keep in self._probes if not keep],
            "probed_failures": [name for name, keep in self._probes if keep],
            "misses": misses,
            "overrun": overrun,
            "flags_source": self._flags.source,
        }

    def _read(self) -> str:
        self._unread = 0
        parts, length = [], 0
        try:
            while length < _TEXT_LIMIT and (part := os.read(self._pipe, 1 << 16)):
                parts.append(part)
                length += len(part)
        except BlockingIOError:
            pass
        return b"".join(parts).decode("utf-8", "replace")

    def _discard(self) -> None:
        """Empty the buffer by whole pages: nothing is put into words that nobody wants to read."""
        self._unread = 0
        for file in self._raw:
            fd = file if isinstance(file, int) else os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                for _ in range(_DISCARDED_PAGES):
                    if not os.read(fd, 1 << 16):
                        break
            except BlockingIOError:
                pass
            finally:
                if not isinstance(file, int):
                    os.close(fd)

    def _losses(self) -> tuple[int, dict[int, int]]:
        """Return the hits that our probes have missed so far, and the events lost so far by CPU."""
        text, offset = b"", 0
        while part := os.pread(self._profile, 1 << 16, offset):
            text += part
            offset += len(part)
            if len(part) < 1 << 11:
                break  # a reader's buffer is a page: a short part is the last one
        missed = sum(map(int, self._profile_line.findall(text)))
        lost = {}
        for cpu, file in enumerate(self._stats):
            text = file.read_bytes() if isinstance(file, Path) else os.pread(file, 1024, 0)
            lost[cpu] = sum(map(int, _LOST_EVENTS.findall(text)))
        return missed, lost

    # The end

    def disarm(self) -> None:
        """Remove the instance and the probes. In a forked child, and again, it does nothing."""
        if os.getpid() != self._owner or self._tracefs is None:
            return
        self._why = "tracing has ended"
        self._take_down()

    def _take_down(self) -> None:
        self._armed = False
        for fd in (self._pipe, self._profile, self._stack_option, *self._stats, *self._raw):
            if isinstance(fd, int) and fd >= 0:
                os.close(fd)
        self._pipe = self._profile = self._stack_option = -1
        self._stats, self._raw = [], []
        if self._tracefs is not None and self._instance_name:
            left = []
            for what, remove, name in (
                ("the trace instance", trace_fs.remove_instance, self._instance_name),
                ("the probes of", trace_fs.remove_group, self._group),
            ):
                try:
                    remove(self._tracefs, name)
                except OSError as error:
                    left.append(f"{what} {name} could not be removed: {_said(error)}")
            if left:
                self._why += "; " + "; ".join(left)  # the journal keeps them for the next start
            else:
                for entry in self._entries:
                    self._journal.remove(entry)
        self._entries = []
        self._tracefs = None
        self._names, self._probes = {}, []
        if self._mount is not None:
            self._mount.close()
            self._mount = None


_tracers: weakref.WeakSet[Tracer] = weakref.WeakSet()


def _in_child() -> None:
    for tracer in _tracers:
        tracer._stale = True


os.register_at_fork(after_in_child=_in_child)


class _Unusable(Exception):
    """Tracing does not work here; its text is the sentence for `status()`."""


_EMPTY: dict[str, Any] = {"events": [], "tree": [], "missing": [], "misses": 0, "overrun": 0}
_NOT_READ = {**_EMPTY, "status": "off", "why": "the call succeeded; its events were not read"}


def _obstacle() -> str:
    """Return why tracing cannot work here, "" where nothing speaks against it. Changes nothing."""
    mode = procfs.lockdown()
    if mode == "confidentiality":
        return "the kernel is locked down (confidentiality), which forbids kprobes and tracefs"
    if os.geteuid() != 0:
        return "following the kernel needs root: tracefs and kprobes are closed to this user"
    tracefs = trace_fs.mounted()
    if tracefs is None:
        return "" if trace_fs.kernel_has_tracefs() else _NO_TRACEFS
    if not (tracefs / "kprobe_events").exists():
        return "this kernel is built without CONFIG_KPROBE_EVENTS"
    if not os.access(tracefs / "kprobe_events", os.W_OK):
        return f"{tracefs} is mounted read-only or may not be written here"
    return ""


_NO_TRACEFS = "this kernel has no tracefs (CONFIG_TRACING)"


def _said(error: OSError) -> str:
    name = errno_name(error.errno or 0)
    return f"{error.strerror or error} ({name})"


def _refusal(name: str, error: OSError) -> str:
    if error.errno in (errnos.ENOENT, errnos.EINVAL):
        return f"this kernel has no symbol {name} that can be probed (inlined, or under another name)"
    if error.errno == errnos.EADDRNOTAVAIL:
        return f"{name} is more than one symbol in this kernel"
    return f"the kernel refused a probe: {_said(error)}"
