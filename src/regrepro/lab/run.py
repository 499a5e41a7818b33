"""One run in the lab: kernel, machine, guest, record, verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from regrepro.errors import EnvironmentProblem, RegreproError, UsageError
from regrepro.judge.names import name_of
from regrepro.kernel import reclaim
from regrepro.kernel.journal import Entry, Journal
from regrepro.lab import accel as acceleration
from regrepro.lab.kernels import Kernel, Kernels
from regrepro.lab.machine import Ending, Limits, Machine, is_hidden, require_tools
from regrepro.lab.progress import LabProgress, Silent
from regrepro.lab.settings import Settings, as_words, host_memory, make_settings
from regrepro.lab.token import new_token
from regrepro.options import RunOptions, format_size
from regrepro.record import FILE_NAME, RecordWriter, encode

CONSOLE_FILE = "console.log"
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class LabOptions:
    """What `lab run` takes beside the options of a run.

    `memory` in bytes, of all nodes together; None: enough for `boot`. `numa`: number of nodes, or the bytes
    of each.
    """

    kernel: str = "latest"
    boot: tuple[str, ...] = ()
    memory: int | None = None
    numa: int | tuple[int, ...] = 1
    cpus: int | None = None
    accel: str = "auto"
    limits: Limits = field(default_factory=Limits)

    def settings(self) -> Settings:
        """Return the machine's settings. Raises `UsageError`."""
        return make_settings(
            boot=self.boot, memory=self.memory, numa=self.numa, cpus=self.cpus, accel=self.accel
        )


class Interrupted(RegreproError):
    """The lab run was ended by a signal; the machine is gone, what was recorded before is whole."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum
        super().__init__(f"ended by {signal.Signals(signum).name}")


class _Stop(BaseException):
    def __init__(self, signum: int) -> None:
        self.signum = signum


def lab_run(
    names: Sequence[str],
    options: RunOptions,
    lab: LabOptions,
    out: Path,
    progress: LabProgress | None = None,
) -> Path:
    """Run scenarios in a guest and leave `record.jsonl` and `verdicts.json` in `out`; return `out`.

    A guest that panics, hangs or runs out of memory is no error here: the record keeps what was seen, with an
    event `lab` that says what happened, and is judged. Raises `UsageError` for what is wrong with names or
    options, `EnvironmentProblem` when there is no kernel or machine to run in, `Interrupted`.
    """
    from regrepro import judge
    from regrepro.record import read_record

    tell: LabProgress = progress if progress is not None else Silent()
    settings = lab.settings()
    arguments, homes = guest_names(names)
    require_tools()
    for sentence in reclaim.reclaim():
        tell.say(f"left by a killed run, given back: {sentence}")
    for name in arguments:
        if name.startswith("/"):
            tell.say(f"{name} is a program: it was run on this machine, too, to read what it declares")
    kernels = Kernels(watcher=tell)
    kernel = kernels.get(lab.kernel)
    out = _made(out)
    try:
        with _signals(), workplace() as place:
            guest_options = replace(options, names=tuple(arguments))
            booted = _Booted(kernel, settings, place, tell, out, homes)
            facts = {
                "kernel": kernel.release,
                "kernel_image": str(kernel.image),
                "kernel_origin": kernel.origin,
                "boot": list(settings.boot),
                "memory": settings.memory,
                "numa": settings.numa,
                "cpus": settings.cpus,
            }
            ending = booted.run_scenarios(guest_options, facts, lab.limits)
    except _Stop as stop:
        _end_record(out, interrupted=True)
        raise Interrupted(stop.signum) from None
    if ending.error is not None:
        text, code = ending.error
        error = UsageError(text) if code == 2 else EnvironmentProblem(text)
        error.exit_code = code
        raise error
    _complete_record(out, ending, guest_options, booted.facts)
    from regrepro.cli import write_json

    write_json(out / "verdicts.json", judge.judge_record(read_record(out)))
    return out


def guest_names(names: Iterable[str]) -> tuple[list[str], list[Path]]:
    """Return names as the guest can find them, paths made absolute, and the directories of those paths."""
    arguments: list[str] = []
    homes: list[Path] = []
    for name in names:
        if name.endswith(".py") or "/" in name:
            path = Path(name).absolute()
            arguments.append(str(path))
            homes.append(path.parent)
        else:
            arguments.append(name)
    return arguments, homes


def _made(out: Path) -> Path:
    out = out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / FILE_NAME).exists():
            raise UsageError(
                f"{out / FILE_NAME} exists already", hint="give --out a directory that holds no run"
            )
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make {out}",
            why=error.strerror or str(error),
            hint="give --out a directory that can be written",
        ) from None
    return out


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into an exception, so that everything is given back on the way out."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise _Stop(number)

    saved: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread: whoever calls handles signals
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                saved[signum] = signal.signal(signum, stop)
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)


class Workplace:
    """A temporary directory and the machine in it, both written down so that the next start removes them."""

    def __init__(self, directory: Path, journal: Journal) -> None:
        self.directory = directory
        self._journal = journal
        self._process: Entry | None = None

    def started(self, pid: int) -> None:
        """Write down a machine's process."""
        self._process = self._journal.add("process", pid=pid)

    def ended(self) -> None:
        """Strike it out."""
        if self._process is not None:
            self._journal.remove(self._process)
            self._process = None


