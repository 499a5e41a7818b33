"""The loader spoken to: what it is told, what it hands over, and what becomes of it when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrepro.watch.attach import FILES
from regrepro.watch.bpf.loader import _ANSWER, _REQUEST, Loader

# In the place of follow.c: it keeps what it is asked, answers MAP, TRAMPOLINE, KPROBE and UPROBE with
# descriptors, and an object that is called "bad" with EINVAL.
FAKE = """#!{python}
import os, socket, struct
request, answer = struct.Struct({request!r}), struct.Struct({answer!r})
channel = socket.socket(fileno=0)
while True:
    data, given, _, _ = socket.recv_fds(channel, request.size, 1)
    if not data:
        break
    what, at_return, number, cookie, program, module, text = request.unpack(data)
    words = [item.partition(b"\\0")[0].decode() for item in (program, module, text)]
    with open({log!r}, "a") as log:
        print(what, at_return, number, cookie, *words, len(given), file=log)
    if words[2] == "dies":
        os._exit(7)
    if words[2] == "bad":
        socket.send_fds(channel, [answer.pack(-22, b"libbpf: it is no object")], [])
        continue
    count = {{6: 1, 7: 2, 8: 2, 9: 2}}.get(what, 0)
    socket.send_fds(channel, [answer.pack(0, b"")], [os.open(os.devnull, os.O_RDONLY) for _ in range(count)])
"""


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Path]:
    """A loader of our own; no descriptor is left behind afterwards."""
    program = tmp_path / "follow"
    text = FAKE.format(
        python=sys.executable, request=_REQUEST.format, answer=_ANSWER.format, log=str(tmp_path / "log")
    )
    program.write_text(text)
    program.chmod(0o755)
    before = descriptors()
    yield program
    assert descriptors() == before


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def asked(program: Path) -> list[str]:
    return (program.parent / "log").read_text().splitlines()


def test_each_call_is_one_question_and_what_it_gets_is_ours(fake: Path) -> None:
    with Loader(fake, Path("an.o")) as loader:
        loader.configure(b"12345678")
        shared = os.open(os.devnull, os.O_RDONLY)
        loader.share("ring", shared)
        os.close(shared)
        loader.load("pin_user_pages")
        fds = [loader.map("ring")]
        attached = [
            loader.trampoline("fexit_failed", "dma_buf_get", "", 5),
            loader.trampoline("fexit_failed", "rxe_reg_user_mr", "rdma_rxe", 6),
            loader.kprobe("kretprobe_failed", "dma_buf_get", 7, at_return=True),
            loader.uprobe("library_entry", "/a/file", 4096, 8, at_return=False),
        ]
    assert asked(fake) == [
        "1 0 0 0   an.o 0",
        "2 0 8 0   12345678 0",
        "3 0 0 0   ring 1",
        "4 0 0 0   pin_user_pages 0",
        "5 0 0 0    0",
        "6 0 0 0   ring 0",
        "7 0 0 5 fexit_failed  dma_buf_get 0",
        "7 0 0 6 fexit_failed rdma_rxe rxe_reg_user_mr 0",
        "8 1 0 7 kretprobe_failed  dma_buf_get 0",
        "9 0 4096 8 library_entry  /a/file 0",
    ]
    for item in attached:
        assert {str(item.link), str(item.program)} <= descriptors()
        item.close()
    os.close(fds[0])


def test_without_a_target_no_program_for_trampolines_is_asked_for(fake: Path) -> None:
    with Loader(fake, Path("an.o")) as loader:
        loader.load()
    assert [line.split()[0] for line in asked(fake)] == ["1", "5"]


def test_what_libbpf_says_is_in_the_error(fake: Path) -> None:
    with pytest.raises(OSError, match=r"Invalid argument \(libbpf: it is no object\)"):
        Loader(fake, Path("bad"))


def test_a_loader_that_dies_is_said(fake: Path) -> None:
    with Loader(fake, Path("an.o")) as loader, pytest.raises(OSError, match="the loader ended with 7"):
        loader.map("dies")


def test_a_loader_that_is_not_there_is_an_error(fake: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Loader(fake.parent / "absent", Path("an.o"))


@pytest.mark.skipif(not FILES[0].exists(), reason="the loader was not built (scripts/test does it)")
def test_the_real_loader_opens_the_real_object_and_refuses_others(tmp_path: Path) -> None:
    junk = tmp_path / "junk.o"
    junk.write_bytes(b"no object" * 100)
    with pytest.raises(OSError, match="libbpf"):
        Loader(FILES[0], junk)
    with pytest.raises(OSError, match="No such file"):
        Loader(FILES[0], tmp_path / "absent.o")
    with Loader(*FILES) as loader:
        with pytest.raises(OSError, match="Invalid argument"):
            loader.configure(b"too short")
        with pytest.raises(OSError, match="No such file"):
            loader.share("no_such_map", 0)
        with pytest.raises(OSError, match=r"Bad file descriptor|No such file"):
            loader.map("ring")  # nothing is loaded


@pytest.mark.skipif(not FILES[0].exists(), reason="the loader was not built (scripts/test does it)")
def test_the_real_loader_survives_packets_that_are_none() -> None:
    done = subprocess.run([FILES[0]], stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=20)
    assert done.returncode == 1
