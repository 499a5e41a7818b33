"""Held pins on the running kernel, as far as it allows an ordinary user."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from regrepro.core import pins
from regrepro.core.memory import PAGE_SIZE, Range

TAKERS: dict[str, Callable[[int, int], pins.HeldPin]] = {
    "process-vm": pins.pin_process_vm,
    "vmsplice": pins.pin_vmsplice,
    "io-uring": pins.pin_io_uring,
}
PAGES_A_THREAD = 2 * PAGE_SIZE // 8


def why_not(owner: str, pages: int) -> str | None:
    """Say what this machine lacks for a pin, or None; never skips for a failure that is ours."""
    with Range.anonymous(pages * PAGE_SIZE) as buffer:
        try:
            TAKERS[owner](buffer.address, buffer.length).release()
        except OSError as error:
            allowed = {errno.EPERM, errno.ENOSYS}
            if owner == "io-uring":
                allowed.add(errno.ENOMEM)  # RLIMIT_MEMLOCK
            assert error.errno in allowed, error
            return str(error)
    return None


@pytest.fixture(params=[(owner, pages) for owner in TAKERS for pages in (1, 5, PAGES_A_THREAD + 1)], ids=str)
def owner_and_pages(request: pytest.FixtureRequest) -> tuple[str, int]:
    owner, pages = request.param
    missing = why_not(owner, pages)
    if missing:
        pytest.skip(missing)
    return owner, pages


@pytest.fixture(params=TAKERS)
def take(request: pytest.FixtureRequest) -> Callable[[int, int], pins.HeldPin]:
    missing = why_not(request.param, 1)
    if missing:
        pytest.skip(missing)
    return TAKERS[request.param]


@pytest.fixture
def process_vm() -> Callable[[int, int], pins.HeldPin]:
    missing = why_not("process-vm", 1)
    if missing:
        pytest.skip(missing)
    return pins.pin_process_vm


@pytest.fixture
def buffer() -> Iterator[Range]:
    with Range.anonymous(4 * PAGE_SIZE, huge=False) as memory:
        memory.fill(5)
        yield memory


def threads() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def blocked_signals(thread: int) -> int:
    for line in Path(f"/proc/self/task/{thread}/status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            return int(line.split()[1], 16)
    raise AssertionError


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def pipes() -> set[int]:
    links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return {int(entry.name) for entry in links if str(entry.readlink()).startswith("pipe:")}


def only_these_are_left(expected: set[int]) -> bool:
    """Wait a little: a thread that was joined leaves /proc a moment later."""
    deadline = time.monotonic() + 5
    while threads() != expected:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_a_pin_is_alive_until_it_is_released_and_changes_nothing(owner_and_pages: tuple[str, int]) -> None:
    owner, pages = owner_and_pages
    before_threads, before_descriptors = threads(), descriptors()
    with Range.anonymous(pages * PAGE_SIZE, huge=False) as buffer:
        buffer.fill(1)
        checksum = buffer.checksum()
        pin = TAKERS[owner](buffer.address + 1, buffer.length - 2)
        assert pin.owner == owner
        assert (pin.address, pin.length) == (buffer.address + 1, buffer.length - 2)
        assert pin.alive()
        held_by = pin.thread_ids()
        assert threads() - before_threads == set(held_by)
        assert len(held_by) == (-(-pages // PAGES_A_THREAD) if owner == "process-vm" else 1)
        unblockable = 1 << signal.SIGKILL - 1 | 1 << signal.SIGSTOP - 1
        assert {blocked_signals(thread) for thread in held_by} == {(1 << 64) - 1 & ~unblockable}
        assert pin.thread_results() == [None] * len(held_by)
        assert buffer.checksum() == checksum
        pin.release()
        assert not pin.alive()
        pin.release()
        assert buffer.checksum() == checksum
        expected = -errno.EFAULT if owner == "process-vm" else 0
        assert pin.thread_results() == [expected] * len(held_by)
    assert only_these_are_left(before_threads)
    assert descriptors() == before_descriptors


def test_kinds_and_apis() -> None:
    expected = {
        "process-vm": ("pin", "process_vm_writev+userfaultfd"),
        "vmsplice": ("get", "vmsplice"),
        "io-uring": ("longterm", "io_uring_register"),
    }
    tried = 0
    with Range.anonymous(PAGE_SIZE) as memory:
        for owner, (kind, api) in expected.items():
            if why_not(owner, 1):
                continue
            with TAKERS[owner](memory.address, 1) as pin:
                assert (pin.kind, pin.api) == (kind, api)
            assert pin.released
            tried += 1
    if not tried:
        pytest.skip("this machine allows none of the three pins")


def test_a_storm_of_signals_changes_nothing(take: Callable[[int, int], pins.HeldPin], buffer: Range) -> None:
    seen = [0]

    def note(_number: int, _frame: object) -> None:
        seen[0] += 1

    checksum = buffer.checksum()
    before = signal.signal(signal.SIGALRM, note)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(20):
            pin = take(buffer.address, buffer.length)
            started = time.monotonic()
            while time.monotonic() < started + 0.01:
                pass
            assert pin.alive()
            pin.release()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen[0] > 10
    assert buffer.checksum() == checksum


def test_a_pin_dies_visibly_when_its_fault_is_answered(
    process_vm: Callable[[int, int], pins.HeldPin], buffer: Range
) -> None:
    pin = process_vm(buffer.address, buffer.length)
    (userfault,) = (
        int(entry.name)
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink() and str(entry.readlink()) == "anon_inode:[userfaultfd]"
    )
    os.close(userfault)
    deadline = time.monotonic() + 10
    while pin.alive():
        assert time.monotonic() < deadline, "a pin whose fault was answered is called alive"
        time.sleep(0.01)
    with pytest.raises(OSError) as caught:
        pin.release()
    assert caught.value.errno == errno.EIO


def test_a_drained_pipe_is_seen(buffer: Range) -> None:
    missing = why_not("vmsplice", 1)
    if missing:
        pytest.skip(missing)
    before = pipes()
    pin = pins.pin_vmsplice(buffer.address, buffer.length)
    reader, _ = sorted(pipes() - before)
    assert pin.alive()
    os.read(reader, 1)
    assert not pin.alive()
    pin.release()


def test_a_forked_child_holds_nothing_and_the_parent_everything(
    take: Callable[[int, int], pins.HeldPin], buffer: Range
) -> None:
    checksum = buffer.checksum()
    pin = take(buffer.address, buffer.length)
    child = os.fork()
    if child == 0:
        wrong = pin.alive()
        pin.release()
        names = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        wrong = wrong or any("userfaultfd" in name or "io_uring" in name for name in names)
        os._exit(int(wrong))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pin.alive()
    pin.release()
    assert buffer.checksum() == checksum


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_the_end_of_the_process_leaves_shared_memory_untouched(
    take: Callable[[int, int], pins.HeldPin], how: str
) -> None:
    with Range.memfd(8 * PAGE_SIZE) as shared:
        shared.fill(2)
        checksum = shared.checksum()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            pin = take(shared.address, shared.length)
            os.write(writer, b"y" if pin.alive() else b"n")
            if how == "SIGKILL":
                time.sleep(100)
            os._exit(0)
        os.close(writer)
        assert os.read(reader, 1) == b"y"
        os.close(reader)
        if how == "SIGKILL":
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert shared.checksum() == checksum


def test_a_forgotten_pin_is_released_with_a_warning(
    take: Callable[[int, int], pins.HeldPin], buffer: Range
) -> None:
    before = threads()
    pin = take(buffer.address, buffer.length)
    assert threads() != before
    with pytest.warns(ResourceWarning, match="dropped without release"):
        del pin
        gc.collect()
    assert only_these_are_left(before)


@pytest.mark.parametrize("owner", TAKERS)
def test_impossible_ranges_are_refused_and_leave_nothing(owner: str) -> None:
    before = threads(), descriptors()
    with Range.anonymous(2 * PAGE_SIZE, reserve_only=True) as reserved:
        unmapped = reserved.address
        for address, length in (
            (reserved.address, PAGE_SIZE),
            (reserved.address, 0),
            (reserved.address, -1),
            ((1 << 64) - PAGE_SIZE, 2 * PAGE_SIZE),
            (1 << 64, 1),
            (-1, 1),
            (reserved.address, 1 << 63),
        ):
            with pytest.raises(OSError) as caught:
                TAKERS[owner](address, length)
            assert caught.value.errno in (errno.EINVAL, errno.EFAULT, errno.ENOMEM, errno.EPERM, errno.ENOSYS)
            assert owner in str(caught.value)
    with pytest.raises(OSError) as caught:
        TAKERS[owner](unmapped, PAGE_SIZE)
    assert "not mapped" in str(caught.value)
    assert only_these_are_left(before[0])
    assert descriptors() == before[1]


def test_a_pipe_too_small_says_what_it_would_take() -> None:
    limit = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    with Range.anonymous(4 * limit, huge=False) as buffer:
        try:
            pin = pins.pin_vmsplice(buffer.address, buffer.length)
        except PermissionError as error:
            assert f"fs.pipe-max-size is {limit}" in str(error)
            assert str(buffer.length) in str(error)
        else:
            assert pin.alive()  # CAP_SYS_RESOURCE
            pin.release()


UNPRIVILEGED = """
import errno, os, sys
from regrepro.core import pins
from regrepro.core.memory import PAGE_SIZE, Range
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
with Range.anonymous(PAGE_SIZE) as buffer:
    try:
        pins.pin_process_vm(buffer.address, PAGE_SIZE).release()
    except OSError as error:
        print(errno.errorcode[error.errno], error)
    else:
        print("held")
"""


def test_an_ordinary_user_is_told_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    setting = Path("/proc/sys/vm/unprivileged_userfaultfd")
    if not setting.exists():
        assert "CONFIG_USERFAULTFD" in done.stdout
    elif setting.read_text().strip() == "1" or os.access("/dev/userfaultfd", os.R_OK | os.W_OK):
        assert done.stdout.startswith(("held", "EPERM"))
    else:
        assert done.stdout.startswith("EPERM ")
        assert "vm.unprivileged_userfaultfd=1" in done.stdout
