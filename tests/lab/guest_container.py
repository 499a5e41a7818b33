"""The DaemonSet's container, run by runc as Kubernetes would have it run. Run as root in a lab guest; prints
TAP.

`python tests/lab/guest_container.py`: what the container may and what it sees is read from
packaging/regrepro-watch-daemonset.yaml; what a container runtime adds by itself (masked paths, mounts) is as
containerd has it. The image is the guest's own file system. Exit code 0 when every line is `ok`, else 1.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import guest_bpf
import yaml
from guest_device import device
from guest_tap import check, results, until

from regrepro.core import memory, verbs
from regrepro.kernel.node import decode_capabilities
from regrepro.record import read_record

MANIFEST = Path(__file__).parents[2] / "packaging" / "regrepro-watch-daemonset.yaml"
PLACE = Path("/run/regrepro-container")
READY_SECONDS = 120.0
# pkg/cri of containerd: what containers see of /proc unless they are privileged.
MASKED = (
    "acpi",
    "asound",
    "kcore",
    "keys",
    "latency_stats",
    "timer_list",
    "timer_stats",
    "sched_debug",
    "scsi",
)
READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
PLAIN_MOUNTS = (
    ("/proc", "proc", "proc", ["nosuid", "noexec", "nodev"]),
    ("/dev", "tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
    ("/dev/shm", "tmpfs", "shm", ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
    ("/run", "tmpfs", "tmpfs", ["nosuid", "nodev", "mode=755"]),
)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def image() -> Path:
    """Return a root of its own: the guest's, and what is written lies in memory."""
    for name in ("upper", "work", "root"):
        (PLACE / name).mkdir(parents=True, exist_ok=True)
    layers = f"lowerdir=/,upperdir={PLACE}/upper,workdir={PLACE}/work"
    run("mount", "-t", "overlay", "overlay", "-o", layers, str(PLACE / "root"))
    return PLACE / "root"


def volume(item: dict[str, Any]) -> tuple[str, str]:
    """Make what a volume of the node needs to be there; return source and type of its mount."""
    if "emptyDir" in item:
        return "tmpfs", "tmpfs"
    path, kind = Path(item["hostPath"]["path"]), item["hostPath"].get("type", "")
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(path), "bind"


def config(spec: dict[str, Any], root: Path) -> dict[str, Any]:
    """Return the runtime's configuration (OCI) of the manifest's container."""
    (container,) = spec["containers"]
    context = container["securityContext"]
    capabilities = [f"CAP_{name}" for name in context["capabilities"]["add"]]
    assert context["capabilities"]["drop"] == ["ALL"] and context["runAsUser"] == 0
    assert context["seccompProfile"]["type"] == context["appArmorProfile"]["type"] == "Unconfined"
    mounts = [
        {"destination": at, "type": kind, "source": source, "options": options}
        for at, kind, source, options in PLAIN_MOUNTS
    ]
    volumes = {item["name"]: item for item in spec["volumes"]}
    for item in container["volumeMounts"]:
        source, kind = volume(volumes[item["name"]])
        options = ["rbind", "rprivate"] if kind == "bind" else ["nosuid", "nodev"]
        options.append("ro" if item.get("readOnly") else "rw")
        mounts.append({"destination": item["mountPath"], "type": kind, "source": source, "options": options})
    namespaces = ["mount", "ipc", "uts", "network"] + ([] if spec.get("hostPID") else ["pid"])
    command = container["command"]
    assert command[0] == "regrepro"
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": context["readOnlyRootFilesystem"]},
        "hostname": "node",
        "mounts": mounts,
        "process": {
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "args": [sys.executable, "-m", "regrepro", *command[1:]],
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"],
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": not context["allowPrivilegeEscalation"],
        },
        "linux": {
            "namespaces": [{"type": kind} for kind in namespaces],
            "maskedPaths": [*(f"/proc/{name}" for name in MASKED), "/sys/firmware"],
            "readonlyPaths": [f"/proc/{name}" for name in READ_ONLY],
        },
    }


def main() -> int:
    spec = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]["template"]["spec"]
    name = device()
    before = guest_bpf.programs()
    if not os.path.ismount("/sys/fs/cgroup"):
        run("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
    made = config(spec, image())
    (PLACE / "config.json").write_text(json.dumps(made), encoding="utf-8")
    command = made["process"]["args"]
    paths = {text.partition("=")[0]: text.partition("=")[2] for text in command if text.startswith("--")}
    log = PLACE / "log"
    with log.open("w") as errors, (PLACE / "out").open("w") as out:
        runtime = subprocess.Popen(
            ["runc", "run", "--bundle", str(PLACE), "watch"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
        )
    try:
        ready = until(lambda: "watching:" in log.read_text() or runtime.poll() is not None, READY_SECONDS)
        if not check(
            "the container comes to watch", ready and "watching:" in log.read_text(), log.read_text()[-300:]
        ):
            return 1
        state = json.loads(subprocess.run(["runc", "state", "watch"], capture_output=True, check=True).stdout)
        status = Path(f"/proc/{state['pid']}/status").read_text()
        found = re.search(r"^CapEff:\s+(\w+)", status, re.M)
        has = decode_capabilities(int(found[1], 16)) if found else []
        wanted = made["process"]["capabilities"]["effective"]
        check("with the manifest's capabilities and no others", sorted(has) == sorted(wanted), f"{has}")
        check(
            "/proc/kcore is hidden from it",
            _is_empty(Path("/proc", str(state["pid"]), "root", "proc", "kcore")),
        )
        check("its file system cannot be written to", not _can_write(state["pid"]))
        with verbs.Device(name) as opened, opened.pd() as pd:
            try:
                pd.reg_mr(memory.PAGE_SIZE, memory.PAGE_SIZE, 7)
            except OSError as error:
                print(f"# {error}")
        told = PLACE / "out"
        caught = until(lambda: told.read_text().count("\n") > 0, 30)
        line = json.loads(told.read_text().splitlines()[0]) if caught else {}
        check(
            "a failure of a process of the node is caught",
            (line.get("pid"), line.get("errno"), line.get("layer")) == (os.getpid(), "EFAULT", "page-fault"),
            str(line),
        )
        lies_in = Path("/var/lib/regrepro/watch")  # where the manifest's volume shows the records on the node
        check("its records go to the node", paths["--out"] == str(lies_in) and any(lies_in.iterdir()))
        metrics = Path("/var/lib/prometheus/node-exporter") / Path(paths["--metrics"]).name
        counted = until(
            lambda: metrics.exists() and 'failures_total{layer="page-fault"' in metrics.read_text(), 40
        )
        check("its metrics, too", counted, metrics.read_text()[:300] if metrics.exists() else "")
        os.kill(state["pid"], signal.SIGTERM)
        check("SIGTERM: it ends with 0", runtime.wait(60) == 0, log.read_text()[-300:])
        check("and leaves a complete record", not read_record(max(lies_in.iterdir())).problems)
        gone = until(lambda: not guest_bpf.programs() - before, 20)
        check("and no BPF program", gone)
    finally:
        if runtime.poll() is None:
            subprocess.run(["runc", "kill", "watch", "KILL"], check=False)
        for text in log.read_text().splitlines():
            print(f"# {text[:300]}", flush=True)
    print(f"1..{len(results)}", flush=True)
    return 0 if all(results) else 1


def _is_empty(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return not file.read(1)
    except OSError:
        return True


def _can_write(pid: int) -> bool:
    done = subprocess.run(
        ["nsenter", "--target", str(pid), "--mount", "touch", "/usr/regrepro-was-here"],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
