"""What `--from` is given: folders, archives, reports; and what is broken, cut, hostile or empty."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audit_nodes import GIB, PAGE, Node
from click.testing import CliRunner

from regrepro.audit import archive
from regrepro.audit.audit import audit
from regrepro.audit.commands import audit as command
from regrepro.audit.places import open_place
from regrepro.audit.reader import FolderReader
from regrepro.errors import UsageError

ROOT = Path(__file__).parents[3]


def exposed_node() -> Node:
    return Node().hugetlb_cma(3 * GIB).driver("535.104.05")


def shape(result: dict[str, Any]) -> Any:
    findings = sorted((one["id"], one["severity"], one["title"]) for one in result["findings"])
    return findings, [(one["class"], one["state"]) for one in result["exposure"]]


def audited(path: Path) -> dict[str, Any]:
    with open_place(path) as reader:
        return audit(reader)


def tarred(folder: Path, path: Path, mode: str) -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, "node")
    return path


def zipped(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                packed.write(file, f"node/{file.relative_to(folder)}")
    return path


def test_every_archive_gives_what_the_folder_gives(tmp_path: Path) -> None:
    folder = exposed_node().write(tmp_path / "node")
    wanted = shape(audited(folder))
    assert wanted[1] == [("A", "not-exposed"), ("B", "exposed")]
    for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tar.bz2", "w:bz2"), ("a.tar.xz", "w:xz")):
        assert shape(audited(tarred(folder, tmp_path / name, mode))) == wanted, name
    assert shape(audited(zipped(folder, tmp_path / "a.zip"))) == wanted
    deep = tmp_path / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "node").symlink_to(folder)  # a link is not followed, the folder itself is found
    exposed_node().write(deep / "real")
    assert shape(audited(tmp_path / "deep")) == wanted


def test_collect_sh_on_this_machine_gives_the_same_findings_as_the_audit(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "scripts/collect.sh"), str(tmp_path / "here")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    here = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert shape(audited(tmp_path / "here")) == shape(here)
    again = subprocess.run(
        ["sh", str(ROOT / "scripts/collect.sh"), str(tmp_path / "here")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 2, "it overwrote a folder"


def bug_report(node: Node) -> str:
    """Write the node's files in the shape of an nvidia-bug-report.log."""
    rule = "_" * 44
    parts = [
        f"{rule}\n\nStart of NVIDIA bug report log file.  Please include this file, along\nwith a "
        f"detailed\n\n"
        "nvidia-bug-report.sh Version: 1\n\nDate: today\nuname: Linux gpu-a17 6.8.0-45-generic #45 SMP "
        "x86_64 GNU/Linux\n\n"
    ]
    for path in (
        "proc/cmdline",
        "proc/meminfo",
        "proc/modules",
        "proc/driver/nvidia/version",
        "proc/zoneinfo",
    ):
        parts.append(
            f"{rule}\n\n*** /{path}\n*** ls: -r--r--r-- 1 root root 0 today /{path}\n{node.files[path]}\n"
        )
    parts.append(f"{rule}\n\n*** /etc/nope does not exist\n\n")
    parts.append(f"{rule}\n\n/usr/bin/dmesg\n\n{node.files['commands/dmesg.txt']}\n")
    smi = (
        "GPU 00000000:1B:00.0\n    Product Name : NVIDIA H100\n    FB Memory Usage\n        Total : 81559 "
        "MiB\n"
    )
    parts.append(
        f"{rule}\n\n/usr/bin/nvidia-smi --query\n\n==============NVSMI LOG==============\nDriver "
        f"Version : 535.104.05\n{smi}\n"
    )
    return "".join(parts)


@pytest.mark.parametrize("packed", [False, True], ids=["log", "gz"])
def test_nvidia_bug_report(tmp_path: Path, packed: bool) -> None:
    text = bug_report(exposed_node()).encode()
    path = tmp_path / ("nvidia-bug-report.log" + (".gz" if packed else ""))
    path.write_bytes(gzip.compress(text) if packed else text)
    result = audited(path)
    value = {(one["group"], one["name"]): one["value"] for one in result["facts"]}
    assert value["nvidia", "version"] == "535.104.05"
    assert value["nvidia", "flavour"] == "open"
    assert value["system", "arch"] == "x86_64"
    assert value["memory", "cma-total"] == 6 * GIB
    assert value["nvidia", "gpus"][0]["name"] == "NVIDIA H100"
    assert (
        next(one["state"] for one in result["exposure"] if one["class"] == "B") == "unknown"
    )  # no RDMA in it
    # A report that is cut in the middle still tells what it holds.
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) * 2 // 3])
    cut = {(one["group"], one["name"]): one["value"] for one in audited(path)["facts"]}
    assert cut["memory", "cma-total"] == 6 * GIB


