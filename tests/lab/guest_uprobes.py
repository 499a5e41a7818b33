"""`core.uprobes` against a real kernel. Run as root in a lab guest of two CPUs; prints TAP.

`python tests/lab/guest_uprobes.py [--no-hotplug]` compiles guest_uprobes.c with gcc and probes that.
`--no-hotplug` is for a machine of whose CPUs none may go offline. Exit code 0 when every line is `ok`,
else 1.
"""

from __future__ import annotations

import argparse
import errno
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from guest_tap import check, results

from regrepro.core import uprobes
from regrepro.core.uprobes import REGISTERS, Hit, UserProbes, Zero

SOURCE = Path(__file__).with_suffix(".c")
SECOND = 0x5EC0DD  # as in guest_uprobes.c
WIDTH = 1 if "rax" in REGISTERS else 4  # of a breakpoint instruction
SCRATCH, FIRST = ("rax", "rdi") if "rax" in REGISTERS else ("x8", "x0")
STACK_POINTER = "rsp" if "rsp" in REGISTERS else "sp"
RING_PAGES = 128  # enough for 1,000 hits that nobody reads
NOBODY = 65534
CPU1 = Path("/sys/devices/system/cpu/cpu1/online")
HOLD = """
import sys, time
from regrepro.core.uprobes import UserProbes
try:
    probes = UserProbes()
    probes.add(sys.argv[1], int(sys.argv[2]))
except OSError as error:
    print(error.errno, error, flush=True)
else:
    print("holds", len(probes.fds()), flush=True)
    time.sleep(600)
"""


