"""Every CUDA call under the address, leak and undefined-behaviour sanitizers: the stand-in, and NVIDIA's own
runtime where one is installed, on a machine without a driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import nvidia_files
import pytest

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-fno-omit-frame-pointer", f"-I{CSRC}"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# What NVIDIA's runtime keeps to its end is not ours to free.
SUPPRESSED = "leak:libcudart\nleak:libcuda\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The program and the stand-in, both with sanitizers."""
    gcc = shutil.which("gcc")
    if not gcc:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("cuda")
    program, stand_in = folder / "exercise_cuda", folder / "libstandin.so"
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run([gcc, *SANITIZE, str(probe), "-o", str(folder / "probe")], check=False).returncode:
        pytest.skip("gcc has no sanitizer libraries (libasan, libubsan)")
    rooms = [str(CSRC / name) for name in ("standin/standin.c", "pin.c", "iouring.c", "memory.c")]
    library = ["-shared", "-fPIC", *rooms, "-lpthread", "-lrt", "-o", str(stand_in)]
    subprocess.run([gcc, *FLAGS, *SANITIZE, *library], check=True)
    sources = [str(ROOT / "tests" / "c" / "exercise_cuda.c"), str(CSRC / "cuda.c")]
    subprocess.run([gcc, *FLAGS, *SANITIZE, *sources, "-ldl", "-lpthread", "-o", str(program)], check=True)
    return program, stand_in


def exercise(program: Path, libraries: list[str]) -> str:
    suppressions = program.parent / "suppressions"
    suppressions.write_text(SUPPRESSED)
    options = f"suppressions={suppressions}:print_suppressions=0"
    done = subprocess.run(
        [str(program), *libraries],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "LSAN_OPTIONS": options},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# all right" in done.stdout
    return done.stdout


def test_the_stand_in_is_clean(built: tuple[Path, Path]) -> None:
    program, stand_in = built
    exercise(program, [str(stand_in)])


@pytest.mark.parametrize("wheel", nvidia_files.RUNTIMES, ids=" ".join)
def test_nvidia_s_runtime_is_called_cleanly_and_refuses_by_name(
    built: tuple[Path, Path], wheel: tuple[str, str]
) -> None:
    nvidia_files.without_a_driver()
    said = exercise(built[0], [str(nvidia_files.runtime(*wheel))])
    assert "cudaHostAlloc: " in said