@pytest.mark.parametrize(
    ("release", "version", "state"),
    [
        ("6.12.118+deb13-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.12.118-1 (2026-09-12)", "exposed"),
        ("6.8.0-45-generic", "#45-Ubuntu SMP PREEMPT_DYNAMIC Fri Aug 30 12:02:04 UTC 2024", "unknown"),
    ],
)
def test_sosreport(release: str, version: str, state: str, tmp_path: Path) -> None:
    """It holds no symbols: the number decides for a Debian kernel, and for no vendor's."""
    node = exposed_node().set("proc/sys/kernel/osrelease", release).set("proc/sys/kernel/version", version)
    root = tmp_path / "sosreport-gpu-a17-2026"
    for name, text in node.files.items():
        if name.startswith(("proc/", "sys/")):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    kernel = root / "sos_commands" / "kernel"
    kernel.mkdir(parents=True)
    (kernel / "dmesg").write_text(node.files["commands/dmesg.txt"], encoding="utf-8")
    (kernel / "uname_-a").write_text(
        f"Linux gpu-a17 {release} {version} x86_64 GNU/Linux\n", encoding="utf-8"
    )
    infiniband = root / "sos_commands" / "infiniband"
    infiniband.mkdir()
    (infiniband / "ibv_devinfo_-v").write_text(
        "hca_id:\tmlx5_0\n\tfw_ver:\t28.1\n\tmax_mr:\t16777216\n", encoding="utf-8"
    )
    packed = tarred(root, tmp_path / "sos.tar.xz", "w:xz")
    for place in (root, packed):
        result = audited(place)
        assert next(one["state"] for one in result["exposure"] if one["class"] == "B") == state
        devices = next(one["value"] for one in result["facts"] if one["name"] == "devices")
        assert devices[0]["max_mr"] == 16777216


def test_run_of_regrepro_and_bundle(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    header = {
        "schema": "regrepro.record/2",
        "version": "0.1.0",
        "node": {
            "hostname": "gpu-a17",
            "kernel": "6.1.0-57-amd64",
            "kernel_version": "#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-1 (2026-09-30)",
            "arch": "x86_64",
            "page_size": PAGE,
            "cmdline": "ro hugetlb_cma=6G",
            "nvidia_driver": "535.104.05",
            "lockdown": "none",
            "vm": {"overcommit_memory": 0},
            "limits": {"memlock_soft": 8 << 20, "memlock_hard": 8 << 20},
        },
    }
    zones = [
        {"node": 0, "zone": "Normal", "start_pfn": 0, "spanned": 10**7, "present": 10**7, "managed": 10**7,
         "blocks": {"Movable": 15000, "CMA": 1536}},
    ]  # fmt: skip
    events = [
        {"seq": 1, "event": "memory-map", "page_size": PAGE, "pageblock_order": 9, "complete": True,
         "has_unpinnable": True, "zones": zones, "problems": []},
        {"seq": 2, "event": "reservation", "argument": "hugetlb_cma", "wanted": 6 * GIB, "got": 3 * GIB,
         "ok": False, "kernel_lines": ["hugetlb_cma: reservation failed: err -12, node 1"]},
    ]  # fmt: skip
    lines = [json.dumps(one) for one in (header, *events)]
    (run / "record.jsonl").write_text("\n".join(lines) + '\n{"seq": 3, "ev', encoding="utf-8")
    for place in (run, run / "record.jsonl", tarred(run, tmp_path / "bundle.tar.gz", "w:gz")):
        result = audited(place)
        ids = {one["id"]: one["severity"] for one in result["findings"]}
        assert ids["reservation-failed"] == "warning"
        assert ids["memlock-too-small"] == "warning"
        assert ids["unpinnable-memory"] == "note"
        conditions = {one["what"]: one["holds"] for one in result["exposure"][1]["conditions"]}
        assert list(conditions.values()) == [True, True, None, True]
        # An archive's own place for the time being is nothing that a reader could look at again.
        assert str(place if place.suffix == ".gz" else run) in result["where"]
        assert "regrepro-audit-" not in json.dumps(result)


def test_loose_files(tmp_path: Path) -> None:
    node = exposed_node()
    for name, path in (
        ("meminfo", "proc/meminfo"),
        ("cmdline.txt", "proc/cmdline"),
        ("zoneinfo", "proc/zoneinfo"),
    ):
        (tmp_path / name).write_text(node.files[path], encoding="utf-8")
    (tmp_path / "dmesg.log").write_text(node.files["commands/dmesg.txt"], encoding="utf-8")
    (tmp_path / "uname.txt").write_text("Linux h 6.8.0-45-generic #1 SMP x86_64\n", encoding="utf-8")
    result = audited(tmp_path)
    assert next(one["severity"] for one in result["findings"] if one["id"] == "unpinnable-memory") == "note"


# --- hostile and broken
# ---------------------------------------------------------------------------------------------


def one_line(path: Path) -> str:
    """The command line says one clear line and exits with 2."""
    shown = CliRunner().invoke(command, ["--from", str(path)])
    assert shown.exit_code == 2, shown.output
    assert shown.output.count("\n") == 1, shown.output
    assert shown.output.startswith("regrepro audit: ")
    return str(shown.output)


def member(
    name: str, *, kind: bytes = tarfile.REGTYPE, data: bytes = b"x", link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    return info, data


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


MEMINFO = b"MemTotal: 1000 kB\nCmaTotal: 0 kB\nCmaFree: 0 kB\n"


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "..", "a\\..\\evil"])
def test_an_archive_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    path = tar_of(tmp_path / "hostile.tar.gz", member("proc/meminfo", data=MEMINFO), member(name))
    assert "leads out of the folder" in one_line(path)
    zip_path = tmp_path / "hostile.zip"
    with zipfile.ZipFile(zip_path, "w") as packed:
        packed.writestr("proc/meminfo", MEMINFO)
        packed.writestr(zipfile.ZipInfo(name), b"x")
    assert "leads out of the folder" in one_line(zip_path)


