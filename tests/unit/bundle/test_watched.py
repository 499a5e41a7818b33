"""A bundle of what `watch` recorded: nothing of the process that failed but what its failure needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import record_builder as build

import regrepro
from regrepro import judge
from regrepro.bundle.make import make_bundle
from regrepro.bundle.redact import Redactor
from regrepro.record import FILE_NAME, RecordWriter, read_record
from regrepro.watch import process
from regrepro.watch.evidence import Evidence, record_events
from regrepro.watch.failed_registration import FailedRegistration, Inner

SCHEMA = json.loads((Path(regrepro.__file__).parent / "schema" / "record-2.json").read_text())
CONTAINER = "5fe1c0ad" * 8
SECRETS = {
    "host": "fairlead-0417",
    "user": "mzelazny",
    "script": "train_orca.py",
    "argument": "--secret-flag",
    "program": "orca-trainer",
    "job name": "orca-next",
    "job": "88172634",
    "master": "berth-0001",
    "master's address": "10.83.201.17",
    "volume": "scratch-orca7",
    "shared memory": "orca-ring",
    "container": CONTAINER,
    "control group": "kubepods-burstable-pod1f.slice",
    "library": "/opt/orca-stack",
}
COMMAND = f"/usr/bin/python3 {SECRETS['script']} {SECRETS['argument']} quiet ro --to {SECRETS['user']}"
ENVIRON = {
    "RANK": "5",
    "WORLD_SIZE": "64",
    "MASTER_ADDR": SECRETS["master"],
    "MASTER_PORT": "29500",
    "SLURM_JOB_ID": SECRETS["job"],
    "SLURM_JOB_NAME": SECRETS["job name"],
    "CUDA_VISIBLE_DEVICES": "0,1",
    "NCCL_IB_HCA": "mlx5_0",
    "PMIX_RANK": SECRETS["master's address"],
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
}
MAPPINGS = [
    "7f0000000000-7f0000008000 rw-p 00000000 00:00 0 ",
    f"7f0000008000-7f0000009000 rw-s 00000000 00:01 99    /dev/shm/{SECRETS['shared memory']} (deleted)",
    f"7f0000009000-7f000000a000 rw-s 00000000 08:01 99    /{SECRETS['volume']}/data/{SECRETS['user']}.bin",
    "7f000000a000-7f000000b000 r-xp 00000000 08:01 98    /usr/lib/x86_64-linux-gnu/libc.so.6",
    "7f000000b000-7f000000c000 rw-s 00000000 00:06 97    /dev/nvidia0",
]


def proc_of(directory: Path) -> Path:
    """A /proc with one process of somebody's."""
    base = directory / "proc" / "4711"
    base.mkdir(parents=True)
    (base / "status").write_text(
        f"Name:\t{SECRETS['program']}\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0\nVmPin:\t60 kB\n"
    )
    (base / "limits").write_text(
        "Max locked memory         65536                65536                bytes\n"
    )
    (base / "environ").write_text("".join(f"{name}={value}\0" for name, value in ENVIRON.items()))
    (base / "cmdline").write_text(COMMAND.replace(" ", "\0") + "\0")
    (base / "cgroup").write_text(f"0::/{SECRETS['control group']}/cri-containerd-{CONTAINER}.scope\n")
    return directory / "proc"


def watch_run(directory: Path) -> Path:
    """A run directory as watch leaves it: the process is read, and written, by watch's own code."""
    seen = process.read_process(4711, proc_of(directory))
    assert seen.facts["cmdline"] == COMMAND and "AWS_SECRET_ACCESS_KEY" not in seen.facts["rank"]
    failure = FailedRegistration(
        4712,
        4711,
        SECRETS["program"],
        2000,
        "ib_uverbs_reg_mr",
        -12,
        "ibv_reg_mr_iova2",
        0x7F0000000000,
        32768,
    )
    failure.inner = [Inner(1900, "rxe_reg_user_mr", -12)]
    evidence = Evidence(failure, seen, 0x7F0000000000, 32768, MAPPINGS[0], MAPPINGS)
    trace = {
        "status": "complete",
        "why": "",
        "events": [{"t": 0.0, "tid": 4712, "fn": "rxe_reg_user_mr", "ret": -12, "caller": None}],
        "tree": [],
        "missing": [],
        "probed": ["pin_user_pages_fast"],
        "probed_failures": ["rxe_reg_user_mr"],
        "misses": 0,
        "overrun": 0,
    }
    run = directory / "run"
    run.mkdir()
    header = build.reproduced_record(hostname=SECRETS["host"]).header
    header["run"] = {**header["run"], "profile": "watch", "names": []}
    with RecordWriter(run / FILE_NAME, header) as writer:
        writer.event(
            "watch",
            what="started",
            functions=["ib_uverbs_reg_mr"],
            by_kprobe=[],
            missing={},
            copies=[
                "/usr/lib/x86_64-linux-gnu/libibverbs.so.1",
                f"{SECRETS['library']}/libibverbs.so.1 of 4711",
            ],
            followed=[
                {
                    "copy": f"{SECRETS['library']}/libibverbs.so.1 of 4711",
                    "verb": "ibv_reg_mr",
                    "at": "failure",
                }
            ],
            not_followed={f"{SECRETS['library']}/lib/libibverbs.so.1": "Permission denied"},
        )
        for kind, keys in record_events(evidence, trace, "failure-1"):
            writer.event(kind, **keys)
        told = {"layer": "memlock-accounting", "errno": "ENOMEM", "comm": SECRETS["program"], "count": 7}
        writer.event("watch", what="suppressed", failures=[told])
        row = {
            "fn": "rxe_reg_user_mr",
            "path": "host",
            "pid": 4711,
            "comm": "python3",
            "count": 1,
            "bytes": 4096,
        }
        writer.event("watch", what="registrations", registrations=[row], sizes=[])
        writer.event("run-end", outcome="finished")
    (run / "program.bt").write_text("BEGIN { }\n")
    return run


