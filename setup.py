"""Builds the C core with cffi in API mode, and puts the shipped scenario files into the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
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


setup(cffi_modules=["csrc/build_core.py:ffi"], cmdclass={"build_py": BuildWithScenarios})
