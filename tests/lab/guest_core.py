"""The C core against a real kernel: pins, registrations, loopback. Run as root in a lab guest; prints TAP.

`python tests/lab/guest_core.py [--expect-refusal yes|no]`: with `yes` (the default) the kernel must refuse to
register pinned pages that lie in unpinnable memory; `no` is for a kernel that registers them in place (before
5.13). Exit code 0 when every line is `ok`, else 1. The guest needs unpinnable memory (`cma=512M`,
`movablecore=512M`).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from regrepro.core import memory, pins, verbs
from regrepro.core.iouring import FixedBuffers

PAGE = memory.PAGE_SIZE
LENGTHS = {"1 page": PAGE, "1,025 pages": 1025 * PAGE, "64 MiB": 64 << 20}
TAKERS: dict[str, Callable[[int, int], pins.HeldPin]] = {
    "process-vm": pins.pin_process_vm,
    "vmsplice": pins.pin_vmsplice,
    "io-uring": pins.pin_io_uring,
}
PFN_MASK = (1 << 55) - 1
PROBE = 64 << 20
ENOUGH = 1024  # pages that moved: their pageblocks are where to look for more
HELD: list[memory.Range] = []
SPANS: list[tuple[int, int]] = []

results: list[bool] = []


def check(name: str, good: bool, note: str = "") -> bool:
    results.append(good)
    line = f"{'ok' if good else 'not ok'} {len(results)} - {name}"
    print(f"{line} # {note}" if note else line, flush=True)
    return good


def errno_of(call: Callable[[], object]) -> str | None:
    """Call and return the name of the errno of the OSError that it raised, or None."""
    try:
        call()
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return "EOPNOTSUPP"  # errorcode calls it by its other name
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return None


def pfns(address: int, pages: int) -> list[int]:
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        raw = pagemap.read(pages * 8)
    words = array("Q")
    words.frombytes(raw)
    return [word & PFN_MASK if word >> 63 else 0 for word in words]


@contextmanager
def signal_storm() -> Iterator[list[int]]:
    """Send this process SIGALRM every millisecond, and SIGUSR1 as fast as another process can."""
    seen = [0]

    def note(_number: int, _frame: object) -> None:
        seen[0] += 1

    before = signal.signal(signal.SIGALRM, note), signal.signal(signal.SIGUSR1, note)
    sender = os.fork()
    if sender == 0:
        parent = os.getppid()
        while os.getppid() == parent:
            os.kill(parent, signal.SIGUSR1)
            time.sleep(0.001)
        os._exit(0)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield seen
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.kill(sender, signal.SIGKILL)
        os.waitpid(sender, 0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGUSR1, before[1])


def cpu_seconds(thread: int) -> float:
    fields = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def every_pin(owner: str, name: str, length: int) -> None:
    label = f"{owner}, {name}"
    with memory.Range.anonymous(length, huge=False) as buffer:
        buffer.populate(threads=2)
        buffer.fill(11)
        before = buffer.checksum()
        pin = TAKERS[owner](buffer.address, length)
        check(f"{label}: alive when made", pin.alive())
        blocked = {
            line.split()[1]
            for thread in pin.thread_ids()
            for line in Path(f"/proc/self/task/{thread}/status").read_text(encoding="ascii").splitlines()
            if line.startswith("SigBlk:")
        }
        check(f"{label}: {len(pin.thread_ids())} threads block every signal", blocked == {"fffffffffffbfeff"})
        check(f"{label}: bytes unchanged while held", buffer.checksum() == before)
        with signal_storm() as seen:
            time.sleep(0.5)
            used = [cpu_seconds(thread) for thread in pin.thread_ids()]
            time.sleep(1)
            spent = sum(cpu_seconds(thread) for thread in pin.thread_ids()) - sum(used)
            alive = pin.alive()
        check(f"{label}: alive after {seen[0]} signals", alive and seen[0] > 50)
        check(f"{label}: no thread spins under them", spent < 0.2, f"{spent:.2f} s of CPU in 1 s")
        frames = pfns(buffer.address, buffer.pages)
        pin.release()
        check(f"{label}: not alive after release", not pin.alive())
        pin.release()
        check(f"{label}: bytes unchanged by release", buffer.checksum() == before)
        check(f"{label}: pages stay in place", pfns(buffer.address, buffer.pages) == frames)
        if owner == "process-vm":
            check(f"{label}: every call ended in EFAULT", set(pin.thread_results()) == {-errno.EFAULT})


def storm_during_creation() -> None:
    length = 64 << 20
    with memory.Range.anonymous(length, huge=False) as buffer:
        buffer.fill(12)
        before = buffer.checksum()
        for owner, take in TAKERS.items():
            with signal_storm():
                good = True
                for _ in range(3):
                    pin = take(buffer.address, length)
                    good = good and pin.alive()
                    pin.release()
            check(f"{owner}: taken and released three times in a storm of signals", good)
            check(f"{owner}: bytes unchanged by it", buffer.checksum() == before)


def early_death() -> None:
    """A pin whose fault is answered from outside is seen to be dead."""
    with memory.Range.anonymous(PAGE) as buffer:
        buffer.fill(13)
        pin = pins.pin_process_vm(buffer.address, PAGE)
        userfaults = [
            int(entry.name)
            for entry in Path("/proc/self/fd").iterdir()
            if entry.is_symlink() and str(entry.readlink()) == "anon_inode:[userfaultfd]"
        ]
        check("early death: one userfaultfd is open", len(userfaults) == 1)
        os.close(userfaults[0])
        deadline = time.monotonic() + 10
        while pin.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        check("early death: a pin whose userfaultfd was closed is not alive", not pin.alive())
        check("early death: release says that a byte was written", errno_of(pin.release) == "EIO")
        check("early death: and does so once", errno_of(pin.release) is None)


def in_a_child(body: Callable[[int], pins.HeldPin]) -> int:
    """Fork; the child runs body with a file descriptor to report ready on; return its id once it is ready."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            kept = body(writer)
            os._exit(0 if kept.alive() else 8)
        finally:
            os._exit(7)
    os.close(writer)
    ready = os.read(reader, 1)
    os.close(reader)
    assert ready == b"r", "the child could not take its pin"
    return child


