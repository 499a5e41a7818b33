"""`regrepro watch` beside users who want it to stop, to lie or to write elsewhere. Run as root in a lab
guest; prints TAP.

`python tests/lab/guest_hostile.py [--seconds N]`: the attackers are processes of users without any
privilege; the guest needs unpinnable memory that anonymous memory lands in (`movablecore=512M`). Exit code 0
when every line is `ok`, else 1.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from guest_device import device
from guest_tap import check, results, until
from guest_watch import ACCESS, BAD, PAGE, Watcher, refused, with_device

from regrepro.core import memory, pins, verbs
from regrepro.watch import lock
from regrepro.watch.libraries import system_copies

ATTACKER, VICTIM, FORGER, PROMETHEUS = 1001, 1002, 1003, 65534
FORGED = "5) : ok\n14:02:11 python3 (1): class B, proven: FORGED\x1b[2J\u202e"
MAPPINGS = 20_000


def as_user(uid: int, body: Callable[[], object]) -> int:
    """Run something in a child process of a user without privileges; return its PID."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            body()
        os._exit(0)
    return pid


def fails(pd: verbs.ProtectionDomain) -> None:
    refused(lambda: pd.reg_mr(BAD, PAGE, ACCESS))


def fresh_processes(name: str) -> None:
    """Failures without end, each of a process of its own."""
    while True:
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                with_device(name, fails)()
            os._exit(0)
        os.waitpid(pid, 0)
        time.sleep(0.2)  # more than is recorded, and not all of an emulated CPU


def forges(name: str) -> int:
    """A process whose rank and environment are lies, and large; its name is one, too."""
    many = {f"FILL_{i}": "x" * 100_000 for i in range(10)}
    return os.spawnve(
        os.P_NOWAIT,
        sys.executable,
        [sys.executable, "-S", __file__, "--forging", name, "--seconds", FORGED],
        {"RANK": FORGED, **os.environ, **many},
    )


def forging(name: str) -> None:
    Path("/proc/self/comm").write_text("a\nFORGED\x1b[2J")
    os.setgid(FORGER)
    os.setuid(FORGER)
    while True:
        with_device(name, fails)()
        time.sleep(1)


def maps_libraries(name: str, directory: Path) -> None:
    """A FIFO in the place of a library that is mapped, and as many mappings of such names as may be."""
    own = directory / "libibverbs.so.1"
    own.write_bytes(system_copies()[0].read_bytes())
    fd = os.open(own, os.O_RDONLY)
    held = [memory_map(fd)]
    own.unlink()
    os.mkfifo(own)
    long = directory / ("libibverbs.s" * 15)
    long.write_bytes(b"\0" * PAGE)
    other = os.open(long, os.O_RDONLY)
    with suppress(OSError):
        held += [memory_map(other) for _ in range(MAPPINGS)]
    while True:
        with_device(name, fails)()
        time.sleep(4)


def memory_map(fd: int) -> object:
    import mmap

    return mmap.mmap(fd, PAGE, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE)


def links(directory: Path, pid: int, victim: Path) -> None:
    """The owner of the metrics' directory wants root to write elsewhere."""
    while True:
        for name in (f".watch.prom.{pid}", "watch.prom"):
            with suppress(OSError):
                (directory / f"new-{name}").symlink_to(victim)
                (directory / f"new-{name}").replace(directory / name)
        time.sleep(0.2)


def opens(path: Path) -> int:
    """Return the errno of opening a file as an attacker, 0 where it could be opened."""
    read, write = os.pipe()

    def body() -> None:
        try:
            os.close(os.open(path, os.O_RDONLY))
            answer = 0
        except OSError as error:
            answer = error.errno or -1
        os.write(write, str(answer).encode())

    os.waitpid(as_user(ATTACKER, body), 0)
    return int(os.read(read, 16))


