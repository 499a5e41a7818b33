"""One virtual machine: booted by virtme-ng's own command line, watched, and never left behind.

virtme-run works out the QEMU command and the initramfs; QEMU is then started by us. So the machine is our
direct child, and the kernel ends it when this process ends in whatever way (PR_SET_PDEATHSIG), which no chain
of vng, sh and virtme-run would.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import platform
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrepro.errors import EnvironmentProblem
from regrepro.kernel.parent import die_with_parent
from regrepro.lab import initramfs
from regrepro.lab.guest import MARK
from regrepro.lab.kernels import Kernel
from regrepro.lab.settings import Settings
from regrepro.lab.token import ARGUMENT

# Warnings and worse reach the console: panics, the OOM killer, reservations that failed.
_LOGLEVEL = 5
CONSOLE_LINES = 40
# virtme-ng-init mounts a file system of its own over these; overlays keep the others.
_HIDDEN = (
    "/dev",
    "/proc",
    "/run",
    "/sys",
    "/var/cache",
    "/var/lib/apt",
    "/var/log",
    "/var/tmp",
    "/lib/modules",
)
_OVERLAYS = ("/etc", "/tmp", "/var")
# What virtme-run takes as a directory to share (_RWDIR_RE in virtme/commands/run.py).
_SHAREABLE = re.compile(r"[a-zA-Z0-9_+ /.-]+")

_PANIC = re.compile(r"Kernel panic - not syncing")
_OUT_OF_MEMORY = re.compile(r"\bOut of memory: Killed process|System is deadlocked on memory")


@dataclass(frozen=True)
class Limits:
    """Seconds. `boot`: until the guest's own code runs. `silence`: without a sign of life after that."""

    boot: float = 420.0
    silence: float = 120.0
    total: float = 4 * 3600.0
    ending: float = 20.0


@dataclass
class Ending:
    """How a machine ended.

    `what` is `finished`, or as in the record's event `lab`: `panic`, `hang`, `out-of-memory`, `guest-ended`.
    `killed_for_memory`: the guest's OOM killer was at work, whatever the end. `error`: what guest code told
    (text, exit code), `boot_seconds` None if the guest's code never ran.
    """

    what: str
    why: str
    console: list[str]
    seconds: float
    boot_seconds: float | None
    killed_for_memory: bool = False
    error: tuple[str, int] | None = None
    notes: list[str] = field(default_factory=list)


def _mapped(word: str) -> str:
    """Return a shared directory's option so that what the guest writes there is plain files of ours, whatever
    it is to the guest: a link, a device or a set-user-ID file must not be one on this host.
    """
    found = re.match(r"local,id=\w+,path=(.*),security_model=none(?!.*readonly=on)", word)
    if not found:
        return word
    path = found[1].replace(",,", ",")
    try:
        os.setxattr(path, "user.virtfs.probe", b"")
        os.removexattr(path, "user.virtfs.probe")
        model = "mapped-xattr"
    except OSError:
        model = "mapped-file"  # it keeps what the files are to the guest in `.virtfs_metadata`
    return word.replace("security_model=none", f"security_model={model},fmode=0644,dmode=0755")


