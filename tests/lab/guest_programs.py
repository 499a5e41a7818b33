"""Programs that are not ours beside `regrepro watch`, and programs that have a libibverbs of their own.

Called by guest_watch.py. The former are ibv_rc_pingpong and perftest, server and client over soft-RoCE.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ADDRESS = "10.99.0.1"  # of guest_device.py
GID_INDEX = "1"  # RoCE v2 over IPv4
NOBODY = "65534"
UNPRIVILEGED = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--bounding-set=-all")
MEMLOCK = ("prlimit", "--memlock=4096", "--")  # less than any of these programs registers
NO_MEMLOCK = ("memlock-accounting", "ENOMEM")
PACKAGES = {"ibv_rc_pingpong": "ibverbs-utils", "ib_write_bw": "perftest", "ib_send_lat": "perftest"}
QUEUE_PAIRS = 32
PAGE = os.sysconf("SC_PAGE_SIZE")


class Watcher(Protocol):
    """What is used of guest_watch.Watcher."""

    def said(self, text: str, limit: float = 240) -> bool: ...

    def caught(self, pid: int, count: int = 1, limit: float = 20) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Tool:
    """A program that is server and client. `registers`: memory regions of each of the two."""

    name: str
    arguments: tuple[str, ...]
    registers: int = 1

    def command(self, device: str, *more: str) -> list[str]:
        return [self.name, "-d", device, *self.arguments, *more]


PINGPONG = Tool("ibv_rc_pingpong", ("-g", GID_INDEX, "-n", "50", "-s", "65536"))
TOOLS = (
    PINGPONG,
    Tool(
        "ib_write_bw",
        ("-x", GID_INDEX, "-F", "-n", "5", "-s", "16384", "-q", str(QUEUE_PAIRS), "--mr_per_qp"),
        QUEUE_PAIRS,
    ),
    Tool("ib_send_lat", ("-x", GID_INDEX, "-F", "-n", "20", "-s", "16384")),
)


@dataclass
class Pair:
    """A server and a client that have ended: exit codes (None: ended by us), PIDs, what they said."""

    server: int | None
    client: int | None
    server_pid: int
    client_pid: int
    said: str


class Waiting:
    """A program of ours that has opened its device and waits for a line, to go on and fail.

    `unlink`: a file that it removes once it has loaded libibverbs, before all else.
    """

    def __init__(self, before: Sequence[str], device: str, call: str, unlink: Path | None = None) -> None:
        program = (
            "import os, sys, time\n"
            "from regrepro.core import verbs\n"
            "assert verbs.available() is None\n"
            f"{f'os.unlink({str(unlink)!r})' if unlink is not None else ''}\n"
            f"with verbs.Device({device!r}) as device, device.pd() as pd:\n"
            "    print('open', flush=True)\n"
            "    sys.stdin.readline()\n"
            "    try:\n"
            f"        pd.{call}\n"
            "    except OSError:\n"
            "        pass\n"
            "    time.sleep(1)\n"
        )
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def opened(self) -> bool:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip() == "open"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@dataclass(frozen=True)
class Beside:
    """Programs beside a running watch. `bad`: an address where nothing is; `access`: flags, as a number."""

    watcher: Watcher
    device: str
    scratch: Path
    check: Callable[..., bool]
    events_of: Callable[[dict[str, Any]], dict[str, Any]]
    bad: int
    access: int

    def once(self, name: str, pid: int, layer_and_errno: tuple[str, str], comm: str) -> dict[str, Any] | None:
        """Check that a process' failure was caught once and rightly; return it."""
        found = self.watcher.caught(pid)
        reasons = "; ".join(str(line.get("reason")) for line in found)
        if not self.check(f"{name}: caught once", len(found) == 1, reasons):
            return None
        told = (found[0]["layer"], found[0]["errno"], found[0]["comm"])
        wanted = (*layer_and_errno, comm[:15])
        self.check(f"{name}: with its layer, errno and name", told == wanted, f"{told} {reasons}")
        return found[0]

    def pair(self, tool: Tool, port: int, client: Sequence[str] = ()) -> Pair:
        """Run a tool's server, and its client by the command `client`."""
        logs = [self.scratch / f"{tool.name}-{port}-{side}.log" for side in ("server", "client")]
        server = start(tool.command(self.device, "-p", str(port)), logs[0])
        listens(port)
        other = start([*client, *tool.command(self.device, "-p", str(port), ADDRESS)], logs[1])
        code = end(other, 90)
        served = end(server, 2 if code else 30)  # one whose client has failed may wait for another
        said = " / ".join(" ".join(log.read_text(errors="replace").split())[-150:] for log in logs)
        return Pair(served, code, server.pid, other.pid, f"{served}, {code}: {said}")

    def others(self) -> None:
        """Each of the tools: what succeeds is not told, what fails is told once, with its layer."""
        check, caught = self.check, self.watcher.caught
        missing = sorted({PACKAGES[tool.name] for tool in TOOLS if shutil.which(tool.name) is None})
        if missing:
            check("programs of others", False, f"apt-get install {' '.join(missing)}")
            return
        subprocess.run(["ip", "link", "set", "lo", "up"], check=False)  # server and client meet by TCP
        for node in Path("/dev/infiniband").iterdir():
            node.chmod(0o666)  # as rdma-core's udev rules do
        for port, tool in zip(range(18600, 18700, 10), TOOLS, strict=False):
            done = self.pair(tool, port)
            if check(f"{tool.name}: both succeed", (done.server, done.client) == (0, 0), done.said):
                told = [line for pid in (done.server_pid, done.client_pid) for line in caught(pid, 0, 0)]
                check(f"{tool.name}: nothing is told of {2 * tool.registers} successes", not told, str(told))
            done = self.pair(tool, port + 1, (*MEMLOCK, *UNPRIVILEGED))
            name = f"{tool.name} without memory to lock"
            check(f"{name}: it fails", done.client not in (0, None), done.said)
            self.once(name, done.client_pid, NO_MEMLOCK, tool.name)
            told = caught(done.server_pid, 0, 0)
            check(f"{name}: nothing is told of its server", not told, str(told))

    def containers(self) -> None:
        """A mount namespace, a copy that was deleted, a chroot: each with a libibverbs of its own."""
        check = self.check
        program = Path(shutil.which(PINGPONG.name) or "")
        library = next(path for path in libraries(program) if path.name.startswith("libibverbs.so")).resolve()
        copy, deleted = self.scratch / "libibverbs.so.1", self.scratch / "deleted" / "libibverbs.so.1"
        deleted.parent.mkdir()
        for path in (copy, deleted):
            shutil.copyfile(library, path)
        root, log = self.scratch / "root", self.scratch / "chroot.log"
        make_root(root)
        mount = ("unshare", "-m", "sh", "-c", f'mount --bind {copy} {library} && exec "$@"', "sh")
        chroot = ("chroot", f"--userspec={NOBODY}:{NOBODY}", str(root))
        # All are there before watch looks, so that all are found at once.
        programs = {
            "a mount namespace": Waiting(
                mount, self.device, f"reg_mr({self.bad}, {5 * PAGE}, {self.access})"
            ),
            "a copy that was deleted": Waiting(
                ("env", f"LD_LIBRARY_PATH={deleted.parent}"),
                self.device,
                f"reg_mr({self.bad}, {6 * PAGE}, {self.access})",
                deleted,
            ),
        }
        server = start([*chroot, *PINGPONG.command(self.device, "-p", "18700")], log)
        try:
            for name, waits in programs.items():
                check(f"{name}: its program runs", waits.opened())
            check("a chroot: its program runs", listens(18700), log.read_text()[-200:])
            pids = {name: waits.process.pid for name, waits in programs.items()} | {"a chroot": server.pid}
            for name, pid in pids.items():
                check(f"{name}: its libibverbs is followed", self.watcher.said(f" of {pid}"))
            failing = start([*MEMLOCK, *chroot, *PINGPONG.command(self.device, "-p", "18701")], log)
            end(failing, 60)
            found = {"a chroot": self.once("a chroot", failing.pid, NO_MEMLOCK, PINGPONG.name)}
            for name, waits in programs.items():
                waits.go_on()
                fault = ("page-fault", "EFAULT")
                found[name] = self.once(name, waits.process.pid, fault, Path(sys.executable).name)
                waits.process.wait(30)
            for name, line in found.items():
                if line is None:
                    continue
                seen = self.events_of(line)
                check(f"{name}: the verb is its own word", seen["register"]["verb_how"] == "observed")
                watched = seen["scenario-begin"]["watched"]
                told = watched.get("mnt_namespace")
                wanted = "its own" if name == "a mount namespace" else "the node's"
                # ibv_rc_pingpong dies at once: what could not be read of it must be named.
                named = name == "a chroot" and any("/ns/mnt" in text for text in watched["not_read"])
                check(f"{name}: its mount namespace", told == wanted or (told is None and named), str(told))
            told = self.watcher.caught(server.pid, 0, 0)
            check("a chroot: nothing is told of its server, which succeeded", not told, str(told))
        finally:
            end(server, 0)
            for waits in programs.values():
                waits.process.kill()
                waits.process.wait()
            take_root_away(root)


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def end(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """Wait for a process' own end; None where it had to be ended."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def listens(port: int, limit: float = 60) -> bool:
    """Wait until somebody listens on a TCP port (state 0A in /proc/net/tcp and tcp6)."""
    wanted = re.compile(rf":{port:04X} [0-9A-F]+:0000 0A ")
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if any(wanted.search(Path(f"/proc/net/{name}").read_text()) for name in ("tcp", "tcp6")):
            return True
        time.sleep(0.1)
    return False


def libraries(program: Path) -> list[Path]:
    """Return the files that a program's linker loads."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True)
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", done.stdout)]


def make_root(root: Path) -> None:
    """Make a root directory that ibv_rc_pingpong runs in."""
    program = Path(shutil.which(PINGPONG.name) or "")
    provider = next(Path("/usr/lib").glob("*/libibverbs/librxe-rdmav*.so"))
    for path in (program, *libraries(program), provider, Path("/etc/libibverbs.d/rxe.driver")):
        target = root / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)  # follows links: each name is a file of its own
        target.chmod(0o755)
    for place in ("dev/infiniband", "sys", "proc"):
        (root / place).mkdir(parents=True)
        subprocess.run(["mount", "--rbind", f"/{place}", str(root / place)], check=True)


def take_root_away(root: Path) -> None:
    for place in ("dev/infiniband", "sys", "proc"):
        subprocess.run(["umount", "--recursive", "--lazy", str(root / place)], check=False)
