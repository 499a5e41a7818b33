"""The kernel's trace of single calls, against a real kernel. Run as root in a lab guest; prints TAP.

`python tests/lab/guest_trace.py [--expect-refusal yes|no] [--speed] [--dump DIR]`: with `yes` (the default)
the kernel must refuse to register pages that are pinned in unpinnable memory; `no` is for a kernel that
registers them in place (before 5.13). Exit code 0 when every line is `ok`, else 1. The guest needs unpinnable
memory that anonymous memory lands in (`movablecore=512M`). `--speed` only measures. `--dump` writes the raw
text of each trace into DIR, numbered.
"""

from __future__ import annotations

import argparse
import errno
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from guest_device import device

from regrepro.core import memory, pins, verbs
from regrepro.core.iouring import FixedBuffers
from regrepro.kernel import reclaim, trace_fs, trace_tree
from regrepro.kernel.journal import Journal
from regrepro.kernel.trace import Tracer

PAGE = memory.PAGE_SIZE
ACCESS = verbs.access_bits(["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ"])
TRACEFS = trace_fs.mounted() or Path("/sys/kernel/tracing")
results: list[bool] = []


def check(name: str, good: bool, note: str = "") -> bool:
    results.append(good)
    line = f"{'ok' if good else 'not ok'} {len(results)} - {name}"
    print(f"{line} # {note}" if note else line, flush=True)
    return good


def say(lines: list[str]) -> None:
    for line in lines:
        print(f"#   {line}", flush=True)


def traced(tracer: Tracer, call: Callable[[], Any], **options: Any) -> tuple[str | None, Any, dict[str, Any]]:
    """Make a call; return its errno's name, its result and its trace."""
    token = tracer.begin(**options)
    name, result = None, None
    try:
        result = call()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "?")
    return name, result, tracer.end(token)


def ours_left(pid: int) -> list[str]:
    """Return what tracefs still holds of process `pid`."""
    left = [
        path.name for path in (TRACEFS / "instances").iterdir() if path.name.startswith(f"regrepro-{pid}-")
    ]
    lines = (TRACEFS / "kprobe_events").read_text().splitlines()
    return left + [line for line in lines if f":regrepro_{pid}_" in line]


def functions(trace: dict[str, Any]) -> list[str]:
    return [item["fn"].split()[0] for item in trace["tree"]]


def dump(tracer: Tracer, directory: Path) -> None:
    """Have every text that the tracer reads written to a file too."""
    read, number = tracer._read, [0]

    def read_and_keep() -> str:
        text = read()
        if text:
            number[0] += 1
            (directory / f"{os.uname().release}-{number[0]:02}.txt").write_text(text)
        return text

    tracer._read = read_and_keep  # type: ignore[method-assign]


