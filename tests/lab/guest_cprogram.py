"""The exported C program against a real kernel, by the commands that its documents give. Prints TAP.

`python tests/lab/guest_cprogram.py`, as root: runs pin_then_register, exports it, builds and runs the
program. The guest needs unpinnable memory (`cma=512M`, `movablecore=512M`) on a kernel that refuses (since
5.13), and a compiler.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from guest_device import device
from guest_tap import check, results

from regrepro.record import read_record
from regrepro.report import cprogram

HELD, RELEASED = "pins held: 1: Cannot allocate memory", "pins held: 0"


def run(program: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout


def main() -> int:
    device()
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "run")
        subprocess.run(
            [sys.executable, "-m", "regrepro", "run", "pin_then_register", "--out", out], check=False
        )
        record = read_record(out)
        [area] = [event for event in record.events if event["event"] == "memory-map"][-1]["unpinnable_ranges"]
        source, program = Path(place, "p.c"), Path(place, "p")
        source.write_text(cprogram.render(record, "pin_then_register"))
        build = ["cc", "-Wall", "-Wextra", "-Werror", "-O2", "-o", program, source, "-libverbs", "-lpthread"]
        subprocess.run(build, check=True)

        code, said = run(program)
        by = "/proc/zoneinfo" if area[2] == "movable-zone" else "the kernel's log"
        check("it finds where its pages lie", f"unpinnable by {by}" in said, said)
        check("the registration fails under the pin, and says so", code == 1 and HELD in said, said)
        check(
            "released, it succeeds, and the pages move", f"{RELEASED}\n" in said and " 8 pages moved" in said
        )
        check("all pages were unpinnable", "8 of 8 are unpinnable" in said)

        code, said = run(program, f"{area[0]:#x}-{area[1] - 1:#x}")
        check("the range by hand gives the same", code == 1 and HELD in said and "assumed" not in said, said)

        code, said = run(program, "-n")
        check(
            "without a pin all registers, and none is said to be held",
            code == 0 and "held: 1" not in said,
            said,
        )

        code, said = run(program, "0x100-0x1ff")
        check(
            "a range that is not unpinnable is refused", code == 4 and "is no unpinnable memory" in said, said
        )

        # A limit fails the registration with and without the pin: nothing that a bisection may call bad.
        limited = ["setpriv", "--bounding-set=-ipc_lock", "prlimit", "--memlock=0:0", program]
        done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=300)
        check(
            "a failure by RLIMIT_MEMLOCK is no failure under a pin",
            done.returncode == 4 and "with no pin held" in done.stdout,
            f"{done.returncode} {done.stdout}{done.stderr}",
        )

        # No log to be read: what the record had is all that is left, and is said to be assumed.
        hidden = source.read_text().replace('"/dev/kmsg"', '"/nowhere"')
        source.write_text(hidden)
        subprocess.run(build, check=True)
        code, said = run(program)
        known = area[2] == "movable-zone" or "assumed, as recorded" in said
        check("without the kernel's log it goes by the record, and says so", code == 1 and known, said)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
