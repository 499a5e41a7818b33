"""What docs/gates.md has an administrator do, done as it stands there: by a real Slurm, a real bisection."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import record_builder
import slurm

from document_blocks import the_block
from regrepro.lab.kernels import Kernels

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
GATES = ROOT / "docs/gates.md"
GATE = the_block(GATES, "# gate.sh NODE").text
PROLOG = (ROOT / "packaging/slurm-prolog-gate").read_text(encoding="utf-8")
WATCH_PROLOG = (ROOT / "packaging/slurm-prolog-watch").read_text(encoding="utf-8")

# In the place of regrepro: notes what it was asked where, and answers what a test wrote for this node.
REGREPRO = """#!/bin/sh
echo "$SLURMD_NODENAME $*" >>/var/log/asked
. "/var/log/answer.$SLURMD_NODENAME"
"""
# What it says goes to a file, which is not there where the node has no syslog.
LOGGER = """#!/bin/sh
echo "$SLURMD_NODENAME $*" >>/var/log/syslog
"""
# Each test has nodes of its own: what it does to them outlives it.
NODES = 25


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """A Slurm that is configured as the document says, with both prologs that are shipped."""
    if why := slurm.missing():
        pytest.skip(why)
    configuration = the_block(GATES, "Prolog=").text
    with slurm.Cluster(tmp_path_factory.mktemp("slurm") / "root", NODES, configuration) as made:
        made.write("/usr/local/bin/regrepro", REGREPRO, program=True)
        made.write("/usr/local/bin/logger", LOGGER, program=True)
        made.write("/usr/local/bin/gate.sh", GATE, program=True)
        made.write("/etc/slurm/prolog.d/slurm-prolog-gate", PROLOG, program=True)
        made.write("/etc/slurm/prolog.d/slurm-prolog-watch", WATCH_PROLOG, program=True)
        for node in made.nodes:
            answer(made, node, "exit 0")
        yield made


def answer(cluster: slurm.Cluster, node: str, does: str) -> None:
    """What regrepro does on a node."""
    cluster.write(f"/var/log/answer.{node}", does + "\n")


def asked(cluster: slurm.Cluster, node: str) -> list[str]:
    """What regrepro was asked on a node."""
    lines = cluster.place("/var/log/asked").read_text().splitlines()
    return [line.partition(" ")[2] for line in lines if line.split()[0] == node]


def said(cluster: slurm.Cluster, node: str) -> str:
    """What the prolog of the gate had to say on a node."""
    lines = cluster.place("/var/log/syslog").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith(f"{node} -t regrepro-gate"))


def drain(cluster: slurm.Cluster, node: str, reason: str) -> None:
    cluster.must("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")


def reservations(cluster: slurm.Cluster) -> str:
    return cluster.run("scontrol", "--oneliner", "show", "reservation")[1]


def completed(cluster: slurm.Cluster, job: str) -> None:
    """Wait for the end of a job that nothing holds."""
    cluster.until(lambda: cluster.job(job) == "COMPLETED None", f"job {job}")


def edited(script: str, old: str, new: str) -> str:
    """What an operator writes at the top of a script."""
    assert script.count(f"\n{old}") == 1
    return script.replace(f"\n{old}", f"\n{new}")


# gate.sh

ANSWERS = {
    "n1": ("echo fixed; exit 0", 0, "none"),
    "n2": ("echo exposed; exit 10", 10, "regrepro gate: reproduced (exit code 10), "),
    "n3": ("exit 125", 125, "regrepro gate: undecided (exit code 125), "),
    "n4": ("exit 11", 11, "regrepro gate: the gate itself failed (exit code 11), "),
    "n5": ("kill -9 $$", 137, "regrepro gate: the gate itself failed (exit code 137), "),
    "n6": ("sleep 60", 124, "regrepro gate: the gate itself failed (exit code 124), "),
}


def test_a_drained_node_comes_back_on_a_pass_alone(cluster: slurm.Cluster) -> None:
    """Every end of a run, on nodes that were drained for it and for which jobs wait."""
    cluster.write("/usr/local/bin/hasty.sh", edited(GATE, "limit=900", "limit=2"), program=True)
    waiting = {}
    for node, (does, _, _) in ANSWERS.items():
        answer(cluster, node, does)
        drain(cluster, node, "regrepro: new driver")
        waiting[node] = cluster.submit(node, "true")
    gates = {node: cluster.start("hasty.sh" if node == "n6" else "gate.sh", node) for node in ANSWERS}
    ended = {node: (gate.communicate(timeout=60)[0], gate.returncode) for node, gate in gates.items()}
    assert not reservations(cluster).count("regrepro-")
    for node, (_, code, reason) in ANSWERS.items():
        output, exit_code = ended[node]
        assert exit_code == code, output
        assert cluster.reason(node).startswith(reason), output
        [question, *_] = asked(cluster, node)
        assert question.startswith(
            "run --profile node --ask driver --cuda real --place online-movable --out /"
        )
        if code:
            assert cluster.states()[node] == "drained"
            assert cluster.job(waiting[node]).startswith("PENDING"), output
            assert len(asked(cluster, node)) == 1
    completed(cluster, waiting["n1"])
    # That job was a user's: it came through the prolog, which asked before it started.
    assert [question.split()[1] for question in asked(cluster, "n1")] == ["--profile", "pin_then_register"]


def test_a_node_without_regrepro_stays_drained(cluster: slurm.Cluster) -> None:
    drain(cluster, "n7", "regrepro: new driver")
    with without_regrepro(cluster):
        code, output = cluster.run("gate.sh", "n7")
    assert code == 127, output
    assert cluster.reason("n7").startswith("regrepro gate: the gate itself failed (exit code 127), ")
    # And when it is there, the same node goes through the gate as it is.
    code, output = cluster.run("gate.sh", "n7")
    assert (code, cluster.reason("n7"), cluster.states()["n7"]) == (0, "none", "idle"), output


def test_a_node_that_is_drained_for_another_reason_is_left_alone(cluster: slurm.Cluster) -> None:
    drain(cluster, "n8", "bad DIMM")
    code, output = cluster.run("gate.sh", "n8")
    assert code == 2 and "n8: left as it is: bad DIMM" in output
    code, output = cluster.run("gate.sh", "n99")
    assert code == 2 and "n99: left as it is: there is no such node" in output
    assert cluster.states()["n8"] == "drained" and cluster.reason("n8") == "bad DIMM"
    assert not reservations(cluster).count("regrepro-")


def test_a_node_in_service_is_asked_after_its_jobs_and_before_others(cluster: slurm.Cluster) -> None:
    """No job starts on it meanwhile; who drains it meanwhile has the last word."""
    running = cluster.submit("n9", "sleep 2")
    cluster.until(lambda: cluster.job(running) == "RUNNING None", "a job on n9, past the prolog")
    answer(cluster, "n9", "date +%s >/var/log/begin; sleep 2; date +%s >/var/log/end")
    gate = cluster.start("gate.sh", "n9")
    cluster.until(lambda: "regrepro-n9" in reservations(cluster), "the reservation")
    late = cluster.submit("n9", "date +%s >/var/tmp/late")
    cluster.until(lambda: cluster.place("/var/log/begin").exists(), "the gate to begin")
    assert cluster.job(running) == "COMPLETED None"
    drain(cluster, "n9", "bad fan")
    output, _ = gate.communicate(timeout=60)
    assert gate.returncode == 0, output
    assert cluster.states()["n9"] == "drained" and cluster.reason("n9") == "bad fan"
    assert cluster.job(late).startswith("PENDING")
    answer(cluster, "n9", "exit 0")
    cluster.must("scontrol", "update", "nodename=n9", "state=resume")
    completed(cluster, late)
    times = [
        int(cluster.place(path).read_text()) for path in ("/var/log/begin", "/var/log/end", "/var/tmp/late")
    ]
    assert times == sorted(times)


def test_a_gate_that_is_stopped_opens_nothing(cluster: slurm.Cluster) -> None:
    """Interrupted it drains; killed it leaves the node closed."""
    for node in ("n10", "n11"):
        answer(cluster, node, f"touch /var/log/{node}; sleep 2")
        drain(cluster, node, "regrepro: new driver")
    gates = {node: cluster.start("gate.sh", node) for node in ("n10", "n11")}
    for node in gates:
        cluster.until(cluster.place(f"/var/log/{node}").exists, f"the gate of {node} to begin")
    # nsenter stays between us and the shell: by its name, in the cluster's own process namespace.
    for node, signal in (("n10", "TERM"), ("n11", "KILL")):
        [pid] = pids(cluster, f"gate.sh {node}")
        cluster.must("kill", f"-{signal}", pid)
    output, _ = gates["n10"].communicate(timeout=60)
    assert gates["n10"].returncode == 130, output
    assert cluster.states()["n10"] == "drained"
    assert cluster.reason("n10").startswith("regrepro gate: interrupted (exit code 130), ")
    gates["n11"].communicate(timeout=60)
    user = cluster.submit("n11", "true")
    cluster.until(lambda: "Reserv" in cluster.job(user) or "ReqNode" in cluster.job(user), "the job to wait")
    assert "regrepro-n11" in reservations(cluster) and "regrepro-n10" not in reservations(cluster)
    code, output = cluster.run("gate.sh", "n11")
    assert code == 2, output  # another gate has it
    answer(cluster, "n11", "exit 0")
    cluster.must(*["scontrol", "delete", "reservation=regrepro-n11"])
    completed(cluster, user)


def pids(cluster: slurm.Cluster, command: str) -> list[str]:
    """The processes of a script, as the cluster numbers them."""
    every = 'for p in /proc/[0-9]*; do echo "${p#/proc/} $(tr "\\0" " " <$p/cmdline)"; done'
    lines = [line.strip() for line in cluster.must("sh", "-c", every).splitlines()]
    return [line.split()[0] for line in lines if line.endswith(f"/usr/local/bin/{command}")]


# The prolog

HELD = {
    "n12": ("exit 10", "reproduced (exit code 10)"),
    "n13": ("exit 125", "undecided (exit code 125)"),
    "n14": ("kill -9 $$", "the gate itself failed (exit code 137)"),
    "n15": ("exit 2", "the gate itself failed (exit code 2)"),
}


def test_the_prolog_as_shipped_holds_a_node_that_does_not_pass(cluster: slurm.Cluster) -> None:
    jobs = {}
    for node, (does, _) in HELD.items():
        answer(cluster, node, f"echo 'the last line'; {does}")
        jobs[node] = cluster.submit(node, "true")
    for node, (_, what) in HELD.items():
        cluster.until(lambda node=node: cluster.states()[node] == "drained", f"{node} to be drained")
        assert cluster.reason(node).startswith(f"regrepro gate: {what}, /var/lib/regrepro/gate/job-")
        [line] = said(cluster, node).splitlines()
        assert f"job {jobs[node]}: held: {what}, " in line
        assert line.endswith(": the last line") or "137" in what
        # Requeued, and not held: another node may have it.
        cluster.until(
            lambda node=node: cluster.job(jobs[node]).startswith("PENDING"), "the job to be requeued"
        )
        assert "held" not in cluster.job(jobs[node]).lower()
        kept = cluster.reason(node).rpartition(" ")[2]
        assert "the last line" in (cluster.place(kept) / "output").read_text()
    # What is not a batch job cannot be requeued: it ends.
    answer(cluster, "n25", "exit 10")
    code, output = cluster.run("srun", "--nodelist=n25", "--chdir=/", "true", user=slurm.USER)
    assert code and "Prolog failure on node n25" in output
    assert cluster.reason("n25").startswith("regrepro gate: reproduced (exit code 10), ")
    passed = cluster.submit("n16", "true")
    completed(cluster, passed)
    assert not said(cluster, "n16") and not list(
        cluster.place("/var/lib/regrepro/gate").glob(f"job-{passed}.*")
    )
    # The prolog of watch ran, too, and said that there is no systemd which could start the service.
    syslog = cluster.place("/var/log/syslog").read_text()
    assert f"n16 -t regrepro-prolog -- job {passed}: regrepro-watch.service could not be started" in syslog
    [question] = asked(cluster, "n16")
    assert question.startswith("run pin_then_register --cuda real --ask driver ")


CHOSEN = {
    "n17": ("echo exposed; exit 10", ""),
    "n18": ("echo placement; exit 125", "let through: undecided (exit code 125), "),
    "n19": ("kill -9 $$", "let through: the gate itself failed (exit code 137), "),
    "n20": ("sleep 60", "let through: the gate itself failed (exit code 124), "),
}
GATE_PROLOG = "/etc/slurm/prolog.d/slurm-prolog-gate"


def test_the_prolog_lets_through_what_the_operator_chose(cluster: slurm.Cluster) -> None:
    """Never without a word; and `reproduced` is nobody's choice."""
    lenient = edited(PROLOG, "undecided=hold", "undecided=run")
    lenient = edited(edited(lenient, "broken=hold", "broken=run"), "limit=45", "limit=1")
    cluster.write(GATE_PROLOG, lenient, program=True)
    try:
        jobs = {}
        for node, (does, _) in CHOSEN.items():
            answer(cluster, node, does)
            jobs[node] = cluster.submit(node, "true")
        cluster.until(lambda: cluster.states()["n17"] == "drained", "n17 to be drained")
        for node, (_, what) in CHOSEN.items():
            if what:
                cluster.until(
                    lambda node=node: cluster.job(jobs[node]) == "COMPLETED None", f"the job of {node}"
                )
                assert cluster.reason(node) == "none"
                assert f"job {jobs[node]}: {what}" in said(cluster, node)
        with without_regrepro(cluster):
            job = cluster.submit("n21", "true")
            completed(cluster, job)
        assert f"job {job}: let through: the gate itself failed (exit code 127), " in said(cluster, "n21")
    finally:
        cluster.write(GATE_PROLOG, PROLOG, program=True)