def failing_path(tracer: Tracer, pd: verbs.ProtectionDomain, refusal: bool) -> None:
    for owner, take in (("process-vm", pins.pin_process_vm), ("vmsplice", pins.pin_vmsplice)):
        with memory.Range.anonymous(8 * PAGE, huge=False) as buffer:
            buffer.fill(1)
            refused, pin, trace = traced(tracer, partial(take, buffer.address, buffer.length), stack=True)
            check(f"{owner}: the pin is taken", refused is None)
            calls = [
                call
                for call in trace_tree.gup_calls(trace)
                if call["start"] == buffer.address and call["nr_pages"] == 8
            ]
            note = f"{calls[0]['fn']} {calls[0]['flags']} by {calls[0]['caller']}" if calls else str(trace)
            check(f"{owner}: its call is seen with the flags it has", bool(calls), note)
            if calls:
                check(f"{owner}: without FOLL_LONGTERM", calls[0]["longterm"] is False)
                check(f"{owner}: all 8 pages were taken", calls[0]["ret"] == 8)
                stacks = [event for event in trace["events"] if event.get("stack")]
                check(f"{owner}: with the kernel stack", bool(stacks), " < ".join(stacks[0]["stack"][:6]))
            name, region, trace = traced(
                tracer, lambda: pd.reg_mr_iova2(buffer.address, buffer.length, buffer.address, ACCESS)
            )
            say(trace_tree.render(trace))
            check(f"{owner}: the trace is complete", trace["status"] == "complete", trace["why"])
            if not refusal:
                check(f"{owner}: this kernel registers", name is None and not trace["tree"], str(name))
                if region:
                    region.dereg()
            else:
                check(f"{owner}: registration fails with ENOMEM", name == "ENOMEM", str(name))
                moved = [event["ret"] for event in trace["events"] if event.get("fn") == "migrate_pages"]
                check(f"{owner}: migrate_pages moved none of 8 pages", moved[-1:] == [8], str(moved))
                tracepoints = [event["fields"] for event in trace["events"] if "tracepoint" in event]
                check(
                    f"{owner}: the tracepoint gives the reason",
                    bool(tracepoints)
                    and tracepoints[-1]["reason"] == "longterm_pin"
                    and tracepoints[-1]["nr_failed"] == 8,
                    str(tracepoints),
                )
                path = functions(trace)
                wanted = ["rxe_reg_user_mr", "pin_user_pages_fast", "__gup_longterm_locked", "migrate_pages"]
                at = [path.index(name) for name in wanted if name in path]
                check(
                    f"{owner}: the tree holds the path in order", len(at) == 4 and at == sorted(at), str(path)
                )
                deepest = [item["fn"] for item in trace["tree"] if item.get("deepest")]
                check(
                    f"{owner}: the deepest failure is the migration", deepest[0].startswith("migrate_pages")
                )
                asked = [call for call in trace_tree.gup_calls(trace) if call["longterm"]]
                check(f"{owner}: the registrar asked for LONGTERM", bool(asked), str(asked[:1]))
            pin.release()
            name, region, trace = traced(tracer, lambda: pd.reg_mr(buffer.address, buffer.length, ACCESS))
            check(
                f"{owner}: released, it registers", name is None and trace["status"] == "complete", str(name)
            )
            check(f"{owner}: and no failing path is shown", trace["tree"] == [], str(trace["tree"]))
            if region:
                region.dereg()


def longterm(tracer: Tracer, refusal: bool) -> None:
    with memory.Range.anonymous(8 * PAGE, huge=False) as buffer, FixedBuffers() as ring:
        buffer.fill(1)
        name, _, trace = traced(tracer, lambda: ring.register(buffer.address, buffer.length), stack=True)
        calls = [call for call in trace_tree.gup_calls(trace) if call["start"] == buffer.address]
        check(
            "io_uring: its pin is seen to ask for FOLL_LONGTERM",
            name is None and bool(calls) and all(call["longterm"] for call in calls),
            str(calls),
        )
    if not refusal:
        return
    with memory.Range.anonymous(8 * PAGE, huge=False) as buffer, FixedBuffers() as ring:
        buffer.fill(1)
        with pins.pin_process_vm(buffer.address, buffer.length):
            name, _, trace = traced(tracer, lambda: ring.register(buffer.address, buffer.length))
        say(trace_tree.render(trace))
        check("io_uring: refused with a pin held", name == "ENOMEM", str(name))
        check("io_uring: its tree ends in the migration", "migrate_pages" in functions(trace))


def other_failures(tracer: Tracer, pd: verbs.ProtectionDomain) -> None:
    with memory.Range.anonymous(8 * PAGE, huge=False) as buffer:
        gone = buffer.address
    name, _, trace = traced(tracer, lambda: pd.reg_mr(gone, 8 * PAGE, ACCESS))
    say(trace_tree.render(trace))
    check("an unmapped address: EFAULT out of GUP", name == "EFAULT", str(name))
    check("and no migration", "migrate_pages" not in functions(trace) and bool(trace["tree"]))
    with memory.Range.anonymous(PAGE) as buffer:
        buffer.fill(1)
        name, _, trace = traced(tracer, lambda: pd.reg_mr(buffer.address, 1 << 43, ACCESS))
        say(trace_tree.render(trace))
        check("2^43 bytes fail in the umem", name == "EFAULT" and bool(trace["tree"]), str(name))
        name, _, trace = traced(tracer, lambda: pd.reg_mr(buffer.address, PAGE, ACCESS | 1 << 12))
        say(trace_tree.render(trace))
        check("unknown access flags never reach GUP", name is not None, str(name))
        check("which the trace shows", not trace_tree.gup_calls(trace) and trace["status"] == "complete")


