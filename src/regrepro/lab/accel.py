"""Whether KVM really works here: it may be present and abort, or hang at boot."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

from regrepro.errors import EnvironmentProblem
from regrepro.kernel.procfs import boot_id
from regrepro.lab.archive import write_atomically

PROBE_SECONDS = 8.0
_DEVICE = "/dev/kvm"
# A kernel without a root gets to here once everything before it has worked.
_WENT_THROUGH = b"VFS: Unable to mount root fs"


def kvm_accessible() -> bool:
    """Whether this user may open /dev/kvm."""
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def remembered(file: Path) -> bool | None:
    """Return what an earlier probe found during this boot of the host, None if there was none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        answer = json.loads(file.read_text(encoding="utf-8"))
        if answer["boot_id"] == boot_id() != "":
            return bool(answer["kvm"])
    return None


def remember(file: Path, works: bool, why: str) -> None:
    """Keep the answer for this boot of the host."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"boot_id": boot_id(), "kvm": works, "why": why}))


def require_kvm() -> None:
    """Raise `EnvironmentProblem` where KVM cannot be used at all."""
    if not kvm_accessible():
        exists = Path(_DEVICE).exists()
        raise EnvironmentProblem(
            "KVM cannot be used",
            why=f"{_DEVICE} cannot be opened" if exists else f"there is no {_DEVICE}",
            hint="leave --accel out, or add this user to the group kvm" if exists else "leave --accel out",
        )


def probe_command(command: list[str]) -> list[str]:
    """Return the QEMU command of a machine, turned into a boot that needs nothing but the CPU and memory."""
    probe: list[str] = []
    words = iter(command)
    for word in words:
        if word == "-initrd":
            next(words)
        elif word == "-append":
            consoles = [part for part in next(words).split() if part.startswith(("console=", "early"))]
            probe += ["-append", " ".join([*consoles, "panic=-1"])]
        else:
            probe.append(word)
    return probe


def probe(command: list[str], seconds: float = PROBE_SECONDS) -> tuple[bool, str]:
    """Boot the machine's own kernel on KVM, without a root. Return whether it got through, and why not.

    `command` is the QEMU command of the real machine with KVM: the same machine type, CPU model and memory.
    """
    try:
        process = subprocess.Popen(
            probe_command(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return False, f"QEMU cannot be started: {error.strerror}"
    assert process.stderr is not None
    said = b""
    deadline = time.monotonic() + seconds
    try:
        while _WENT_THROUGH not in said:
            left = deadline - time.monotonic()
            if left <= 0:
                return False, f"the kernel did not come up within {seconds:.0f} s"
            if select.select([process.stderr], [], [], left)[0]:
                data = os.read(process.stderr.fileno(), 65536)
                if not data:
                    last = said.decode("utf-8", "replace").strip().splitlines()
                    return False, last[-1] if last else "QEMU ended at once"
                said += data
        return True, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
