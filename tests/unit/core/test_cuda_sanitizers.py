"""Every CUDA call under the address, leak and undefined-behaviour sanitizers: the stand-in, and NVIDIA's own
runtime where one is installed, on a machine without a driver.
"""

from __future__ import annotations

from pathlib import Path

import nvidia_files
import pytest
from c_programs import C_TESTS, CSRC, SANITIZE, build, library, run_clean, sanitizing

# What NVIDIA's runtime keeps to its end is not ours to free.
SUPPRESSED = "leak:libcudart\nleak:libcuda\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The program and the stand-in, both with sanitizers."""
    folder = tmp_path_factory.mktemp("cuda")
    gcc = sanitizing("gcc", folder)
    parts = [str(CSRC / name) for name in ("standin/standin.c", "pin.c", "iouring.c", "memory.c")]
    stand_in = library(gcc, folder / "libstandin.so", *SANITIZE, *parts, "-lpthread", "-lrt")
    sources = [str(C_TESTS / "exercise_cuda.c"), str(CSRC / "cuda.c")]
    return build(gcc, folder / "exercise_cuda", *SANITIZE, *sources, "-ldl", "-lpthread"), stand_in


def exercise(program: Path, libraries: list[str]) -> str:
    suppressions = program.parent / "suppressions"
    suppressions.write_text(SUPPRESSED)
    return run_clean(program, libraries, LSAN_OPTIONS=f"suppressions={suppressions}:print_suppressions=0")


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
