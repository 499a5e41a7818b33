"""What a driver's own source says, on small trees in the shape of each variant."""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path

import pytest
from audit_nodes import GIB, Node

from regrepro.audit import driversource
from regrepro.audit.audit import audit
from regrepro.audit.places import open_place
from regrepro.errors import UsageError

HEAD = """/* os-mlock: user page locking */
#include "nv-linux.h"

{outside}
NV_STATUS NV_API_CALL os_lock_user_pages(
    void *address, NvU64 page_count, void **page_array, NvU32 flags
)
{{
    unsigned int gup_flags = WRITE(flags) ? FOLL_WRITE : 0;
    long ret;
{flag}
    ret = {call}((unsigned long)address, page_count, gup_flags, user_pages);
    return NV_OK;
}}

NV_STATUS NV_API_CALL os_unlock_user_pages(NvU64 page_count, void *page_array)
{{
    return NV_OK;
}}
"""
IF = "#if {condition}\n    gup_flags |= FOLL_LONGTERM;\n#endif\n"
X86_AND_TEST = "defined(NVCPU_FAMILY_X86) && defined(NV_FOLL_LONGTERM_PRESENT)"


def mlock(flag: str = "", call: str = "NV_PIN_USER_PAGES", outside: str = "") -> str:
    """Write an os-mlock.c of our own in the shape of the driver's."""
    return HEAD.format(flag=flag, call=call, outside=outside)


VARIANTS = {
    "none": (mlock(), "none", "never", "never"),
    "get": (mlock(call="NV_GET_USER_PAGES"), "none", "never", "never"),
    "x86 behind the build test": (
        mlock(IF.format(condition=X86_AND_TEST)),
        "x86-only",
        "if-present",
        "never",
    ),
    "x86 only": (mlock(IF.format(condition="defined(NVCPU_FAMILY_X86)")), "x86-only", "always", "never"),
    "ifdef": (
        mlock("#ifdef NVCPU_X86_64\n    gup_flags |= FOLL_LONGTERM;\n#endif\n"),
        "x86-only",
        "always",
        "never",
    ),
    "else": (
        mlock("#ifndef NVCPU_AARCH64\n    ;\n#else\n    gup_flags |= FOLL_LONGTERM;\n#endif\n"),
        "other-than-x86-only",
        "never",
        "always",
    ),
    "all": (mlock("    gup_flags |= FOLL_LONGTERM;\n"), "all", "always", "always"),
    "all behind the build test": (
        mlock(IF.format(condition="defined(NV_FOLL_LONGTERM_PRESENT)")),
        "all",
        "if-present",
        "if-present",
    ),
    "continued condition": (
        mlock(IF.format(condition="defined(NVCPU_FAMILY_X86) && \\\n     defined(NV_FOLL_LONGTERM_PRESENT)")),
        "x86-only",
        "if-present",
        "never",
    ),
    "only in a comment": (
        mlock("    /* gup_flags |= FOLL_LONGTERM; */\n    // FOLL_LONGTERM\n"),
        "none",
        "never",
        "never",
    ),
    "if 0": (mlock(IF.format(condition="0")), "none", "never", "never"),
    "negated": (
        mlock(IF.format(condition="!defined(NVCPU_FAMILY_X86)")),
        "other-than-x86-only",
        "never",
        "always",
    ),
    "unknown condition": (
        mlock(IF.format(condition="defined(NV_SOME_NEW_TEST)")),
        "unknown",
        "unknown",
        "unknown",
    ),
    "x86 or unknown": (
        mlock(IF.format(condition="defined(NVCPU_FAMILY_X86) || defined(NV_SOME_NEW_TEST)")),
        "unknown",
        "always",
        "unknown",
    ),
    "at run time": (mlock("    if (wants) gup_flags |= FOLL_LONGTERM;\n"), "unknown", "unknown", "unknown"),
    "cleared": (mlock("    gup_flags &= ~FOLL_LONGTERM;\n"), "unknown", "unknown", "unknown"),
    "macro inside": (mlock("#define MY_FLAGS (FOLL_WRITE|FOLL_LONGTERM)\n"), "unknown", "unknown", "unknown"),
    "macro outside": (
        mlock(outside="#define NV_LONGTERM_FLAGS FOLL_LONGTERM"),
        "unknown",
        "unknown",
        "unknown",
    ),
    "another call": (mlock(call="nv_own_pin"), "unknown", "unknown", "unknown"),
    "no such function": ("int other(void)\n{\n return 0;\n}\n", "unknown", "unknown", "unknown"),
    "unbalanced": (
        mlock("#if defined(NVCPU_FAMILY_X86)\n    gup_flags |= FOLL_LONGTERM;\n"),
        "unknown",
        "unknown",
        "unknown",
    ),
    "empty": ("", "unknown", "unknown", "unknown"),
    "cut": (mlock(IF.format(condition=X86_AND_TEST))[:420], "unknown", "unknown", "unknown"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str) -> None:
    text, variant, x86, arm = VARIANTS[name]
    found = driversource.read_host_pin(text)
    assert (found.by_arch["x86_64"], found.by_arch["aarch64"]) == (x86, arm), found.why
    assert found.variant == variant
    assert found.why
    if name == "get":
        assert found.call == "get"


def test_a_build_that_never_runs_the_test_never_has_the_flag() -> None:
    found = driversource.read_host_pin(mlock(IF.format(condition=X86_AND_TEST)), tested=False)
    assert found.variant == "none"
    assert "never runs the test" in found.why


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ret = nvidia_p2p_get_pages(0, 0, a, b);", "legacy"),
        ("ret = nvidia_p2p_get_pages(0);\nret = nvidia_p2p_get_pages_persistent(a);", "both"),
        ("static int persistent_api_support = 1;\nnvidia_p2p_get_pages_persistent(a);", "persistent"),
        ("/* nvidia_p2p_get_pages(a) */", None),
    ],
)
def test_peermem(text: str, value: str | None) -> None:
    assert driversource.read_peermem(text) == value


