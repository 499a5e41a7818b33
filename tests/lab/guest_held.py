"""What holds pages beside `regrepro watch`, and for how long: which of it is class B, proven.

Called by guest_watch.py. It happens at the same time, beside one `watch`, each in a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from guest_tap import check

from regrepro.core import memory, pins, verbs
from regrepro.core.pages import read_pfns
from regrepro.kernel.memorymap import ISOLATE, read_memory_map
from regrepro.record import read_record

PAGE = memory.PAGE_SIZE
ACCESS = verbs.access_bits(["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ"])
LOOKS = 4  # of each failure, the last 31 s after it or, where one was late, later
HOLD = 600.0  # until it is killed
PATIENCE = 180.0  # seconds for all that is looked at
BLOCKS = Path("/sys/devices/system/memory")
DELAY = Path("/sys/bus/pseudo/drivers/scsi_debug/delay")
JIFFIES = 2000  # 2 to 8 s
APART = 1.0  # seconds: where several register at once the kernel passes probes over


class Watcher(Protocol):
    """What is used of guest_watch.Watcher."""

    lines: list[dict[str, Any]]

    def caught(self, pid: int, count: int = 1, limit: float = 20) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Holder:
    """Somebody who holds pages that he then registers. `proven`: what is to be said of it, None: either."""

    name: str
    body: Callable[[verbs.ProtectionDomain, Callable[[str | None], None]], None]
    proven: bool | None = False
    owner: str = "unknown"
    says: str = ""  # why it is not proven


def buffer_of(pages: int) -> memory.Range:
    made = memory.Range.anonymous(pages * PAGE, huge=False)
    made.fill(1)
    return made


def register(pd: verbs.ProtectionDomain, buffer: memory.Range) -> str | None:
    try:
        region = pd.reg_mr_iova2(buffer.address, buffer.length, buffer.address, ACCESS)
    except OSError as error:
        return os.strerror(error.errno or 0)
    region.dereg()
    return None


def held_by(take: Callable[[int, int], pins.HeldPin], seconds: float, before: bool = False) -> Any:
    """Pin, register, and let go some time later. `before`: somebody else has read the pages and gone."""

    def body(pd: verbs.ProtectionDomain, tell: Callable[[str | None], None]) -> None:
        with buffer_of(8) as buffer:
            if before:
                read_by_process_vm(buffer)
            pin = take(buffer.address, buffer.length)
            tell(register(pd, buffer))
            time.sleep(seconds)
            pin.release()
            time.sleep(HOLD)

    return body


def read_by_process_vm(buffer: memory.Range) -> None:
    """Read a range by process_vm_readv, which pins it for as long as that takes."""

    class Iovec(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))

    into = ctypes.create_string_buffer(buffer.length)
    local, remote = Iovec(ctypes.addressof(into), buffer.length), Iovec(buffer.address, buffer.length)
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.process_vm_readv(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if done != buffer.length:
        raise OSError(ctypes.get_errno(), "process_vm_readv")


def two_of_64(pd: verbs.ProtectionDomain, tell: Callable[[str | None], None]) -> None:
    with buffer_of(64) as buffer:
        stays = pins.pin_process_vm(buffer.address + 7 * PAGE, 2 * PAGE)
        goes = pins.pin_process_vm(buffer.address, buffer.length)
        why = register(pd, buffer)
        goes.release()
        tell(why)
        time.sleep(HOLD)
        stays.release()


def slow_disk() -> str | None:
    """Make a disk of which a read can take seconds; return its path, None where this kernel has none."""
    subprocess.run(["modprobe", "sd_mod"], check=False)
    command = ["modprobe", "scsi_debug", "dev_size_mb=8", "delay=0"]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode:
        print(f"# {made.stderr.strip()}", flush=True)
        return None
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for model in Path("/sys/block").glob("sd*/device/model"):
            device = Path("/dev") / model.parts[3]
            if model.read_text().startswith("scsi_debug") and device.exists():
                return str(device)
        time.sleep(0.2)
    return None


def direct_io(path: str) -> Any:
    def body(pd: verbs.ProtectionDomain, tell: Callable[[str | None], None]) -> None:
        with buffer_of(8) as buffer:
            into = (ctypes.c_char * buffer.length).from_address(buffer.address)
            disk = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(disk, [into], 0)
            DELAY.write_text(str(JIFFIES))
            reading = threading.Thread(target=os.preadv, args=(disk, [into], 0))
            begin = time.monotonic()
            reading.start()
            time.sleep(0.2)
            why = register(pd, buffer)
            reading.join()
            print(f"# the read took {time.monotonic() - begin:.1f} s", flush=True)
            tell(why)
            time.sleep(HOLD)
            del into

    return body


def two_threads(pd: verbs.ProtectionDomain, tell: Callable[[str | None], None]) -> None:
    failed: list[bool] = []
    time.sleep(4)  # the kernel passes probes over while they do: a failure near that is not proven
    end = time.monotonic() + 8
    while time.monotonic() < end:
        with buffer_of(64) as buffer:

            def both(buffer: memory.Range = buffer) -> None:
                failed.extend(register(pd, buffer) is not None for _ in range(4))

            threads = [threading.Thread(target=both) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    print(f"# two threads that register the same pages: {sum(failed)} failures", flush=True)
    tell(str(len(failed) - sum(failed)))
    time.sleep(HOLD)


def holders() -> list[Holder]:
    disk = slow_disk()
    if disk is None:
        print("# this kernel has no disk that can be made slow", flush=True)
    made = [
        Holder("a held FOLL_PIN", held_by(pins.pin_process_vm, HOLD), True, "process-vm"),
        Holder("a held FOLL_GET", held_by(pins.pin_vmsplice, HOLD), True),
        Holder(
            "process_vm_readv that ended, and a held FOLL_GET", held_by(pins.pin_vmsplice, HOLD, True), True
        ),
        Holder("a FOLL_PIN let go at once", held_by(pins.pin_process_vm, 0.002), says="transient"),
        Holder("a FOLL_GET let go at once", held_by(pins.pin_vmsplice, 0.002), says="transient"),
        Holder("a FOLL_PIN let go after 3 s", held_by(pins.pin_process_vm, 3.2), says="transient"),
        Holder("2 of 64 pages", two_of_64, says="62 of 64 pages"),
    ]
    if disk is not None:
        made.append(Holder("O_DIRECT of some seconds", direct_io(disk), says="transient"))
    return [*made, Holder("two threads", two_threads, None)]


def start(holder: Holder, device: str) -> tuple[int, int]:
    """Start a holder in a process of its own; return its PID and where it tells of its registration."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with verbs.Device(device) as opened, opened.pd() as pd:
                holder.body(pd, lambda why: void(os.write(write, json.dumps(why).encode())))
        finally:
            os._exit(0)
    os.close(write)
    return pid, read