def test_links_lead_nowhere_outside(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("MemTotal: 77 kB\nCmaTotal: 0 kB\n", encoding="utf-8")
    path = tar_of(
        tmp_path / "links.tar.gz",
        member("proc/cmdline", data=b"ro\n"),
        member("proc/meminfo", kind=tarfile.SYMTYPE, link=str(secret)),
        member("proc/zoneinfo", kind=tarfile.SYMTYPE, link="../../../../../../../../.." + str(secret)),
        member("proc/modules", kind=tarfile.LNKTYPE, link=str(secret)),
        member("sys/loop", kind=tarfile.SYMTYPE, link="loop"),
        member("proc/fifo", kind=tarfile.FIFOTYPE),
        member("proc/kmsg", kind=tarfile.CHRTYPE),
        member("proc/version", kind=tarfile.SYMTYPE, link="cmdline"),
    )
    with open_place(path) as reader:
        assert reader.read("proc/meminfo").text is None
        assert reader.read("proc/zoneinfo").text is None
        assert reader.read("proc/modules").text is None
        assert reader.read("sys/loop").text is None
        assert reader.read("proc/fifo").text is None
        assert reader.read("proc/version").text == "ro\n"  # a link that stays inside is one


def test_a_captured_folder_cannot_point_outside_either(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "meminfo").write_text("MemTotal: 77 kB\n", encoding="utf-8")
    node = tmp_path / "node"
    (node / "proc").mkdir(parents=True)
    (node / "proc" / "meminfo").symlink_to(secret / "meminfo")
    (node / "sys").symlink_to(secret)
    os.mkfifo(node / "proc" / "cmdline")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(node / "proc" / "modules"))
        reader = FolderReader(
            node, links={"proc/zoneinfo": "../../secret/meminfo", "proc/stat": "/secret/meminfo"}
        )
        for path in (
            "proc/meminfo",
            "sys/meminfo",
            "proc/cmdline",
            "proc/modules",
            "proc/zoneinfo",
            "proc/stat",
        ):
            assert reader.read(path).text is None, path
        assert reader.names("sys") == []
        assert reader.read("proc/../../secret/meminfo").text is None
        assert reader.names("..") == []


def test_the_unpacked_files_are_private_and_go_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = exposed_node().write(tmp_path / "node")
    path = tarred(folder, tmp_path / "a.tar.gz", "w:gz")
    with open_place(path):
        made = next(tmp_path.glob("regrepro-audit-*"))
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert not list(tmp_path.glob("regrepro-audit-*"))


def bomb(path: Path) -> Path:
    """200 MiB of zeros in a few KiB."""
    with gzip.open(path, "wb") as out, tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("proc/meminfo")
        info.size = 200 << 20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    return path