def death_of_the_process(registrar: verbs.ProtectionDomain) -> None:
    """SIGKILL and plain exit of a process that holds a pin on shared memory leave it untouched and free."""
    for owner, take in TAKERS.items():
        for how in ("SIGKILL", "exit"):
            with memory.Range.memfd(2000 * PAGE) as buffer:
                buffer.fill(14)
                before = buffer.checksum()

                def hold(
                    writer: int, take: Callable[[int, int], pins.HeldPin] = take, how: str = how
                ) -> pins.HeldPin:
                    pin = take(buffer.address, buffer.length)
                    if pin.alive():
                        os.write(writer, b"r")
                    if how == "SIGKILL":
                        time.sleep(1000)
                    return pin

                child = in_a_child(hold)
                if how == "SIGKILL":
                    os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                ended = os.waitstatus_to_exitcode(status)
                check(
                    f"{owner}, {how} of the holder: it held to the end", ended == (0 if how == "exit" else -9)
                )
                check(f"{owner}, {how} of the holder: shared bytes unchanged", buffer.checksum() == before)
                deadline = time.monotonic() + 20
                while True:
                    frames = pfns(buffer.address, 8)
                    refused = errno_of(lambda: registrar.reg_mr(buffer.address, 8 * PAGE, 1).dereg())
                    if not refused or time.monotonic() > deadline:
                        break
                    time.sleep(0.1)
                check(
                    f"{owner}, {how} of the holder: its pages can be registered afterwards",
                    refused is None,
                    f"errno {refused}, {'moved' if frames != pfns(buffer.address, 8) else 'in place'}",
                )


def fork_while_held() -> None:
    """The parent's pin survives a fork and the child's end; the child holds nothing."""
    with memory.Range.anonymous(PAGE * 3) as buffer:
        buffer.fill(15)
        before = buffer.checksum()
        for owner, take in TAKERS.items():
            pin = take(buffer.address, buffer.length)
            child = os.fork()
            if child == 0:
                files = Path("/proc/self/fd").iterdir()
                names = [str(entry.readlink()) for entry in files if entry.is_symlink()]
                held = [name for name in names if "io_uring" in name or "userfaultfd" in name]
                os._exit(int(pin.alive()) + 2 * len(held))
            _, status = os.waitpid(child, 0)
            check(f"{owner}: the forked child holds nothing", os.waitstatus_to_exitcode(status) == 0)
            check(f"{owner}: the parent's pin outlives the child", pin.alive())
            pin.release()
            check(f"{owner}: bytes unchanged after fork and release", buffer.checksum() == before)


