"""The table of kernel functions: whoever probes, reads or recognises a function has it from its row."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from regrepro import kernel_functions
from regrepro.explain.explain import explain
from regrepro.kernel_functions import FUNCTIONS, Family, of_family

PACKAGE = Path(kernel_functions.__file__).parent
UMEM = ["ib_umem_get", "mlx5_ib_reg_user_mr"]
PIN = ["pin_user_pages_fast", *UMEM]
# Family: what a log shows, the family's own function first; a cause, and why it is left by that function.
TOLD_BY_OTHERS = {
    Family.MLOCK: (("can_do_mlock", *UMEM), (0, -1, -1), "memlock-accounting", "can_do_mlock said no"),
    Family.CGROUP: (("charge_memcg", *PIN), (-12,) * 4, "memory-cgroup", "could not be charged"),
    Family.SG_TABLE: (
        ("sg_alloc_append_table_from_pages", *PIN),
        (-12, 8, -12, -12),
        "umem-alloc",
        "the scatter list could not be allocated",
    ),
    Family.MAPPING_CHECK: (("check_vma_flags", *PIN), (-14,) * 4, "bar-map", "check_vma_flags refused"),
}


def families_read(path: Path) -> set[Family]:
    """Return the families that a module names."""
    return {
        Family[node.attr]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Family"
    }


def test_every_family_that_a_rule_reads_can_be_emitted_by_something_that_probes() -> None:
    """A rule that rests on a function which nothing looks at would never speak, or speak of nothing.

    Neither `run` nor `watch` probes what `TOLD_BY_OTHERS` has of other tracers' logs: judge/narrowing.py
    alone reads that. GUP_PATH is read together with GUP, which is probed.
    """
    probed = {family for row in FUNCTIONS if row.probed for family in row.families}
    read = {path.name: families_read(path) - probed for path in (PACKAGE / "judge").glob("*.py")}
    assert read.pop("narrowing.py") == {Family.GUP_PATH, *TOLD_BY_OTHERS}
    assert set[Family]().union(*read.values()) <= {Family.GUP_PATH}


@pytest.mark.parametrize("family", TOLD_BY_OTHERS, ids=lambda family: family.name)
def test_what_only_other_tracers_show_is_read_and_decides(family: Family) -> None:
    names, values, cause, why = TOLD_BY_OTHERS[family]
    assert names[0] in of_family(family)
    lines = [f"kretprobe:{name}: {value}" for name, value in zip(names, values, strict=True)]
    (group,) = explain([("log", io.BytesIO("\n".join(lines).encode()))])["groups"]
    assert why in {one["cause"]: one["why"] for one in group["causes"]}[cause]
    (group,) = explain([("log", io.BytesIO("\n".join(lines[1:]).encode()))])["groups"]
    assert why not in {one["cause"]: one["why"] for one in group["causes"]}[cause]


def test_a_name_stands_in_one_row() -> None:
    every = [name for row in FUNCTIONS for name in row.names]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda row: row.names[0])
def test_a_row_says_when_its_function_was_renamed(row: kernel_functions.KernelFunction) -> None:
    """The release and the commit; what is said of two names fits together."""
    for name in row.known_as:
        for told in (name.since, name.until):
            assert re.fullmatch(r"(?:\d\.\d+ [0-9a-f]{12})?", told)
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
old = 'Name("__ib_umem_get_va", "7.2 28fb701c642b")'
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
from regrepro.watch.functions import find_functions

(row,) = [row for row in trace_probes.PROBED if "ib_umem_pin_va" in row.names]
print(trace_probes.return_probe("g", "e", "ib_umem_pin_va", row, with_arguments=False))
found = find_functions(b"0 t ib_umem_pin_va\\t[ib_core]\\n", {})
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
