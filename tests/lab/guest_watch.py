"""`regrepro watch` against a real kernel. Run as root in a lab guest; prints TAP.

`python tests/lab/guest_watch.py [--expect-refusal yes|no] [--rates N,N] [--keep DIR] [--only held]`: with
`yes` (the default) the kernel must refuse to register pages that are pinned in unpinnable memory; the guest
needs such memory that anonymous memory lands in (`movablecore=512M`). `--rates` are failures a second. Exit
code 0 when every line is `ok`, else 1.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import guest_bpf
import guest_held
import guest_programs
from guest_device import device
from guest_tap import check, results

from regrepro import judge
from regrepro.core import memory, pins, verbs
from regrepro.record import read_record

PAGE = memory.PAGE_SIZE
ACCESS = verbs.access_bits(["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ"])
BAD = 0x10000  # nothing is ever mapped so low (vm.mmap_min_addr)
FLOOD = 2000  # failures of each rate
RATES = "1000,0"  # a second; 0: as fast as they come


def refused(call: Callable[[], Any]) -> str | None:
    """Make a call; return its errno's name, None where it succeeded."""
    try:
        region = call()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "?")
    region.dereg()
    return None


def as_the_unit_does() -> list[str]:
    """Return the command that runs another with the capabilities of the packaged unit, and no more."""
    unit = Path(__file__).parents[2] / "packaging" / "regrepro-watch.service"
    found = re.search(r"^CapabilityBoundingSet=(.*)$", unit.read_text(), re.MULTILINE)
    assert found is not None
    names = [f"+{name.removeprefix('CAP_').lower()}" for name in found[1].split()]
    return ["setpriv", "--no-new-privs", f"--bounding-set={','.join(['-all', *names])}", "--inh-caps=-all"]


class Watcher:
    """A running `regrepro watch`."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.out = out
        self.log = out.with_suffix(".log")
        self.lines: list[dict[str, Any]] = []
        self._errors = self.log.open("w")
        self.process = subprocess.Popen(
            [
                *as_the_unit_does(),
                sys.executable,
                *("-m", "regrepro", "watch", "--out", str(out), "--json"),
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def said(self, text: str, limit: float = 240) -> bool:
        """Wait until it has said something on stderr."""
        deadline = time.monotonic() + limit
        while text not in self.log.read_text():
            if time.monotonic() > deadline or self.process.poll() is not None:
                return False
            time.sleep(0.2)
        return True

    def caught(self, pid: int, count: int = 1, limit: float = 20) -> list[dict[str, Any]]:
        """Wait for failures of a process; a moment longer than needed, so that one told twice shows."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            found = [line for line in self.lines if line["pid"] == pid]
            if len(found) >= count:
                time.sleep(1.0)
                break
            time.sleep(0.1)
        return [line for line in self.lines if line["pid"] == pid]


def in_child(body: Callable[[], None]) -> int:
    """Run something in a child process; return its PID once it has ended."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return pid


def with_device(name: str, body: Callable[[verbs.ProtectionDomain], None]) -> Callable[[], None]:
    """An RDMA context belongs to the process that opened it: a child needs its own."""

    def run() -> None:
        with verbs.Device(name) as opened, opened.pd() as pd:
            body(pd)

    return run


def events_of(line: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the events of a failure's pass in the record, by type."""
    record = read_record(Path(line["record"]))
    return {event["event"]: event for event in record.events if event.get("failure") == line["failure"]}