def zip_bomb(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("proc/meminfo", bytes(200 << 20))
    return path


def report_bomb(path: Path) -> Path:
    text = b"Start of NVIDIA bug report log file\n" + bytes(200 << 20)
    path.write_bytes(gzip.compress(text))
    return path


@pytest.mark.parametrize(
    ("name", "make"), [("b.tar.gz", bomb), ("b.zip", zip_bomb), ("nvidia-bug-report.log.gz", report_bomb)]
)
def test_a_bomb_is_refused(tmp_path: Path, name: str, make: Callable[[Path], Path]) -> None:
    assert "is refused" in one_line(make(tmp_path / name))


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_MEMBERS", 10)
    path = tar_of(tmp_path / "many.tar.gz", *(member(f"proc/{number}") for number in range(20)))
    assert "more than 10 members" in one_line(path)
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as packed:
        for number in range(20):
            packed.writestr(f"proc/{number}", b"x")
    assert "more than 10 members" in one_line(tmp_path / "many.zip")


def test_a_zip_that_lies_about_its_sizes_is_stopped(tmp_path: Path) -> None:
    path = zip_bomb(tmp_path / "lies.zip")
    data = bytearray(path.read_bytes())
    real = (200 << 20).to_bytes(4, "little")
    while (at := data.find(real)) >= 0:
        data[at : at + 4] = (1000).to_bytes(4, "little")
    path.write_bytes(bytes(data))
    one_line(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz", "zip"])
def test_a_cut_archive_is_one_line_or_what_is_left(tmp_path: Path, mode: str, share: float) -> None:
    folder = exposed_node().write(tmp_path / "node")
    (folder / "noise").write_bytes(os.urandom(200_000))  # so that the cut falls inside of something
    path = zipped(folder, tmp_path / "a") if mode == "zip" else tarred(folder, tmp_path / "a", mode)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert "broken or cut" in one_line(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x1f\x8b", b"PK\x03\x04", b"BZh9", b"\xfd7zXZ\x00", b"hello\n", bytes(1024), b"{}\n",
     b'{"schema": 1}\n',
     b"\x28\xb5\x2f\xfd\x00", gzip.compress(b"", mtime=0), gzip.compress(b"not a tar", mtime=0),
     b"#!/bin/sh\nexit 0\n"],
)  # fmt: skip
def test_what_is_no_archive_is_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "thing"
    path.write_bytes(data)
    one_line(path)


def test_empty_places_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds nothing that the audit reads" in one_line(tmp_path / "empty")
    tar_of(tmp_path / "empty.tar.gz")
    one_line(tmp_path / "empty.tar.gz")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    one_line(tmp_path / "empty.zip")
    one_line(tmp_path / "nowhere")
    one_line(Path("/dev/null"))


def test_names_that_clash_do_no_harm(tmp_path: Path) -> None:
    path = tar_of(
        tmp_path / "clash.tar.gz",
        member("proc/meminfo", data=MEMINFO),
        member("proc/meminfo/deeper"),
        member("proc", data=b"a file where a folder is"),
        member("x" * 300),
        member("proc/cmdline", data=b"ro\n"),
    )
    with open_place(path) as reader:
        assert reader.read("proc/cmdline").text == "ro\n"
        assert reader.read("proc/meminfo").text == MEMINFO.decode()


def test_inside() -> None:
    assert archive.inside("a/./b") == "a/b"
    assert archive.inside("a/../b") == "b"
    for name in ("../a", "a/../../b", "/a", "a\0b"):
        assert archive.inside(name) is None


def test_usage_error_is_what_unpack_raises(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        archive.unpack(bomb(tmp_path / "b.tar.gz"), tmp_path / "out")


@pytest.mark.parametrize(
    "event",
    [
        {"event": "memory-map", "page_size": False, "zones": None},
        {
            "event": "memory-map",
            "page_size": -5,
            "pageblock_order": 9999,
            "zones": [{"zone": "Movable", "managed": True}],
        },
        {"event": "memory-map", "zones": [{"zone": "Normal", "blocks": {"CMA": True, "Movable": -1}}, 7]},
        {"event": "reservation", "kernel_lines": [None, {}], "ok": False},
    ],
)
def test_a_record_of_odd_values_says_nothing_rather_than_crash(tmp_path: Path, event: dict[str, Any]) -> None:
    """What the fuzzer found: numbers that are none."""
    record = tmp_path / "record.jsonl"
    record.write_text(
        json.dumps({"schema": "regrepro.record/2"}) + "\n" + json.dumps(event), encoding="utf-8"
    )
    assert audited(record)["findings"]
