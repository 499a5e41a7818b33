"""A Slurm on this machine: munge, slurmctld and several slurmds, in namespaces of their own.

Needs root, and Debian's slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins and munge; no systemd,
cgroups or database. Each place that a gate reads or writes (`/etc/slurm`, `/var/lib`, `/usr/local/bin`, …)
is a folder below the cluster's directory, so that documents run as they stand. The daemons end with the
process namespace, however the test ends; ports and the hostname are the namespace's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

HOSTNAME = "gatehost"  # not the name of any node: Slurm's name of a node is no hostname
PROGRAMS = [
    "slurmctld",
    "slurmd",
    "scontrol",
    "srun",
    "sbatch",
    "munged",
    "unshare",
    "nsenter",
    "setpriv",
    "ip",
]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER = 1  # `daemon`: somebody who is not root and has an entry in /etc/passwd everywhere
PLACES = ("/etc/slurm", "/etc/munge", "/run", "/usr/local/bin", "/var/lib", "/var/log", "/var/tmp")
READY_SECONDS = 30.0

# The first process of the namespace. Its end is the end of all others.
FIRST = """set -e
for place in {places}; do mount --bind "{directory}$place" "$place"; done
mount --bind {directory}/etc/hosts /etc/hosts
echo {hostname} >/proc/sys/kernel/hostname
ip link set lo up
# An address that is not loopback: without one, Slurm (AI_ADDRCONFIG) resolves none.
ip address add 192.0.2.1/32 dev lo
touch {directory}/mounted
sleep infinity &
wait
"""
CONFIGURATION = """ClusterName=gates
SlurmctldHost={hostname}(127.0.0.1)
SlurmUser=root
StateSaveLocation=/var/lib/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdPidFile=/run/slurmd.%n.pid
SlurmdSpoolDir=/var/lib/slurmd.%n
SlurmdLogFile=/var/log/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
ReturnToService=2
KillWait=1
NodeName=n[1-{nodes}] NodeHostname={hostname} NodeAddr=127.0.0.1 Port=[17001-{last}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    """Return why no Slurm can run here, or an empty string."""
    if os.geteuid() != 0:
        return "a Slurm of the test's own needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"needs {', '.join(lacking)} (packages of SLURM_PACKAGES in scripts/lib.sh)" if lacking else ""


class Cluster:
    """A Slurm of `nodes` nodes, n1, n2, …; `extra` is what a document has in slurm.conf."""

    def __init__(self, directory: Path, nodes: int, extra: str = "") -> None:
        self.directory = directory
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._extra = extra
        self._first: subprocess.Popen[bytes] | None = None

    def place(self, path: str) -> Path:
        """Where a path of the cluster's lies on this machine."""
        return self.directory / path.lstrip("/")

    def write(self, path: str, text: str, *, program: bool = False) -> None:
        """Write a file of the cluster's."""
        file = self.place(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755 if program else 0o644)

    # Up and down

    def __enter__(self) -> Cluster:
        for path in PLACES:
            self.place(path).mkdir(parents=True)
        # munged is strict about who may write above its socket.
        self.directory.chmod(0o755)
        self.place("/var/tmp").chmod(0o1777)
        for path in ("/etc/munge", "/var/lib/munge", "/var/log/munge"):
            self.place(path).mkdir(mode=0o700, exist_ok=True)
        key = self.place("/etc/munge/munge.key")
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in ("/run/munge", "/var/lib/slurmctld", *(f"/var/lib/slurmd.{node}" for node in self.nodes)):
            self.place(path).mkdir(mode=0o755)
        self.write("/etc/hosts", f"127.0.0.1 localhost {HOSTNAME}\n")
        count = len(self.nodes)
        own = CONFIGURATION.format(hostname=HOSTNAME, nodes=count, last=17000 + count)
        self.write("/etc/slurm/slurm.conf", own + self._extra)
        # Debian 12's (22.05) knows no such word and wants no control groups; 13's (24.11) must be told.
        version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout
        old = version.split()[1].startswith("22.")
        self.write("/etc/slurm/cgroup.conf", "" if old else "CgroupPlugin=disabled\n")
        first = FIRST.format(places=" ".join(PLACES), directory=self.directory, hostname=HOSTNAME)
        # Its death follows ours: nothing is left where a test is killed.
        spaces = ["--mount", "--propagation", "private", "--pid", "--mount-proc", "--net", "--uts", "--ipc"]
        self._first = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "unshare",
                *spaces,
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                first,
            ],
            stdin=subprocess.DEVNULL,
        )
        try:
            self.until((self.directory / "mounted").exists, "the namespaces")
            self.must("munged", "--num-threads=2")
            self.must("slurmctld", "-c")
            for node in self.nodes:
                self.must("slurmd", "-N", node)
            self.until(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "every node to be idle")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._first is not None
        self._first.kill()
        self._first.wait()

    def namespace(self) -> str:
        """The process namespace, as `/proc/PID/ns/pid` names it."""
        assert self._first is not None
        return str(Path(f"/proc/{self._first.pid}/ns/pid_for_children").readlink())

    # Commands

    def start(
        self, *command: str, user: int = 0, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command in the cluster; its output and errors are one text."""
        assert self._first is not None
        target = str(self._first.pid)
        # The process namespace is that of unshare's child, not its own. `--root`: we may be in a chroot.
        enter = ["nsenter", "--target", target, "--mount", "--net", "--uts", "--ipc", "--root"]
        enter += [f"--pid=/proc/{target}/ns/pid_for_children", "--wd=/"]
        became = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        return subprocess.Popen(
            [*enter, "--", *became, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": PATH, "LC_ALL": "C", **(environment or {})},
        )

    def run(self, *command: str, user: int = 0, timeout: float = 60.0) -> tuple[int, str]:
        """Run a command in the cluster; return its exit code and what it said."""
        process = self.start(*command, user=user)
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return process.returncode, said

    def must(self, *command: str, user: int = 0) -> str:
        """Run a command that may not fail; return what it said."""
        code, said = self.run(*command, user=user)
        assert code == 0, f"{' '.join(command)}: exit code {code}: {said}"
        return said.strip()

    # What Slurm knows

    def states(self) -> dict[str, str]:
        """The state of each node, without the mark of one that does not answer yet."""
        said = self.run("sinfo", "--noheader", "--Node", "--format=%N %T")[1]
        return {name: state for name, _, state in (line.partition(" ") for line in said.split("\n") if line)}

    def reason(self, node: str) -> str:
        """Why a node is drained, or `none`."""
        return self.must("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%E")

    def job(self, number: str) -> str:
        """The state of a job and, where it waits, what for."""
        return self.must("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T %r")

    def submit(self, node: str, command: str) -> str:
        """Submit a user's job to a node; return its number."""
        options = ["--parsable", f"--nodelist={node}", "--output=/dev/null", "--chdir=/"]
        return self.must("sbatch", *options, f"--wrap={command}", user=USER)

    def until(self, true: Callable[[], object], what: str, seconds: float = READY_SECONDS) -> None:
        """Wait for something; fail with the daemons' last words where it does not come."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"waited for {what}\n{self.log()}"
            time.sleep(0.1)

    def log(self) -> str:
        """The last lines of each daemon's log."""
        files: Sequence[Path] = sorted(self.place("/var/log").glob("**/*.log"))
        return "\n".join(f"--- {file.name}\n" + file.read_text(errors="replace")[-1500:] for file in files)
