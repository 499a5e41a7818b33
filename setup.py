"""Builds the C core with cffi in API mode; puts the scenario files and the BPF programs into the package."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "csrc"))

import build_bpf
from setuptools import Extension, setup
from setuptools.command.build_py import build_py


class BuildWithScenarios(build_py):
    """Copy `scenarios/` to `regrepro/_scenarios/`, so that an installed package finds them by name."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # a checkout reads scenarios/ where it lies
        source = Path(__file__).parent / "scenarios"
        for file in sorted(source.rglob("*.py")):
            target = Path(self.build_lib) / "regrepro" / "_scenarios" / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        self._build_bpf()

    def _build_bpf(self) -> None:
        """Build what `watch` needs, where the libraries are: all else of the package does without."""
        # As distutils names the platform that a wheel is built for, where that is another one: linux-aarch64.
        architecture = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).rpartition("-")[2]
        try:
            build_bpf.build(Path(self.build_lib) / "regrepro" / "_bpf", architecture)
        except (OSError, KeyError, subprocess.CalledProcessError) as error:
            if os.environ.get("REGREPRO_BPF") == "required":
                raise
            self.warn(f"`regrepro watch` will not work: {error}")


# Not a Python module but a plain shared library, opened by the C core as it opens NVIDIA's: see csrc/cuda.c.
STAND_IN = Extension(
    "regrepro._standin",
    sources=["csrc/standin/standin.c", "csrc/pin.c", "csrc/iouring.c", "csrc/memory.c"],
    depends=["csrc/pin.h", "csrc/iouring.h", "csrc/memory.h"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
    libraries=["pthread"],
    py_limited_api=True,
)

setup(
    cffi_modules=["csrc/build_core.py:ffi"],
    ext_modules=[STAND_IN],
    cmdclass={"build_py": BuildWithScenarios},
    # cffi builds against the stable ABI: one wheel serves Python 3.10 and all later ones.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