def errors_teach() -> None:
    with memory.Range.anonymous(2 * PAGE, reserve_only=True) as buffer:
        for owner, take in TAKERS.items():
            refused = errno_of(lambda take=take: take(buffer.address, buffer.length))  # type: ignore[misc]
            check(
                f"{owner}: memory without access is refused at once",
                refused in ("EFAULT", "ENOMEM"),
                str(refused),
            )
    huge = 1 << 32
    with memory.Range.anonymous(huge, reserve_only=True) as buffer:
        refused = errno_of(lambda: pins.pin_vmsplice(buffer.address, huge))
        check("vmsplice: 4 GiB of reserved addresses are refused", refused is not None, str(refused))
    with memory.Range.anonymous(PAGE) as buffer:
        # An ordinary user has neither the privilege nor, in this guest, the sysctl.
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            try:
                pins.pin_process_vm(buffer.address, PAGE)
                os.write(writer, b"no error")
            except OSError as error:
                os.write(writer, f"{error.errno} {error}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        text = os.read(reader, 4096).decode()
        expected = Path("/proc/sys/vm/unprivileged_userfaultfd").read_text(encoding="ascii").strip() == "0"
        good = (
            text.startswith("1 ") and "unprivileged_userfaultfd" in text if expected else text == "no error"
        )
        check("process-vm: an ordinary user is told what is missing", good, text)


def rdma_device() -> str:
    """Return the name of the guest's RDMA device; where the lab made none, make one."""
    found = verbs.devices()
    if found:
        return found[0]
    for command in (
        "modprobe rdma_rxe",
        "ip link add regrepro0 type dummy",
        "ip addr add 10.99.0.1/24 dev regrepro0",
        "ip link set regrepro0 up",
        "rdma link add rxe0 type rxe netdev regrepro0",
    ):
        subprocess.run(command.split(), check=True)
    return "rxe0"


def unpinnable_spans() -> list[tuple[int, int]]:
    """Return spans of PFNs that a long-term pin moves pages out of, found without this package's own map.

    ZONE_MOVABLE by /proc/zoneinfo; CMA by what it does: the pageblocks out of which io_uring moved pages.
    """
    spans = []
    zone, spanned = "", 0
    for line in Path("/proc/zoneinfo").read_text(encoding="ascii").splitlines():
        words = line.replace(",", "").split()
        if line.startswith("Node"):
            zone = words[3]
        elif words[:1] == ["spanned"]:
            spanned = int(words[1])
        elif words[:1] == ["start_pfn:"] and zone == "Movable" and spanned:
            spans.append((int(words[1]), int(words[1]) + spanned))
    # CMA is lent once ordinary free memory is scarce: hold some, until enough has been moved out of it.
    block = (memory.thp_size() or 2 << 20) // PAGE
    blocks: set[int] = set()
    moved = 0
    while not spans and moved < ENOUGH and free_memory() > 4 * PROBE:
        piece = memory.Range.anonymous(PROBE, huge=False)
        piece.populate()
        before = pfns(piece.address, piece.pages)
        ring_once(piece.address, piece.length)
        after = pfns(piece.address, piece.pages)
        frames = [old for old, new in zip(before, after, strict=True) if old != new]
        moved += len(frames)
        blocks |= {frame // block for frame in frames}
        HELD.append(piece)
    return spans or [(number * block, (number + 1) * block) for number in sorted(blocks)]


def free_memory() -> int:
    line = next(
        line for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if "MemFree" in line
    )
    return int(line.split()[1]) << 10


def unpinnable_pages(count: int) -> memory.Range:
    """Gather `count` pages that lie in unpinnable memory."""
    if not SPANS:
        SPANS.extend(unpinnable_spans())
    chosen: list[tuple[int, int]] = []  # address, frame
    pieces = 0
    with contextlib.ExitStack() as stack:
        # The kernel lends CMA as it likes: take more until there are enough.
        while len(chosen) < count and (not pieces or free_memory() > 4 * PROBE):
            source = stack.enter_context(memory.Range.anonymous(PROBE, huge=False))
            source.populate()
            pieces += 1
            frames = pfns(source.address, source.pages)
            chosen += [
                (source.address + index * PAGE, frame)
                for index, frame in enumerate(frames)
                if any(low <= frame < end for low, end in SPANS)
            ]
        print(f"# {len(chosen)} pages in {pieces} pieces lie in {len(SPANS)} unpinnable spans", flush=True)
        if len(chosen) < count:
            raise SystemExit(f"Bail out! only {len(chosen)} pages in unpinnable memory")
        chosen = chosen[:count]
        target = memory.Range.anonymous(count * PAGE, reserve_only=True)
        memory.gather([address for address, _ in chosen], target.address)
    check("gather keeps the physical pages", pfns(target.address, count) == [frame for _, frame in chosen])
    return target


def registrations(pd: verbs.ProtectionDomain, expect_refusal: bool) -> None:
    pages = 8
    length = pages * PAGE
    access = verbs.access_bits(["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ"])
    for owner, take in TAKERS.items():
        with unpinnable_pages(pages) as buffer:
            buffer.fill(16)
            before = buffer.checksum()
            frames = pfns(buffer.address, pages)
            pin = take(buffer.address, length)
            want = "ENOMEM" if expect_refusal and owner != "io-uring" else None
            for name, register in (
                (
                    "ibv_reg_mr_iova2",
                    lambda: pd.reg_mr_iova2(buffer.address, length, buffer.address, access).dereg(),
                ),
                ("ibv_reg_mr", lambda: pd.reg_mr(buffer.address, length, access).dereg()),
                ("io_uring", lambda: ring_once(buffer.address, length)),
            ):
                got = errno_of(register)
                check(f"{owner} pin held, {name}: {want or 'success'}", got == want, f"errno {got}")
            moved = pfns(buffer.address, pages) != frames
            should_move = owner == "io-uring" and expect_refusal
            check(
                f"{owner} pin held: pages {'moved' if should_move else 'did not move'}", moved == should_move
            )
            check(f"{owner} pin is alive after the registrations", pin.alive())
            pin.release()
            got = errno_of(lambda: pd.reg_mr_iova2(buffer.address, length, buffer.address, access).dereg())
            check(f"{owner} pin released: registration succeeds", got is None, f"errno {got}")
            if expect_refusal:
                after = pfns(buffer.address, pages)
                check(f"{owner} pin released: and every page moved", not set(after) & set(frames))
            check(f"{owner}: bytes unchanged by all that", buffer.checksum() == before)


def ring_once(address: int, length: int) -> None:
    with FixedBuffers() as ring:
        ring.register(address, length)
        ring.unregister()


def other_arguments(pd: verbs.ProtectionDomain) -> None:
    access = verbs.ACCESS["LOCAL_WRITE"]
    with memory.Range.anonymous(16 * PAGE) as buffer:
        for name, call in {
            "length 0, unaligned": lambda: pd.reg_mr_iova2(buffer.address + 1, 0, buffer.address + 1, access),
            "unaligned": lambda: pd.reg_mr_iova2(buffer.address + 123, 4567, buffer.address + 123, access),
            "iova of its own": lambda: pd.reg_mr_iova2(buffer.address, PAGE, 0x1000, access),
        }.items():
            region = call()
            check(f"{name}: registered", region.lkey != 0)
            region.dereg()
            region.dereg()
        for name, call in {
            "length 0, aligned": lambda: pd.reg_mr_iova2(buffer.address, 0, buffer.address, access),
            "2^43 bytes": lambda: pd.reg_mr_iova2(buffer.address, 1 << 43, buffer.address, access),
            "2^46 bytes": lambda: pd.reg_mr_iova2(buffer.address, 1 << 46, buffer.address, access),
            "2^64 - 1 bytes": lambda: pd.reg_mr_iova2(buffer.address, (1 << 64) - 1, buffer.address, access),
            "unknown access flag": lambda: pd.reg_mr_iova2(buffer.address, PAGE, buffer.address, 1 << 18),
            "remote write without local write": lambda: pd.reg_mr(buffer.address, PAGE, 2),
            "unmapped": lambda: pd.reg_mr(0x1000, PAGE, access),
            "dma-buf on rxe": lambda: pd.reg_dmabuf_mr(0, 0, PAGE, 0, access),
        }.items():
            got = errno_of(call)
            check(f"{name}: refused", got is not None, str(got))


def one_transfer(device: verbs.Device, pd: verbs.ProtectionDomain, opcode: str, length: int) -> None:
    access = verbs.access_bits(["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ"])
    with memory.Range.anonymous(length) as source, memory.Range.anonymous(length) as target:
        source.fill(17)
        target.fill(18)
        iova = (0x7000_0000_0000 if length > 1 else target.address) + target.address % PAGE
        with (
            pd.reg_mr(source.address, length, access) as left,
            pd.reg_mr_iova2(target.address, length, iova, access) as right,
        ):
            transfer = verbs.loopback_transfer
            got = errno_of(lambda: transfer(device, 1, None, left, right, length, opcode, timeout=20))
        same = source.read(0, length) == target.read(0, length)
    check(f"loopback {opcode} of {length} bytes moves them", got is None and same, f"errno {got}")


def loopback(device: verbs.Device, pd: verbs.ProtectionDomain) -> None:
    for opcode in verbs.OPCODES:
        for length in (1, PAGE + 1, 1 << 20):
            one_transfer(device, pd, opcode, length)
    with memory.Range.anonymous(PAGE) as source, memory.Range.anonymous(PAGE) as target:
        source.fill(19)
        target.fill(20)
        before = target.checksum()
        with (
            pd.reg_mr(source.address, PAGE, verbs.ACCESS["LOCAL_WRITE"]) as left,
            pd.reg_mr(target.address, PAGE, verbs.ACCESS["LOCAL_WRITE"]) as right,
        ):
            try:
                verbs.loopback_transfer(device, 1, None, left, right, PAGE, "RDMA_WRITE")
                text = "no error"
            except OSError as error:
                text = str(error)
        check("loopback into an MR without REMOTE_WRITE is refused", "work completion" in text, text)
        check("and changes nothing", target.checksum() == before)


def hot_loop(pd: verbs.ProtectionDomain) -> None:
    """How much the Python wrapper adds to one registration and deregistration."""
    count = 2000
    access = verbs.ACCESS["LOCAL_WRITE"]
    with memory.Range.anonymous(PAGE) as buffer:
        buffer.populate()
        best_c = best_python = 1e9
        for _ in range(3):
            start = time.perf_counter()
            pd.register_loop(buffer.address, PAGE, access, count)
            best_c = min(best_c, time.perf_counter() - start)
            start = time.perf_counter()
            for _ in range(count):
                pd.reg_mr_iova2(buffer.address, PAGE, buffer.address, access).dereg()
            best_python = min(best_python, time.perf_counter() - start)
    print(
        f"# one registration and deregistration: C {best_c / count * 1e6:.1f} µs, "
        f"Python {best_python / count * 1e6:.1f} µs",
        flush=True,
    )


def pyverbs_agrees(device: str, expect_refusal: bool) -> None:
    from regrepro.core import pyverbs_device

    missing = pyverbs_device.available()
    if missing:
        print(f"# skipped pyverbs: {missing}", flush=True)
        return
    check("pyverbs lists the device", device in pyverbs_device.devices())
    with pyverbs_device.PyverbsDevice(device) as registrar, unpinnable_pages(4) as buffer:
        length = 4 * PAGE
        pin = pins.pin_process_vm(buffer.address, length)
        want = "ENOMEM" if expect_refusal else None
        got = errno_of(lambda: registrar.reg_mr(buffer.address, length, 1).dereg())
        check(f"pyverbs.MR with the pin held: {want or 'success'}", got == want, f"errno {got}")
        pin.release()
        got = errno_of(lambda: registrar.reg_mr(buffer.address, length, 1).dereg())
        check("pyverbs.MR after the release: success", got is None, f"errno {got}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--expect-refusal", choices=("yes", "no"), default="yes")
    expect_refusal = parser.parse_args().expect_refusal == "yes"
    for owner in TAKERS:
        for name, length in LENGTHS.items():
            every_pin(owner, name, length)
    storm_during_creation()
    early_death()
    fork_while_held()
    errors_teach()
    device_name = rdma_device()
    with verbs.Device(device_name) as device:
        print(f"# {device.query()}", flush=True)
        print(f"# GIDs: {verbs.gids(device.name)}", flush=True)
        with device.pd() as pd:
            registrations(pd, expect_refusal)
            other_arguments(pd)
            loopback(device, pd)
            death_of_the_process(pd)
            hot_loop(pd)
    pyverbs_agrees(device_name, expect_refusal)
    deadline = time.monotonic() + 5  # a thread that was joined leaves /proc a moment later
    while len(list(Path("/proc/self/task").iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    check("no thread of a pin is left", len(list(Path("/proc/self/task").iterdir())) == 1)
    print(f"1..{len(results)}", flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
