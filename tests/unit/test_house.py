"""The rules of the house that a machine can hold: CONTRIBUTING.md's map of who may import whom, and more."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/regrepro"
MODULES = sorted(PACKAGE.rglob("*.py"))
# Each costs seconds in a guest without KVM, and a GPU node may not have them.
HEAVY = {"rich", "jsonschema", "jinja2", "matplotlib", "virtme"}


def house_map() -> dict[str, set[str]]:
    """Return the table `| package | job | may import |` of CONTRIBUTING.md as package → packages."""
    rows = re.findall(
        r"^\| `([a-z_.]+)` \|[^|]*\|([^|]*)\|$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M
    )
    assert len(rows) > 10, "CONTRIBUTING.md has no map of the house"
    return {package: set(re.findall(r"`([a-z_.]+)`", may)) for package, may in rows}


HOUSE = house_map()


def package_of(name: str) -> str:
    """Return the package of a dotted name below `regrepro`: the longest in the map, else its first part."""
    parts = name.split(".")
    for length in (2, 1):
        if ".".join(parts[:length]) in HOUSE:
            return ".".join(parts[:length])
    return parts[0]


def package_of_file(path: Path) -> str:
    """Return the package that a module lies in."""
    return package_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"))


def run_time_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all nodes but those under `if TYPE_CHECKING:`, which no interpreter runs."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of each import that a module can run."""
    for node in run_time_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides which package is meant"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full


def is_package(name: str) -> bool:
    path = PACKAGE / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists() or name == "_core"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_packages_import_only_those_that_the_map_allows(path: Path) -> None:
    own = package_of_file(path)
    if own in ("__init__", "__main__"):
        return  # the package's face and its entry point show what lies inside
    assert own in HOUSE, f"CONTRIBUTING.md's map has no package {own}"
    allowed = HOUSE[own] | {own}
    wrong = []
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        package = package_of(rest)
        if top == "regrepro" and is_package(package) and package not in allowed:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} may not import {package}")
    assert not wrong, "\n".join(wrong)


def test_the_map_names_only_packages_that_exist() -> None:
    named = set(HOUSE).union(*HOUSE.values())
    assert not {package for package in named if not is_package(package)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_stay_where_a_guest_never_goes(path: Path) -> None:
    package = package_of_file(path)
    heavy = [(line, name) for line, name in imports(path) if name.split(".")[0] in HEAVY]
    assert not heavy or package in ("views", "lab"), f"{path.relative_to(ROOT)}: {heavy}"


def test_a_lower_package_never_imports_a_higher_one() -> None:
    """The map has no circle, so there is an order from the ground up."""
    waiting = {package: may - {package} for package, may in HOUSE.items()}
    while waiting:
        free = [package for package, may in waiting.items() if not may & set(waiting)]
        assert free, f"a circle among {sorted(waiting)}"
        for package in free:
            del waiting[package]


def module_of(path: Path) -> str:
    """Return the dotted name of a module."""
    return ".".join(("regrepro", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules that import each other, of a graph of module → modules that it imports."""
    reach = {name: set(may) for name, may in graph.items()}
    for middle, beyond in reach.items():
        for its in reach.values():
            if middle in its:
                its.update(beyond)
    together = {tuple(sorted(other for other in its if name in reach[other])) for name, its in reach.items()}
    return sorted(list(group) for group in together if group)


def test_no_modules_of_a_package_import_each_other() -> None:
    """An import within a function counts as any other: it hides a circle and does not end it."""
    names = {module_of(path) for path in MODULES}
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        own = module_of(path)
        package = own.split(".")[1:2]
        found = {name if name in names else name.rpartition(".")[0] for _, name in imports(path)}
        graph[own] = {name for name in found & names - {own} if name.split(".")[1:2] == package}
    assert not circles(graph)


# Class names that mean more than one thing. None may come in; whoever renames one takes it out.
KNOWN_TWINS = """
Buffer Caught Change Contract Finding Interrupted Limits Lines Look MemoryMap Moment PageState Pass
Pin Plan Reader RecordLike Registration Settings ShortTermPin Silent Size
"""


def test_a_class_name_stands_once() -> None:
    """But for the Protocols of stage/ports.py, which say what the stage needs of the class of that name."""
    where: dict[str, list[str]] = {}
    for path in MODULES:
        if module_of(path) == "regrepro.stage.ports":
            continue
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.M):
            where.setdefault(name, []).append(module_of(path))
    twins = {name for name, places in where.items() if len(places) > 1}
    known = set(KNOWN_TWINS.split())
    assert not twins - known, {name: where[name] for name in twins - known}
    assert not known - twins, f"take out of KNOWN_TWINS: {known - twins}"


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("needs the git checkout: not installed from one, or git is missing")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_no_file_holds_a_binary_or_a_build_product() -> None:
    for path in tracked_files():
        if path.is_file():
            assert b"\0" not in path.read_bytes()[:8192], f"{path} is binary"


def test_every_c_header_is_plain_enough_for_cffi() -> None:
    """`build_core.py` drops preprocessor lines, so a header must not make declarations depend on one."""
    for header in sorted((ROOT / "csrc").glob("*.h")):
        if not header.with_suffix(".c").exists():
            continue
        conditions = re.findall(r"^#\s*(?:if|ifdef|elif|else)\b.*", header.read_text(), re.M)
        assert not conditions, f"{header.name}: {conditions}"
