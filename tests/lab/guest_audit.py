"""Audits the booted guest and says in TAP whether it found exactly what the boot arguments put there.

    python tests/lab/guest_audit.py KIND        KIND: hugetlb_cma, cma, movablecore, none, failed

Runs as root in a lab guest. Expects of each kind: `hugetlb_cma` two nodes with 1 GiB each
(hugetlb_cma=2G), `cma` one area of 512 MiB (cma=512M), `movablecore` 512 MiB of ZONE_MOVABLE
(movablecore=512M), `none` no unpinnable memory, `failed` hugetlb_cma=2G of which one node got nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from regrepro.audit.audit import audit as _imported  # noqa: E402, F401
from regrepro.audit.commands import audit as audit_command  # noqa: E402
from regrepro.kernel import memorymap as _memorymap  # noqa: E402, F401

MIB = 1 << 20
NO_LONGTERM = "535.104.05"
LONGTERM_ON_X86 = "550.67"


class Tap:
    """Test Anything Protocol on standard output."""

    def __init__(self) -> None:
        self.count = 0
        self.failed = 0

    def ok(self, good: bool, what: str, detail: object = "") -> None:
        """State one check."""
        self.count += 1
        self.failed += not good
        print(f"{'ok' if good else 'not ok'} {self.count} - {what}", flush=True)
        if not good:
            print("".join(f"# {line}\n" for line in str(detail).splitlines()), end="", flush=True)

    def end(self) -> int:
        """Write the plan; return the exit status."""
        print(f"1..{self.count}", flush=True)
        return 1 if self.failed else 0


def run(*argv: str) -> None:
    """Run a command; what it says matters only where it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"# {' '.join(argv)}: {done.stderr.strip()}", flush=True)


def rdma_device() -> None:
    """Bring up a software RDMA device on a dummy network device, unless the lab has done so already."""
    if devices_here():
        return
    run("modprobe", "rdma_rxe")
    run("ip", "link", "add", "regrepro0", "type", "dummy")
    run("ip", "addr", "add", "10.99.0.1/24", "dev", "regrepro0")
    run("ip", "link", "set", "regrepro0", "up")
    run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "regrepro0")


def devices_here() -> list[str]:
    """Return the names of the RDMA devices that this kernel has."""
    folder = Path("/sys/class/infiniband")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def command(*arguments: str, user: int | None = None) -> tuple[int, str, str]:
    """Run `regrepro audit` in a child of this process: (exit status, output, errors).

    A child by fork, not a new interpreter: importing takes seconds where the processor is emulated.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os.chdir("/")
                if user is not None:
                    os.setgroups([])
                    os.setgid(user)
                    os.setuid(user)
                audit_command.main(list(arguments), prog_name="audit")
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, waited = os.waitpid(pid, 0)
        output.seek(0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(waited), output.read(), errors.read()


def audit(tap: Tap, what: str, expected: int, *arguments: str, user: int | None = None) -> dict[str, Any]:
    """Run the audit with --json, check its exit status and that it left no traceback; return what it
    found.
    """
    code, output, errors = command("--json", *arguments, user=user)
    tap.ok(code == expected, f"{what}: exit status {expected}", f"got {code}\n{errors}\n{output[-3000:]}")
    tap.ok("Traceback" not in errors, f"{what}: no traceback", errors)
    try:
        return dict(json.loads(output))
    except ValueError:
        return {"findings": [], "nodes": [], "facts": [], "exposure": []}


def finding(result: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return a finding by its id."""
    return next((one for one in result["findings"] if one["id"] == name), None)


def fact(result: dict[str, Any], group: str, name: str) -> Any:
    """Return a fact's value."""
    return next(
        (one["value"] for one in result["facts"] if (one["group"], one["name"]) == (group, name)), None
    )


