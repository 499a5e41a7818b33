"""cffi builder of `regrepro._core`: every csrc/NAME.h that has a csrc/NAME.c beside it is a part of the core.

The headers are written so that cffi can read them: plain declarations, and preprocessor lines only where
cffi may skip them (include guards, includes).
"""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path("csrc")


def declarations(header: Path) -> str:
    """Return a header without its preprocessor lines."""
    lines = header.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


parts = sorted(source.stem for source in HERE.glob("*.c") if source.with_suffix(".h").exists())

ffi = FFI()
for part in parts:
    ffi.cdef(declarations(HERE / f"{part}.h"))
ffi.set_source(
    "regrepro._core",
    "\n".join(f'#include "{part}.h"' for part in parts),
    sources=[str(HERE / f"{part}.c") for part in parts],
    include_dirs=[str(HERE)],
    depends=sorted(str(header) for header in HERE.glob("*.h")),
    libraries=["dl", "pthread", "rt"],
    extra_compile_args=[
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-fvisibility=hidden",
    ],
)