def long_range(tracer: Tracer, pd: verbs.ProtectionDomain) -> None:
    pages = 4096
    with memory.Range.anonymous(pages * PAGE, huge=False) as buffer:
        buffer.fill(1)
        first, region, _ = traced(tracer, lambda: pd.reg_mr(buffer.address, buffer.length, ACCESS))
        region.dereg()  # now out of unpinnable memory
        name, region, trace = traced(tracer, lambda: pd.reg_mr(buffer.address, buffer.length, ACCESS))
        region.dereg()
        calls = trace_tree.gup_calls(trace)
        check(
            "a range pinned in parts is one line",
            first is None and name is None and len(calls) == 1 and calls[0]["nr_pages"] == pages,
            str(calls),
        )


def unread(tracer: Tracer, pd: verbs.ProtectionDomain) -> None:
    """Successful calls whose events nobody wants to see are thrown away, and nothing else."""
    with memory.Range.anonymous(PAGE) as buffer:
        buffer.fill(1)
        for _ in range(200):
            token = tracer.begin()
            region = pd.reg_mr(buffer.address, PAGE, ACCESS)
            tracer.end(token, succeeded=True)
            region.dereg()
        name, _, trace = traced(tracer, lambda: pd.reg_mr(0x1000, PAGE, ACCESS))
        check(
            "a failure after 200 calls that were not read has its trace",
            name == "EFAULT" and trace["status"] == "complete" and bool(trace["tree"]),
            f"{name} {trace['status']} {trace['why']}",
        )
        token = tracer.begin()
        pd.reg_mr(buffer.address, PAGE, ACCESS).dereg()
        tracer.end(token, succeeded=True)
        tracer._discard()
        left = tracer._read()
        check("what is thrown away is gone", not left, left[:200])


def overrun(tracer: Tracer) -> None:
    """Overwrite events in the middle of a call: the trace must say that it is not whole."""
    token = tracer.begin()
    with Path("/proc/self/mem").open("rb", buffering=0) as own:
        marker = bytearray(PAGE)
        for _ in range(60000):
            os.pread(own.fileno(), 8, id(marker))
    trace = tracer.end(token)
    note = f"{trace['overrun']} overwritten, {len(trace['events'])} left"
    check("an overrun spoils the trace", trace["status"] == "spoiled" and trace["overrun"] > 0, note)
    say(trace_tree.render(trace)[-1:])
    with memory.Range.anonymous(PAGE) as buffer:
        buffer.fill(1)
        name, pin, trace = traced(tracer, lambda: pins.pin_vmsplice(buffer.address, PAGE), stack=True)
        pin.release()
        check("the next trace is whole again", trace["status"] == "complete" and name is None, trace["why"])
    # Lost before the call: that spoils nothing.
    with Path("/proc/self/mem").open("rb", buffering=0) as own:
        for _ in range(60000):
            os.pread(own.fileno(), 8, id(marker))
    token = tracer.begin()
    trace = tracer.end(token)
    check("what was overwritten before a call spoils nothing", trace["status"] == "complete", trace["why"])


def not_ours(tracer: Tracer) -> None:
    """Neither another process' calls nor what lies before the call appear."""
    child = os.fork()
    if child == 0:
        os.execvp("sleep", ["sleep", "60"])  # followed as our child; not what this test is about
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os,sys\nm=open('/proc/self/mem','rb',0)\nsys.stdin.read(1)\n"
            "while 1: os.pread(m.fileno(),8,id(m))",
        ],
        stdin=subprocess.PIPE,
    )
    tracer.follow(os.getpid())  # and not the child that was just made
    assert other.stdin is not None
    other.stdin.write(b"x")
    other.stdin.flush()
    time.sleep(0.5)
    token = tracer.begin()
    time.sleep(0.5)
    trace = tracer.end(token)
    other.kill()
    other.wait()
    check("another process' calls are not seen", trace["events"] == [], str(trace["events"][:2]))


