"""CUDA's scenarios in the booted guest, under each contract of the stand-in, held to what the write-up says.

    python tests/lab/guest_cuda.py [--refuses yes|no] [--place online-movable] [--options] [SCENARIO …]

Runs as root in a lab guest that has soft-RoCE and unpinnable memory, or can make it. `--refuses no`: a kernel
before 5.13, which pins in place. `--options`: NCCL's connection with each of its options, and nothing else.
Prints TAP.
"""

from __future__ import annotations

import argparse
import os
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
from regrepro.judge.names import names_of  # noqa: E402
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
# Before 5.13 a page that would not move was pinned in place, and ZONE_MOVABLE not looked at.
PINNED_IN_PLACE = ("not-reproduced", "kernel")
# Before 6.5 a writable file mapping could be pinned for long (writable_file_mapping_allowed(), mm/gup.c).
FILE_IS_REFUSED_SINCE = (6, 5)
WHY_UNMET = {
    "gpu_buffer_dmabuf": "has no dma-buf support: rdma_rxe answers EOPNOTSUPP",
    "gpu_buffer_peermem": "no peer-memory module (nvidia-peermem) is loaded",
    "peermem_teardown_race": "no peer-memory module (nvidia-peermem) is loaded",
}
# NCCL 2.17.1's default sizes on x86-64: protocol, bytes, memory, kind of MR.
SIMPLE = nccl.sizes_of("auto")["SIMPLE"]
FIFO = ("fifo", 16384, "host", "ordinary")
CONNECTION = [
    FIFO,
    ("LL", 524288, "host", "ordinary"),
    ("LL128", 4915200, "cuda", "dma-buf"),
    ("SIMPLE", SIMPLE, "cuda", "dma-buf"),
]
# By option: the log, and what becomes of each registration under standin:pin. A receiver has each protocol's
# buffer on the device; of two processes one registers before the other pins (ncclShmOpen); an ordinary MR of
# device memory wants peer memory.
REFUSED = ["registered", "failed", "not-tried", "not-tried"]
WITH_OPTION: dict[tuple[str, ...], tuple[list[tuple[str, int, str, str]], list[str]]] = {
    ("direction=recv",): (
        [("remote fifo", *FIFO[1:])] + [(part, size, "cuda", "dma-buf") for part, size, *_ in CONNECTION[1:]],
        ["registered", "unmet", "unmet", "unmet"],
    ),
    ("dmabuf=no",): ([one if one[2] == "host" else (*one[:3], "ordinary") for one in CONNECTION], REFUSED),
    ("relaxed_ordering=no",): (CONNECTION, REFUSED),
    ("process=multi",): (CONNECTION, ["registered", "registered", "unmet", "unmet"]),
    ("go_on=yes",): (CONNECTION, ["registered", "failed", "unmet", "unmet"]),
    ("go_on=yes", "dmabuf=no"): (
        [one if one[2] == "host" else (*one[:3], "ordinary") for one in CONNECTION],
        ["registered", "failed", "unmet", "unmet"],
    ),
    ("arch=arm64",): ([*CONNECTION[:3], ("SIMPLE", 1048576, "cuda", "dma-buf")], REFUSED),
    ("gpudirect=no",): (
        [FIFO, *((part, size, "host", "ordinary") for part, size, *_ in CONNECTION[1:])],
        REFUSED,
    ),
    ("ll_size=8K",): ([FIFO, ("LL", 8192, "host", "ordinary"), *CONNECTION[2:]], REFUSED),
}


def told(tap: Tap, events: Iterable[Mapping[str, Any]], cuda: str, more_than: int) -> None:
    """Every event that the stand-in touched says so, and there are more than so many."""
    mine = [
        event
        for event in events
        if event.get("owner") in ("cuda", cuda)
        or event.get("name") in ("cuda-memory", "nccl-connection", "dmabuf-export")
        or (event.get("name") == "nccl-registration" and event.get("protocol") in nccl.PROTOCOLS)
    ]
    silent = [event["seq"] for event in mine if event.get("stand_in") != cuda]
    good = len(mine) > more_than and not silent
    tap.ok(good, f"{cuda}: each of its events says stand-in", (len(mine), silent))


