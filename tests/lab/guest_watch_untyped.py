"""`regrepro watch` where the RDMA modules have no types of their own. Run as root in a lab guest; prints TAP.

Modules that DKMS or OFED built are often so. It takes the modules out, and loads copies without their .BTF.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import guest_device
import guest_watch
from guest_tap import check, results

from regrepro.lab import softroce
from regrepro.record import read_record

MODULES = ("ib_core", "ib_uverbs", "rdma_rxe")  # in the order in which they need one another


def without_types(folder: Path) -> None:
    """Load copies of the modules that have no types."""
    copies = []
    for name in MODULES:
        shown = subprocess.run(["modinfo", "-n", name], check=True, capture_output=True, text=True)
        packed, copy = Path(shown.stdout.strip()), folder / f"{name}.ko"
        read = {".xz": "xz", ".zst": "zstd"}.get(packed.suffix)
        data = packed.read_bytes()
        if read is not None:
            data = subprocess.run([read, "-dc"], check=True, input=data, capture_output=True).stdout
        copy.write_bytes(data)
        subprocess.run(["objcopy", "--remove-section", ".BTF", copy], check=True)
        copies.append(copy)
    subprocess.run(["rdma", "link", "delete", guest_device.device()], check=True)
    subprocess.run(["modprobe", "-r", *reversed(MODULES)], check=True)
    subprocess.run(["modprobe", "-a", "ip6_udp_tunnel", "udp_tunnel", "ib_cm"], check=False)
    subprocess.run(["modprobe", "-r", "ib_cm", "ib_core"], check=False)
    for copy in copies:
        subprocess.run(["insmod", copy], check=True)
    softroce.make_rxe()


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="regrepro-untyped-"))
    without_types(folder)
    left = [name for name in MODULES if (Path("/sys/kernel/btf") / name).exists()]
    check("the modules have no types", not left, str(left))
    name = guest_device.device()
    watcher = guest_watch.Watcher(folder / "watch", "--pins", "unpins")
    try:
        begin = time.monotonic()
        if check("it watches", watcher.said("watching:"), watcher.log.read_text()[-400:]):
            print(f"# it took {time.monotonic() - begin:.0f} s to be ready", flush=True)
            guest_watch.successes(watcher, name)
            guest_watch.held(watcher, name, True)
            events = read_record(record_of(watcher)).events
            slow = set(next(event for event in events if event["event"] == "watch")["by_kprobe"])
            of_modules = {"ib_uverbs_reg_mr", "rxe_reg_user_mr"}
            check("functions of the modules are followed by kprobes", of_modules <= slow, str(slow))
            check("those of the kernel by fexit", "pin_user_pages_fast" not in slow, str(slow))
    finally:
        watcher.process.kill()
        for line in watcher.log.read_text().splitlines():
            print(f"# watch: {line[:300]}", flush=True)
    print(f"1..{len(results)}", flush=True)
    return 0 if all(results) else 1


def record_of(watcher: Any) -> Path:
    """Return the run directory that it writes."""
    return next(path for path in sorted(watcher.out.iterdir()) if (path / "record.jsonl").exists())


if __name__ == "__main__":
    sys.exit(main())