def forked(tracer: Tracer) -> None:
    """A child of the owner traces its own calls with what the owner armed."""
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        good = False
        with memory.Range.anonymous(PAGE) as buffer:
            buffer.fill(1)
            _, pin, trace = traced(tracer, lambda: pins.pin_vmsplice(buffer.address, PAGE), stack=True)
            pin.release()
            good = any(call["start"] == buffer.address for call in trace_tree.gup_calls(trace))
            good = good and trace["status"] == "complete"
        tracer.disarm()  # must do nothing here
        os._exit(0 if good else 1)
    os.close(ready)
    tracer.follow(child)
    os.write(go, b"g")
    os.close(go)
    _, status = os.waitpid(child, 0)
    check("a forked child traces its calls", status == 0)
    check("and its end leaves the owner's tracing alone", bool(ours_left(os.getpid())))
    tracer.follow(os.getpid())


def paused(tracer: Tracer) -> None:
    """With the probes taken out nothing is seen; afterwards all is as before."""
    with memory.Range.anonymous(PAGE) as buffer:
        buffer.fill(1)
        seen = []
        for pause in (True, False):
            with tracer.paused() if pause else nullcontext():
                _, pin, trace = traced(tracer, partial(pins.pin_vmsplice, buffer.address, PAGE), stack=True)
            pin.release()
            seen.append(any(call["start"] == buffer.address for call in trace_tree.gup_calls(trace)))
    check("paused it sees nothing, and then again all", seen == [False, True], str(seen))


def killed() -> None:
    """A run that is killed leaves an instance and probes, and the next start removes them."""
    directory = Path(tempfile.mkdtemp(prefix="regrepro-"))
    counts = []
    for round_number in range(4):
        child = os.fork()
        if child == 0:
            mine = Tracer(Journal(directory))
            if round_number:
                signal.setitimer(signal.ITIMER_REAL, 0.3 * round_number)
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            mine.arm()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        left = ours_left(child)
        counts.append(len(left))
        said = reclaim.reclaim(directory)
        still = ours_left(child)
        check(
            f"killed {round_number}: {len(left)} left, the next start removes all", not still, "; ".join(said)
        )
    check("a run killed while armed does leave something", counts[0] > 5, str(counts))
    child = os.fork()
    if child == 0:
        Tracer(Journal(Path(tempfile.mkdtemp(prefix="regrepro-")))).arm()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    before = bool(ours_left(child))
    said = trace_fs.reclaim(TRACEFS)
    check("even without its journal", before and not ours_left(child), "; ".join(said))


def two_at_once(tracer: Tracer) -> None:
    child_ready, child_done = os.pipe()
    child = os.fork()
    if child == 0:
        mine = Tracer(Journal())
        good = mine.arm()
        with memory.Range.anonymous(PAGE) as buffer:
            buffer.fill(1)
            _, pin, trace = traced(mine, lambda: pins.pin_vmsplice(buffer.address, PAGE), stack=True)
            pin.release()
            good = good and any(call["start"] == buffer.address for call in trace_tree.gup_calls(trace))
        mine.disarm()
        good = good and not ours_left(os.getpid())
        os.write(child_done, b"1" if good else b"0")
        os._exit(0)
    good = os.read(child_ready, 1) == b"1"
    os.waitpid(child, 0)
    check("a second run arms, sees its own and leaves nothing", good)
    with memory.Range.anonymous(PAGE) as buffer:
        buffer.fill(1)
        _, pin, trace = traced(tracer, lambda: pins.pin_vmsplice(buffer.address, PAGE), stack=True)
        pin.release()
        check(
            "while ours keeps working", any(c["start"] == buffer.address for c in trace_tree.gup_calls(trace))
        )