def test_nothing_private_of_a_watched_process_is_in_any_file(tmp_path: Path) -> None:
    run = watch_run(tmp_path)
    for text in (run / FILE_NAME).read_text().splitlines():
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))

    def left(**options: Any) -> set[str]:
        files = make_bundle(run, **options).files
        whole = b"".join(name.encode() + data for name, data in files.items()).lower()
        return {name for name, secret in SECRETS.items() if secret.lower().encode() in whole}

    assert left() == set()
    # The search itself finds them where they are kept.
    assert left(redact=False) == set(SECRETS)


def test_what_the_failure_needs_is_kept(tmp_path: Path) -> None:
    run = watch_run(tmp_path)
    bundle = make_bundle(run)
    lines = [json.loads(line) for line in bundle.files[FILE_NAME].splitlines()]
    by_event = {line.get("event"): line for line in lines}
    watched = by_event["scenario-begin"]["watched"]
    assert watched["rank"]["RANK"] == "5" and watched["rank"]["WORLD_SIZE"] == "64"
    assert watched["rank"]["CUDA_VISIBLE_DEVICES"] == "0,1" and watched["rank"]["NCCL_IB_HCA"] == "mlx5_0"
    assert watched["rank"]["SLURM_JOB_ID"].startswith("job-") and watched["rank"]["MASTER_ADDR"].startswith(
        "host-"
    )
    assert watched["cmdline"].startswith("[command-") and watched["cmdline"].endswith("7 words]")
    assert watched["cgroup"].startswith("/cgroup-") and watched["container"]["runtime"] == "kubepods"
    assert watched["uid"] == 1000 and watched["pid"] == 4711
    assert by_event["register"]["limits"] == {"memlock_soft": 65536, "vmpin": 61440}
    mappings = by_event["buffer"]["mappings"]
    assert mappings[0] == MAPPINGS[0] and mappings[3:] == MAPPINGS[3:]
    assert "/dev/shm/path-" in mappings[1] and mappings[1].endswith(" (deleted)")
    started, suppressed, registrations = [line for line in lines if line.get("event") == "watch"]
    assert started["copies"][0] == "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
    assert started["copies"][1].endswith("/libibverbs.so.1 of 4711")
    [followed] = started["followed"]
    assert followed["copy"] == started["copies"][1] and followed["at"] == "failure"
    [(path, why)] = started["not_followed"].items()
    assert path.startswith("/path-") and why == "Permission denied"
    # One program has one placeholder wherever it stands.
    assert suppressed["failures"][0]["comm"] == watched["comm"] and watched["comm"].startswith("program-")
    assert registrations["registrations"][0]["comm"] == "python3"
    # And the verdict is the same.
    [before] = judge.judge_record(read_record(run))["verdicts"]
    [after] = json.loads(bundle.files["verdicts.json"])["verdicts"]
    assert after["verdict"] == before["verdict"] == "other-failure"
    assert after["layer"] == before["layer"] == "memlock-accounting"
    assert "program.bt: no part of a run" in bundle.files["REDACTED.txt"].decode()


@pytest.mark.parametrize(
    ("comm", "private"),
    [
        ("python3.11", False),
        ("pt_main_thread", False),
        ("ib_write_bw", False),
        ("ibv_rc_pingpong", False),
        ("all_reduce_perf", False),
        ("NCCL Service 0", False),
        ("orca", True),
        ("python3-orca", True),
    ],
)
def test_a_program_that_many_have_keeps_its_name(comm: str, private: bool) -> None:
    shown = Redactor().json({"comm": comm}, "x")["comm"]
    assert (shown == "program-1") if private else (shown == comm)