@contextlib.contextmanager
def workplace() -> Iterator[Workplace]:
    """Make the workplace of one machine, and remove it."""
    directory = Path(tempfile.gettempdir()) / f"regrepro-lab-{secrets.token_hex(8)}"
    with Journal() as journal:
        journal.add("directory", path=str(directory))
        place = Workplace(directory, journal)
        try:
            try:
                directory.mkdir(mode=0o700)
            except OSError as error:
                raise EnvironmentProblem(
                    f"cannot make {directory}", why=error.strerror or str(error), hint="set TMPDIR"
                ) from None
            yield place
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            # Not only what `place` knows: a signal may have come while an entry was being made.
            for entry in journal.entries:
                journal.remove(entry)


class _Booted:
    """Boots one machine and runs one spec in it."""

    def __init__(  # noqa: PLR0917 - what a run is made of, in order
        self,
        kernel: Kernel,
        settings: Settings,
        place: Workplace,
        tell: LabProgress,
        out: Path,
        homes: Iterable[Path] = (),
    ) -> None:
        self._kernel = kernel
        self._settings = settings
        self._place = place
        self._tell = tell
        self._out = out
        self._homes = list(homes)
        self.facts: dict[str, Any] = {}

    def run_scenarios(self, options: RunOptions, facts: dict[str, Any], limits: Limits) -> Ending:
        """Run scenarios; the record comes to lie in the run directory."""
        spec = {"kind": "scenarios", "options": options.as_json(), "out": str(self._out)}
        follow = _Follow(self._out / FILE_NAME, self._tell)
        return self.run(spec, facts, limits, follow)

    def run(
        self, spec: dict[str, Any], facts: dict[str, Any], limits: Limits, follow: _Follow | None = None
    ) -> Ending:
        """Boot and run a spec of `regrepro.lab.guest`."""
        token = new_token()
        spec_file = self._place.directory / "spec.json"
        script, readable = guest_script(spec_file)
        compile_package()

        def make(kvm: bool) -> Machine:
            return Machine(
                self._kernel,
                self._settings,
                self._place.directory,
                script=script,
                shared=[self._out],
                readable=[*readable, *self._homes],
                token=token,
                kvm=kvm,
            )

        kvm = self._use_kvm(make)
        machine = make(kvm)
        accel = "kvm" if kvm else "icount" if self._settings.accel == "icount" else "tcg"
        self.facts = {**facts, "accel": accel}
        spec_file.write_text(json.dumps({**spec, "token": token, "lab": self.facts}), encoding="utf-8")
        words = f" with {as_words(self._settings.boot)}" if self._settings.boot else ""
        size = format_size(self._settings.memory)
        nodes = f" in {self._settings.numa} nodes" if self._settings.numa > 1 else ""
        self._tell.say(
            f"booting {self._kernel.release}{words} ({size}{nodes}, {self._settings.cpus} CPUs, {accel})"
        )
        if self._settings.memory > host_memory():
            self._tell.say(
                f"this machine has {format_size(host_memory())}: a guest that comes to use more is ended"
            )
        started = time.monotonic()

        def on_message(message: dict[str, Any]) -> None:
            if message["what"] == "started":
                self._tell.say(f"the guest is up after {time.monotonic() - started:.1f} s")
            elif message["what"] == "note":
                self._tell.say(str(message.get("text")))

        def boot(machine: Machine) -> Ending:
            ending = machine.run(
                limits,
                on_message=on_message,
                on_start=self._place.started,
                poll=follow.look if follow is not None else None,
                console_log=self._out / CONSOLE_FILE,
            )
            self._place.ended()
            return ending

        ending = boot(machine)
        if ending.what == "panic" and ending.boot_seconds is None and not kvm:
            # Seen under emulation on a busy host, before any code of the guest ran: nothing is lost by it.
            self._tell.say(f"{ending.why}, before the guest was up; booting once more")
            ending = boot(make(kvm))
        if follow is not None:
            follow.look()
        if ending.what != "finished":
            self._tell.say(f"{ending.why}; the console's last lines:")
            for line in ending.console[-12:]:
                self._tell.say(f"    {line}")
        elif ending.killed_for_memory:
            self._tell.say("the guest ran out of memory on the way; see console.log")
        return ending

    def _use_kvm(self, make: Any) -> bool:
        """Whether to use KVM: as asked, or where a probe shows that it works."""
        if self._settings.accel in ("tcg", "icount"):
            return False
        if self._settings.accel == "kvm":
            acceleration.require_kvm()
            return True
        if not acceleration.kvm_accessible():
            return False
        from regrepro.lab.kernels import cache_directory

        file = cache_directory() / "kvm.json"
        known = acceleration.remembered(file)
        if known is not None:
            return known
        self._tell.say(f"trying KVM (at most {acceleration.PROBE_SECONDS:.0f} s)")
        works, why = acceleration.probe(make(True).command)
        acceleration.remember(file, works, why)
        self._tell.say("KVM works" if works else f"KVM does not work here ({why}); emulating the CPU (TCG)")
        return works