def second_tracer(pd: verbs.ProtectionDomain) -> None:
    """Others' probes and tracers on the same functions work before, during and after ours."""
    other = TRACEFS / "instances" / "another"
    trace_fs.append(TRACEFS / "kprobe_events", "r:another/theirs pin_user_pages_fast ret=$retval:s32\n")
    other.mkdir(exist_ok=True)
    theirs = other / "events" / "another" / "theirs"
    trace_fs.write(theirs / "filter", f"common_pid == {os.getpid()}")
    trace_fs.write(theirs / "enable", "1")

    def hits() -> int:
        return (other / "trace").read_text().count("theirs:")

    with memory.Range.anonymous(PAGE) as buffer:
        buffer.fill(1)

        def register() -> None:
            pd.reg_mr(buffer.address, PAGE, ACCESS).dereg()

        bpf = bpftrace(register)
        before = hits()
        with Tracer(Journal()) as tracer:
            for _ in range(5):
                _, _, trace = traced(tracer, register)
            check("beside others ours sees its call", len(trace_tree.gup_calls(trace)) == 1, trace["why"])
            # Not fewer: this process may pin by the same function for reasons of its own.
            check("theirs lost none of five", hits() - before >= 5, str(hits() - before))
        register()
        check("and goes on after ours has ended", hits() - before >= 6, str(hits() - before))
        if bpf is not None:
            time.sleep(2)
            bpf.send_signal(signal.SIGINT)
            try:
                out, _ = bpf.communicate(timeout=60)
            except subprocess.TimeoutExpired:  # seen under emulation: it waits long in the kernel at its end
                bpf.kill()
                out, _ = bpf.communicate()
            check("so does bpftrace", out.count("hit 1") >= 6, " ".join(out.split()))
    trace_fs.write(theirs / "enable", "0")
    other.rmdir()
    trace_fs.append(TRACEFS / "kprobe_events", "-:another/theirs\n")