def test_the_prolog_as_shipped_holds_where_regrepro_is_missing(cluster: slurm.Cluster) -> None:
    """127 from a program that is not on slurmd's PATH was a job that ran, once."""
    with without_regrepro(cluster):
        job = cluster.submit("n22", "true")
        cluster.until(lambda: cluster.states()["n22"] == "drained", "n22 to be drained")
    assert cluster.reason("n22").startswith("regrepro gate: the gate itself failed (exit code 127), ")
    assert f"job {job}: held: the gate itself failed (exit code 127), " in said(cluster, "n22")


def test_the_prolog_with_regrepro_itself(cluster: slurm.Cluster) -> None:
    """A record with a pin of our own: an answer for the kernel, none for a driver."""
    made = record_builder.reproduced_record()
    lines = [json.dumps(line) + "\n" for line in (made.header, *made.events)]
    cluster.write("/var/tmp/run/record.jsonl", "".join(lines))
    expected = {
        "n23": ("kernel", "reproduced (exit code 10)"),
        "n24": ("driver", "undecided (exit code 125)"),
    }
    jobs = {}
    for node, (question, _) in expected.items():
        judge = f"{sys.executable} -m regrepro judge /var/tmp/run --no-write --ask {question}"
        answer(cluster, node, f"exec {judge}")
        jobs[node] = cluster.submit(node, "true")
    for node, (question, what) in expected.items():
        cluster.until(lambda node=node: cluster.states()[node] == "drained", f"{node} to be drained")
        assert cluster.reason(node).startswith(f"regrepro gate: {what}, ")
        assert f"job {jobs[node]}: held: {what}, " in said(cluster, node)
        assert f": Asked {question} (" in said(cluster, node)


