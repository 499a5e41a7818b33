"""The runner: one child process for each pass through a scenario, and a record that survives whatever becomes
of it.

The child is forked after the imports, in a session of its own. It is killed when its time is up, when the run
is interrupted, and by the kernel when the runner itself is killed. The end of each pass is written by the
parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from regrepro.core.memory import keep_from_numa_balancing
from regrepro.errors import EnvironmentProblem, RegreproError, Unmet
from regrepro.kernel import procfs
from regrepro.kernel.parent import die_with_parent
from regrepro.options import RunOptions, format_size
from regrepro.progress import Progress, Silent
from regrepro.record import FILE_NAME, RecordProblem, RecordWriter
from regrepro.runner.ending import (
    End,
    Watched,
    await_group,
    kill,
    memory_events,
    read_output,
    signal_name,
    where,
)
from regrepro.runner.environment import Environment
from regrepro.scenario import Change, Instead, Library, Scenario, check_options
from regrepro.stage import Stage, needs
from regrepro.stage.ports import Backend, MemoryMap, Tracer
from regrepro.stage.system import default_contract

# After SIGKILL: longer than the kernel takes to tear down a large address space under emulation.
_DEATH_SECONDS = 15.0

# What a child leaves in the shared byte when it got as far as this.
_RUNNING, _FINISHED, _UNMET, _EXCEPTION, _RECORD_LOST = range(5)


class Interrupted(RegreproError):
    """The run was ended by a signal. What was recorded before is whole, and lies in `out_dir`."""

    def __init__(self, signum: int, out_dir: Path) -> None:
        self.exit_code = 128 + signum
        self.out_dir = out_dir
        name = signal.Signals(signum).name
        super().__init__(f"ended by {name}", hint=f"what was recorded before lies in {out_dir}")


@dataclass(frozen=True)
class Pass:
    """One way through a scenario's body: the scenario itself, or one of its controls."""

    scenario: Scenario
    control: str | None
    body: Scenario
    change: Change | None

    @property
    def labels(self) -> dict[str, Any]:
        """What every event of it bears."""
        scenario = self.scenario
        return {"scenario": scenario.function, "variant": scenario.variant, "control": self.control}

    def contract(self, options: RunOptions) -> str:
        """Return what the pin of this pass promises."""
        if self.change is not None and self.change.variable == "pin":
            return self.change.value
        return self.body.contract(default_contract(options))


def passes(scenario: Scenario, library: Library) -> Iterator[Pass]:
    """Yield the passes of a scenario: itself, then each control."""
    yield Pass(scenario, None, scenario, None)
    for name, control in scenario.controls.items():
        if isinstance(control, Instead):
            yield Pass(scenario, name, library.control(control, beside=scenario), None)
        else:
            yield Pass(scenario, name, scenario, control)


def run(
    names: Iterable[str],
    options: RunOptions,
    out_dir: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    lab: dict[str, Any] | None = None,
    environment: Environment | None = None,
    library: Library | None = None,
) -> Path:
    """Run scenarios and write `record.jsonl` into `out_dir`; return that directory.

    `names`: scenarios and files; none: those of the options' profile. `lab`: the header's `lab`, in a lab
    guest. Raises `UsageError` for what is wrong with names or files, before anything is made;
    `EnvironmentProblem` where the record cannot be written; `Interrupted` after SIGINT, SIGTERM or SIGHUP,
    with everything given back.
    """
    shelf = library or Library()
    scenarios = shelf.select(names, options.profile)
    check_options(scenarios, options.option)
    directory = Path(out_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make {directory}",
            why=error.strerror or str(error),
            hint="give --out a directory that can be written",
        ) from None
    planned = [one for scenario in scenarios for one in passes(scenario, shelf)]
    runner = _Run(options, directory, progress or Silent(), environment or Environment())
    runner.run(planned, lab)
    return directory


