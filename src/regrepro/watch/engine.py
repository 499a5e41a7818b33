"""bpftrace as a child process: found, started, read, and gone with us.

Its probes hang on its file descriptors, so nothing stays attached once it is dead; it gets SIGKILL from the
kernel when this process dies (PR_SET_PDEATHSIG), and the journal names it for the case that even that fails.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from regrepro.errors import EnvironmentProblem
from regrepro.kernel.leftovers import Entry, Journal
from regrepro.kernel.parent import die_with_parent
from regrepro.kernel.trace_fs import lockdown, mounted
from regrepro.watch.events import Correlator
from regrepro.watch.program import Program

OLDEST = (0, 14)  # of which the JSON output and tuples in maps are as they are read here
_MAP_KEYS = "16384"
_STOP_SECONDS = 10.0
_LINE_LIMIT = 1 << 20
_AT_ONCE = 1 << 14  # bytes, of some twenty failures
_STDERR_KEPT = 50
_BUFFERS_PAGES = 16384
_PROBE = re.compile(rb"^prog_type:\s+(2|26)$", re.MULTILINE)  # BPF_PROG_TYPE_KPROBE, BPF_PROG_TYPE_TRACING
_MISSES = re.compile(rb"^recursion_misses:\s+(\d+)", re.MULTILINE)


def find_bpftrace() -> tuple[str, tuple[int, int]]:
    """Return bpftrace's path and version. Raises EnvironmentProblem."""
    path = shutil.which("bpftrace", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/usr/local/bin")
    if path is None:
        raise EnvironmentProblem(
            "watch needs bpftrace, and it is not installed",
            hint="install the distribution's package, for example: apt-get install bpftrace",
        )
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"{path} cannot be run", why=str(error)) from None
    found = re.search(r"v?(\d+)\.(\d+)", done.stdout)
    if not found:
        said = (done.stderr or done.stdout).strip()
        raise EnvironmentProblem(f"{path} --version says nothing that is known", why=said[:200])
    version = int(found[1]), int(found[2])
    if version < OLDEST:
        raise EnvironmentProblem(
            f"bpftrace {found[1]}.{found[2]} is too old",
            hint=f"watch needs {OLDEST[0]}.{OLDEST[1]} or later",
        )
    return path, version


def _buffer_pages(cpus: int) -> int:
    """Return the pages of each CPU's buffer, a power of two: 64 MiB (of 4 KiB pages) are for all of them.

    One failure takes less than 1 KiB, and all may come from one CPU. Pages that nothing was written to cost
    no resident memory.
    """
    pages = _BUFFERS_PAGES // max(cpus, 1)
    return max(16, min(256, 1 << max(pages, 1).bit_length() - 1))


def require_rights() -> None:
    """Raise EnvironmentProblem, with what would help, where this user or kernel cannot be watched."""
    if os.geteuid() != 0:
        raise EnvironmentProblem(
            "watch follows the kernel and other users' processes, which needs root", hint="run it with sudo"
        )
    mode = lockdown()
    if mode == "confidentiality":
        raise EnvironmentProblem(
            "this kernel is locked down (confidentiality)",
            why="it lets nobody follow it, root neither",
            hint="boot it with lockdown=integrity or without",
        )
    if not Path("/sys/kernel/btf").is_dir() and mounted() is None:
        raise EnvironmentProblem(
            "this kernel shows neither BTF nor tracefs",
            hint="mount -t tracefs tracefs /sys/kernel/tracing",
        )
    with suppress(OSError):
        own = Path("/proc/self/ns/pid").stat().st_ino
        if own != 0xEFFFFFFC:  # PROC_PID_INIT_INO, include/linux/proc_ns.h
            raise EnvironmentProblem(
                "watch runs in a PID namespace of its own and would not find the node's processes",
                hint="run it on the node itself, or in a container with the node's PIDs (hostPID: true)",
            )