@contextlib.contextmanager
def without_regrepro(cluster: slurm.Cluster) -> Iterator[None]:
    """Meanwhile there is no `regrepro` on any node."""
    here = cluster.place("/usr/local/bin/regrepro")
    away = here.with_suffix(".away")
    here.rename(away)
    try:
        yield
    finally:
        away.rename(here)


def test_nothing_is_left_of_a_cluster_whose_test_was_killed(tmp_path: Path) -> None:
    """Every daemon is in the process namespace, and that ends with us."""
    if why := slurm.missing():
        pytest.skip(why)
    code = (
        "import pathlib, sys, time, slurm\n"
        "with slurm.Cluster(pathlib.Path(sys.argv[1]), 1) as cluster:\n"
        "    print(cluster.namespace(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "root")],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    namespace = process.stdout.readline().strip()

    def inside() -> list[str]:
        found = []
        for link in Path("/proc").glob("[0-9]*/ns/pid"):
            with contextlib.suppress(OSError):
                found += [link.parts[2]] if str(link.readlink()) == namespace else []
        return found

    began = len(inside())
    process.kill()
    process.wait()
    assert began >= 4  # munged, slurmctld, slurmd and the namespace's first
    end = time.monotonic() + 10
    while inside():
        assert time.monotonic() < end, inside()
        time.sleep(0.1)


# git bisect

BISECT = the_block(GATES, "# bisect.sh:").text
BISECT_RUN = the_block(GATES, "git bisect start BAD GOOD").text
IMAGES = {"x86_64": "arch/x86/boot/bzImage", "aarch64": "arch/arm64/boot/Image"}
# A build that ends at once: the tree gets the image and the modules of a kernel that is built already.
MAKEFILE = """built := $(shell cat built)
all:
	rm -rf arch include kernel .virtme_mods
	mkdir -p {folder} include/config
	ln -s $(built)/vmlinuz {image}
	ln -s $(built)/kernel kernel
	ln -sf $(built)/System.map $(built)/modules.builtin $(built)/modules.builtin.modinfo .
	basename $(built) >include/config/kernel.release
	find {modules} -name '*.ko*' >modules.order
olddefconfig:
	cp $(built)/config .config
"""
# What soft-RoCE and the guest's file systems need; the whole is thousands.
MODULES = "kernel/{crypto,drivers/char,drivers/infiniband,drivers/net,drivers/virtio,fs,lib,net}"


def test_a_bisection_finds_the_commit_that_refuses(lab: Lab, tmp_path: Path) -> None:
    """5.10 pins a page of ZONE_MOVABLE in place, 6.12 must move it: two boots between GOOD and BAD."""
    trees = {}
    for series in ("5.10", "6.12"):
        lab.require(series)
        trees[series] = Kernels().get(series).modules
    tree = tmp_path / "linux"
    tree.mkdir()

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=tree, check=True)

    git("init", "-q")
    image = IMAGES[platform.machine()]
    (tree / "Makefile").write_text(
        "SHELL := bash\n" + MAKEFILE.format(image=image, folder=Path(image).parent, modules=MODULES)
    )
    (tree / "bisect.sh").write_text(BISECT)
    for number, series in enumerate(("5.10", "5.10", "6.12", "6.12")):
        (tree / "built").write_text(f"{trees[series]}\n")
        (tree / "number").write_text(str(number))
        git("add", "Makefile", "built", "number")
        git("commit", "-q", "-m", f"commit {number}: {series}")
        if number in (0, 3):
            git("tag", "BAD" if number else "GOOD")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", BISECT_RUN],
        cwd=tree,
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "is the first bad commit" in done.stdout and "    commit 2: 6.12" in done.stdout, done.stdout
    codes = re.findall(r"^\w+: regrepro exit code (\d+), ", done.stdout, re.M)
    assert sorted(codes) == ["0", "10"], done.stdout
