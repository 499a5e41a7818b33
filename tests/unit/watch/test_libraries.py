"""Copies of libibverbs: found, held, and where their functions begin."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from regrepro.watch import elf, libraries


def image() -> bytes:
    """An ELF file of one loaded segment: addresses from 0x1000, at offset 0x100 of the file, 0x40 bytes."""
    order = 1 if struct.pack("=H", 1) == b"\x01\x00" else 2
    head = bytearray(0x100 + 0x40)
    head[:6] = b"\x7fELF\x02" + bytes([order])
    struct.pack_into("=H", head, 0x12, 62)
    struct.pack_into("=Q", head, 0x20, 0x40)
    struct.pack_into("=HH", head, 0x36, 56, 1)
    struct.pack_into("=IIQQQQQQ", head, 0x40, 1, 5, 0x100, 0x1000, 0x1000, 0x40, 0x40, 0x1000)
    head[0x100:] = bytes(range(0x40))
    return bytes(head)


def test_copies_are_found_by_what_processes_have_mapped() -> None:
    maps = (
        "7f00-7f01 r--p 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0\n"
        "7f01-7f02 r-xp 00001000 08:01 11 /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0\n"
        "7f03-7f04 r-xp 00001000 08:01 12 /opt/app/libibverbs-1234abcd.so.1 (deleted)\n"
        "7f05-7f06 r-xp 00001000 08:01 13 /usr/lib/libmlx5.so.1\n"
    )
    assert list(libraries.mapped_copies(maps)) == [
        libraries.Mapped("/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0", "7f01-7f02"),
        libraries.Mapped("/opt/app/libibverbs-1234abcd.so.1", "7f03-7f04", deleted=True),
    ]


def test_a_copy_is_reached_by_its_mapping_or_else_below_the_process_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chroot the kernel shows us the path from our root, which is not there below the process' own."""
    found = libraries.system_copies()
    if not found:
        pytest.skip("needs libibverbs.so.1: apt-get install libibverbs1")
    own, deleted, at_root = (tmp_path / f"{name}-libibverbs.so.1" for name in ("own", "deleted", "root"))
    for path in (own, deleted, at_root):
        path.write_bytes(found[0].read_bytes())
    proc = tmp_path / "proc"
    for pid, path, gone in ((41, own, False), (42, deleted, True), (43, at_root, False), (44, deleted, True)):
        (proc / str(pid)).mkdir(parents=True)
        text = (
            f"00400000-00401000 r-xp 00000000 08:01 {pid} /a/libibverbs.so.1{' (deleted)' if gone else ''}\n"
        )
        (proc / str(pid) / "maps").write_text(text)
        if pid in (41, 42):
            (proc / str(pid) / "map_files").mkdir()
            (proc / str(pid) / "map_files" / "400000-401000").symlink_to(path)
    (proc / "43" / "root" / "a").mkdir(parents=True)
    at_root.rename(proc / "43" / "root" / "b")
    at_root = proc / "43" / "root" / "b"
    (proc / "43" / "root" / "a" / "libibverbs.so.1").symlink_to("/b")
    refuse(monkeypatch, proc / "43" / "map_files")
    known = libraries.Copies(proc)
    assert [known.look_at(pid) for pid in (41, 42, 43, 44)] == [True, True, True, False]
    assert (
        list(known.problems) == ["/a/libibverbs.so.1 of 44"]
        and "deleted" in known.problems["/a/libibverbs.so.1 of 44"]
    )
    assert {copy.key[1] for copy in known.known.values()} == {
        path.stat().st_ino for path in (own, deleted, at_root)
    }
    known.close()