class Machine:
    """A machine to boot once. `private` is a directory of ours for its files; the caller removes it.

    `shared` directories are writable in the guest, under the same path. `script` is a shell command that runs
    there as root. Raises `EnvironmentProblem` when this host cannot boot it.
    """

    def __init__(
        self,
        kernel: Kernel,
        settings: Settings,
        private: Path,
        *,
        script: str,
        shared: Iterable[Path] = (),
        readable: Iterable[Path] = (),
        token: str = "",
        kvm: bool = False,
    ) -> None:
        self.kernel = kernel
        self.settings = settings
        self._private = private
        self._kvm = kvm
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None
        self.command = self._prepare(script, list(shared), list(readable))

    @property
    def pid(self) -> int | None:
        """PID of QEMU while it runs."""
        return self._process.pid if self._process is not None else None

    def _prepare(self, script: str, shared: list[Path], readable: list[Path]) -> list[str]:
        """Return the QEMU command."""
        require_tools()
        image = self._private / "initramfs"
        image.unlink(missing_ok=True)
        # virtme-ng passes the script on the kernel's command line, which is short: only its path goes there.
        script_file = self._private / "start.sh"
        script_file.write_text(script, encoding="utf-8")
        source = ["--kdir" if self.kernel.build_tree else "--kimg", str(self.kernel.image)]
        arguments = [
            *source,
            "--mods",
            "auto",
            "--force-9p",
            "--force-initramfs",
            "--save-initramfs",
            str(image),
        ]
        arguments += ["--script-sh", f". {shlex.quote(str(script_file))}", "--show-boot-console"]
        arguments += self.settings.virtme_arguments()
        arguments += ["--kopt", f"loglevel={_LOGLEVEL}"]
        if self._token:
            arguments += ["--kopt", f"{ARGUMENT}={self._token}"]
        if not self._kvm:
            arguments.append("--disable-kvm")
        for overlay in overlays():
            arguments += ["--overlay-rwdir", overlay]
        for directory in shared:
            arguments += ["--rwdir", self._share(directory)]
        needed = [self._private, *readable, *([self.kernel.modules] if self.kernel.modules else [])]
        for place in dict.fromkeys(needed):
            if is_hidden(place) and not any(place.is_relative_to(other) for other in shared):
                arguments += ["--rodir", self._share(place)]
        command = _virtme_run([*arguments, "--show-command", "--dry-run"])
        kernel_arguments = command[command.index("-append") + 1]
        modules = self.kernel.modules
        if self.kernel.build_tree:
            # virtme-ng gathers a build tree's modules in a place of its own.
            link = re.search(r"virtme_link_mods=(\S+)", kernel_arguments)
            modules = Path(link[1]) if link else None
        initramfs.adapt(
            image,
            initramfs.Plan(
                release=self.kernel.release,
                modules=str(modules) if modules is not None else None,
                overlays=tuple(overlays()),
                mounts=initramfs.mounts_in(kernel_arguments),
                script=str(script_file),
            ),
        )
        return self._adapted(command)

    def _share(self, directory: Path) -> str:
        """Return what virtme-run shall share. A path that it does not take goes by a link of a plain name."""
        if _SHAREABLE.fullmatch(str(directory)):
            return str(directory)
        raise EnvironmentProblem(
            f"the lab cannot use the directory {directory}",
            why="virtme-ng shares paths of plain letters, digits, blanks and +./_- only",
            hint="give --out a plain path",
        )

    def _adapted(self, command: list[str]) -> list[str]:
        adapted = []
        for word in command:
            # The exit code comes on our own channel; this file would stay behind.
            word = re.sub(r"path=\S*/virtme_ret\w+", f"path={self._private}/ret", word)  # noqa: PLW2901
            if self._kvm:
                word = word.replace("accel=kvm:tcg", "accel=kvm")  # noqa: PLW2901
            adapted.append(_mapped(word))
        # One thread of the host for all emulated CPUs: with one each, a kernel that changes its own code (a
        # probe armed, a static key turned) while another CPU runs it was seen to die of a breakpoint that was
        # gone already ("Oops: int3" in __schedule), and of crashes in interrupts between CPUs.
        if not self._kvm and not any("accel=" in word for word in adapted):
            adapted[1:1] = ["-accel", "tcg,thread=single"]
            if self.settings.accel == "icount":
                # The guest's clock counts its instructions, a nanosecond each.
                adapted[1:1] = ["-icount", "shift=0,sleep=off"]
            # TCG copies and clears by `rep movsb` and `rep stosb` byte by byte. Without ERMS the kernel moves
            # words: a page is cleared five times as fast, and copied as well.
            if Path(adapted[0]).name == "qemu-system-x86_64":
                adapted = [
                    f"{word},-erms" if (before, word) == ("-cpu", "max") else word
                    for before, word in zip(["", *adapted], adapted, strict=False)
                ]
        return adapted

    def run(
        self,
        limits: Limits,
        *,
        on_message: Callable[[dict[str, Any]], None] | None = None,
        on_start: Callable[[int], None] | None = None,
        poll: Callable[[], None] | None = None,
        console_log: Path | None = None,
    ) -> Ending:
        """Boot, watch until the machine is gone, and return how it ended.

        `on_message` gets what guest code tells (`regrepro.lab.guest.tell`), `poll` is called a few times a
        second, `on_start` once with QEMU's PID. The machine is gone when this returns or raises.
        """
        watch = _Watch(limits, on_message)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(console_log.open("ab", buffering=0)) if console_log else None
            stack.callback(self.kill)
            process = self._start()
            if on_start is not None:
                on_start(process.pid)
            assert process.stdout is not None
            assert process.stderr is not None
            streams = {process.stdout.fileno(): watch.heard, process.stderr.fileno(): watch.saw}
            console = process.stderr.fileno()
            poller = select.poll()
            for descriptor in streams:
                poller.register(descriptor, select.POLLIN)
            while streams and watch.goes_on():
                for descriptor, _ in poller.poll(200):
                    data = os.read(descriptor, 65536)
                    if not data:
                        poller.unregister(descriptor)
                        del streams[descriptor]
                        continue
                    if descriptor == console and log is not None:
                        with contextlib.suppress(OSError):  # a full disk is no reason to end the run
                            log.write(data)
                    streams[descriptor](data)
                if poll is not None:
                    poll()
            if streams:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=limits.ending)
            self.kill()
        return watch.ending(process.returncode)

    def _start(self) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        # A signal that came between the fork and the assignment would leave a machine that nobody knows of.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

        def in_the_child() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if not die_with_parent(parent):
                os._exit(1)

        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=in_the_child,  # noqa: PLW1509 - no threads of ours are running
            )
        except OSError as error:
            raise EnvironmentProblem("QEMU cannot be started", why=error.strerror or str(error)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self._process

    def kill(self) -> None:
        """End the machine, if it runs, and everything that it started."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


class _Watch:
    """Reads what a machine says and decides when it is at its end."""

    def __init__(self, limits: Limits, on_message: Callable[[dict[str, Any]], None] | None) -> None:
        self._limits = limits
        self._on_message = on_message
        self._started = time.monotonic()
        self._alive = self._started
        self._boot_seconds: float | None = None
        self._end_by: float | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=CONSOLE_LINES)
        self._partial = {"heard": b"", "saw": b""}
        self._finished = False
        self._panic = ""
        self._memory = False
        self._hang = ""
        self._error: tuple[str, int] | None = None
        self._crash = ""
        self._notes: list[str] = []

    def _complete(self, channel: str, data: bytes) -> Iterable[str]:
        *lines, self._partial[channel] = (self._partial[channel] + data).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")

    def saw(self, data: bytes) -> None:
        """Take what came on the console."""
        for line in self._complete("saw", data):
            if not line.strip():
                continue
            self._lines.append(line)
            if _PANIC.search(line) and not self._panic:
                self._panic = line.partition("not syncing: ")[2].strip() or line
                # panic=-1 ends the machine at once; where even that hangs, we do.
                self._end_by = time.monotonic() + self._limits.ending
            if _OUT_OF_MEMORY.search(line):
                self._memory = True

    def heard(self, data: bytes) -> None:
        """Take what guest code said."""
        for line in self._complete("heard", data):
            if not line.startswith(MARK):
                if line.strip():
                    self._lines.append(line)
                continue
            try:
                message = json.loads(line[len(MARK) :])
            except ValueError:
                continue
            self._alive = time.monotonic()
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        what = message.get("what")
        if what == "started":
            self._boot_seconds = self._alive - self._started
        elif what == "ended":
            self._finished = True
            self._end_by = time.monotonic() + self._limits.ending
        elif what == "error":
            self._error = (str(message.get("text")), int(message.get("code", 2)))
        elif what == "crash":
            self._crash = str(message.get("text"))
        elif what == "note":
            self._notes.append(str(message.get("text")))
        if self._on_message is not None and what != "beat":
            self._on_message(message)

    def goes_on(self) -> bool:
        """Whether to go on waiting; sets the reason where not."""
        now = time.monotonic()
        if self._end_by is not None:
            return now < self._end_by
        limits = self._limits
        if self._boot_seconds is None:
            if now - self._started > limits.boot:
                self._hang = f"the guest was not up after {limits.boot:.0f} s"
        elif now - self._alive > limits.silence:
            self._hang = f"the guest gave no sign of life for {limits.silence:.0f} s"
        if now - self._started > limits.total:
            self._hang = f"the guest was not done after {limits.total:.0f} s"
        return not self._hang

    def ending(self, returncode: int | None) -> Ending:
        """Return how it ended. Raises `EnvironmentProblem` when QEMU did not even start the kernel."""
        for channel in ("saw", "heard"):
            if self._partial[channel].strip():
                getattr(self, channel)(b"\n")
        console = list(self._lines)
        ours_killed = bool(self._hang or self._end_by)
        if returncode and not ours_killed and self._boot_seconds is None and not self._panic:
            raise EnvironmentProblem(
                "the virtual machine did not start",
                why=" ".join(console[-3:]) or f"QEMU ended with {returncode}",
                hint="check --memory, --numa and --accel",
            )
        what, why = "guest-ended", self._crash or "the guest ended before it was done"
        if self._finished and not self._panic:
            what, why = "finished", ""
        elif self._panic:
            what, why = ("out-of-memory" if self._memory else "panic"), f"kernel panic: {self._panic}"
        elif self._memory:
            what, why = "out-of-memory", "the guest ran out of memory"
        elif self._hang:
            what, why = "hang", self._hang
        elif returncode and returncode < 0:
            why = f"QEMU was ended by {signal.Signals(-returncode).name}"
        return Ending(
            what,
            why,
            console,
            time.monotonic() - self._started,
            self._boot_seconds,
            self._memory,
            self._error,
            self._notes,
        )


def overlays() -> list[str]:
    """Return the directories of this host that the guest shall be able to change, for itself alone.

    virtme-ng-init mounts the modules at /lib/modules, which a container or a chroot may lack.
    """
    return [*_OVERLAYS, *([] if Path("/lib/modules").is_dir() else ["/lib"])]


def is_hidden(path: Path) -> bool:
    """Whether the guest's init mounts something over a path of this host's file system."""
    resolved = os.path.realpath(path)
    return any(resolved == place or resolved.startswith(f"{place}/") for place in _HIDDEN)


def qemu_name() -> str:
    """Return the name of QEMU for this machine's own architecture."""
    return f"qemu-system-{platform.machine()}"


def require_tools() -> None:
    """Raise `EnvironmentProblem` naming the first program that the lab needs and this host lacks."""
    if importlib.util.find_spec("virtme") is None:
        raise EnvironmentProblem(
            "the lab needs virtme-ng", why="it is not installed", hint="pip install 'regrepro[lab]'"
        )
    for program, package in (
        (qemu_name(), "qemu-system-x86" if platform.machine() == "x86_64" else "qemu-system-arm"),
        ("busybox", "busybox-static"),
        ("file", "file"),
        ("modprobe", "kmod"),
    ):
        if shutil.which(program, path=_search_path()) is None:
            raise EnvironmentProblem(
                f"the lab needs {program}", why="it is not installed", hint=f"install the package {package}"
            )


def _search_path() -> str:
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([own, os.environ.get("PATH", os.defpath), "/usr/local/sbin:/usr/sbin:/sbin"])


def _virtme_run(arguments: list[str]) -> list[str]:
    """Return the QEMU command that virtme-run would start. Raises `EnvironmentProblem` with what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "virtme.commands.run", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PATH": _search_path()},
        check=False,
    )
    command = shlex.split(done.stdout.decode("utf-8", "replace"))
    if done.returncode != 0 or not command or "-kernel" not in command:
        said = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        raise EnvironmentProblem(
            "virtme-ng cannot boot this kernel", why=said[-1] if said else "it did not say why"
        )
    return command