def tree(
    folder: Path, flavours: dict[str, str], *, version: str = "999.10.01", kbuild: str | None = None
) -> Path:
    for flavour, text in flavours.items():
        base = folder / flavour if flavour else folder
        (base / "nvidia").mkdir(parents=True)
        (base / "nvidia" / "os-mlock.c").write_text(text, encoding="utf-8")
        (base / "dkms.conf").write_text(
            f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\n', encoding="utf-8"
        )
        if kbuild is not None:
            (base / "nvidia" / "nvidia.Kbuild").write_text(kbuild, encoding="utf-8")
    return folder


LONGTERM = mlock(IF.format(condition=X86_AND_TEST))


def test_dkms_folder_and_source_tree(tmp_path: Path) -> None:
    dkms = driversource.read_driver_source(tree(tmp_path / "nvidia-999.10.01", {"": LONGTERM}))
    assert (dkms.version, dkms.pin.variant) == ("999.10.01", "x86-only")
    source = driversource.read_driver_source(tree(tmp_path / "open", {"kernel-open": LONGTERM}))
    assert source.pin.variant == "x86-only"
    only = tmp_path / "only" / "nvidia"
    only.mkdir(parents=True)
    (only / "os-mlock.c").write_text(LONGTERM, encoding="utf-8")
    assert driversource.read_driver_source(only).pin.variant == "x86-only"


def test_flavours_that_differ_are_unknown(tmp_path: Path) -> None:
    folder = tree(tmp_path / "both", {"kernel": mlock(), "kernel-open": LONGTERM})
    found = driversource.read_driver_source(folder)
    assert found.pin.variant == "unknown"
    assert "flavours differ" in found.pin.why