def void(_: object) -> None: ...


def looks_of(watcher: Watcher, pid: int) -> list[tuple[Any, ...]]:
    """What later looks at the process' last failure saw, as far as they are recorded."""
    lines = watcher.caught(pid, 0, 0)
    return [
        (event["after_seconds"], event["lists"], (event["pages"] or {}).get("refcount"), event["ended"])
        for event in (read_record(Path(lines[-1]["record"])).events if lines else [])
        if event["event"] == "look" and event.get("failure") == lines[-1]["failure"]
    ]


def beside(watcher: Watcher, device: str, verdicts: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Run all of them beside one watch; return how often the two threads registered. `verdicts`: of a line,
    what the record says of it now.
    """
    begun = time.monotonic()
    running = []
    for holder in holders():
        running.append((holder, *start(holder, device)))
        time.sleep(APART)
    told = {
        holder.name: json.loads(os.read(read, 100) or b'"it told nothing"') for holder, _, read in running
    }
    if DELAY.exists():
        DELAY.write_text("0")
    deadline = time.monotonic() + PATIENCE
    for holder, pid, _ in running:
        while holder.proven is not None and time.monotonic() < deadline:
            looks = looks_of(watcher, pid)
            if len(looks) == LOOKS or (looks and looks[-1][-1]):
                break
            time.sleep(0.5)
    time.sleep(1)  # a last word comes after its look
    for holder, pid, read in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        lines = watcher.caught(pid, 0, 0)
        reasons = "; ".join(str(line["reason"]) for line in lines)
        states = [(line.get("class") or {}).get("state") for line in lines]
        if holder.proven is None:
            check(f"{holder.name}: never proven", "proven" not in states, reasons)
            continue
        check(f"{holder.name}: it fails with ENOMEM", bool(lines) and lines[0]["errno"] == "ENOMEM", reasons)
        check(f"{holder.name}: likely at first", states[:1] == ["likely"], reasons)
        if holder.proven:
            check(f"{holder.name}: proven in the end", states == ["likely", "proven"], reasons)
        else:
            check(f"{holder.name}: never proven", "proven" not in states, reasons)
        if not lines:
            continue
        print(f"# {holder.name}: {looks_of(watcher, pid)}", flush=True)
        verdict = verdicts(lines[-1])
        reason = str(verdict.get("reason"))
        check(f"{holder.name}: and why", holder.says in reason, reason)
        if holder.proven:
            check(f"{holder.name}: whose it is", verdict.get("pin_owner") == holder.owner, reason)
    print(f"# they told {told}, and all took {time.monotonic() - begun:.0f} s", flush=True)
    return int(told["two threads"])


def isolated(watcher: Watcher, device: str) -> None:
    """A registration out of a pageblock that is isolated, as memory that is to go offline."""

    def body(pd: verbs.ProtectionDomain, tell: Callable[[str | None], None]) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        with buffer_of(8) as buffer:
            pin = pins.pin_process_vm(buffer.address, buffer.length)
            size = int((BLOCKS / "block_size_bytes").read_text(), 16)
            block = BLOCKS / f"memory{int(read_pfns(buffer.address, 1)[0]) * PAGE // size}"
            # It goes on until it is told to stop, as these pages do not move (offline_pages(),
            # mm/memory_hotplug.c).
            offline = subprocess.Popen(
                ["sh", "-c", f"while :; do echo offline > {block}/state; done"], stderr=subprocess.DEVNULL
            )
            deadline = time.monotonic() + PATIENCE
            places = read_memory_map()
            while has_isolated_places() and time.monotonic() < deadline:
                if (places.places_now(read_pfns(buffer.address, 8)) == ISOLATE).all():
                    break
            else:
                print("# the block was not seen isolated", flush=True)
            tell(register(pd, buffer))
            signal.sigtimedwait({signal.SIGUSR1}, PATIENCE)  # isolated until the watch has looked
            offline.kill()
            offline.wait()
            pin.release()

    pid, read = start(Holder("an isolated block", body), device)
    told = os.read(read, 100)
    lines = watcher.caught(pid)
    os.kill(pid, signal.SIGUSR1)
    os.waitpid(pid, 0)
    os.close(read)
    reasons = f"{told!r} " + "; ".join(str(line["reason"]) for line in lines)
    states = [(line.get("class") or {}).get("state") for line in lines]
    check("an isolated block: caught, and never proven", states == ["likely"], reasons)
    if has_isolated_places():
        check("an isolated block: it is named", "isolated pageblock" in reasons, reasons)


def has_isolated_places() -> bool:
    """Whether an isolated block is unpinnable for that (CONFIG_CMA)."""
    config = Path(f"/boot/config-{os.uname().release}")
    meminfo = Path("/proc/meminfo").read_text()
    return "CmaTotal" in meminfo or (config.exists() and "CONFIG_CMA=y" in config.read_text())
