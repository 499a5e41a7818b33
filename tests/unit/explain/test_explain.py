"""What explain says beyond the corpus: grouping, narrowing by an audit, wrapping, the command line,
memory.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from audit_nodes import GIB, LIMITS, Node
from click.testing import CliRunner

from regrepro.audit.audit import audit
from regrepro.audit.places import open_place
from regrepro.explain import formats, text, traces
from regrepro.explain.commands import explain as command
from regrepro.explain.explain import Explainer, explain
from regrepro.explain.report import plain, ranges
from regrepro.explain.scan import Needles, read

CORPUS = Path(__file__).parent / "corpus"
WARN = (
    "gpu{host:02d}:{pid}:9 [0] misc/ibvwrap.cc:213 NCCL WARN Call to ibv_reg_mr_iova2 failed with error "
    "Cannot allocate memory\n"
)


def run(log: str | bytes, **options: Any) -> dict[str, Any]:
    data = log.encode() if isinstance(log, str) else log
    return explain([("log", io.BytesIO(data))], **options)


def status(result: dict[str, Any], cause: str, group: int = 0) -> str:
    return next(one["status"] for one in result["groups"][group]["causes"] if one["cause"] == cause)


def test_every_result_holds_to_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(
        resources.files("regrepro").joinpath("schema", "explain-1.json").read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in sorted(CORPUS.glob("*.log")):
        result = run(path.read_bytes())
        validator.validate(json.loads(json.dumps(result)))
        assert plain(result)


def test_the_same_failure_of_many_is_one_group() -> None:
    log = "".join(WARN.format(host=number % 50, pid=number) for number in range(3000))
    result = run(log)
    (group,) = result["groups"]
    assert group["count"] == 3000
    assert len(group["hosts"]) == 50
    assert len(group["samples"]) == 3
    assert (group["first"]["line"], group["last"]["line"]) == (1, 3000)


def audit_of(node: Node, folder: Path) -> dict[str, Any]:
    with open_place(node.write(folder)) as reader:
        return audit(reader)


LOG = WARN.format(host=1, pid=7)


def test_an_audit_without_unpinnable_memory_excludes_the_bug(tmp_path: Path) -> None:
    before = run(LOG)
    assert status(before, "page-migration") == "possible"
    after = run(LOG, audit=audit_of(Node().driver("535.104.05"), tmp_path / "node"))
    assert status(after, "page-migration") == "impossible"
    assert status(after, "migration-target") == "impossible"
    assert status(after, "peer-memory") == "impossible"
    assert status(after, "memlock-accounting") == "possible"
    assert after["audited"] is True


def test_an_audit_of_an_exposed_node_speaks_for_it(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("535.104.05")
    node.set("proc/self/limits", LIMITS.format(soft="65536", hard="65536"))
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "page-migration") == "supported"
    assert status(after, "memlock-accounting") == "supported"
    assert not [one for one in after["groups"][0]["causes"] if one["status"] == "decided"]


def test_ranks_without_a_limit_exclude_it(tmp_path: Path) -> None:
    node = Node().set("proc/77/limits", LIMITS.format(soft="unlimited", hard="unlimited"))
    node.set("proc/77/status", "Name:\tpython3\nCapEff:\t0\n").link("proc/77/fd/9", "/dev/infiniband/uverbs0")
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "memlock-accounting") == "impossible"


def test_a_longterm_driver_is_not_the_holder_but_another_can_be(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("550.67")
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "page-migration") == "possible"
    why = next(one["why"] for one in after["groups"][0]["causes"] if one["cause"] == "page-migration")
    assert "not the NVIDIA driver's pin" in why


def test_without_peermem_a_gpu_address_gives_efault(tmp_path: Path) -> None:
    log = LOG.replace("Cannot allocate memory", "Bad address")
    after = run(log, audit=audit_of(Node().driver("535.104.05"), tmp_path / "node"))
    assert status(after, "peer-memory") == "supported"


def test_an_old_kernel_excludes_the_bug(tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("535.104.05").without("commands/kallsyms.txt")
    node.set("proc/sys/kernel/osrelease", "5.10.0-46-amd64\n")
    node.set("proc/sys/kernel/version", "#1 SMP Debian 5.10.257-1 (2026-08-02)\n")
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "page-migration") == "impossible"


@pytest.mark.parametrize(
    "release", ["5.10.0-136.12.0.86.oe2203sp1.x86_64", "4.19.90-25.10.v2101.ky10.x86_64"]
)
def test_an_old_kernel_of_a_vendor_excludes_nothing(release: str, tmp_path: Path) -> None:
    node = Node().hugetlb_cma(3 * GIB).driver("535.104.05").without("commands/kallsyms.txt")
    node.set("proc/sys/kernel/osrelease", release)
    after = run(LOG, audit=audit_of(node, tmp_path / "node"))
    assert status(after, "page-migration") != "impossible"


MESSAGE = LOG.index("Call to") + len("Call to ibv_reg_")


@pytest.mark.parametrize("at", range(MESSAGE, len(LOG) - 1, 2))
@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_a_line_wrapped_anywhere_in_the_message_is_read(at: int, ending: str) -> None:
    """Terminals and collectors cut lines where they please."""
    (group,) = run(LOG[:at] + ending + LOG[at:])["groups"]
    assert (group["call"], group["errno"], group["count"]) == ("ibv_reg_mr_iova2", "ENOMEM", 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("-12", -12),
        ("0xfffffff4", -12),
        ("0xfffffffffffffff4", -12),
        ("4294967284", -12),
        ("8", 8),
        ("zz", None),
    ],
)
def test_return_values(value: str, expected: int | None) -> None:
    assert text.signed(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("failed with error Cannot allocate memory", "ENOMEM"),
        ("failed: -14", "EFAULT"),
        ("errno 22", "EINVAL"),
        ("returned ENOSPC", "ENOSPC"),
        ("RC: -12, Error: whatever", "ENOMEM"),
        ("nothing of it", None),
        ("step 12 of 22", None),
    ],
)
def test_errno_of(value: str, expected: str | None) -> None:
    assert text.errno_of(value) == expected


def test_needles_cover_the_rules() -> None:
    """Each fragment of the corpus that has an answer is found by the words that the scan looks for."""
    answers = json.loads((CORPUS / "answers.json").read_text(encoding="utf-8"))
    search = Needles((*formats.NEEDLES, *traces.NEEDLES))
    assert search.fast, "the C core is not built"
    for name, answer in answers.items():
        if answer["groups"]:
            with (CORPUS / f"{name}.log").open("rb") as file:
                assert list(read(file, search)), name


def test_scan_counts_lines_and_cuts_endless_ones() -> None:
    data = b"x" * 3_000_000 + b"\n" + b"ibv_reg_mr\n" * 3 + b"y" * 2_000_000
    for use_core in (True, False):
        found = list(read(io.BytesIO(data), Needles((b"ibv_reg_mr",), use_core=use_core)))
        assert [one.line for one in found] == [b"ibv_reg_mr"] * 3
        assert [one.number for one in found] == [2, 3, 4]


def test_binary_noise_says_nothing() -> None:
    result = run(bytes(range(256)) * 4096)
    assert result["groups"] == []
    assert result["remarks"] == []


def test_ranges() -> None:
    assert ranges([0, 1, 2, 3, 7]) == "0-3, 7"
    assert ranges([]) == ""


def test_command_line(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(LOG, encoding="utf-8")
    packed = tmp_path / "job.log.gz"
    packed.write_bytes(gzip.compress(LOG.encode()))
    shown = CliRunner().invoke(command, [str(log), str(packed)])
    assert shown.exit_code == 0
    assert "ibv_reg_mr_iova2 failed with ENOMEM, 2 times" in shown.output
    piped = CliRunner().invoke(command, ["--json"], input=LOG)
    assert json.loads(piped.output)["groups"][0]["errno"] == "ENOMEM"
    nothing = CliRunner().invoke(command, ["-"], input="all is well\n")
    assert nothing.exit_code == 0
    assert nothing.output == "No failed memory registration in standard input.\n"


def test_command_line_errors_are_one_line(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(LOG, encoding="utf-8")
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(LOG.encode() * 1000)[:60])
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}", encoding="utf-8")
    for arguments in (["/nonexistent"], [str(tmp_path)], [str(cut)], ["--audit", str(wrong), str(log)],
                      ["--audit", str(log), str(log)], ["--audit", "/nonexistent", str(log)]):  # fmt: skip
        shown = CliRunner().invoke(command, arguments)
        assert shown.exit_code == 2, arguments
        assert shown.output.count("\n") == 1, shown.output
        assert shown.output.startswith("regrepro explain: ")


def test_command_takes_an_audit(tmp_path: Path) -> None:
    value = tmp_path / "audit.json"
    value.write_text(json.dumps(audit_of(Node().driver("535.104.05"), tmp_path / "node")), encoding="utf-8")
    shown = CliRunner().invoke(command, ["--audit", str(value), "--json", "-"], input=LOG)
    assert status(json.loads(shown.output), "page-migration") == "impossible"


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """64 MiB with a failure in every tenth line, all different: the peak stays that of an empty log,
    nearly.
    """
    log = tmp_path / "job.log"
    with log.open("w", encoding="utf-8") as file:
        for number in range(60_000):
            file.write(
                f"[Rank {number % 64}] step {number} loss 2.1 and some more words to fill the line\n" * 9
            )
            file.write(WARN.format(host=number % 100, pid=number))
    program = (
        "import re, sys\nfrom regrepro.explain.explain import explain\n"
        "with open(sys.argv[1], 'rb') as file:\n    result = explain([('log', file)])\n"
        # Not ru_maxrss: that starts from the peak of the process which was forked from.
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(result['groups'][0]['count'], peak)\n"
    )
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-c", program, str(log)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": source},
    )
    count, peak = done.stdout.split()
    assert int(count) == 60_000
    assert int(peak) < 80 * 1024, f"{peak} KiB"


def test_foreign_text_reaches_the_terminal_without_control_characters() -> None:
    shown = plain(run(b"\x1b]0;owned\x07" + LOG.encode() + b"libfabric: fi_mr_reg failed \x1b[2J -12\n"))
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_too_many_kinds_are_counted_not_kept() -> None:
    explainer = Explainer()
    log = "".join(
        f"libfabric:{number}:2::efa:mr:efa_mr_{number:04d}():1<warn> Unable to register MR\n"
        for number in range(400)
    )
    explainer.read_file("log", io.BytesIO(log.encode()))
    result = explainer.result()
    assert len(result["groups"]) == 256
    assert result["more_groups"] == 144
