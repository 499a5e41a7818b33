"""The systemd unit of `watch` and the Slurm prolog, under a systemd that is PID 1.

Run as root in a lab guest. Prints TAP; exit code 0 when no line is `not ok`. Expects the unit where systemd
looks for those of this boot (/run/systemd/system).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import guest_bpf
import guest_device
from guest_tap import check, results, until

from regrepro.core import memory, verbs
from regrepro.kernel.node import decode_capabilities
from regrepro.record import read_record

UNIT = "regrepro-watch.service"
RECORDS = Path("/var/lib/regrepro/watch")
METRICS = Path("/var/lib/prometheus/node-exporter/regrepro_watch.prom")
PROLOG = Path(__file__).parents[2] / "packaging" / "slurm-prolog-watch"
READY_SECONDS = 300.0


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, (done.stdout + done.stderr).strip()


def shown(what: str) -> str:
    return run("systemctl", "show", "--value", "-p", what, UNIT)[1]


def journal() -> str:
    return run("journalctl", "--no-pager", "-o", "cat", "-u", UNIT)[1]


def left() -> str:
    """What follows the kernel, by whomever."""
    return " ".join(map(str, sorted(guest_bpf.programs())))


def errnos() -> list[str]:
    """The errno of each failure that lies in a record."""
    found = []
    for path in RECORDS.glob("*/record.jsonl"):
        for event in read_record(path).events:
            if event["event"] == "register":
                found.append(str(event["errno"]))
    return found


def main() -> int:
    comm = Path("/proc/1/comm").read_text().strip()
    check("systemd is PID 1", comm == "systemd", comm)
    run("systemctl", "start", UNIT)
    state = shown("ActiveState")
    check("without RDMA modules the unit does not start, and has not failed", state == "inactive", state)
    code, said = run("sh", str(PROLOG))
    check("the prolog never keeps a job from a node", code == 0, said)

    name = guest_device.device()
    code, said = run("systemctl", "start", UNIT)
    check("with them it starts", code == 0, said)
    ready = until(lambda: "watching:" in journal() or shown("ActiveState") != "active", READY_SECONDS)
    check("it comes to watch", ready and "watching:" in journal(), journal()[-300:])
    pid = shown("MainPID")
    check("it follows the kernel", bool(left()), left())
    status = Path(f"/proc/{pid}/status").read_text()
    effective = re.search(r"^CapEff:\s+(\w+)", status, re.M)
    has = decode_capabilities(int(effective[1], 16)) if effective else []
    allowed = shown("CapabilityBoundingSet").upper().split()
    check("with the unit's capabilities and no others", sorted(has) == sorted(allowed), f"{has} {allowed}")
    modes = {path: path.stat().st_mode & 0o777 for path in (RECORDS, *RECORDS.rglob("*"))}
    check("what it writes is root's alone", not any(mode & 0o077 for mode in modes.values()), str(modes))
    check("its system calls are filtered", "Seccomp:\t2" in status)
    code, said = run(sys.executable, "-m", "regrepro", "watch", "--out", "/tmp/other")
    check("another watch says who watches, and may try again", code == 125 and f"process {pid}" in said, said)

    with verbs.Device(name) as opened, opened.pd() as pd:
        try:
            pd.reg_mr(memory.PAGE_SIZE, memory.PAGE_SIZE, 7)
        except OSError as error:
            print(f"# {error}")
    check("a failure is recorded", until(lambda: errnos() == ["EFAULT"], 30), str(errnos()))

    def metrics() -> str:
        return METRICS.read_text() if METRICS.exists() else ""

    one = re.compile(r'^regrepro_watch_failures_total\{[^}]*layer="page-fault"[^}]*\} 1$', re.M)
    there = until(lambda: one.search(metrics()), 40)
    check("and counted in a directory that the unit has made", there, metrics())
    before = set(RECORDS.iterdir())
    code, said = run("systemctl", "reload", UNIT)
    check("reload begins a new record", until(lambda: set(RECORDS.iterdir()) - before, 20), said)
    check("and goes on", shown("ActiveState") == "active")

    run("kill", "-9", pid)
    gone = until(lambda: not left(), 20)
    check("kill -9: no BPF program is left", gone, left())
    anew = until(lambda: shown("ActiveState") == "activating", 20)
    check("and systemd will start it anew", anew, shown("ActiveState"))
    run("systemctl", "stop", UNIT)
    code, said = run("sh", str(PROLOG))
    active = until(lambda: shown("ActiveState") == "active", 60)
    check("the prolog starts it", code == 0 and active, f"{said} {shown('ActiveState')}")
    run("systemctl", "stop", UNIT)
    ended = [shown(what) for what in ("ActiveState", "Result", "ExecMainStatus")]
    check(
        "it stops cleanly",
        ended == ["inactive", "success", "0"] and not left(),
        f"{ended} {left()}",
    )
    for line in journal().splitlines():
        print(f"# {line[:300]}")
    print(f"1..{len(results)}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
