"""Whatever shape a log comes in, it is read or refused, and never called clean unread."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from regrepro.explain.commands import explain as command
from unit.explain.explaining import LOG

NOISE = "".join(f"12:00:{n % 60:02d} step {n} of the training\n" for n in range(3000))
TEXT = f"{NOISE}{LOG}{NOISE}"
DATA = TEXT.encode()


def tarred(**members: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def zipped(**members: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


def journald(text: str, *, as_bytes: bool) -> bytes:
    """What `journalctl -o json` prints: a message that is no clean text is an array of bytes."""
    entries = []
    for line in text.splitlines():
        told = list(line.encode()) if as_bytes else line
        entries.append({"__CURSOR": "s=1", "_HOSTNAME": "n1", "_PID": "7", "MESSAGE": told})
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


BINARY = bytes(range(256)) * 64
SHAPES = {
    "plain": DATA,
    "gzip": gzip.compress(DATA),
    "two gzip members": gzip.compress(NOISE.encode()) + gzip.compress(LOG.encode()),
    "bzip2": bz2.compress(DATA),
    "xz": lzma.compress(DATA),
    "utf-16 with a mark": TEXT.encode("utf-16"),
    "utf-16-le": TEXT.encode("utf-16-le"),
    "utf-16-be": TEXT.encode("utf-16-be"),
    "utf-8 with a mark": TEXT.encode("utf-8-sig"),
    "utf-32": TEXT.encode("utf-32"),
    "latin-1": f"gr\u00fc\u00dfe\n{TEXT}".encode("latin-1"),
    "cr only": TEXT.replace("\n", "\r").encode(),
    "crlf": TEXT.replace("\n", "\r\n").encode(),
    "colours": f"\x1b[31m{LOG.strip()}\x1b[0m\n".encode(),
    "journald's json": journald(TEXT, as_bytes=False),
    "journald's json, bytes": journald(TEXT, as_bytes=True),
    "a long line of json": json.dumps({"log": "x" * 100_000, "line": LOG, "more": "y" * 100_000}).encode(),
    "gzip of utf-16": gzip.compress(TEXT.encode("utf-16")),
    "zip": zipped(a=NOISE.encode(), b=DATA),
    "tar": tarred(rank0=NOISE.encode(), rank1=DATA, core=BINARY),
    "tar.gz": gzip.compress(tarred(rank0=DATA)),
    "gzip in tar in gzip": gzip.compress(tarred(a=gzip.compress(DATA))),
}


def explained(data: bytes, folder: Path, *, piped: bool = False) -> Result:
    path = folder / "log"  # no suffix tells
    path.write_bytes(data)
    return CliRunner().invoke(command, [] if piped else [str(path)], input=data if piped else None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("piped", [False, True])
def test_each_shape_is_read(shape: str, piped: bool, tmp_path: Path) -> None:
    done = explained(SHAPES[shape], tmp_path, piped=piped)
    assert done.exit_code == 0, done.output
    assert "ibv_reg_mr_iova2 failed with ENOMEM, once" in done.output
    assert "damaged" not in done.output


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_damaged_end_costs_the_end_alone_and_is_said(pack: object, tmp_path: Path) -> None:
    assert callable(pack)
    noise = "".join(random.Random(1).choices("abcdefgh \n", k=3_000_000))
    whole = pack((LOG + noise).encode())
    done = explained(whole[: len(whole) * 4 // 5], tmp_path)
    assert done.exit_code == 0, done.output
    assert "ibv_reg_mr_iova2 failed with ENOMEM, once" in done.output
    assert "is damaged" in done.output and "what came before was read" in done.output


def test_a_damaged_text_without_a_failure_is_not_called_clean(tmp_path: Path) -> None:
    noise = "".join(random.Random(1).choices("abcdefgh \n", k=3_000_000))
    done = explained(gzip.compress(noise.encode())[:-1000], tmp_path)
    assert done.exit_code == 125 and "is damaged" in done.output


@pytest.mark.parametrize(
    "data", [BINARY, b"\x7fELF" + bytes(4096), gzip.compress(DATA)[:40], os.urandom(8192)]
)
def test_what_cannot_be_read_is_refused(data: bytes, tmp_path: Path) -> None:
    done = explained(data, tmp_path)
    assert done.exit_code == 2, done.output
    assert done.output.startswith("regrepro explain: ") and done.output.count("\n") == 1


def test_archives_within_archives_have_an_end(tmp_path: Path) -> None:
    data = DATA
    for _ in range(6):
        data = gzip.compress(tarred(a=data))
    assert explained(data, tmp_path).exit_code == 2


def test_a_journal_is_read_through_journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "journalctl"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LOG}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = explained(b"LPKSHHRH" + bytes(1000), tmp_path)
    assert done.exit_code == 0 and "ibv_reg_mr_iova2 failed with ENOMEM, once" in done.output
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    done = explained(b"LPKSHHRH" + bytes(1000), tmp_path)
    assert done.exit_code == 2 and "is a journal of systemd" in done.output


def test_a_pipe_that_comes_slowly_is_waited_for(tmp_path: Path) -> None:
    program = (
        f"import sys, time; print({LOG[:20]!r}, end='', flush=True); time.sleep(0.5); print({LOG[20:]!r})"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as slow:
        done = subprocess.run(
            [sys.executable, "-m", "regrepro", "explain", "-"],
            stdin=slow.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
    assert "ibv_reg_mr_iova2 failed with ENOMEM" in done.stdout, done.stderr
