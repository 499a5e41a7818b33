"""The C core under the address, leak and undefined-behaviour sanitizers, and under cppcheck."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from c_programs import C_TESTS, CSRC, SANITIZE, build, library, run_clean, sanitizing

PARTS = [str(CSRC / f"{name}.c") for name in ("memory", "pin", "iouring", "bpf", "verbs")]


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_the_core_is_clean_under_sanitizers(name: str, tmp_path: Path) -> None:
    cc = sanitizing(name, tmp_path)
    fake = library(cc, tmp_path / "libfake_verbs.so", str(C_TESTS / "fake_verbs.c"))
    sources = [str(C_TESTS / "exercise_core.c"), *PARTS]
    program = build(cc, tmp_path / "exercise_core", *SANITIZE, *sources, "-ldl", "-lpthread", "-lrt")
    run_clean(program, [str(fake)])


def test_cppcheck_finds_nothing() -> None:
    cppcheck = shutil.which("cppcheck")
    if not cppcheck:
        pytest.skip("cppcheck is not installed")
    options = ["--enable=warning,performance,portability", "--error-exitcode=1", "--inline-suppr", "-q"]
    done = subprocess.run([cppcheck, *options, *PARTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
