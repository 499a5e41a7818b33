"""Small files that ask for large work: each is refused in words, or costs little."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import record_builder as build

from regrepro.audit import archive, driversource, parse
from regrepro.errors import UsageError
from regrepro.kernel import zones
from regrepro.record import read_record

pytestmark = pytest.mark.timeout(60)
MEMORY = 400 << 20  # of a process with Python and numpy in it


def regrepro(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that may take so much memory; it ends in words."""
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY}, {MEMORY}));"
    limited += "from regrepro.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", limited, *arguments], capture_output=True, text=True, check=False, timeout=50
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def spoiled(event: str, /, **keys: Any) -> build.Record:
    record = build.partly_pinned_record()
    found = build.find(record, event)
    found.update(keys)
    return record


HUGE = [
    ("buffer", {"length": 4096 * 10**9}),
    ("buffer", {"length": 4096 * 10**9, "place": {"cma": [1]}}),
    ("pin", {"length": 4096 * 10**15}),
    ("pin", {"ranges": [[0, 4096 * 10**15]]}),
    ("register", {"length": 10**30}),
    ("memory-map", {"unpinnable_ranges": [[0, 10**12, "cma"], [0, 10**12, []]]}),
    ("buffer", {"event": "head"}),
    ("register", {"event": "cannot"}),
]


@pytest.mark.parametrize(("event", "keys"), HUGE)
@pytest.mark.parametrize("command", ["judge", "report --format c", "report --format html", "bundle"])
def test_a_record_of_a_few_lines_never_takes_long(
    event: str, keys: dict[str, Any], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = build.write(tmp_path / "run", spoiled(event, **keys), verdicts=False)
    done = regrepro(*command.split(), str(directory))
    assert done.returncode in (0, 2, 10, 11, 125), done.stderr
    assert done.stderr.count("\n") <= 1


@pytest.mark.parametrize("names", [1.5, 10**30, "all", {"a": 1}, [[1], {"b": 2}]])
def test_names_of_another_type_are_no_names(names: Any, tmp_path: Path) -> None:
    record = build.partly_pinned_record()
    record.header["run"]["names"] = names
    directory = build.write(tmp_path / "run", record, verdicts=False)
    done = regrepro("bundle", str(directory), "--output", str(tmp_path / "b.tar.gz"))
    assert done.returncode == 0, done.stderr


def test_a_record_of_more_values_than_runs_make_is_refused(tmp_path: Path) -> None:
    record = build.no_pin_record()
    directory = build.write(tmp_path / "run", record, verdicts=False)
    with (directory / "record.jsonl").open("a") as file:
        file.write('{"seq":99,"t":1,"event":"note","text":[' + ",".join(["{}"] * 6_000_000) + "]}\n")
    with pytest.raises(UsageError, match="more than 5000000 values"):
        read_record(directory)
    assert regrepro("judge", str(directory)).returncode == 2


def packed(path: Path, header: bytes, kind: bytes, times: int) -> Path:
    """An archive of extended headers."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(times):
            member = tarfile.TarInfo("x")
            member.size, member.type = len(header), kind
            file.write(member.tobuf(tarfile.USTAR_FORMAT))
            file.write(header + b"\0" * (-len(header) % 512))
        body = tarfile.TarInfo("run/y")
        file.write(body.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 1024)
    return path


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("command", ["bundle --check", "audit --from", "audit --driver-source"])
def test_an_archive_of_headers_is_refused(kind: bytes, command: str, tmp_path: Path) -> None:
    size = 32 << 20
    header = b"%d a=" % size + b"x" * (size - len(b"%d a=" % size) - 1) + b"\n"
    path = packed(tmp_path / "b.tar.gz", header, kind, 1)
    done = regrepro(*command.split(), str(path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


def test_headers_do_not_gather(tmp_path: Path) -> None:
    def header(number: int) -> bytes:
        text = b"key%d=" % number + b"x" * 30000 + b"\n"
        return b"%d " % (len(text) + 6) + text

    made = io.BytesIO()
    for number in range(100):
        member = tarfile.TarInfo("x")
        member.size, member.type = len(header(number)), tarfile.XGLTYPE
        made.write(member.tobuf(tarfile.USTAR_FORMAT) + header(number) + b"\0" * (-len(header(number)) % 512))
        made.write(tarfile.TarInfo(f"f{number}").tobuf(tarfile.USTAR_FORMAT))
    made.write(b"\0" * 1024)
    made.seek(0)
    for tar, member in archive.tar_members(made):
        assert not member.pax_headers and len(tar.pax_headers) <= 1


LINES = ["a", " ", "\n", "(", "{", '"', "'", "\\\n", "/*", "a b ", "1: ", ":", "0x0 ", "#if X\n", "\t"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", LINES)
@pytest.mark.parametrize(
    "read",
    [
        parse.rdma_resource,
        parse.devinfo,
        parse.smi,
        parse.boot_log,
        zones.parse_meminfo,
        zones.parse_zoneinfo,
        driversource.read_host_pin,
        driversource.read_peermem,
    ],
)
def test_texts_are_read_in_linear_time(read: Any, unit: str) -> None:
    text = unit * (300_000 // len(unit))
    for given in (text, f"1: x: {text}", f"void os_lock_user_pages(int a)\n{{\n{text}\n}}\n"):
        read(given)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ["os_lock_user_pages(", "#elif X\n", "#if X\nf |= FOLL_LONGTERM;\n#endif\n"])
def test_a_drivers_source_of_any_shape_is_read_in_linear_time(unit: str) -> None:
    body = f"void os_lock_user_pages(int a)\n{{\npin_user_pages(1);\n#if Y\n{unit * 20000}#endif\n}}\n"
    for text in (unit * 40000, body):
        assert json.dumps(driversource.read_host_pin(text).by_arch)