def connection(tap: Tap, events: Iterable[Mapping[str, Any]], cuda: str, *, fails: bool) -> None:
    """The registration log is what NCCL's source gives, number for number."""
    log = [event for event in events if event.get("name") == "nccl-registration" and not event["control"]]
    log = [event for event in log if event["scenario"] == "nccl_send_connection"]
    seen = [(event["protocol"], event["length"], event["memory"], event["mr"]) for event in log]
    tap.ok(seen == CONNECTION, f"{cuda}: the log of a connection", seen)
    outcomes = [event["outcome"] for event in log]
    wanted = ["registered", "failed" if fails else "registered"]
    wanted += ["not-tried"] * 2 if fails else ["unmet"] * 2
    tap.ok(outcomes == wanted, f"{cuda}: what became of each registration", outcomes)
    tap.ok(log[1]["errno"] == ("ENOMEM" if fails else None), f"{cuda}: errno of the LL buffer", log[1])
    fields = {"address", "length", "memory", "direction", "protocol", "mr", "errno"}
    tap.ok(all(fields <= set(event) for event in log), f"{cuda}: every field that section 19 asks for")


def with_options(tap: Tap) -> None:
    """Each option gives the log that NCCL's source gives; the device's parts are unmet here, and say why."""
    for given, (wanted, outcomes) in WITH_OPTION.items():
        options = RunOptions(cuda="standin:pin", option=given, names=("nccl_send_connection",), trace="off")
        with tempfile.TemporaryDirectory() as out:
            record = read_record(runner.run(options.names, options, Path(out) / "run"))
        log = [
            event
            for event in record.events
            if event.get("name") == "nccl-registration" and not event["control"]
        ]
        name = " ".join(given)
        seen = [(event["protocol"], event["length"], event["memory"], event["mr"]) for event in log]
        tap.ok(seen == wanted, f"{name}: the log of a connection", seen)
        found = [event["outcome"] for event in log]
        tap.ok(found == outcomes, f"{name}: what became of each registration", found)
        verbs = {event["verb"] for event in log[1:] if event["verb"]}
        ordered = "ibv_reg_mr" if given == ("relaxed_ordering=no",) else "ibv_reg_mr_iova2"
        tap.ok(verbs <= {ordered}, f"{name}: the verb", verbs)
        unmet = [event["why"] for event in log if event["outcome"] == "unmet"]
        reason = "no peer-memory module" if "dmabuf=no" in given else "rdma_rxe"
        tap.ok(all(reason in why for why in unmet), f"{name}: why a device part is unmet", unmet)


def contract(tap: Tap, cuda: str, names: tuple[str, ...], place: str, refuses: bool) -> None:
    """Run scenarios under one contract of the stand-in, and hold their verdicts to the table."""
    given = tuple(item for item in OPTIONS if item.split(".")[0] in names)
    options = RunOptions(cuda=cuda, names=names, option=given, place=place)
    kernel = tuple(map(int, os.uname().release.split(".")[:2]))
    with tempfile.TemporaryDirectory() as out:
        record = read_record(runner.run(names, options, Path(out) / "run"))
    events = list(record.events)
    verdicts = {names_of(item)[-1]: item for item in judge.judge_record(record)["verdicts"]}
    for name in names:
        item = verdicts[name]
        found = (item["verdict"], item["layer"] or item["basis"])
        wanted = EXPECTED[name][cuda == "standin:longterm"]
        if not refuses and wanted in (REPRODUCED, PINNED_FIRST):
            wanted = PINNED_IN_PLACE
        if name == "cuda_host_register_file" and cuda == "standin:pin" and kernel < FILE_IS_REFUSED_SINCE:
            wanted = PINNED_IN_PLACE
        tap.ok(found == wanted, f"{cuda}: {name} is {' '.join(map(str, wanted))}", item["reason"])
        if wanted in (REPRODUCED, PINNED_FIRST):
            tap.ok(item["pin_owner"] == cuda, f"{cuda}: it says whose pin it was", item["pin_owner"])
        if item["verdict"] == "reproduced":
            held = [control["name"] for control in item["controls"] if control["held"]]
            tap.ok(len(held) == len(item["controls"]) > 0, f"{cuda}: its controls held", item["controls"])
        if name in WHY_UNMET:
            tap.ok(WHY_UNMET[name] in item["reason"], f"{cuda}: {name} says why", item["reason"])
    told(tap, events, cuda, more_than=10 if set(names) == set(EXPECTED) else 2)
    if "nccl_send_connection" in names:
        connection(tap, events, cuda, fails=refuses and cuda == "standin:pin")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--refuses", choices=["yes", "no"], default="yes")
    parser.add_argument("--place", choices=["gather", "online-movable"], default="gather")
    parser.add_argument("--options", action="store_true")
    parser.add_argument("scenario", nargs="*")
    given = parser.parse_args(arguments)
    tap = Tap()
    rdma_device()
    try:
        if given.options:
            with_options(tap)
        else:
            for cuda in ("standin:pin", "standin:longterm"):
                contract(tap, cuda, tuple(given.scenario or EXPECTED), given.place, given.refuses == "yes")
    except Exception:
        tap.ok(False, "the program came to its end", traceback.format_exc())
    return tap.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
