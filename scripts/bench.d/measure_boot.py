"""A warm `lab run pin_then_register` beside a boot of the same machine that does nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import Row, Work, measurement, ratio

BOOT, MEMORY, CPUS = "cma=512M", "2G", "2"
REPRODUCED = 10


@measurement("warm `lab run pin_then_register` over a bare `vng … true` boot", where="host")
def boot(work: Work) -> list[Row]:
    """Time whole commands, one of each by turns, after one of each that is not counted."""
    from regrepro.lab.kernels import Kernels

    image = Kernels().get(work.kernel).image
    accel = _lab_run(work, 0)[1]  # also fetches and warms
    vng = str(Path(sys.executable).with_name("vng"))
    bare = [vng, "--run", str(image), "--force-9p", "--cpus", CPUS, "--memory", MEMORY]
    bare += ["--append", BOOT, *(["--disable-kvm"] if accel == "tcg" else []), "--exec", "true"]
    _timed(bare, 0)
    pairs = [(_lab_run(work, number)[0], _timed(bare, 0)) for number in range(1, min(work.rounds, 3) + 1)]
    return [ratio("warm lab run pin_then_register / vng true", pairs, bound=2.0)]


def _lab_run(work: Work, number: int) -> tuple[float, str]:
    out = work.directory / f"lab-run-{number}"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "regrepro", "lab", "run", "pin_then_register", "--kernel", work.kernel]
    command += [
        "--boot",
        BOOT,
        "--memory",
        MEMORY,
        "--cpus",
        CPUS,
        "--accel",
        work.accel,
        "--out",
        str(out),
        "--quiet",
    ]
    seconds = _timed(command, REPRODUCED)
    with (out / "record.jsonl").open() as record:
        return seconds, str(json.loads(record.readline())["lab"]["accel"])


def _timed(command: Sequence[str], expected: int) -> float:
    # vng calls virtme-run by its name.
    found = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    environment = os.environ | {"PATH": found}
    started = time.perf_counter()
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment
    )
    seconds = time.perf_counter() - started
    if done.returncode != expected:
        raise SystemExit(
            f"bench: {' '.join(map(str, command))} exited with {done.returncode}, not {expected}:\n"
            f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return seconds
