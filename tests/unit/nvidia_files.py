"""NVIDIA's own libraries as `scripts/nvidia_libraries.py` leaves them under `.cache/nvidia`, for tests."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "nvidia"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nvidia_libraries", ROOT / "scripts/nvidia_libraries.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _load()
RUNTIMES: tuple[tuple[str, str], ...] = script.RUNTIMES
CUDA_PYTHON: tuple[tuple[str, str], ...] = script.CUDA_PYTHON


def wheel(name: str, version: str) -> Path:
    """The folder of a wheel; skips where it is not there."""
    folder: Path = script.folder_of(FOLDER, name, version)
    if not folder.is_dir():
        pytest.skip(f"{name} {version} is not here: python scripts/nvidia_libraries.py .cache/nvidia")
    return folder


def runtime(name: str, version: str) -> Path:
    """The libcudart of a wheel."""
    [library] = wheel(name, version).glob("nvidia/*/lib/libcudart.so.*")
    return library


def driver() -> Path:
    """The folder with Debian's libcuda.so.1."""
    found = sorted((FOLDER / script.DRIVER).rglob("libcuda.so.1"))
    if not found:
        pytest.skip("Debian's libcuda1 is not here: python scripts/nvidia_libraries.py .cache/nvidia")
    return found[0].parent


@cache
def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def without_a_driver() -> None:
    """Skip on a machine that has NVIDIA's driver: the test is about its absence."""
    if _has_driver():
        pytest.skip("this machine has an NVIDIA driver; the test is about its absence")