def guest_script(spec_file: Path) -> tuple[str, list[Path]]:
    """Return the shell command that runs a spec in the guest, and the directories that it reads.

    The guest's Python is this one, with this one's import path given outright: `-S` leaves out what site
    would do, which under emulation takes seconds.
    """
    package = _PACKAGE.parent
    standard = {Path(os.__file__).parent, Path(os.__file__).parent / "lib-dynload"}
    places = [package]
    for entry in sys.path:
        path = Path(entry)
        if entry and path.is_absolute() and path.is_dir() and path not in standard:
            places.append(path)
    places = list(dict.fromkeys(places))
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    command = f"{shlex.quote(sys.executable)} -S -m regrepro.lab.guest {shlex.quote(str(spec_file))}"
    # Every write of ours has reached the host when it returns: no need for an orderly shutdown.
    script = f"cd /\nexport {exports}\n{command}\necho o > /proc/sysrq-trigger\nsleep 60\n"
    readable = [path for path in (*places, Path(sys.prefix), Path(sys.executable).parent) if is_hidden(path)]
    return script, readable


def compile_package() -> None:
    """Compile regrepro's own modules where they lie: the guest throws away what it compiles."""
    import compileall

    if os.access(_PACKAGE, os.W_OK):
        with contextlib.suppress(OSError):
            compileall.compile_dir(str(_PACKAGE), quiet=2)


