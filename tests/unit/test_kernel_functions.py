"""The table of kernel functions: whoever probes, reads or recognises a function has it from its row."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from regrepro import kernel_functions
from regrepro.kernel_functions import FUNCTIONS, Family, of_family

PACKAGE = Path(kernel_functions.__file__).parent
# Rules of pasted logs alone read these, since neither `run` nor `watch` probes them (judge/narrowing.py).
FOREIGN = {name for row in FUNCTIONS if not row.probed for name in row.names}


def families_read(path: Path) -> set[Family]:
    """Return the families that a module names."""
    return {
        Family[node.attr]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Family"
    }


def test_every_family_that_a_rule_reads_can_be_emitted_by_something_that_probes() -> None:
    """A rule that rests on a function which nothing looks at would never speak, or speak of nothing."""
    read = set[Family]().union(
        *(families_read(path) for path in (PACKAGE / "judge").glob("*.py") if path.name != "narrowing.py")
    )
    assert {Family.GUP, Family.UMEM, Family.DMA_MAP, Family.MKEY, Family.PEER, Family.DMABUF} <= read
    read.discard(Family.GUP_PATH)  # read with GUP, which is probed
    probed = {family for row in FUNCTIONS if row.probed for family in row.families}
    assert read <= probed


def test_a_name_stands_in_one_row() -> None:
    every = [name for row in FUNCTIONS for name in row.names]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda row: row.names[0])
def test_a_row_says_when_its_function_was_renamed(row: kernel_functions.KernelFunction) -> None:
    """A version, and the commit where it is known; what is said of two names fits together."""
    for name in row.known_as:
        for told in (name.since, name.until):
            assert re.fullmatch(r"(?:(?:by )?\d\.\d+(?: [0-9a-f]{12})?)?", told)
    for newer, older in zip(row.known_as, row.known_as[1:], strict=False):
        assert older.until in ("", newer.since)


def test_no_other_file_lists_names_of_kernel_functions() -> None:
    """Two or more of them in one tuple, list or set are a list that drifts away from the table."""
    known = {name for row in FUNCTIONS for name in row.names}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "kernel_functions.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            items = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
            if sum(isinstance(item, ast.Constant) and item.value in known for item in items) > 1:
                found.append(f"{path.relative_to(PACKAGE)}:{items[0].lineno}")
    assert found == []


RENAMED = """
import sys, types
from pathlib import Path
source = Path(sys.argv[1])
text = source.read_text()
old = 'Name("__ib_umem_get_va", "by 7.3")'
assert text.count(old) == 1
module = types.ModuleType("regrepro.kernel_functions")
import regrepro
regrepro.kernel_functions = sys.modules[module.__name__] = module
text = text.replace(old, 'Name("ib_umem_pin_va", "8.0"), ' + old)
exec(compile(text, str(source), "exec"), module.__dict__)

import io
from regrepro.explain.explain import explain
from regrepro.judge.tracefacts import read_trace
from regrepro.kernel import trace_probes
from regrepro.kernel_functions import Family
from regrepro.watch.functions import BtfFunctions, find_functions

(row,) = [row for row in trace_probes.PROBED if "ib_umem_pin_va" in row.names]
print(trace_probes.return_probe("g", "e", "ib_umem_pin_va", row, with_arguments=False))
found = find_functions(BtfFunctions(Path("/nowhere")), b"0 t ib_umem_pin_va\\t[ib_core]\\n", {})
print([(item.name, item.module, item.returns.value) for item in found.inner])
trace = read_trace({"status": "complete", "events": [{"fn": "ib_umem_pin_va", "ret": -12}]}, "it", [])
print(trace.failed(Family.UMEM))
log = b"kretprobe:ib_umem_pin_va: -12\\nkretprobe:mlx5_ib_reg_user_mr: -12\\n"
(group,) = explain([("log", io.BytesIO(log))])["groups"]
print(group["call"], {one["cause"]: one["why"] for one in group["causes"]}["mkey"])
"""


def test_a_renamed_kernel_function_is_one_name_in_one_row() -> None:
    """With the name in its row alone, `run` and `watch` probe it, the judge and `explain` read it."""
    done = subprocess.run(
        [sys.executable, "-c", RENAMED, str(PACKAGE / "kernel_functions.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "r:g/e ib_umem_pin_va ret=$retval:s64",
        "[('ib_umem_pin_va', 'ib_core', 'pointer')]",
        "-12",
        "mlx5_ib_reg_user_mr the trace shows that ib_umem_get failed, which comes before it",
    ]


def test_what_only_other_tracers_show_is_recognised() -> None:
    from regrepro.explain.traces import KNOWN

    assert set(of_family(*Family)) == KNOWN
    assert FOREIGN & KNOWN