def errno_of(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "nothing"


class Probed:
    """A running guest_uprobes.c."""

    def __init__(self, program: Path, threads: int, base: int) -> None:
        self.process = subprocess.Popen(
            [str(program), "run", str(threads), str(base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self.address = int(self._line())
        self.tids = sorted(int(path.name) for path in Path(f"/proc/{self.pid}/task").iterdir())[1:]

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def start(self, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()

    def done(self) -> int:
        """Wait until the runs are over; return ns a run."""
        return int(self._line().split()[1])

    def run(self, count: int) -> int:
        self.start(count)
        return self.done()

    def text(self) -> bytes:
        with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(self.address)
            return memory.read(WIDTH)

    def becomes(self, text: bytes, limit: float = 10) -> bool:
        """Wait until the instruction is this one."""
        deadline = time.monotonic() + limit
        while self.text() != text:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def registers_and_stack(program: Path, offset: int) -> None:
    one = Probed(program, 1, 1000)
    before = one.text()
    descriptors = count_descriptors()
    with UserProbes() as probes:
        number = probes.add(program, offset)
        cpus = os.cpu_count() or 0
        taken = count_descriptors() - descriptors
        check("a ring for each CPU, two maps, one event", taken == cpus + 3, f"{taken}, {cpus} CPUs")
        probes.remove(probes.add(program, offset))
        check("and nothing of a probe that went", count_descriptors() - descriptors == taken)
        check("a mapped page has the breakpoint", one.text() != before, one.text().hex())
        poll = select.poll()
        for fd in probes.fds():
            poll.register(fd, select.POLLIN)
        check("nothing is to be read before a hit", poll.poll(0) == [] and probes.read() == [])
        started = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        one.run(1)
        ended = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        check("a poll sees a hit", len(poll.poll(2000)) == 1)
        hits = probes.read()
        if check("one run is one hit", len(hits) == 1, str(hits)):
            hit = hits[0]
            good = hit.registers[FIRST] == 1000 and hit.registers[SCRATCH] == 1005
            check("registers are those of the instruction", good and tuple(hit.registers) == REGISTERS)
            values = [int.from_bytes(hit.stack[at : at + 8], sys.byteorder) for at in (0, 8)]
            check("the stack begins at the stack pointer", values == [1000, SECOND], str(values))
            check("all of the stack was read", len(hit.stack) == 256, str(len(hit.stack)))
            check("the stack pointer is one", hit.registers[STACK_POINTER] > 1 << 20)
            whose = hit.probe, hit.pid, hit.tid
            check("probe, process and thread", whose == (number, one.pid, one.tids[0]), str(whose))
            near = started <= hit.ns <= ended
            check("the time is boottime", near, f"{hit.ns - started} ns after, {ended - hit.ns} ns before")
        second = probes.add(program, offset)
        one.run(1)
        both = sorted(hit.probe for hit in probes.read())
        check("two probes on one instruction both hit", both == [number, second], str(both))
        probes.remove(number)
        one.run(1)
        check("removing the first leaves the second", [hit.probe for hit in probes.read()] == [second])
        probes.remove(second)
        check("removing both restores the text", one.becomes(before, 0), one.text().hex())
        one.run(1)
        check("and nothing hits any more", probes.read() == [])
    with UserProbes(stack_bytes=0) as probes:
        probes.add(program, offset)
        one.run(2)
        hits = probes.read()
        check("no stack where none is asked for", [hit.stack for hit in hits] == [b"", b""])
    with UserProbes(stack_bytes=16384, ring_pages=16) as probes:
        probes.add(program, offset)
        one.run(2)
        hits = probes.read()
        lengths = [len(hit.stack) for hit in hits]
        good = len(lengths) == 2 and all(16 <= length <= 16384 for length in lengths)
        check("more stack than there may be", good, str(lengths))
    one.end()


def conditions(program: Path, offset: int) -> None:
    """Only hits with 0 in a register, or on the stack, count; FIRST is `first`, which the stack has too."""
    places = {"a register": {"register": FIRST}, "the stack": {"offset": 0}}
    for first, sizes in ((0, [4, 8]), (1 << 32, [4]), (1, []), (1 << 31, [])):
        one = Probed(program, 1, first)
        for name, place in places.items():
            for size in (4, 8):
                with UserProbes() as probes:
                    probes.add(program, offset, zero=Zero(**place, size=size))
                    one.run(1)
                    found = len(probes.read()), probes.lost
                    wanted = int(size in sizes), 0
                    check(
                        f"{first:#x}, {size} bytes of {name} are 0: {wanted[0]} hits",
                        found == wanted,
                        f"{found}",
                    )
        one.end()


def hits_of_many(program: Path, offset: int) -> None:
    early = Probed(program, 2, 100)
    with UserProbes(ring_pages=RING_PAGES) as probes:
        probes.add(program, offset)
        late = Probed(program, 2, 200)
        check("a process that starts later has the breakpoint", late.text() == early.text())
        early.start(50)
        late.start(50)
        early.done()
        late.done()
        hits = probes.read()
        of: dict[tuple[int, int, int], int] = {}
        for hit in hits:
            key = hit.pid, hit.tid, hit.registers[FIRST]
            of[key] = of.get(key, 0) + 1
        wanted = {
            (one.pid, tid, base + index): 50
            for one, base in ((early, 100), (late, 200))
            for index, tid in enumerate(one.tids)
        }
        check("every run of two threads of two processes on two CPUs", of == wanted, f"{of} {wanted}")
        check("by time", hits == sorted(hits, key=lambda hit: hit.ns))
        early.run(500)
        hits = probes.read()
        check("1,000 quick hits", len(hits) == 1000 and probes.lost == 0, f"{len(hits)}, {probes.lost} lost")
        check("nothing is wrong with a ring", not probes.unreadable and not probes.foreign)
        check("nothing was held back", probes.throttled == 0, str(probes.throttled))
    early.end()
    late.end()


def hits_of_others(program: Path, offset: int) -> None:
    with UserProbes() as probes:
        probes.add(program, offset)
        inside = ["unshare", "--pid", "--fork", str(program), "run", "1", "900"]
        done = subprocess.run(inside, input="1\n", stdout=subprocess.PIPE, text=True, check=True)
        seen = [hit.pid for hit in probes.read()]
        its_own = done.stdout.split()[1]
        good = its_own == "1" and len(seen) == 1 and seen[0] > 1
        check("a process in a PID namespace has the reader's number", good, f"{its_own}, {seen}")
    if "rax" not in REGISTERS:
        return
    small, source = program.with_name("small"), program.with_name("small.s")
    source.write_text(".globl _start\n_start: nop\nmovl $1, %eax\nxorl %ebx, %ebx\nint $0x80\n")
    subprocess.run(["gcc", "-m32", "-nostdlib", "-static", "-o", str(small), str(source)], check=True)
    with UserProbes() as probes:
        probes.add(small, small.read_bytes().index(b"\x90\xb8\x01\0\0\0"))
        subprocess.run([str(small)], check=True)
        counts = len(probes.read()), probes.foreign, probes.lost, probes.unreadable
        check("a 32-bit program's hit is counted apart", counts == (0, 1, 0, 0), str(counts))


def losses(program: Path, offset: int) -> None:
    one = Probed(program, 1, 300)
    with UserProbes(ring_pages=1) as probes:
        probes.add(program, offset)
        one.run(1000)
        lost = probes.lost
        first = len(probes.read())
        note = f"{first} read, {lost} lost"
        check("losses are counted to the last one, at once", lost > 0 and first + lost == 1000, note)
        one.run(1)
        check("and a hit is read after them", len(probes.read()) == 1 and probes.lost == lost)
    check("the count outlives the probes", probes.lost == lost)
    with UserProbes() as probes:
        probes.add(program, offset)
        poll = select.poll()
        for fd in probes.fds():
            poll.register(fd, select.POLLIN)
        one.start(3000)
        seen: list[Hit] = []
        while poll.poll(1000):
            seen += probes.read()
        one.done()
        note = f"{len(seen)} read, {probes.lost} lost of a ring of 8 pages"
        check("a reader at work sees or counts 3,000", len(seen) + probes.lost == 3000, note)
    one.end()


def costs(program: Path, offset: int) -> None:
    one = Probed(program, 1, 400)
    plain = one.run(100_000)
    with UserProbes() as probes:
        began = time.monotonic()
        number = probes.add(program, offset)
        added = time.monotonic() - began
        full = one.run(2000)  # nearly all are lost: no reader runs beside
        probes.read()
        singles = []
        for _ in range(20):
            singles.append(one.run(50))
            probes.read()
        began = time.monotonic()
        probes.follow_cpus()
        followed = time.monotonic() - began
        began = time.monotonic()
        probes.remove(number)
        removed = time.monotonic() - began
        probes.add(program, offset)
        began = time.monotonic()
        probes.close()
        closed = time.monotonic() - began
    rings = [UserProbes() for _ in range(64 // (os.cpu_count() or 1))]
    for probes in rings:
        probes._open_rings("")
    began = time.monotonic()
    for probes in rings:
        probes.close()
    rings_closed = time.monotonic() - began
    before = one.text()
    holder = hold(program, offset)
    said(holder)
    began = time.monotonic()
    holder.kill()
    holder.wait()
    ended = time.monotonic() - began
    one.becomes(before)
    singles.sort()
    print(
        f"# costs: a run {plain} ns, a hit {singles[len(singles) // 2]} ns, a lost one {full} ns; add "
        f"{added * 1e3:.1f} ms, follow_cpus {followed * 1e3:.2f} ms, remove {removed * 1e3:.1f} ms, "
        f"close with one probe {closed * 1e3:.1f} ms, of 64 rings alone {rings_closed * 1e3:.1f} ms, "
        f"kill -9 {ended * 1e3:.1f} ms",
        flush=True,
    )
    one.end()


def hold(program: Path, offset: int, *before: str) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-c", HOLD, str(program), str(offset)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(holder: subprocess.Popen[str]) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline()


def killed(program: Path, offset: int) -> None:
    one = Probed(program, 1, 500)
    before = one.text()
    holder = hold(program, offset)
    answer = said(holder)
    check("another process holds a probe", answer.startswith("holds") and one.text() != before, answer)
    holder.kill()
    holder.wait()
    check("kill -9 takes it out of the text", one.becomes(before), one.text().hex())
    one.run(1)
    check("and the program runs", one.process.poll() is None)
    one.end()


def refusals(program: Path, offset: int) -> None:
    descriptors = count_descriptors()
    with UserProbes() as probes:
        size = program.stat().st_size
        for name, path, at, wanted in (
            ("a path that does not exist", program.with_name("none"), 0, "ENOENT"),
            ("an offset beyond the file", program, size + 4096, "EINVAL"),
            ("the offset at its end", program, size, "EINVAL"),
            ("a folder", program.parent, 0, "EINVAL"),
            ("a device", Path("/dev/null"), 0, "EINVAL"),
        ):
            got = errno_of(lambda path=path, at=at: probes.add(path, at))  # type: ignore[misc]
            check(f"{name}: {wanted}", got == wanted, got)
    now = count_descriptors()
    check("errors leave no descriptor", now == descriptors, f"{descriptors}, {now}")
    user = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--bounding-set=-all")
    holder = hold(program, offset, "setpriv", *user)
    answer = said(holder)
    holder.kill()
    holder.wait()
    codes = (f"{errno.EACCES} ", f"{errno.EPERM} ")
    check("a user without rights: EACCES or EPERM", answer.startswith(codes), answer)
    for name, limits, wanted in (
        ("a low soft limit of descriptors is raised", "--nofile=7:64", "holds"),
        ("a low hard one is EMFILE", "--nofile=7:7", f"{errno.EMFILE} "),
    ):
        holder = hold(program, offset, "prlimit", limits)
        answer = said(holder)
        holder.kill()
        holder.wait()
        check(name, answer.startswith(wanted), answer)
    holder = hold(program, offset, "prlimit", "--memlock=0:0")
    answer = said(holder)
    holder.kill()
    holder.wait()
    check("locked memory is raised where that is allowed", answer.startswith("holds"), answer)
    holder = hold(program, offset, "prlimit", "--memlock=0:0", "setpriv", "--bounding-set=-sys_resource")
    answer = said(holder)
    holder.kill()
    holder.wait()
    refused = answer.startswith(f"{errno.EPERM} ") and "RLIMIT_MEMLOCK" in answer
    # Linux 5.11 made it the memory of the cgroup.
    old = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]) < (5, 11)
    check("where it is not, old kernels refuse", refused if old else answer.startswith("holds"), answer)


def hotplug(program: Path, offset: int) -> None:
    with UserProbes() as probes:
        probes.add(program, offset)
        two = Probed(program, 2, 600)
        probes.follow_cpus()
        fds = probes.fds()
        two.run(1)
        CPU1.write_text("0")
        probes.follow_cpus()
        check("a CPU that went is left", len(probes.fds()) == len(fds) - 1, str(probes.fds()))
        check("its last hits are read", len(probes.read()) == 2)
        CPU1.write_text("1")
        pinned = Probed(program, 2, 650)
        pinned.run(5)
        seen = len(probes.read())
        check(
            "hits before it is followed are lost, and counted",
            (seen, probes.lost) == (5, 5),
            f"{probes.lost}",
        )
        pinned.end()
        probes.follow_cpus()
        check("a CPU that came is followed", len(probes.fds()) == len(fds), str(probes.fds()))
        two.end()
        two = Probed(program, 2, 700)
        two.run(1)
        seen = sorted(hit.registers[FIRST] for hit in probes.read())
        check("hits on both CPUs again", seen == [700, 701], str(seen))
        CPU1.write_text("0")
        CPU1.write_text("1")
        probes.follow_cpus()
        two.end()
        two = Probed(program, 2, 800)
        two.run(1)
        seen = sorted(hit.registers[FIRST] for hit in probes.read())
        check("and where it went and came between two looks", seen == [800, 801], str(seen))
        CPU1.write_text("0")
        CPU1.write_text("1")
        two.end()
        two = Probed(program, 2, 850)
        lost = probes.lost
        two.run(3)
        seen = len(probes.read())
        check(
            "a ring of a CPU that was away takes none, and that is counted",
            (seen, probes.lost - lost) == (3, 3),
        )
        two.end()
    online = uprobes._cpus
    uprobes._cpus = lambda file: online(file)[::-1] if file == uprobes._ONLINE else online(file)
    with UserProbes() as probes:
        probes.add(program, offset)  # its one event is CPU 1's
        uprobes._cpus = online
        CPU1.write_text("0")
        probes.follow_cpus()
        one = Probed(program, 1, 900)
        one.run(2)
        check("a probe outlives the CPU that it was opened on", len(probes.read()) == 2 and probes.lost == 0)
        CPU1.write_text("1")
        probes.follow_cpus()
        two = Probed(program, 2, 950)
        two.run(2)
        seen = sorted(hit.registers[FIRST] for hit in probes.read())
        check("and its return", seen == [950, 950, 951, 951], str(seen))
        one.end()
        two.end()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-hotplug", action="store_true")
    given = parser.parse_args()
    signal.alarm(1200)
    print(f"# {os.uname().release}, {os.cpu_count()} CPUs, {resource.getrlimit(resource.RLIMIT_NOFILE)}")
    if not check("this kernel has uprobes", UserProbes.supported() == "", UserProbes.supported()):
        return 1
    # In the guest's own /tmp, a file system with a page cache of its own, as programs have on a node.
    with tempfile.TemporaryDirectory(prefix="regrepro-uprobes-") as folder:
        Path(folder).chmod(0o755)
        program = Path(folder) / "probed"
        subprocess.run(["gcc", "-O1", "-pthread", "-o", str(program), str(SOURCE)], check=True)
        place = subprocess.run([str(program), "place"], stdout=subprocess.PIPE, text=True, check=True)
        offset = int(place.stdout)
        registers_and_stack(program, offset)
        conditions(program, offset)
        hits_of_many(program, offset)
        hits_of_others(program, offset)
        losses(program, offset)
        killed(program, offset)
        refusals(program, offset)
        if not given.no_hotplug:
            hotplug(program, offset)
        costs(program, offset)
    print(f"1..{len(results)}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