class _Signals:
    """Notes SIGINT, SIGTERM and SIGHUP for the length of a run; a wait for a child wakes up by `fd`."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._saved: dict[int, Any] = {}
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._saved_wakeup = -1

    def __enter__(self) -> _Signals:
        with contextlib.suppress(ValueError):  # not the main thread: whoever calls handles signals
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._saved[number] = signal.signal(number, self._note)
            self._saved_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(self._saved_wakeup)
            for number, handler in self._saved.items():
                signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_fd)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number

    def reset_in_child(self) -> None:
        """Give a forked child the default handling."""
        signal.set_wakeup_fd(-1)
        for number in self._saved:
            signal.signal(number, signal.SIG_DFL)


class _Run:
    def __init__(
        self, options: RunOptions, directory: Path, progress: Progress, environment: Environment
    ) -> None:
        self._options = options
        self._directory = directory
        self._progress = progress
        self._environment = environment
        self._tracer: Tracer | None = None
        self._trace_status: dict[str, Any] = {"status": "off", "why": "--trace off"}
        self._unmet: Unmet | None = None  # of the run: no pass can do without
        self._memory_map: MemoryMap | None = None
        self._pressing: mmap.mmap | None = None
        self._block_events: Any = None

    def run(self, planned: list[Pass], lab: dict[str, Any] | None) -> None:
        environment, options = self._environment, self._options
        header = {
            "run": options.as_json() | {"names": list(dict.fromkeys(item.scenario.name for item in planned))},
            "node": environment.node_facts(),
            "lab": lab,
            "stand_ins": environment.stand_ins(options),
        }
        try:
            writer = RecordWriter(self._directory / FILE_NAME, header)
        except RegreproError:
            with contextlib.suppress(OSError):
                self._directory.rmdir()  # empty: ours, or as good as
            raise
        with writer, _Signals() as signals:
            self._writer, self._signals = writer, signals
            with contextlib.ExitStack() as cleanup:
                self._prepare(cleanup, (lab or {}).get("boot", ()))
                self._passes(planned)
            writer.event("run-end", outcome="finished" if signals.received is None else "interrupted")
            if signals.received is not None:
                raise Interrupted(signals.received, self._directory)

    def _prepare(self, cleanup: contextlib.ExitStack, boot: Iterable[str]) -> None:
        """Reclaim, look, reserve and arm; `cleanup` gives everything back."""
        environment, writer = self._environment, self._writer
        for sentence in environment.reclaim():
            writer.event("note", text=f"left by a killed run, given back: {sentence}", stand_in=None)
            self._progress.say(f"left by a killed run, given back: {sentence}")
        journal = environment.journal()
        if hasattr(journal, "close"):
            cleanup.callback(journal.close)
        self._journal = journal
        for item in environment.reservations(boot):
            writer.event("reservation", **item)
            if item["ok"] is False:
                self._progress.say(f"boot argument {item['argument']}: {item['why']}")
        self._map()
        if self._options.place == "pressure":
            # A pass that is killed leaves the control group of its pressure.
            cleanup.callback(environment.reclaim)
        if self._options.place == "online-movable":
            self._online(journal, cleanup)
            self._map()  # the block lies in ZONE_MOVABLE now
        if self._memory_map is not None:
            writer.event("memory-map", **self._memory_map.as_record())
        self._block_events = self._environment.block_events()
        cleanup.callback(self._block_events.close)
        if self._options.trace != "off":
            self._arm(journal, cleanup)

    def _map(self) -> None:
        try:
            self._memory_map = self._environment.memory_map()
        except (OSError, RegreproError) as error:
            self._writer.event("note", text=f"no map of this node's memory: {error}", stand_in=None)

    def _online(self, journal: Any, cleanup: contextlib.ExitStack) -> None:
        """Make a block of unpinnable memory for this run; where that cannot be, every pass is unmet."""

        def report(step: dict[str, Any]) -> None:
            self._writer.event("online-movable", **step)

        try:
            block = self._environment.online_movable(journal, self._memory_map, report)
        except Unmet as unmet:
            self._unmet = unmet
            return
        self._progress.say("a memory block was made unpinnable for this run")

        def give_back() -> None:
            if not block.give_back():
                self._progress.say(
                    "the memory block is still in use and could not be given back; the next start tries again"
                )

        cleanup.callback(give_back)

    def _arm(self, journal: Any, cleanup: contextlib.ExitStack) -> None:
        try:
            tracer = self._environment.tracer(journal)
            cleanup.callback(tracer.disarm)
            available = tracer.arm()
            why = tracer.status()[1]
        except (OSError, RegreproError) as error:
            available, why = False, str(error)
        if available:
            self._tracer = tracer
            return
        if self._options.trace == "on":
            raise EnvironmentProblem("the kernel's trace cannot be had", why=why, hint="leave --trace on out")
        self._trace_status = {"status": "unavailable", "why": why}

    def _passes(self, planned: list[Pass]) -> None:
        backend = self._environment.backend(self._options, self._memory_map)
        self._pressing = getattr(backend, "pressing", None)
        without_controls: set[str] = set()
        for number, one in enumerate(planned, start=1):
            if self._signals.received is not None:
                return
            name = one.scenario.name
            if one.control is not None and name in without_controls:
                continue
            self._progress.scenario(name, one.control, number, len(planned))
            try:
                outcome, seconds = self._pass(one, backend)
            except RegreproError:
                self._progress.scenario_ended(name, one.control, "could not be recorded", 0.0)
                raise
            self._progress.scenario_ended(name, one.control, outcome, seconds)
            if outcome == "blocked" and self._environment.in_lab:
                return  # what the kernel holds while it waits, the next pass may need: the guest must end
            if one.control is None and outcome == "unmet":
                without_controls.add(name)  # what the scenario lacks, its controls lack as well

    def _pass(self, one: Pass, backend: Backend) -> tuple[str, float]:
        """Run one pass in a child; return its outcome and seconds."""
        writer = self._writer
        labels = one.labels
        timeout = self._options.timeout or one.body.timeout
        status = mmap.mmap(-1, mmap.PAGESIZE)
        output = os.memfd_create("regrepro-output", os.MFD_CLOEXEC)
        ready, go = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(go)
            self._child(one, backend, parent=parent, ready=ready, output=output, status=status)
        os.close(ready)
        entry = None
        self._block_events.count()  # what changed before is in the map
        try:
            with contextlib.suppress(OSError, RegreproError, AttributeError):
                entry = self._journal.add("process", pid=pid)
            declared = one.body.declared() | {"timeout": timeout}
            writer.event(
                "scenario-begin",
                **labels,
                file=one.body.file,
                body=one.body.function,
                declared=declared,
                contract=one.contract(self._options),
                change=str(one.change) if one.change else None,
                options=one.body.option_values(self._options.option),
                pid=pid,
            )
            if self._tracer is not None:
                self._tracer.follow(pid)
            os.write(go, b"g")
            end = self._wait(pid, started + timeout)
        except BaseException:
            kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            raise
        finally:
            os.close(go)
        seconds = round(time.monotonic() - started, 6)
        text = read_output(output)
        os.close(output)
        reached = status[0]
        status.close()
        if text:
            writer.event("note", **labels, text=f"the scenario printed: {text}", stand_in=None)
        changed = self._check_map(labels)
        outcome = self._outcome(end, reached, labels)
        if entry is not None and outcome["outcome"] != "blocked":
            with contextlib.suppress(OSError, RegreproError):
                self._journal.remove(entry)
        writer.event("scenario-end", **labels, **outcome, seconds=seconds)
        if changed and self._memory_map is not None:
            writer.event("memory-map", **self._memory_map.as_record())
        if reached == _RECORD_LOST:
            raise RecordProblem(
                f"the record in {self._directory} could not be written",
                why=text,
                hint="what was recorded before is whole",
            )
        return str(outcome["outcome"]), seconds

    def _check_map(self, labels: dict[str, Any]) -> bool:
        """Look at the node's memory once more and record whether the map held for this pass. Return whether
        it changed: the next pass gets the new one.
        """
        if self._memory_map is None:
            return False
        found = self._memory_map.check()
        blocks = self._block_events.count()
        self._writer.event("memory-map-check", **labels, **found, block_events=blocks)
        return bool(found["changed"])

    def _outcome(self, end: End, reached: int, labels: dict[str, Any]) -> dict[str, Any]:
        """Return outcome and its particulars for scenario-end."""
        if end.blocked:
            return {"outcome": "blocked", "where": end.where}
        if end.timed_out:
            return {"outcome": "timeout", "where": end.where}
        if end.signal is not None:
            name = signal_name(end.signal)
            more: dict[str, Any] = {"why": "the run was interrupted"} if end.interrupted else {}
            if end.memory_events:
                more["memory_events"] = end.memory_events
            return {"outcome": "killed", "signal": name} | more
        if reached == _FINISHED:
            return {"outcome": "finished"}
        if reached == _UNMET:
            return {"outcome": "unmet"}
        if reached == _RUNNING:
            self._writer.event(
                "exception",
                **labels,
                type="ProcessExit",
                text=f"the process ended with exit status {end.status} before the scenario returned",
                file=None,
                line=None,
                traceback="",
            )
        return {"outcome": "exception"}

    def _wait(self, pid: int, deadline: float) -> End:
        """Wait until a child ends, its time is up or the run is interrupted; then kill what it left."""
        end = End()
        with Watched(pid, self._signals.fd) as watched:
            while not watched.ended(min(1.0, max(0.0, deadline - time.monotonic()))):
                if self._signals.received is not None:
                    end.interrupted = True
                    break
                self._tell_pressure()
                if time.monotonic() >= deadline:
                    end.timed_out = True
                    end.where = where(pid)
                    # Have it say in its output where it is; the handler runs in C, also within a system call.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)
                    watched.ended(0.5)
                    break
            kill(pid)
            death = time.monotonic() + _DEATH_SECONDS
            while not watched.ended(0.2):
                if time.monotonic() >= death:
                    end.blocked = True
                    end.where = where(pid)
                    return end
        end.memory_events = memory_events(pid)
        _, status = os.waitpid(pid, 0)
        await_group(pid)
        code = os.waitstatus_to_exitcode(status)
        end.status = code
        if code < 0:
            end.signal = -code
        return end

    def _tell_pressure(self) -> None:
        """Say how much memory the pass has held so far, if it holds any on purpose."""
        if self._pressing is None:
            return
        held, goal = (int.from_bytes(self._pressing[at : at + 8], "little") for at in (0, 8))
        if goal:
            self._progress.say(f"holding ordinary memory: {format_size(held)} of about {format_size(goal)}")

    def _child(
        self,
        one: Pass,
        backend: Backend,
        *,
        parent: int,
        ready: int,
        output: int,
        status: mmap.mmap,
    ) -> None:
        """Run a pass in the forked child. Never returns."""
        try:
            self._become_child(parent, output)
            if os.read(ready, 1) != b"g":
                os._exit(3)  # the parent is gone
            status[0] = self._body(one, backend)
        except BaseException:
            # Not even the recording of the failure worked: leave words in the output.
            with contextlib.suppress(BaseException):
                traceback.print_exc()
                sys.stderr.flush()
            status[0] = _RECORD_LOST if isinstance(sys.exc_info()[1], RecordProblem) else _EXCEPTION
        finally:
            # No clean-up of the parent's: its atexit handlers and open files are not the child's.
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)

    def _become_child(self, parent: int, output: int) -> None:
        self._signals.reset_in_child()
        os.setsid()
        if not die_with_parent(parent):
            os._exit(3)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Whatever the caller had made of these, the scenario's output goes to the record.
        sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        faulthandler.enable(file=2, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # A page that moves for another reason than the call under test proves nothing.
        keep_from_numa_balancing()
        # Should memory run out, this process goes first, and nothing of the node's own.
        procfs.end_first_when_memory_runs_out()

    def _body(self, one: Pass, backend: Backend) -> int:
        """Check the needs, run the body, and record what became of it."""
        writer = self._writer
        labels = one.labels
        stage = Stage(
            backend,
            writer,
            **labels,
            body_variant=one.body.variant,
            change=one.change,
            tracer=self._tracer,
            trace_status=self._trace_status,
            options=one.body.option_values(self._options.option),
        )
        reached = _FINISHED
        try:
            if self._unmet is not None:
                raise self._unmet
            if self._options.place == "pressure":
                backend.start_pressure()
            needs.check(one.body.needs, backend)
            one.body(stage)
        except Unmet as unmet:
            writer.event("unmet", **labels, need=unmet.need, why=unmet.why, how=unmet.how)
            reached = _UNMET
        except RecordProblem:
            raise
        except BaseException as error:
            writer.event("exception", **labels, **_describe(error, one.body.file))
            reached = _EXCEPTION
        try:
            stage.finish()
        except RecordProblem:
            raise
        except BaseException as error:
            writer.event("exception", **labels, **_describe(error, one.body.file))
            reached = _EXCEPTION
        return reached


def _describe(error: BaseException, file: str) -> dict[str, Any]:
    """Return an exception as the record holds it: the innermost place in the scenario's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or list(frames)
    return {
        "type": type(error).__name__,
        "text": str(error),
        "file": own[-1].filename if own else None,
        "line": own[-1].lineno if own else None,
        "traceback": "".join(traceback.format_exception(error)),
    }