def bpftrace(register: Callable[[], None]) -> subprocess.Popen[str] | None:
    """Start bpftrace on a function of ours; return it once it has seen a call, None where there is none."""
    script = f'kretprobe:pin_user_pages_fast /pid == {os.getpid()}/ {{ printf("hit %d\\n", retval); }}'
    try:
        process = subprocess.Popen(
            ["bpftrace", "-B", "line", "-e", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except FileNotFoundError:
        print("# bpftrace is not installed: not part of this check", flush=True)
        return None
    assert process.stdout is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        register()
        while select.select([process.stdout], [], [], 1)[0]:
            line = process.stdout.readline()
            if "hit" in line:
                time.sleep(2)
                while select.select([process.stdout], [], [], 0.1)[0]:
                    os.read(process.stdout.fileno(), 1 << 16)
                return process
            print(f"# bpftrace: {line.strip()}", flush=True)
            if not line:
                return None
    process.kill()
    return None


def elsewhere() -> None:
    """A node whose tracefs is mounted nowhere, one where it is read-only, and a user who is not root."""
    unmount = "umount /sys/kernel/debug/tracing /sys/kernel/tracing /sys/kernel/debug 2>/dev/null; "
    readonly = (
        "mount --bind /sys/kernel/tracing /sys/kernel/tracing && "
        "mount -o remount,bind,ro /sys/kernel/tracing && umount /sys/kernel/debug; "
    )
    for name, setup, word in (
        ("mounted nowhere, it works by a mount of its own", unmount, "traced"),
        ("mounted read-only, it says so", readonly, "read-only"),
        ("without root, it says so", "exec setpriv --reuid 65534 --clear-groups ", "needs root"),
    ):
        command = setup + ("" if setup.startswith("exec") else "exec ") + '"$0" "$1" --alone'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", command, sys.executable, __file__],
            capture_output=True,
            text=True,
            check=False,
        )
        said = " ".join((done.stdout + done.stderr).split())
        check(f"tracefs {name}" if "mounted" in name else name, word in done.stdout, said)


def alone() -> int:
    """Trace one call with what this process finds, and print what came of it."""
    tracer = Tracer(Journal())
    armed = tracer.arm()
    print(tracer.status()[1])
    if armed:
        with memory.Range.anonymous(PAGE) as buffer:
            buffer.fill(1)
            _, pin, trace = traced(tracer, lambda: pins.pin_vmsplice(buffer.address, PAGE), stack=True)
            pin.release()
            if any(call["start"] == buffer.address for call in trace_tree.gup_calls(trace)):
                print("traced")
        tracer.disarm()
    return 0


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def speed(pd: verbs.ProtectionDomain) -> None:
    """Print what tracing costs (no check: the numbers depend on the machine's load)."""
    rounds = 6
    with memory.Range.anonymous(64 << 20, huge=False) as buffer:
        buffer.fill(1)

        def one(length: int, tracer: Tracer | None, known: bool) -> float:
            start = time.perf_counter()
            token = tracer.begin() if tracer else None
            region = pd.reg_mr(buffer.address, length, ACCESS)
            if tracer:
                tracer.end(token, succeeded=known)
            region.dereg()
            return time.perf_counter() - start

        def series(count: int, length: int, tracer: Tracer | None, known: bool = True) -> list[float]:
            return [one(length, tracer, known) for _ in range(count)]

        def loop(count: int, length: int) -> float:
            start = time.perf_counter()
            pd.register_loop(buffer.address, length, ACCESS, count)
            return (time.perf_counter() - start) / count

        pd.reg_mr(buffer.address, 64 << 20, ACCESS).dereg()
        found: dict[str, list[float]] = {}
        arming, ending = [], []
        for _ in range(rounds):
            for name, length, count in (("4 KiB", PAGE, 200), ("64 MiB", 64 << 20, 8)):
                found.setdefault(f"{name} untraced", []).extend(series(count, length, None))
                found.setdefault(f"{name} C loop, untraced", []).append(loop(count, length))
            tracer = Tracer(Journal())
            start = time.perf_counter()
            tracer.arm()
            arming.append(time.perf_counter() - start)
            for name, length, count in (("4 KiB", PAGE, 200), ("64 MiB", 64 << 20, 8)):
                found.setdefault(f"{name} traced, unread", []).extend(series(count, length, tracer))
                found.setdefault(f"{name} traced, read", []).extend(series(count, length, tracer, False))
                found.setdefault(f"{name} C loop, followed", []).append(loop(count, length))
            tracer.follow(1)
            for name, length, count in (("4 KiB", PAGE, 200), ("64 MiB", 64 << 20, 8)):
                found.setdefault(f"{name} C loop, beside", []).append(loop(count, length))
            start = time.perf_counter()
            tracer.disarm()
            ending.append(time.perf_counter() - start)
            for name, length, count in (("4 KiB", PAGE, 200), ("64 MiB", 64 << 20, 8)):
                found.setdefault(f"{name} C loop, after", []).append(loop(count, length))
    print(f"# arm {median(arming):.3f} s, disarm {median(ending):.3f} s")
    for name, values in sorted(found.items()):
        print(f"# {name}: min {min(values) * 1e6:.1f} µs, median {median(values) * 1e6:.1f} µs", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--expect-refusal", choices=("yes", "no"), default="yes")
    parser.add_argument("--speed", action="store_true", help="measure only")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dump", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.alone:
        return alone()
    refusal = options.expect_refusal == "yes"
    with verbs.Device(device()) as rdma, rdma.pd() as pd:
        if options.speed:
            speed(pd)
            return 0
        probes_before = (TRACEFS / "kprobe_events").read_text()
        start = time.monotonic()
        tracer = Tracer(Journal())
        check("there is tracing here", tracer.status()[0], tracer.status()[1])
        check("it arms", tracer.arm(), f"{tracer.status()[1]} ({time.monotonic() - start:.2f} s)")
        if options.dump:
            dump(tracer, options.dump)
        say([f"missing: {item['fn']}: {item['why']}" for item in tracer.missing])
        try:
            failing_path(tracer, pd, refusal)
            longterm(tracer, refusal)
            other_failures(tracer, pd)
            long_range(tracer, pd)
            unread(tracer, pd)
            not_ours(tracer)
            forked(tracer)
            two_at_once(tracer)
            paused(tracer)
            overrun(tracer)
        finally:
            start = time.monotonic()
            tracer.disarm()
        check("disarming leaves nothing", not ours_left(os.getpid()), f"{time.monotonic() - start:.2f} s")
        check("and no other probe is gone", (TRACEFS / "kprobe_events").read_text() == probes_before)
        second_tracer(pd)
        killed()
        elsewhere()
    print(f"1..{len(results)}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