class _Follow:
    """Reads a record while it grows and tells the progress of each pass."""

    def __init__(self, path: Path, tell: LabProgress) -> None:
        self._path = path
        self._tell = tell
        self._position = 0
        self._partial = b""
        self._number = 0

    def look(self) -> None:
        """Read what is new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        self._position += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            # Most lines are large and of no interest here.
            if b'"scenario-' in line[:200] or b'"reservation"' in line[:200]:
                with contextlib.suppress(ValueError):
                    self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        name, control = name_of(event), event.get("control")
        what = f"control {control} of {name}" if control else name
        if kind == "scenario-begin":
            self._number += 1
            self._tell.say(f"[{self._number}] {what} …")
        elif kind == "scenario-end":
            self._tell.say(f"    {what}: {event.get('outcome')} after {event.get('seconds', 0):.1f} s")
        elif kind == "reservation" and event.get("ok") is False:
            self._tell.say(f"boot argument {event.get('argument')}: {event.get('why') or 'it failed'}")


def _complete_record(out: Path, ending: Ending, options: RunOptions, facts: dict[str, Any]) -> None:
    """Say in the record how the guest ended, where that is not plain from it."""
    path = out / FILE_NAME
    if ending.what == "finished" and not ending.killed_for_memory:
        return
    if not _has_header(path):
        path.unlink(missing_ok=True)
        header = {
            "run": {**options.as_json(), "names": scenario_names(options.names)},
            "node": _facts_from_outside(facts),
            "lab": facts,
            "stand_ins": [],
        }
        RecordWriter(path, header).close()
    what = ending.what if ending.what != "finished" else "out-of-memory"
    append_event(
        path, "lab", what=what, why=ending.why, console=ending.console, seconds=round(ending.seconds, 3)
    )


def scenario_names(names: Iterable[str]) -> list[str]:
    """Return the names of the scenarios that were asked for, a file's own where one was named."""
    from regrepro.scenario import Library

    found: list[str] = []
    for name in names:
        try:
            found += [item.name for item in Library().select([name], "default")]
        except RegreproError:
            found.append(name)
    return list(dict.fromkeys(found))


def _facts_from_outside(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the header's `node` for a guest that never said anything itself."""
    return {
        "hostname": socket.gethostname(),
        "kernel": facts["kernel"],
        "kernel_version": "",
        "arch": platform.machine(),
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "cmdline": None,
        "cpus": facts["cpus"],
        "memory_total": facts["memory"],
        "euid": 0,
        "capabilities": [],
        "lockdown": None,
        "vm": {},
        "nvidia_driver": None,
        "limits": {"memlock_soft": None, "memlock_hard": None},
    }


def _has_header(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return False


def _end_record(out: Path, *, interrupted: bool) -> None:
    path = out / FILE_NAME
    if interrupted and _has_header(path):
        with contextlib.suppress(OSError, RegreproError):
            append_event(path, "run-end", outcome="interrupted")


def append_event(path: Path, event: str, **keys: Any) -> None:
    """Append an event to the record of a guest that is no more.

    A line that was being written when the guest died is cut off first, and kept in the event as `cut`: a
    reader would take it for damage in the middle. Raises `EnvironmentProblem`.
    """
    try:
        with path.open("r+b") as file:
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                keys["cut"] = data[whole:].decode("utf-8", "replace")[:2000]
            lines = data[:whole].splitlines()
            header, last = json.loads(lines[0]), json.loads(lines[-1])
            started = datetime.fromisoformat(header["started"])
            now = (datetime.now(timezone.utc) - started).total_seconds()
            t = max(round(now, 6), float(last.get("t", 0)))
            seq = int(last.get("seq", 0)) + 1
            line = encode({"seq": seq, "t": t, "event": event, **keys}) + "\n"
            file.truncate(whole)
            file.seek(whole)
            file.write(line.encode("ascii"))
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentProblem(f"cannot complete {path}", why=str(error)) from error


def run_commands(
    commands: Sequence[str],
    lab: LabOptions,
    out: Path,
    progress: LabProgress | None = None,
) -> tuple[Ending, list[tuple[int | None, str]]]:
    """Run shell commands as root in one guest with soft-RoCE.

    Return how it ended, and each command's exit code and output.

    For tests and benchmarks. The exit code is None for a command that did not end.
    """
    tell: LabProgress = progress if progress is not None else Silent()
    settings = lab.settings()
    require_tools()
    kernel = Kernels(watcher=tell).get(lab.kernel)
    out = _made(out)
    facts = {"kernel": kernel.release, "memory": settings.memory, "cpus": settings.cpus}
    try:
        with _signals(), workplace() as place:
            spec = {"kind": "command", "commands": list(commands), "out": str(out)}
            ending = _Booted(kernel, settings, place, tell, out).run(spec, facts, lab.limits)
    except _Stop as stop:
        raise Interrupted(stop.signum) from None
    results: list[tuple[int | None, str]] = []
    for number in range(len(commands)):
        code: int | None = None
        text = ""
        with contextlib.suppress(OSError, ValueError):
            text = (out / f"{number}.out").read_text(encoding="utf-8", errors="replace")
            code = int((out / f"{number}.rc").read_text(encoding="ascii"))
        results.append((code, text))
    return ending, results
