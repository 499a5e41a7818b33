"""The C core under the address, leak and undefined-behaviour sanitizers, and under cppcheck."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"
C_TESTS = ROOT / "tests" / "c"
ROOMS = ("memory", "pin", "iouring", "bpf", "verbs")
WARNINGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_the_core_is_clean_under_sanitizers(name: str, tmp_path: Path) -> None:
    cc = shutil.which(name)
    if not cc:
        pytest.skip(f"{name} is not installed")
    library, program = tmp_path / "libfake_verbs.so", tmp_path / "exercise_core"
    sanitize = [
        "-g",
        "-O1",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run([cc, *sanitize, str(probe), "-o", str(tmp_path / "probe")], check=False).returncode:
        pytest.skip(f"{name} has no sanitizer libraries (libasan, libubsan)")
    fake = [str(C_TESTS / "fake_verbs.c"), "-o", str(library)]
    subprocess.run([cc, *WARNINGS, "-shared", "-fPIC", f"-I{CSRC}", *fake], check=True)
    sources = [str(C_TESTS / "exercise_core.c"), *(str(CSRC / f"{room}.c") for room in ROOMS)]
    subprocess.run(
        [cc, *WARNINGS, *sanitize, f"-I{CSRC}", *sources, "-ldl", "-lpthread", "-lrt", "-o", str(program)],
        check=True,
    )
    done = subprocess.run(
        [str(program), str(library)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# all right" in done.stdout
    assert "not ok" not in done.stdout


def test_cppcheck_finds_nothing() -> None:
    cppcheck = shutil.which("cppcheck")
    if not cppcheck:
        pytest.skip("cppcheck is not installed")
    sources = [str(CSRC / f"{room}.c") for room in ROOMS]
    options = ["--enable=warning,performance,portability", "--error-exitcode=1", "--inline-suppr", "-q"]
    done = subprocess.run([cppcheck, *options, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