def probe_programs(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """Return the files of a process' descriptors, under fdinfo, that are BPF programs of probes."""
    found = []
    with suppress(OSError):
        for path in (proc / str(pid) / "fdinfo").iterdir():
            with suppress(OSError):
                if _PROBE.search(path.read_bytes()):
                    found.append(str(path))
    return found


def missed_hits(programs: Sequence[str]) -> int | None:
    """Return how many hits of these probes the kernel says it missed; None where it does not say.

    It counts them where a program would have interrupted itself or another, since 5.12 for trampolines, since
    6.7 for kprobes and uprobes (recursion_misses; bpf_prog_show_fdinfo() in kernel/bpf/syscall.c). What a
    kprobe itself misses (kprobe_profile) is shown of those that tracefs made, which bpftrace's are not.
    """
    total, known = 0, False
    for path in programs:
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = _MISSES.search(os.read(fd, 4096))
            finally:
                os.close(fd)
            if found:
                total, known = total + int(found[1]), True
    return total if known else None


class Engine:
    """One bpftrace. `output` and `errors` are descriptors to wait on; `take()` reads them."""

    def __init__(
        self, path: str, program: Program, correlator: Correlator, file: Path, journal: Journal
    ) -> None:
        self.correlator = correlator
        self.correlator.on_error = self._keep
        self.errors: list[str] = []
        self.started = time.monotonic()
        self.last_line = self.started
        self._journal = journal
        self._partial = {1: b"", 2: b""}
        self._programs: list[str] | None = None  # those of its descriptors: none comes once all are attached
        file.write_text(program.text)
        environment = {
            **os.environ,
            "BPFTRACE_MAP_KEYS_MAX": _MAP_KEYS,
            "BPFTRACE_MAX_MAP_KEYS": _MAP_KEYS,
            "BPFTRACE_STRLEN": "64",
            "BPFTRACE_PERF_RB_PAGES": str(_buffer_pages(os.cpu_count() or 1)),
            "BPFTRACE_CACHE_USER_SYMBOLS": "0",
            "LC_ALL": "C",
        }
        us = os.getpid()

        def die_with_us() -> None:
            if not die_with_parent(us):
                os._exit(1)

        try:
            self._child = subprocess.Popen(
                [path, "-f", "json", "-B", "line", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                preexec_fn=die_with_us,  # noqa: PLW1509 - there are no threads here
                start_new_session=True,  # a terminal's interrupt is ours to pass on
            )
        except OSError as error:
            raise EnvironmentProblem(f"{path} cannot be started", why=error.strerror or str(error)) from None
        self._entry: Entry | None = journal.add("process", pid=self._child.pid)
        assert self._child.stdout is not None and self._child.stderr is not None
        self.output = self._child.stdout.fileno()
        self.error_output = self._child.stderr.fileno()
        for fd in (self.output, self.error_output):
            os.set_blocking(fd, False)

    @property
    def pid(self) -> int:
        """The child's PID."""
        return self._child.pid

    @property
    def lost(self) -> int:
        """Events that it counted as lost."""
        return self.correlator.counts.lost

    @property
    def probes(self) -> int | None:
        """How many probes it says are attached."""
        return self.correlator.counts.attached

    def fds(self) -> list[int]:
        """File descriptors to poll."""
        return [self.output, self.error_output]

    @property
    def attached(self) -> bool:
        """Whether all its probes are: the heartbeat is the last of them."""
        return self.correlator.counts.heartbeats >= 1

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._child.poll() is not None

    def memory(self) -> int:
        """Return its resident memory in bytes, 0 where that cannot be read."""
        try:
            text = Path(f"/proc/{self.pid}/statm").read_text()
            return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return 0

    def missed(self) -> int | None:
        """Return how many hits of its probes the kernel says it missed; None where it does not say."""
        if self.attached and self._programs is None:
            self._programs = probe_programs(self.pid)
        return missed_hits(self._programs or ())

    def take(self) -> bool:
        """Read what there is, but not for ever where more keeps coming; return whether there was anything."""
        some = self._read(self.output, 1, self.correlator.line)
        return self._read(self.error_output, 2, self._keep) or some

    def _read(self, fd: int, which: int, use: object) -> bool:
        try:
            part = os.read(fd, _AT_ONCE)
        except OSError:  # nothing now, or never again
            return False
        if part:
            self.last_line = time.monotonic()
            *lines, rest = (self._partial[which] + part).split(b"\n")
            self._partial[which] = rest[-_LINE_LIMIT:]
            for line in lines:
                use(line.decode("utf-8", "replace"))  # type: ignore[operator]
        return bool(part)

    def _keep(self, text: str) -> None:
        text = text.strip()
        if text:
            self.errors.append(text)
            del self.errors[:-_STDERR_KEPT]
            lost = re.match(r"Lost (\d+) events", text)
            if lost:
                self.correlator.counts.lost += int(lost[1])

    def why(self) -> str:
        """What it said of its failure, one line."""
        told = [line for line in self.errors if "ERROR" in line and "RLIMIT_MEMLOCK" not in line]
        return " ".join((told or self.errors or ["it said nothing"])[0].split())[:300]

    def stop(self) -> None:
        """End it: its probes are gone afterwards. What it had still to say is read."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)
            deadline = time.monotonic() + _STOP_SECONDS
            while self._child.poll() is None:
                self.take()
                if time.monotonic() > deadline:
                    self._child.kill()
                time.sleep(0.02)
        while self.take():
            pass
        self._child.wait()
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
        if self._entry is not None:
            self._journal.remove(self._entry)
            self._entry = None
