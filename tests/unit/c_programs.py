"""C programs that tests build and run: by a compiler that is there, under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
C_TESTS = ROOT / "tests/c"
SANITIZE = [
    *("-g", "-O1", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
]


def compiler(*names: str) -> str:
    """Return the first of these compilers that is installed; skips the test without one."""
    found = next(filter(None, map(shutil.which, names)), None)
    if not found:
        pytest.skip(f"{', '.join(names)}: not installed")
    return found


def build(cc: str, target: Path, *arguments: str) -> Path:
    """Build with warnings as errors. Raises CalledProcessError."""
    warnings = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run([cc, *warnings, *arguments, "-o", str(target)], check=True)
    return target


def library(cc: str, target: Path, *arguments: str) -> Path:
    return build(cc, target, "-shared", "-fPIC", *arguments)


def sanitizing(name: str, folder: Path) -> str:
    """Return a compiler that has its sanitizers' libraries; skips the test without."""
    cc, probe = compiler(name), folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run([cc, *SANITIZE, str(probe), "-o", str(folder / "probe")], check=False).returncode:
        pytest.skip(f"{name} has no sanitizer libraries (libasan, libubsan)")
    return cc


def run_clean(program: Path, arguments: Sequence[str], **environment: str) -> str:
    """Run a program of tests/c that checks itself under sanitizers; return what it said."""
    said = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1", **environment}
    done = subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **said},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# all right" in done.stdout
    assert "not ok" not in done.stdout
    return done.stdout
