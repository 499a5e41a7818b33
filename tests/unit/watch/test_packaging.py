"""What starts `watch` on a fleet: the systemd unit, the DaemonSet, the Slurm prolog."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from regrepro.watch import lock
from regrepro.watch.commands import watch as command

PACKAGING = Path(__file__).parents[3] / "packaging"
UNIT = PACKAGING / "regrepro-watch.service"
PROLOG = PACKAGING / "slurm-prolog-watch"
# tests/lab/guest_watch.py runs watch with the unit's capabilities and no others.
CAPABILITIES = {
    "BPF",
    "PERFMON",
    "SYS_ADMIN",
    "SYS_PTRACE",
    "DAC_READ_SEARCH",
    "SYS_RAWIO",
    "SYSLOG",
    "SYS_RESOURCE",
}


def settings() -> dict[str, list[str]]:
    """The unit's settings; one that stands more than once has all its values."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#;[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def daemon_set() -> dict[str, Any]:
    return dict(yaml.safe_load((PACKAGING / "regrepro-watch-daemonset.yaml").read_text(encoding="utf-8")))


# systemd


def test_systemd_finds_nothing_wrong_with_the_unit() -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("needs systemd-analyze (package systemd)")
    done = subprocess.run(
        [tool, "verify", str(UNIT)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_has_the_capabilities_that_watch_needs_and_no_more() -> None:
    unit = settings()
    [bounding] = unit["CapabilityBoundingSet"]
    assert set(bounding.split()) == {f"CAP_{name}" for name in CAPABILITIES}
    assert "AmbientCapabilities" not in unit and unit["NoNewPrivileges"] == ["yes"]
    # What watch looks at must not be hidden from it: kcore and kallsyms, other processes, and their rights.
    for name in (
        "ProtectKernelTunables",
        "ProtectKernelLogs",
        "ProtectProc",
        "PrivateUsers",
        "PrivateDevices",
    ):
        assert name not in unit
    assert {"bpf", "perf_event_open"} <= set(unit["SystemCallFilter"][0].split())
    assert unit["SystemCallErrorNumber"] == ["EPERM"]  # what is refused is an error, and kills nothing
    assert unit["UMask"] == ["0077"] and unit["StateDirectoryMode"] == ["0700"]
    assert unit["RestrictNamespaces"] == unit["LockPersonality"] == unit["PrivateNetwork"] == ["yes"]


def test_the_unit_exposes_little() -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("needs systemd-analyze (package systemd)")
    done = subprocess.run(
        [tool, "security", "--offline=true", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposure is not None and float(exposure[1]) <= 3.5, done.stdout + done.stderr


def test_the_unit_can_write_where_watch_writes_and_stays_small() -> None:
    unit = settings()
    assert unit["StateDirectory"] == ["regrepro/watch"] and unit["ProtectSystem"] == ["strict"]
    [started] = unit["ExecStart"]
    assert "--out /var/lib/regrepro/watch" in started
    writable = [path.removeprefix("-") for path in unit["ReadWritePaths"][0].split()]
    assert writable[:2] == [str(lock.PATH), "/run/regrepro"]
    # What makes these must not be held by ProtectSystem=strict itself.
    makes, touches = unit["ExecStartPre"]
    assert makes.startswith("-+") and makes.split()[-1] == writable[2]
    assert touches.startswith("+") and all(path in touches for path in writable[:2])
    assert {"MemoryMax", "CPUQuota", "OOMScoreAdjust"} <= set(unit)
    # 2 is "cannot be watched": starting it again and again would not help.
    assert unit["Restart"] == ["on-failure"] and unit["RestartPreventExitStatus"] == ["2"]
    assert unit["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


# Kubernetes


def test_the_daemon_set_has_the_privileges_that_watch_needs_and_no_more() -> None:
    pod = daemon_set()["spec"]["template"]["spec"]
    assert pod["hostPID"] is True and pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostIPC", "serviceAccountName", "initContainers"} & set(pod)
    [container] = pod["containers"]
    context = container["securityContext"]
    assert set(context["capabilities"]["add"]) == CAPABILITIES and context["capabilities"]["drop"] == ["ALL"]
    assert "privileged" not in context and context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True and context["runAsUser"] == 0
    assert context["seccompProfile"] == {"type": "Unconfined"}  # bpf(2), perf_event_open(2)
    assert not {"ports", "env", "envFrom"} & set(container)
    assert {"cpu", "memory"} == set(container["resources"]["limits"])


def test_the_daemon_set_mounts_what_watch_reads_and_writes_and_no_more() -> None:
    pod = daemon_set()["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounts = {item["mountPath"]: item for item in container["volumeMounts"]}
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert {item["name"] for item in mounts.values()} == set(volumes)
    writable = {path for path, item in mounts.items() if not item.get("readOnly")}
    lock_path = str(lock.PATH)
    assert writable == {"/var/lib/regrepro", "/var/lib/node-exporter", lock_path, "/run/regrepro", "/tmp"}
    assert set(mounts) - writable == {"/sys"}
    # The lock and the journal are one for the node, in a container or not.
    for path in (lock_path, "/run/regrepro"):
        assert volumes[mounts[path]["name"]]["hostPath"]["path"] == path
    for given in container["command"]:
        option, _, path = given.partition("=")
        if path:
            assert any(path.startswith(f"{place}/") for place in writable), option


def test_the_daemon_set_selects_its_own_pods_and_calls_watch_rightly() -> None:
    whole = daemon_set()
    assert (whole["apiVersion"], whole["kind"]) == ("apps/v1", "DaemonSet")
    labels = whole["spec"]["template"]["metadata"]["labels"]
    assert whole["spec"]["selector"]["matchLabels"].items() <= labels.items()
    # Two on one node would refuse each other.
    assert whole["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
    [container] = whole["spec"]["template"]["spec"]["containers"]
    program, name, *options = container["command"]
    assert (program, name) == ("regrepro", "watch")
    with command.make_context("watch", options, resilient_parsing=False) as context:
        assert context.params["as_json"] is True and context.params["metrics"] is not None


# Slurm


def prolog(directory: Path, systemctl: str, logger: str = "exit 0") -> tuple[int, str, str]:
    """Run the prolog with other commands than the system's; return its exit code, output and calls."""
    calls = directory / "calls"
    calls.touch()
    for name, body in (("systemctl", systemctl), ("logger", logger)):
        file = directory / name
        file.write_text(f'#!/bin/sh\necho "{name} $*" >>{calls}\n{body}\n')
        file.chmod(0o755)
    done = subprocess.run(
        [str(PROLOG)],
        env={"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text()


IS_ACTIVE = "systemctl is-active regrepro-watch.service\n"
START = "systemctl start --no-block regrepro-watch.service\n"


def test_the_prolog_leaves_a_node_that_is_watched_alone(tmp_path: Path) -> None:
    assert prolog(tmp_path, "echo active") == (0, "", IS_ACTIVE)


@pytest.mark.parametrize("state", ["inactive", "failed", "activating"])
def test_the_prolog_starts_watch_says_what_it_was_and_does_not_wait(state: str, tmp_path: Path) -> None:
    """A service that fails again and again can be started, by `--no-block`, each time."""
    code, output, calls = prolog(tmp_path, f'[ "$1" = start ] || {{ echo {state}; exit 3; }}')
    assert (code, output) == (0, "") and calls.startswith(IS_ACTIVE + START)
    assert f"job 4711: regrepro-watch.service was {state} and is started; registrations that fail" in calls


@pytest.mark.parametrize(
    ("systemctl", "logger"),
    [
        ("echo Unit not found. >&2; exit 5", "exit 0"),
        ("exit 127", "exit 127"),
        ("kill -9 $$", "kill -9 $$"),
        ("exit 1", "echo no journal >&2; exit 1"),
    ],
)
def test_the_prolog_never_keeps_a_job_from_a_node(systemctl: str, logger: str, tmp_path: Path) -> None:
    code, output, calls = prolog(tmp_path, systemctl, logger)
    assert (code, output) == (0, "")
    assert calls.startswith(IS_ACTIVE + START)
    assert "logger -t regrepro-prolog -- job 4711: regrepro-watch.service could not be started" in calls


def test_the_prolog_does_not_wait_for_a_manager_that_does_not_answer(tmp_path: Path) -> None:
    begin = time.monotonic()
    assert prolog(tmp_path, "exec sleep 600")[:2] == (0, "")
    assert time.monotonic() - begin < 40


@pytest.mark.parametrize("name", ["regrepro-watch.service", "regrepro-watch-daemonset.yaml"])
def test_what_is_packaged_calls_watch_with_options_that_it_has(name: str) -> None:
    lines = [
        line
        for line in (PACKAGING / name).read_text(encoding="utf-8").splitlines()
        if line.startswith("ExecStart=") or line.lstrip().startswith("- --")
    ]
    given = set(re.findall(r" (--[a-z]+)", "\n".join(lines)))
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert {"--out", "--metrics"} <= given <= known