def verdict_of(line: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be said of a failure by its record, as it is by now."""
    verdicts = judge.judge_record(read_record(Path(line["record"])))["verdicts"]
    return next(item for item in verdicts if item.get("failure") == line["failure"])


def only(name: str, found: list[dict[str, Any]]) -> dict[str, Any] | None:
    check(f"{name}: caught once", len(found) == 1, "; ".join(str(line.get("reason")) for line in found))
    return found[0] if found else None


def successes(watcher: Watcher, name: str) -> None:
    def body(pd: verbs.ProtectionDomain) -> None:
        with memory.Range.anonymous(8 * PAGE, huge=False) as buffer:
            buffer.fill(1)
            pd.register_loop(buffer.address, buffer.length, ACCESS, 3000)

    pid = in_child(with_device(name, body))
    time.sleep(2)
    check("3,000 registrations that succeed: nothing is told", watcher.caught(pid, 0, 0) == [])


def held(watcher: Watcher, name: str, refusal: bool) -> None:
    for owner, take in (("process-vm", pins.pin_process_vm), ("vmsplice", pins.pin_vmsplice)):
        seen: list[Any] = []
        read, write = os.pipe()

        def body(pd: verbs.ProtectionDomain, take: Any = take, write: int = write) -> None:
            with memory.Range.anonymous(8 * PAGE, huge=False) as buffer:
                buffer.fill(1)
                pin = take(buffer.address, buffer.length)
                why = refused(lambda: pd.reg_mr_iova2(buffer.address, buffer.length, buffer.address, ACCESS))
                os.write(write, json.dumps([why, buffer.address]).encode())
                time.sleep(8)
                pin.release()
                refused(lambda: pd.reg_mr_iova2(buffer.address, buffer.length, buffer.address, ACCESS))

        pid = in_child(with_device(name, body))
        seen = json.loads(os.read(read, 4096))
        os.close(read)
        os.close(write)
        if not refusal:
            check(f"{owner}: this kernel registers", seen[0] is None, str(seen[0]))
            check(f"{owner}: nothing is told", watcher.caught(pid, 0, 0) == [])
            continue
        check(f"{owner}: the registration fails with ENOMEM", seen[0] == "ENOMEM", str(seen[0]))
        line = only(owner, watcher.caught(pid))
        if line is None:
            continue
        state = (line.get("class") or {}).get("state")
        check(f"{owner}: the layer is page-migration", line["layer"] == "page-migration", str(line["layer"]))
        check(f"{owner}: class B, likely at first", state == "likely", str(line["reason"]))
        check(
            f"{owner}: with its address and length", [line["address"], line["length"]] == [seen[1], 8 * PAGE]
        )
        events = events_of(line)
        register, buffer = events["register"], events["buffer"]
        places = {what for _, _, what in (register["before"] or {}).get("place", [])}
        check(
            f"{owner}: the pages are seen in unpinnable memory",
            bool(places & {"cma", "movable-zone"}),
            str(places),
        )
        stuck = register["stuck"]
        check(
            f"{owner}: the kernel told of the pages that stayed",
            bool(stuck) and all(page["place"] in ("cma", "movable-zone") for page in stuck),
            str(stuck[:2]),
        )
        runs = (register["before"] or {}).get("pfn", [])
        pfns = {pfn + i for _, pfn, count in runs for i in range(count)}
        check(
            f"{owner}: and they are the range's", {page["pfn"] for page in stuck} <= pfns, str(sorted(pfns))
        )
        functions = [item["fn"] for item in register["trace"]["tree"]]
        wanted_path = ["ib_uverbs_reg_mr", "pin_user_pages_fast", "__gup_longterm_locked", "migrate_pages"]
        at = [functions.index(fn) for fn in wanted_path if fn in functions]
        check(f"{owner}: the failing path in order", len(at) == 4 and at == sorted(at), str(functions))
        check(
            f"{owner}: the verb is libibverbs' own word", register["verb_how"] == "observed", register["verb"]
        )
        check(f"{owner}: with its mapping", buffer["vma"] is not None and "rw-p" in buffer["vma"])
        check(f"{owner}: with its device", register["device"] == name, str(register["devices_open"]))
        if owner == "process-vm":
            flags = [pin["flags"] for pin in register["plain_pins"]]
            check(
                "process-vm: the pin itself was seen",
                bool(flags) and "FOLL_LONGTERM" not in flags[0],
                str(flags),
            )
            known = [(pin["held"], pin["pfn"] is not None) for pin in register["plain_pins"]]
            check("process-vm: with its frames, and held", known == [(True, True)], str(known))


def other_causes(watcher: Watcher, name: str) -> None:
    def memlock(pd: verbs.ProtectionDomain) -> None:
        with memory.Range.anonymous(8 * PAGE, huge=False) as buffer:
            buffer.fill(1)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (PAGE, PAGE))
            os.setgid(65534)
            os.setuid(65534)
            refused(lambda: pd.reg_mr(buffer.address, buffer.length, ACCESS))
            time.sleep(1)

    def bad_address(pd: verbs.ProtectionDomain) -> None:
        refused(lambda: pd.reg_mr(BAD, PAGE, ACCESS))
        time.sleep(1)

    def dmabuf(pd: verbs.ProtectionDomain) -> None:
        refused(lambda: pd.reg_dmabuf_mr(0, 0, PAGE, 0, ACCESS))
        time.sleep(1)

    def flags(pd: verbs.ProtectionDomain) -> None:
        with memory.Range.anonymous(PAGE, huge=False) as buffer:
            refused(lambda: pd.reg_mr(buffer.address, PAGE, verbs.access_bits(["REMOTE_WRITE"])))
            time.sleep(1)

    for layer, why, body in (
        ("memlock-accounting", "ENOMEM", memlock),
        ("page-fault", "EFAULT", bad_address),
        ("dma-buf", "EOPNOTSUPP", dmabuf),
        ("arguments", "EINVAL", flags),
    ):
        line = only(layer, watcher.caught(in_child(with_device(name, body))))
        if line is not None:
            told = [line["layer"], line["errno"]]
            check(f"{layer}: with its layer and errno", told == [layer, why], f"{told} {line['reason']}")


def without_ioctl() -> None:
    """Let this process' ioctl(2) fail with EPERM before the kernel does anything: a seccomp filter
    (Documentation/userspace-api/seccomp_filter.rst).
    """
    number = {"x86_64": 16, "aarch64": 29}[os.uname().machine]
    code = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, number),
        (0x06, 0, 0, 0x50000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000),
    ]
    raw = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *item) for item in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(raw))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "seccomp")


def handlers_never_run(watcher: Watcher, name: str) -> None:
    """Failures that libibverbs alone can tell of, and one whose errno only the kernel's entry knows."""

    def filtered(pd: verbs.ProtectionDomain) -> None:
        with memory.Range.anonymous(3 * PAGE, huge=False) as buffer:
            buffer.fill(1)
            refused(lambda: pd.reg_mr(buffer.address, buffer.length, ACCESS))  # the kernel has nothing to say
            without_ioctl()
            for _ in range(2):
                refused(lambda: pd.reg_mr(buffer.address, 3 * PAGE, ACCESS))
            time.sleep(2)
            os._exit(0)  # what it holds could not be given back

    found = watcher.caught(in_child(with_device(name, filtered)), 2)
    check("no system call was made: both are caught", len(found) == 2, f"{found}")
    for line in found:
        register = events_of(line)["register"]
        told = [line["verb"], line["length"], line["errno"], line["layer"]]
        check("no system call was made: what is known", told[1:] == [3 * PAGE, None, "unknown"], f"{told}")
        check("no system call was made: the verb is libibverbs' own word", register["verb_how"] == "observed")
        check("no system call was made: what is not known is said", register["errno"] == "EUNKNOWN")

    before = set(verbs.devices())
    for command in (
        "ip link add regrepro1 type dummy",
        "ip link set regrepro1 up",
        "rdma link add rxe1 type rxe netdev regrepro1",
    ):
        subprocess.run(command.split(), check=True)
    deadline = time.monotonic() + 10
    while set(verbs.devices()) == before and time.monotonic() < deadline:
        time.sleep(0.1)
    (second,) = set(verbs.devices()) - before

    marks = Path("/run/regrepro-gone")

    def gone(pd: verbs.ProtectionDomain) -> None:
        with memory.Range.anonymous(PAGE, huge=False) as buffer:
            buffer.fill(1)
            with subprocess.Popen(["rdma", "link", "delete", second]) as deleting:
                with suppress(subprocess.TimeoutExpired):
                    marks.write_text(str(deleting.wait(10)))
                    refused(lambda: pd.reg_mr(buffer.address, PAGE, ACCESS))
                    time.sleep(2)
                os._exit(0)

    pid = in_child(with_device(second, gone))
    if not marks.exists():
        # Drivers without disassociate_ucontext: ib_uverbs_remove_one() waits until the last user is gone.
        print("# this kernel takes no device away from those that have it open", flush=True)
        line = None
    else:
        line = only("a device that is gone", watcher.caught(pid))
    if line is not None:
        told = [line["errno"], line["layer"], line["length"]]
        check("a device that is gone: its errno and layer", told == ["EIO", "device", PAGE], f"{told}")
    subprocess.run(["ip", "link", "delete", "regrepro1"], check=True)


def program_of_others(watcher: Watcher, name: str) -> None:
    """A program with pyverbs, which is rdma-core's. pyverbs' own tests are in rdma-core's source only."""
    program = (
        "import time, mmap\n"
        "from pyverbs.device import Context\n"
        "from pyverbs.pd import PD\n"
        "from pyverbs.mr import MR\n"
        f"pd = PD(Context(name={name!r}))\n"
        "for _ in range(1000):\n"
        f"    MR(pd, {PAGE}, {ACCESS}).close()\n"
        "try:\n"
        f"    MR(pd, {7 * PAGE}, {ACCESS}, address={BAD})\n"
        "except Exception as error:\n"
        "    print(error)\n"
        "time.sleep(1)\n"
    )
    python = "/usr/bin/python3"
    if subprocess.run([python, "-c", "import pyverbs.mr"], capture_output=True, check=False).returncode:
        check("a program of others", False, "needs python3-pyverbs: apt-get install python3-pyverbs")
        return
    with subprocess.Popen([python, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = child.stdout.read()
    line = only("a program of others (pyverbs)", watcher.caught(child.pid))
    if line is not None:
        told = [line["layer"], line["length"], line["comm"]]
        check("a program of others: its failure", told[:2] == ["page-fault", 7 * PAGE], f"{told} {said}")


def dies_at_once(watcher: Watcher, name: str, refusal: bool) -> None:
    if not refusal:
        return

    limit = 77 * PAGE

    def body(pd: verbs.ProtectionDomain) -> None:
        buffer = memory.Range.anonymous(8 * PAGE, huge=False)
        buffer.fill(1)
        pin = pins.pin_process_vm(buffer.address, buffer.length)
        # Not what it was when the device was opened; root may pin beyond it.
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
        if refused(lambda: pd.reg_mr(buffer.address, buffer.length, ACCESS)) is not None and pin.alive():
            os.kill(os.getpid(), signal.SIGKILL)

    line = only("a process that dies at once", watcher.caught(in_child(with_device(name, body))))
    if line is not None:
        events = events_of(line)
        register = events["register"]
        check(
            "a process that dies at once: class B all the same",
            (line["class"] or {}).get("name") == "B",
            line["reason"],
        )
        check("a process that dies at once: the pages that stayed are kept", bool(register["stuck"]))
        missing = events["scenario-begin"]["watched"]["not_read"]
        named = register["before"] is not None or bool(register.get("pages_unknown"))
        check("a process that dies at once: what could not be read is named", named, f"{missing[:2]}")
        limits = register["limits"]
        told = limits.get("memlock_soft") == limit and "vmpin" in limits
        check("a process that dies at once: its limits of that moment", told, str(limits))


def at_the_same_moment(watcher: Watcher, name: str) -> None:
    gate, opened = os.pipe()
    children = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            with verbs.Device(name) as device_, device_.pd() as pd:
                os.read(gate, 1)
                refused(partial(pd.reg_mr, BAD, (number + 1) * PAGE, ACCESS))
                time.sleep(1)
            os._exit(0)
        children.append(pid)
    time.sleep(2)
    os.write(opened, b"xx")
    for pid in children:
        os.waitpid(pid, 0)
    for number, pid in enumerate(children):
        line = only(f"process {number + 1} of two at the same moment", watcher.caught(pid))
        if line is not None:
            check(f"process {number + 1} of two: with its own length", line["length"] == (number + 1) * PAGE)


def while_another_forks(watcher: Watcher, name: str) -> None:
    def body(pd: verbs.ProtectionDomain) -> None:
        stop = threading.Event()

        def fork_on() -> None:
            while not stop.is_set():
                child = os.fork()
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)

        thread = threading.Thread(target=fork_on)
        thread.start()
        time.sleep(0.5)
        refused(lambda: pd.reg_mr(BAD, 3 * PAGE, ACCESS))
        stop.set()
        thread.join()
        time.sleep(0.5)

    line = only(
        "a thread that registers while another forks", watcher.caught(in_child(with_device(name, body)))
    )
    if line is not None:
        check("a thread that registers while another forks: its length", line["length"] == 3 * PAGE)


def fail_on(pd: verbs.ProtectionDomain, rate: int, number: int, comm: str) -> None:
    """Fail `number` times, `rate` a second, under a name of its own; leave how fast it was in /run."""
    from regrepro._core import ffi, lib

    Path("/proc/self/comm").write_text(comm)
    # As if on a CPU of its own: else the failing program waits for those that look at its failures.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    cell = ffi.new("struct rr_mr **")
    begin = time.monotonic()
    for done in range(number):
        if rate and done % 10 == 0:
            time.sleep(max(0.0, begin + done / rate - time.monotonic()))
        if lib.rr_reg_mr(pd._pd, BAD, PAGE, ACCESS, cell) == 0:
            raise SystemExit("a registration succeeded that must fail")
    Path(f"/run/{comm}").write_text(str(number / (time.monotonic() - begin)))


def counted(watcher: Watcher, comm: str) -> tuple[int, int, int]:
    """Return a program's failures that were recorded in full, those that were counted; all lost events."""
    told = lost = 0
    for run in watcher.out.iterdir():
        for event in read_record(run).events:
            if event["event"] == "watch" and event["what"] == "suppressed":
                told += sum(item["count"] for item in event["failures"] if item["comm"] == comm)
            elif event["event"] == "watch" and event["what"] == "lost":
                lost += event["events"]
    return sum(line["comm"] == comm for line in watcher.lines), told, lost


def flood(watcher: Watcher, name: str, metrics: Path, rates: list[int], more: int) -> None:
    def total(what: str) -> int:
        text = metrics.read_text()
        return sum(int(value) for value in re.findall(rf"^regrepro_watch_{what}\S* (\d+)$", text, re.M))

    time.sleep(16)  # so that the metrics are of now
    text = metrics.read_text()
    found = re.search(r'registrations_total\{path="host",driver="rxe"\} (\d+)', text)
    succeeded = int(found[1]) if found else 0
    check(
        "--registrations: what succeeded is counted by its path",
        4000 <= succeeded - more < 4300,
        f"{succeeded} with {more}",
    )
    failed, told = total("failures_total"), 0
    for rate in rates:
        comm, (_, _, lost) = f"flood-{rate}", counted(watcher, "")
        in_child(with_device(name, partial(fail_on, rate=rate, number=FLOOD, comm=comm)))
        # They are told every ten seconds, once they have been looked at; what was lost is never told.
        deadline = time.monotonic() + 150
        seen, since = 0, time.monotonic()
        while seen < FLOOD and time.monotonic() < deadline:
            full, others, lost_now = counted(watcher, comm)
            if full + others != seen:
                seen, since = full + others, time.monotonic()
            if seen and lost_now > lost and time.monotonic() - since > 25:
                break
            time.sleep(1)
        full, others, lost_now = counted(watcher, comm)
        told += full + others
        check(
            f"{FLOOD} failures, {rate or 'as many as can be'} a second: each is counted, or the loss is",
            full + others == FLOOD or (full + others < FLOOD and lost_now > lost),
            f"{float(Path(f'/run/{comm}').read_text()):.0f} a second: {full} recorded, {others} counted, "
            f"{lost_now - lost} events lost",
        )
    time.sleep(16)
    failed = total("failures_total") - failed
    check("the metrics say the same", failed == told, f"{failed} of {told}")
    check("and each is counted under its layer", 'layer="not-judged"' not in metrics.read_text())


def loaded_later(watcher: Watcher) -> None:
    """A driver comes while watch runs."""
    subprocess.run(["modprobe", "mlx5_ib"], check=True)
    said = watcher.said("mlx5_ib_reg_user_mr_dmabuf", 40)
    check("a driver that is loaded later is followed, too", said, watcher.log.read_text()[-300:])


def one_at_a_time(scratch: Path, watcher: Watcher) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regrepro", "watch", "--out", str(scratch / "second")],
        capture_output=True,
        text=True,
        check=False,
    )
    named = f"process {watcher.process.pid} " in done.stderr
    check("a second watch says who holds the first", done.returncode == 125 and named, done.stderr)


def rotates(watcher: Watcher) -> None:
    before = {path.name for path in watcher.out.iterdir()}
    watcher.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while {path.name for path in watcher.out.iterdir()} == before and time.monotonic() < deadline:
        time.sleep(0.2)
    after = {path.name for path in watcher.out.iterdir()}
    check("SIGHUP: a new record is begun", len(after - before) == 1, str(after))
    time.sleep(1)
    complete = [watcher.out / name for name in before]
    check("SIGHUP: the one before is judged", all((path / "verdicts.json").exists() for path in complete))
    for path in complete:
        record = read_record(path)
        verdicts = judge.judge_record(record)
        wrong = [*record.problems, *verdicts["problems"]]
        check(
            "the completed record is whole and is judged",
            not wrong and bool(verdicts["verdicts"]),
            str(wrong),
        )
        # What was class B, likely, may have become more likely or less since it was told.
        said = {
            line["failure"]: line["class"] or line["reason"]
            for line in watcher.lines
            if line["record"] == str(path)
        }
        judged = {item.get("failure"): item.get("class") or item["reason"] for item in verdicts["verdicts"]}
        for both in (said, judged):
            both.update({name: what["state"] for name, what in both.items() if isinstance(what, dict)})
        check("the judge says the same of the record as watch did", said == judged, f"{said} {judged}")


def killed(watcher: Watcher, name: str, before: set[int]) -> None:
    check("its BPF programs are seen", bool(guest_bpf.programs() - before), f"{len(before)} before")
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{watcher.process.pid}/status").read_text())
    kept = int(found[1]) // 1024 if found else 0
    check("it takes less than 100 MiB", 0 < kept < 100, f"{kept} MiB")
    pid = os.fork()
    if pid == 0:

        def load(pd: verbs.ProtectionDomain) -> None:
            while True:
                refused(lambda: pd.reg_mr(BAD, PAGE, ACCESS))

        with_device(name, load)()
    time.sleep(1)
    watcher.process.kill()
    watcher.process.wait()
    time.sleep(2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    # The kernel takes probes away one after the other while it dies, each with a grace period.
    deadline = time.monotonic() + 60
    while guest_bpf.programs() - before and time.monotonic() < deadline:
        time.sleep(0.2)
    check("kill -9: no BPF program stays", not guest_bpf.programs() - before)
    newest = max(watcher.out.iterdir())
    problems = [text for text in read_record(newest).problems if "run-end" not in text]
    check("kill -9: the record is whole", not problems, str(problems))


def stops(scratch: Path, arguments: list[str], before: set[int]) -> None:
    watcher = Watcher(scratch / "after", *arguments)
    check("it starts again after kill -9", watcher.said("watching:"), watcher.log.read_text()[-300:])
    left = list(Path("/run/regrepro").glob("*.json")) if Path("/run/regrepro").exists() else []
    check("the dead one's journal is gone", len(left) <= 1, str(left))
    watcher.process.send_signal(signal.SIGTERM)
    check("SIGTERM: it ends with 0", watcher.process.wait(60) == 0)
    time.sleep(1)
    check("SIGTERM: no BPF program stays", not guest_bpf.programs() - before)
    check("SIGTERM: no journal stays", not list(Path("/run/regrepro").glob("*.json")))
    check("SIGTERM: the record is complete", not read_record(max(watcher.out.iterdir())).problems)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--expect-refusal", choices=["yes", "no"], default="yes")
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", choices=["held"])
    given = parser.parse_args()
    refusal = given.expect_refusal == "yes"
    name = device()
    scratch = given.keep or Path(tempfile.mkdtemp(prefix="regrepro-watch-"))
    scratch.mkdir(parents=True, exist_ok=True)
    metrics = scratch / "watch.prom"
    arguments = ["--pins", "unpins"]
    programs = guest_bpf.programs()
    watcher = Watcher(
        scratch / "watch", *arguments, "--metrics", str(metrics), "--registrations", "--each", "20"
    )
    try:
        begin = time.monotonic()
        if not check("it watches", watcher.said("watching:"), watcher.log.read_text()[-400:]):
            return 1
        print(f"# it took {time.monotonic() - begin:.0f} s to be ready", flush=True)
        if given.only:
            held(watcher, name, refusal)
            guest_held.beside(watcher, name, verdict_of)
            guest_held.isolated(watcher, name)
            return 0 if all(results) else 1
        successes(watcher, name)
        held(watcher, name, refusal)
        more = 0
        if refusal:
            more = guest_held.beside(watcher, name, verdict_of)
            guest_held.isolated(watcher, name)
        other_causes(watcher, name)
        handlers_never_run(watcher, name)
        program_of_others(watcher, name)
        dies_at_once(watcher, name, refusal)
        at_the_same_moment(watcher, name)
        while_another_forks(watcher, name)
        beside = guest_programs.Beside(watcher, name, scratch, check, events_of, BAD, ACCESS)
        beside.others()
        beside.containers()
        loaded_later(watcher)
        one_at_a_time(scratch, watcher)
        rotates(watcher)
        flood(watcher, name, metrics, [int(rate) for rate in given.rates.split(",")], more)
        killed(watcher, name, programs)
        stops(scratch, arguments, programs)
    finally:
        if watcher.process.poll() is None:
            watcher.process.kill()
        for line in watcher.log.read_text().splitlines():
            print(f"# watch: {line[:300]}", flush=True)
    print(f"1..{len(results)}", flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