def refuse(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Have what lies in a directory refused, as /proc/PID/map_files without rights."""
    real = os.open

    def opened(path: Any, *arguments: Any, **keys: Any) -> int:
        if str(path).startswith(str(directory)):
            raise PermissionError(1, "Operation not permitted")
        return real(path, *arguments, **keys)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "link out of the root", "link of /proc", "directory"])
def test_what_a_process_puts_in_a_librarys_place_is_neither_waited_for_nor_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "41"
    (base / "root" / "a").mkdir(parents=True)
    place = base / "root" / "a" / "libibverbs.so.1"
    secret = tmp_path / "secret"
    secret.write_bytes(b"\x7fELF")
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        target = {"link out of the root": secret, "link of /proc": Path("/proc/self/exe")}.get(
            kind, Path(kind)
        )
        place.symlink_to(target)
    (base / "maps").write_text("00400000-00401000 r-xp 00000000 08:01 5 /a/libibverbs.so.1\n")
    refuse(monkeypatch, base / "map_files")
    known = libraries.Copies(tmp_path)
    assert not known.look_at(41) and not known.known
    assert "cannot be opened" in known.problems["/a/libibverbs.so.1 of 41"]


@pytest.mark.timeout(20)
def test_mappings_of_any_shape_are_read_in_linear_time() -> None:
    name = "/" + "libibverbs.s" * 340
    maps = "".join(f"{i:x}000-{i:x}fff r-xp 00000000 08:01 {i} {name}\n" for i in range(2000))
    assert not list(libraries.mapped_copies(maps))


def test_why_copies_are_not_followed_is_kept_within_bounds(tmp_path: Path) -> None:
    known = libraries.Copies(tmp_path)
    for number in range(5000):
        known.add_file(tmp_path / str(number), str(number))
    assert len(known.problems) == libraries.PROBLEMS_LIMIT


def test_a_file_too_large_to_be_a_library_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "libibverbs.so.1"
    with path.open("wb") as file:
        file.truncate(libraries.SIZE_LIMIT + 1)
    found = libraries.Copies()
    assert not found.add_file(path, "theirs") and "no libibverbs" in found.problems["theirs"]
    assert not found.known


def test_the_default_version_of_a_function_is_the_one_that_programs_call() -> None:
    found = libraries.system_copies()
    if not found:
        pytest.skip("needs libibverbs.so.1: apt-get install libibverbs1")
    blob = found[0].read_bytes()
    functions = libraries.verbs_in(blob)
    known = elf.dynamic_functions(blob)
    assert {"ibv_reg_mr_iova2", "ibv_reg_dmabuf_mr"} <= set(functions)
    assert functions["ibv_reg_dmabuf_mr"] == elf.file_offset(blob, known["ibv_reg_dmabuf_mr"][0])


@pytest.mark.parametrize("blob", [b"", b"\x7fELF\x01\x01", b"\x7fELF\x02\x01" + bytes(58), os.urandom(512)])
def test_what_is_no_library_is_said_to_be_none(blob: bytes) -> None:
    with pytest.raises(elf.NotElf):
        elf.dynamic_functions(blob)


def test_a_copy_is_followed_once_however_it_is_reached(tmp_path: Path) -> None:
    found = libraries.system_copies()
    if not found:
        pytest.skip("needs libibverbs.so.1: apt-get install libibverbs1")
    link = tmp_path / "libibverbs.so.1"
    link.symlink_to(found[0])
    known = libraries.Copies()
    assert known.add_file(found[0], "one") and not known.add_file(link, "two")
    other = tmp_path / "copy.so"
    other.write_bytes(found[0].read_bytes())
    assert known.add_file(other, "three") and len(known.known) == 2
    other.unlink()
    assert Path(list(known.known.values())[1].path).read_bytes()[:4] == b"\x7fELF"
    known.close()


def test_copies_of_containers_that_are_gone_are_let_go(tmp_path: Path) -> None:
    found = libraries.system_copies()
    if not found:
        pytest.skip("needs libibverbs.so.1: apt-get install libibverbs1")
    known = libraries.Copies(tmp_path)
    assert known.add_file(found[0], "the system's")
    other = tmp_path / "libibverbs.so.1"
    other.write_bytes(found[0].read_bytes())
    (tmp_path / "42").mkdir()
    assert known.add_file(other, "a container's", 42) and not known.add_file(other, "again", 43)
    known.forget_unused()
    assert len(known.known) == 2
    (tmp_path / "42").rmdir()
    known.forget_unused()
    assert [copy.shown for copy in known.known.values()] == ["the system's"]
    known.close()


@pytest.mark.parametrize(("size", "followed"), [(11, False), (124, True)])
def test_an_ibv_reg_mr_that_only_jumps_into_iova2_is_followed_there(
    size: int, followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = {"ibv_reg_mr": (0x1000, size), "ibv_reg_mr_iova2": (0x1020, 32), "ibv_open_device": (0x1030, 1)}
    monkeypatch.setattr(libraries, "dynamic_functions", lambda _blob: offered)
    found = libraries.verbs_in(image())
    assert found == {"ibv_reg_mr_iova2": 0x120, **({"ibv_reg_mr": 0x100} if followed else {})}
    offered.pop("ibv_reg_mr_iova2")
    assert libraries.verbs_in(image()) == {"ibv_reg_mr": 0x100}


def test_addresses_of_a_library_lie_in_its_file() -> None:
    blob = image()
    assert elf.file_offset(blob, 0x1008) == 0x108
    with pytest.raises(elf.NotElf):
        elf.file_offset(blob, 0x1040)
    for cut in range(0, 0x68, 5):
        with pytest.raises(elf.NotElf):
            elf.file_offset(blob[:cut], 0x1008)