def test_kbuild_decides_whether_the_test_runs(tmp_path: Path) -> None:
    with_test = tree(
        tmp_path / "a", {"": LONGTERM}, kbuild="NV_CONFTEST_TYPE_COMPILE_TESTS += foll_longterm_present\n"
    )
    assert driversource.read_driver_source(with_test).pin.variant == "x86-only"
    without = tree(tmp_path / "b", {"": LONGTERM}, kbuild="NV_CONFTEST_TYPE_COMPILE_TESTS += other\n")
    found = driversource.read_driver_source(without)
    assert found.pin.variant == "none"
    assert found.notes


def run_package(path: Path, members: dict[str, str], *, compress: str = "xz") -> Path:
    """Write a package in the shape of a .run: a script that says at which line its archive begins."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(f"./NVIDIA-Linux-x86_64-999.10.01/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    packed = lzma.compress(plain.getvalue()) if compress == "xz" else plain.getvalue()
    script = "#!/bin/sh\nskip=6\n# a self-extracting package\necho not run\nexit 1\n"
    path.write_bytes(script.encode() + packed)
    return path


def test_run_package_is_read_without_running_it(tmp_path: Path) -> None:
    path = run_package(
        tmp_path / "NVIDIA-Linux-x86_64-999.10.01.run",
        {
            "kernel/nvidia/os-mlock.c": LONGTERM,
            "kernel-open/nvidia/os-mlock.c": LONGTERM,
            "big": "x" * 100000,
        },
    )
    found = driversource.read_driver_source(path)
    assert (found.version, found.pin.variant) == ("999.10.01", "x86-only")
    assert len(found.pins) == 2


@pytest.mark.parametrize("keep", [10, 80, 200, 400])
def test_a_cut_run_package_is_one_line(tmp_path: Path, keep: int) -> None:
    path = run_package(tmp_path / "cut.run", {"kernel/nvidia/os-mlock.c": LONGTERM})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError) as error:
        driversource.read_driver_source(path)
    assert "\n" not in str(error.value)


def test_what_is_no_driver_source_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello\n", encoding="utf-8")
    for path in (tmp_path / "empty", tmp_path / "text", tmp_path / "none"):
        with pytest.raises(UsageError) as error:
            driversource.read_driver_source(path)
        assert "\n" not in str(error.value)


def headers(folder: Path, text: str, name: str = "mm_types.h") -> Path:
    (folder / "include" / "linux").mkdir(parents=True)
    (folder / "include" / "linux" / name).write_text(text, encoding="utf-8")
    return folder


def test_kernel_headers_answer_the_build_time_test(tmp_path: Path) -> None:
    new = headers(tmp_path / "new", "enum {\n\tFOLL_WRITE = 1 << 0,\n\tFOLL_LONGTERM = 1 << 8,\n};\n")
    middle = headers(tmp_path / "middle", "#define FOLL_LONGTERM\t0x10000\n", "mm.h")
    old = headers(tmp_path / "old", "#define FOLL_WRITE\t0x01\n", "mm.h")
    assert driversource.kernel_has_longterm(new)[0] is True
    assert driversource.kernel_has_longterm(middle)[0] is True
    assert driversource.kernel_has_longterm(old)[0] is False
    assert driversource.kernel_has_longterm(tmp_path)[0] is None


def test_the_gates_question(tmp_path: Path) -> None:
    """Would this node be exposed with that driver, which is not installed yet?"""
    node = Node().hugetlb_cma(3 * GIB).write(tmp_path / "node")
    source = tree(tmp_path / "nvidia-999.10.01", {"": LONGTERM})
    old = headers(tmp_path / "old", "#define FOLL_WRITE\t0x01\n", "mm.h")
    with open_place(node) as reader:
        on_x86 = audit(reader, driver_source=source)
        on_arm = audit(reader, driver_source=source, arch="aarch64")
        old_kernel = audit(reader, driver_source=source, headers=old)
        unknown = audit(reader, driver_source=tree(tmp_path / "u", {"": mlock(IF.format(condition="MAYBE"))}))
    states = [result["exposure"][1]["state"] for result in (on_x86, on_arm, old_kernel, unknown)]
    assert states == ["not-exposed", "exposed", "exposed", "unknown"]
    assert on_x86["driver"]["source"]["variant"] == "x86-only"
