"""CUDA's scenarios in the booted guest, under each contract of the stand-in, held to what the write-up says.

    python tests/lab/guest_cuda.py [SCENARIO …]

Runs as root in a lab guest that has soft-RoCE and unpinnable memory. Prints TAP.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "tests" / "lab"))

from guest_audit import Tap, rdma_device  # noqa: E402

from regrepro import judge, runner  # noqa: E402
from regrepro.options import RunOptions  # noqa: E402
from regrepro.record import read_record  # noqa: E402
from regrepro.stage import nccl  # noqa: E402

OPTIONS = ("cuda_host_register_large.length=8M", "retained_registrations.count=8")
REPRODUCED, REFUSED_BY_CUDA = ("reproduced", "page-migration"), ("other-failure", "cuda-pin")
PINNED_FIRST, UNMET = ("not-reproduced", "pin"), ("unmet", None)
# By scenario: verdict and layer or basis, under standin:pin and under standin:longterm.
EXPECTED: dict[str, tuple[tuple[str, str | None], tuple[str, str | None]]] = {
    "cuda_host_alloc_then_register": (REPRODUCED, PINNED_FIRST),
    "cuda_host_register_shm": (REPRODUCED, PINNED_FIRST),
    "cuda_host_register_memfd": (REPRODUCED, PINNED_FIRST),
    "cuda_host_register_file": (("other-failure", "longterm-refused"), REFUSED_BY_CUDA),
    "cuda_host_register_large": (REPRODUCED, PINNED_FIRST),
    "nccl_send_connection": (REPRODUCED, PINNED_FIRST),
    "lazy_second_connection": (REPRODUCED, PINNED_FIRST),
    "retry_changes_placement": (REPRODUCED, PINNED_FIRST),
    "retained_registrations": (REPRODUCED, PINNED_FIRST),
    "gpu_buffer_dmabuf": (UNMET, UNMET),
    "gpu_buffer_peermem": (UNMET, UNMET),
    "peermem_teardown_race": (UNMET, UNMET),
}
WHY_UNMET = {
    "gpu_buffer_dmabuf": "has no dma-buf support: rdma_rxe answers EOPNOTSUPP",
    "gpu_buffer_peermem": "no peer-memory module (nvidia-peermem) is loaded",
    "peermem_teardown_race": "no peer-memory module (nvidia-peermem) is loaded",
}
# NCCL 2.17.1's default sizes on x86-64: protocol, bytes, memory, kind of MR.
CONNECTION = [
    ("fifo", 16384, "host", "ordinary"),
    ("LL", 524288, "host", "ordinary"),
    ("LL128", 4915200, "cuda", "dma-buf"),
    ("SIMPLE", 4194304 if nccl.sizes_of("auto")["SIMPLE"] == 4 << 20 else 1048576, "cuda", "dma-buf"),
]


def told(tap: Tap, events: Iterable[Mapping[str, Any]], cuda: str) -> None:
    """Every event that the stand-in touched says so."""
    mine = [
        event
        for event in events
        if event.get("owner") in ("cuda", cuda)
        or event.get("name") in ("cuda-memory", "nccl-connection", "dmabuf-export")
        or (event.get("name") == "nccl-registration" and event.get("protocol") in nccl.PROTOCOLS)
    ]
    silent = [event["seq"] for event in mine if event.get("stand_in") != cuda]
    tap.ok(len(mine) > 10 and not silent, f"{cuda}: each of its events says stand-in", (len(mine), silent))


def connection(tap: Tap, events: Iterable[Mapping[str, Any]], cuda: str) -> None:
    """The registration log is what NCCL's source gives, number for number."""
    log = [event for event in events if event.get("name") == "nccl-registration" and not event["control"]]
    log = [event for event in log if event["scenario"] == "nccl_send_connection"]
    seen = [(event["protocol"], event["length"], event["memory"], event["mr"]) for event in log]
    tap.ok(seen == CONNECTION, f"{cuda}: the log of a connection", seen)
    outcomes = [event["outcome"] for event in log]
    fails = cuda == "standin:pin"
    wanted = ["registered", "failed" if fails else "registered"]
    wanted += ["not-tried"] * 2 if fails else ["unmet"] * 2
    tap.ok(outcomes == wanted, f"{cuda}: what became of each registration", outcomes)
    tap.ok(log[1]["errno"] == ("ENOMEM" if fails else None), f"{cuda}: errno of the LL buffer", log[1])
    fields = {"address", "length", "memory", "direction", "protocol", "mr", "errno"}
    tap.ok(all(fields <= set(event) for event in log), f"{cuda}: every field that section 19 asks for")


def go_on(tap: Tap) -> None:
    """With the option to go on, the device parts are unmet on soft-RoCE, and say why."""
    options = RunOptions(cuda="standin:pin", option=("go_on=yes",), names=("nccl_send_connection",))
    with tempfile.TemporaryDirectory() as out:
        events = list(read_record(runner.run(options.names, options, Path(out) / "run")).events)
    log = [event for event in events if event.get("name") == "nccl-registration" and not event["control"]]
    seen = [event["outcome"] for event in log]
    tap.ok(seen == ["registered", "failed", "unmet", "unmet"], "a connection that goes on", seen)
    tap.ok("rdma_rxe" in log[-1]["why"], "why a device part is unmet", log[-1])


def contract(tap: Tap, cuda: str, names: tuple[str, ...]) -> None:
    """Run scenarios under one contract of the stand-in, and hold their verdicts to the table."""
    options = RunOptions(cuda=cuda, names=names)
    given = tuple(item for item in OPTIONS if item.split(".")[0] in names)
    options = dataclasses.replace(options, option=given)
    with tempfile.TemporaryDirectory() as out:
        record = read_record(runner.run(names, options, Path(out) / "run"))
    events = list(record.events)
    verdicts = {item["scenario"]: item for item in judge.judge_record(record)["verdicts"]}
    for name in names:
        item = verdicts[name]
        found = (item["verdict"], item["layer"] or item["basis"])
        wanted = EXPECTED[name][cuda == "standin:longterm"]
        tap.ok(found == wanted, f"{cuda}: {name} is {' '.join(map(str, wanted))}", item["reason"])
        if wanted in (REPRODUCED, PINNED_FIRST):
            tap.ok(item["pin_owner"] == cuda, f"{cuda}: it says whose pin it was", item["pin_owner"])
        if item["verdict"] == "reproduced":
            held = [control["name"] for control in item["controls"] if control["held"]]
            tap.ok(len(held) == len(item["controls"]) > 0, f"{cuda}: its controls held", item["controls"])
        if name in WHY_UNMET:
            tap.ok(WHY_UNMET[name] in item["reason"], f"{cuda}: {name} says why", item["reason"])
    told(tap, events, cuda)
    if "nccl_send_connection" in names:
        connection(tap, events, cuda)


def main(names: tuple[str, ...]) -> int:
    tap = Tap()
    rdma_device()
    chosen = names or tuple(EXPECTED)
    try:
        for cuda in ("standin:pin", "standin:longterm"):
            contract(tap, cuda, chosen)
        if "nccl_send_connection" in chosen:
            go_on(tap)
    except Exception:
        tap.ok(False, "the program came to its end", traceback.format_exc())
    return tap.end()


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
