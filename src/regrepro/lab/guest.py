"""The lab's side inside the guest: `python -m regrepro.lab.guest SPEC.json`.

Makes soft-RoCE, runs what the spec asks for, and talks to the host in lines on standard output, which is a
virtio port. Under emulation every import counts: this file keeps to a few of the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

MARK = "regrepro-lab "
BEAT_SECONDS = 2.0


def tell(what: str, **keys: Any) -> None:
    """Tell the host something: one line, written at once."""
    os.write(1, f"{MARK}{json.dumps({'what': what, **keys})}\n".encode())


def start_beating() -> None:
    """Start a process that writes a line every two seconds: while they come, the guest's kernel is alive.

    It is no child of this process (the runner waits for its own children only), it is exempt from the OOM
    killer, and ends with this process.
    """
    owner = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - pathlib is one more import
            file.write("-1000")
        while os.path.exists(f"/proc/{owner}"):  # noqa: PTH110
            os.write(1, f'{MARK}{{"what": "beat"}}\n'.encode())
            time.sleep(BEAT_SECONDS)
    finally:
        os._exit(0)


def main(arguments: list[str]) -> int:
    """Run a spec. Return the exit code for the host: 0 done, 3 an error that was told, 4 a crash."""
    start_beating()
    tell("started")
    with open(arguments[0], encoding="utf-8") as file:  # noqa: PTH123
        spec = json.load(file)
    from regrepro.lab import token

    if not token.is_guest_of(spec["token"]):
        tell("error", text="this is not the guest that the spec was written for", code=2)
        return 3
    try:
        return _run(spec)
    except BaseException as error:
        from regrepro.errors import RegreproError

        if isinstance(error, RegreproError):
            tell("error", text=str(error), code=error.exit_code)
            return 3
        # The console is where the host looks when a guest ends for no known reason.
        traceback.print_exc(file=sys.stderr)
        tell("crash", text=f"{type(error).__name__}: {error}")
        return 4


def _run(spec: dict[str, Any]) -> int:
    loader = _load_modules()
    if spec["kind"] == "command":
        _finish_modules(loader)
        return _command(spec)
    # numpy takes seconds to import under emulation, the modules some to load: side by side.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import numpy  # noqa: F401

    _finish_modules(loader)
    from regrepro import runner
    from regrepro.options import RunOptions

    options = RunOptions.from_json(spec["options"])
    runner.run(options.names, options, spec["out"], lab=spec["lab"])
    tell("ended")
    return 0


def _command(spec: dict[str, Any]) -> int:
    """Run shell commands one after the other, each with its output in a file. For tests and benchmarks."""
    import subprocess

    for number, command in enumerate(spec["commands"]):
        tell("command", number=number)
        with open(f"{spec['out']}/{number}.out", "wb") as output:  # noqa: PTH123
            done = subprocess.run(
                ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            )
        with open(f"{spec['out']}/{number}.rc", "w") as file:  # noqa: PTH123
            file.write(str(done.returncode))
    tell("ended")
    return 0


def _load_modules() -> tuple[int, int]:
    """Start modprobe for soft-RoCE; return its PID and the pipe with what it says."""
    from regrepro.lab.softroce import MODULES

    reading, writing = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_DUP2, writing, 2)]
    environment = {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
    pid = 0
    for path in ("/usr/sbin/modprobe", "/sbin/modprobe"):
        if os.access(path, os.X_OK):
            pid = os.posix_spawn(path, [path, "-a", *MODULES], environment, file_actions=actions)
            break
    os.close(writing)
    return pid, reading


def _finish_modules(loader: tuple[int, int]) -> None:
    """Wait for modprobe and make the soft-RoCE device. What fails is told: scenarios then use io_uring."""
    pid, reading = loader
    said = b""
    while chunk := os.read(reading, 4096):
        said += chunk
    os.close(reading)
    if pid:
        os.waitpid(pid, 0)
    from regrepro.lab import softroce

    try:
        softroce.make()
        if not softroce.wait_for_gid():
            tell("note", text=f"{softroce.DEVICE} got no GID for {softroce.ADDRESS}")
    except OSError as error:
        why = said.decode("utf-8", "replace").strip().replace("\n", "; ")
        tell(
            "note", text=f"no soft-RoCE in this guest: {error.strerror or error}{f' ({why})' if why else ''}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