def shape(result: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same on the machine and from captured files."""
    return {
        "findings": sorted((one["id"], one["severity"], one["title"]) for one in result["findings"]),
        "exposure": [(one["class"], one["state"]) for one in result["exposure"]],
    }


def near(value: float, wanted: float) -> bool:
    """Within two per cent: the kernel takes struct pages and rounding from a zone."""
    return abs(value - wanted) <= 0.02 * wanted + 4 * MIB


def check(tap: Tap, kind: str, result: dict[str, Any]) -> None:
    """Check that the audit found what is there and nothing else."""
    nodes = result["nodes"]
    cma = sum(node["cma"] for node in nodes)
    movable = sum(node["movable"] for node in nodes)
    ids = {one["id"]: one["severity"] for one in result["findings"]}
    unpinnable = finding(result, "unpinnable-memory") or {"severity": None, "explanation": ""}
    wanted = {"hugetlb_cma": 2048, "cma": 512, "failed": 1024}.get(kind, 0) * MIB
    tap.ok(near(cma, wanted) if wanted else cma == 0, f"CMA is {wanted // MIB} MiB", nodes)
    if kind == "movablecore":
        # The kernel rounds the start of ZONE_MOVABLE to its alignment, so it can be a little less.
        tap.ok(400 * MIB <= movable <= 512 * MIB, "ZONE_MOVABLE is about 512 MiB", nodes)
    else:
        tap.ok(movable == 0, "ZONE_MOVABLE is empty", nodes)
    tap.ok(
        unpinnable["severity"] == ("ok" if kind == "none" else "note"),
        "unpinnable memory as it is",
        unpinnable,
    )
    tap.ok(
        ("reservation-failed" in ids) == (kind == "failed"), "failed reservation told where there is one", ids
    )
    if kind == "hugetlb_cma":
        tap.ok([near(node["cma"], 1024 * MIB) for node in nodes] == [True, True], "1 GiB on each node", nodes)
    if kind in ("hugetlb_cma", "failed"):
        tap.ok("hugetlb_cma=2G" in unpinnable["explanation"], "it comes from hugetlb_cma=2G", unpinnable)
        tap.ok("cma-unused" in ids, "CMA that nobody uses is told", ids)
    if kind == "failed":
        lines = [
            str(item["value"])
            for item in (finding(result, "reservation-failed") or {"evidence": []})["evidence"]
        ]
        tap.ok(any("reservation failed" in line for line in lines), "with the kernel's own line", lines)
    if kind == "cma":
        tap.ok("cma=512M" in unpinnable["explanation"], "it comes from cma=512M", unpinnable)
    if kind == "movablecore":
        tap.ok("movablecore" in unpinnable["explanation"], "it comes from movablecore", unpinnable)
    tap.ok("cma-beyond-total" not in ids, "no CMA beyond CmaTotal", finding(result, "cma-beyond-total"))
    devices = fact(result, "rdma", "devices") or []
    names = [device["name"] for device in devices]
    tap.ok(len(names) == 1 and names == devices_here(), "the RDMA device is found", devices)


def main() -> int:
    """Run all checks for one kind of boot."""
    kind = sys.argv[1]
    tap = Tap()
    rdma_device()
    exposed = 0 if kind == "none" else 10
    here = audit(tap, "this node, no driver", 0)
    check(tap, kind, here)
    asked = audit(tap, f"with driver {NO_LONGTERM}", exposed, "--driver", NO_LONGTERM)
    tap.ok(
        {one["class"]: one["state"] for one in asked["exposure"]}.get("B")
        == ("not-exposed" if kind == "none" else "exposed"),
        "class B is judged by the memory",
        asked["exposure"],
    )
    audit(tap, f"with driver {LONGTERM_ON_X86}", 0, "--driver", LONGTERM_ON_X86, "--arch", "x86_64")
    audit(
        tap,
        f"with driver {LONGTERM_ON_X86} on arm64",
        exposed,
        "--driver",
        LONGTERM_ON_X86,
        "--arch",
        "aarch64",
    )
    # Without root nobody sees pageblock types, so that hidden CMA cannot be ruled out: it cannot be told.
    plain = audit(
        tap, "without root", 125 if kind == "none" else exposed, "--driver", NO_LONGTERM, user=65534
    )
    tap.ok(bool(plain["findings"]), "without root there are findings")
    with tempfile.TemporaryDirectory() as folder:
        collected = Path(folder) / "node"
        run("sh", str(ROOT / "scripts" / "collect.sh"), str(collected))
        archive = Path(folder) / "node.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(collected, "node")
        again = audit(
            tap, "from the collected folder", exposed, "--from", str(collected), "--driver", NO_LONGTERM
        )
        tap.ok(
            shape(again) == shape(asked), "the same findings from the folder", [shape(again), shape(asked)]
        )
        packed = audit(tap, "from the archive", exposed, "--from", str(archive), "--driver", NO_LONGTERM)
        tap.ok(
            shape(packed) == shape(asked), "the same findings from the archive", [shape(packed), shape(asked)]
        )
    return tap.end()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        print("Bail out! " + traceback.format_exc().replace("\n", " "), flush=True)
        sys.exit(1)
