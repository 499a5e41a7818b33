"""Builds what `regrepro watch` needs beside the core: the BPF programs and the program that loads them.

    python csrc/build_bpf.py OUT [ARCHITECTURE]

OUT gets `registrations.bpf.o`, by zig's C compiler (the package ziglang of PyPI), and `follow`, by $CC or cc
with the static libraries of libbpf-dev, libelf-dev, zlib1g-dev and libzstd-dev, so that it needs libc alone.
Exits with 1 and a sentence where something is missing.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS = Path("/usr/include")
TARGETS = {"x86_64": "x86", "aarch64": "arm64"}
LIBRARIES = ("libbpf.a", "libelf.a", "libz.a", "libzstd.a")


NOTICE = """\
The program `follow` beside this file has been linked with these static libraries of the Debian system that it
was built on, where their sources and licences are (https://sources.debian.org):

  libbpf    LGPL-2.1 or BSD-2-Clause
  libelf    LGPL-3.0-or-later or GPL-2.0-or-later (elfutils)
  zlib      Zlib
  zstd      BSD-3-Clause or GPL-2.0

It can be linked again with other versions of them: csrc/build_bpf.py of regrepro's source archive does it.
`registrations.bpf.o` is made of regrepro's own source and is "GPL-2.0 OR BSD-2-Clause" to the kernel.
"""


def build(out: Path, architecture: str) -> None:
    """Build both, or nothing. Raises OSError, KeyError (architecture) or subprocess.CalledProcessError."""
    multiarch = HEADERS / f"{platform.machine()}-linux-gnu"
    libraries = [Path(f"/usr/lib/{architecture}-linux-gnu") / name for name in LIBRARIES]
    for needed in (HEADERS / "bpf/libbpf.h", *libraries):
        if not needed.exists():
            raise OSError(f"{needed} is missing: install libbpf-dev, libelf-dev, zlib1g-dev and libzstd-dev")
    with tempfile.TemporaryDirectory() as folder:
        # libbpf's headers alone: a compiler for an older glibc has its own of everything else.
        (Path(folder) / "bpf").symlink_to(HEADERS / "bpf")
        programs = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            "bpfel-freestanding",
            "-O2",
            "-g",
            "-Wall",
            "-Wextra",
        ]
        programs += [
            f"-D__TARGET_ARCH_{TARGETS[architecture]}",
            f"-I{folder}",
            f"-I{HEADERS}",
            f"-I{multiarch}",
        ]
        source = HERE / "bpf/registrations.bpf.c"
        run([*programs, "-c", str(source), "-o", f"{folder}/registrations.bpf.o"])
        loader = [
            *shlex.split(os.environ.get("CC", "cc")),
            "-std=gnu11",
            "-O2",
            "-Wall",
            "-Wextra",
            "-s",
            f"-I{folder}",
        ]
        source = HERE / "libbpf/follow.c"
        run([*loader, "-o", f"{folder}/follow", str(source), *(str(path) for path in libraries)])

        out.mkdir(parents=True, exist_ok=True)
        for name in ("registrations.bpf.o", "follow"):
            shutil.copy(Path(folder) / name, out / name)
        (out / "NOTICE").write_text(NOTICE, encoding="utf-8")


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    if not 1 <= len(given) <= 2 or given[-1] not in (*TARGETS, given[0]):
        sys.exit("build_bpf.py: OUT and x86_64 or aarch64 are expected")
    try:
        build(Path(given[0]), given[1] if len(given) > 1 else platform.machine())
    except (OSError, KeyError, subprocess.CalledProcessError) as error:
        sys.exit(f"build_bpf.py: {error}")
