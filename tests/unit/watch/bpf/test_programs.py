"""The BPF programs' source held against the engine: numbers that both have, and programs that it names."""

from __future__ import annotations

import importlib.util
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from regrepro.watch.bpf import engine

ROOT = Path(__file__).parents[4]
SOURCE = (ROOT / "csrc/bpf/registrations.bpf.c").read_text(encoding="utf-8")
ENGINE = (ROOT / "src/regrepro/watch/bpf/engine.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["POINTER", "NOT_EAGAIN", "DMABUF", "BEHIND_MM", "ARRAY", "COMMAND", "ALWAYS"]
)
def test_the_bits_of_a_cookie_are_the_same(name: str) -> None:
    found = re.search(rf"#define {name} \(1ULL << (\d+)\)", SOURCE)
    assert found is not None and getattr(engine, f"_{name}") == 1 << int(found[1])


@pytest.mark.parametrize("name", ["DRIVER_SHIFT", "STUCK_PAGES", "STACK_FRAMES", "PARAMETERS"])
def test_sizes_are_the_same(name: str) -> None:
    found = re.search(rf"#define {name} (\d+)", SOURCE)
    assert found is not None and getattr(engine, f"_{name}") == int(found[1])
    assert f"#define RING_BYTES ({engine.RING_BYTES >> 20} << 20)" in SOURCE


def test_the_config_is_as_the_programs_read_it() -> None:
    body = re.search(r"struct config \{(.*?)\n\};", SOURCE, re.DOTALL)
    assert body is not None
    fields = re.findall(r"\n\t(u64|u32) (\w+)((?:\[\d+\])*);", body[1])
    sizes = {"u64": "Q", "u32": "I"}
    counts = [eval("*".join(re.findall(r"\d+", array)) or "1") for _, _, array in fields]
    layout = "=" + "".join(f"{n}{sizes[kind]}" for (kind, _, _), n in zip(fields, counts, strict=True))
    assert struct.calcsize(layout) == engine._CONFIG.size
    offsets = engine.RequestOffsets(command=32, present=96, attributes=104, size=24)
    made = struct.unpack(layout, engine.config(offsets, 256, [7], unpins=True))
    names = [name for (_, name, _), n in zip(fields, counts, strict=True) for _ in range(n)]
    told = list(zip(names, made, strict=True))
    assert told[:8] == [
        *(("longterm", 256), ("reasons", 7), ("reasons", 7), ("has_request", 1)),
        *(("command", 32), ("present", 96), ("attributes", 104), ("attribute_size", 24)),
    ]
    # Twice start, length, iova, access, fd: REG_MR, then REG_DMABUF_MR.
    assert [value for name, value in told if name == "attribute"] == [8, 10, 6, 12, 14, 4, 6, 8, 12, 10]
    assert told[-1] == ("follow_unpins", 1)
    none = struct.unpack(layout, engine.config(None, 0, [], unpins=False))
    assert dict(zip(names, none, strict=True))["reasons"] == 0xFFFFFFFF and not none[3]


def test_every_program_that_the_engine_names_is_there() -> None:
    at_entry, at_return = (
        set(re.findall(rf"^{kind}\((\w+)", SOURCE, re.MULTILINE)) for kind in ("AT_ENTRY", "AT_RETURN")
    )
    assert set(re.findall(r'_at_entry\(loader, "(\w+)"', ENGINE)) == at_entry
    assert set(re.findall(r'_at_return\(loader, "(\w+)"', ENGINE)) == at_return
    for name in ("kprobe_keep", "library_return", "library_entry"):
        assert f" {name}(struct pt_regs *ctx)" in SOURCE and f'"{name}"' in ENGINE


@pytest.mark.parametrize("architecture", ["x86", "arm64"])
def test_they_compile_without_a_warning(architecture: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang") is None or not Path("/usr/include/bpf/bpf_helpers.h").exists():
        pytest.skip("ziglang (PyPI) or libbpf-dev is not installed")
    (tmp_path / "bpf").symlink_to("/usr/include/bpf")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "bpfel-freestanding", "-O2", "-g"]
    command += [
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-D__TARGET_ARCH_{architecture}",
        f"-I{tmp_path}",
        "-I/usr/include",
    ]
    command += [f"-I/usr/include/{platform.machine()}-linux-gnu", "-c", "csrc/bpf/registrations.bpf.c"]
    cache = {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "zig"), "ZIG_LOCAL_CACHE_DIR": str(tmp_path / "zig")}
    made = tmp_path / "an.o"
    done = subprocess.run(
        [*command, "-o", str(made)], cwd=ROOT, env=cache, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert b".BTF.ext" in made.read_bytes()