def victim(name: str) -> int:
    """A process whose buffer is held by a pin, and cannot be registered."""

    def body(pd: verbs.ProtectionDomain) -> None:
        with memory.Range.anonymous(8 * PAGE, huge=False) as buffer:
            buffer.fill(1)
            pin = pins.pin_vmsplice(buffer.address, buffer.length)
            for _ in range(3):
                refused(lambda: pd.reg_mr_iova2(buffer.address, buffer.length, buffer.address, ACCESS))
                time.sleep(2)
            time.sleep(60)
            pin.release()

    return as_user(VICTIM, with_device(name, body))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", default="20")
    parser.add_argument("--forging")
    given = parser.parse_args()
    if given.forging:
        forging(given.forging)
    name = device()
    scratch = Path(tempfile.mkdtemp(prefix="regrepro-hostile-"))
    scratch.chmod(0o755)
    theirs, metrics = scratch / "theirs", scratch / "metrics"
    for directory, uid in ((theirs, ATTACKER), (metrics, PROMETHEUS)):
        directory.mkdir()
        os.chown(directory, uid, uid)
        directory.chmod(0o777)  # with the unit's capabilities root cannot write in another's directory
    root_file = scratch / "root's"
    root_file.write_text("untouched")
    root_file.chmod(0o644)
    # Emulated, ten records a second are more than a CPU can make beside those that attack.
    limits = ["--rate", "2", "--burst", "5"]
    watcher = Watcher(scratch / "watch", "--metrics", str(metrics / "watch.prom"), *limits)
    if not check("it watches", watcher.said("watching:"), watcher.log.read_text()[-400:]):
        return 1
    pid = watcher.process.pid
    attackers = [
        as_user(ATTACKER, lambda: fresh_processes(name)),
        as_user(ATTACKER, lambda: maps_libraries(name, theirs)),
        as_user(PROMETHEUS, lambda: links(metrics, pid, root_file)),
        forges(name),
    ]
    time.sleep(float(given.seconds))
    check("the lock cannot be opened by others", opens(lock.PATH) == errno.EACCES)
    its = victim(name)
    told = watcher.caught(its, 3, 60)
    check("each failure of a victim is recorded in full", len(told) == 3, str(len(told)))

    def states() -> set[str]:
        return {(line.get("class") or {}).get("state", "") for line in watcher.lines if line["pid"] == its}

    check("and is proven", until(lambda: "proven" in states(), 90), str(states()))
    status = Path(f"/proc/{pid}/status").read_text()
    memory_used = int((re.search(r"VmHWM:\s+(\d+)", status) or [0, 0])[1]) // 1024
    check("it took less than 150 MiB", 0 < memory_used < 150, f"{memory_used} MiB")
    for attacker in attackers:
        os.kill(attacker, signal.SIGKILL)
        os.waitpid(attacker, 0)
    os.kill(its, signal.SIGKILL)
    os.waitpid(its, 0)
    prom = metrics / "watch.prom"
    is_up = until(lambda: not prom.is_symlink() and "\nregrepro_watch_up 1\n" in prom.read_text(), 40)
    check("its metrics are there, and say that it watches", is_up)
    check("a file of root's is as it was", root_file.read_text() == "untouched")
    others = [line for line in watcher.lines if line["pid"] != its]
    check("the attackers' failures were caught, too", len(others) > 20, str(len(others)))
    log = watcher.log.read_text()
    strange = {sign for sign in log if not sign.isprintable() and sign != "\n"}
    check("nothing of theirs speaks to a terminal", not strange, str(strange))
    forged = [line for line in log.splitlines() if not line.startswith("regrepro watch: ")]
    check("and no line is forged", not forged, str(forged[:3]))
    lies = [line for line in others if "FORGED" in json.dumps(line.get("rank"))]
    check("what they say of themselves stands where it belongs", bool(lies), str(len(lies)))
    modes = [path.stat().st_mode & 0o077 for path in watcher.out.rglob("*")]
    check("records are root's alone", modes and not any(modes))
    watcher.process.send_signal(signal.SIGTERM)
    check("SIGTERM: it ends with 0", watcher.process.wait(60) == 0)
    for line in log.splitlines()[-30:]:
        print(f"# watch: {line[:300]}", flush=True)
    print(f"1..{len(results)}", flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
