"""The stage over a machine made of numbers: what a body calls, and that every step is recorded."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from stage_fakes import Bench, FakeBackend, places

from regrepro.errors import Unmet, UsageError
from regrepro.kernel import own_process
from regrepro.scenario import Change
from regrepro.stage.ports import PAGE_SIZE


def test_the_incident(bench: Bench) -> None:
    stage = bench.stage
    buffer = stage.buffer(pages=8, place="unpinnable")
    pin = stage.pin(buffer)
    assert pin
    assert not stage.register(buffer)
    pin.release()
    assert not pin
    registration = stage.register(buffer)
    assert registration
    registration.deregister()
    stage.finish()
    assert [event["event"] for event in bench.events()] == [
        "buffer",
        "pin",
        "register",
        "release",
        "register",
        "deregister",
        "free",
    ]
    made, pinned, failed, released, succeeded = bench.events("buffer", "pin", "register", "release")
    assert made["placed"] == "gather"
    assert places(made) == ["cma"] * 8
    assert made["vma"].endswith("rw-p 00000000 00:00 0")
    assert (pinned["owner"], pinned["kind"], pinned["errno"]) == ("process-vm", "pin", None)
    assert [count for _, _, count in pinned["after"]["refcount"]] == [1025] * 8
    assert failed["errno"] == "ENOMEM"
    assert failed["pins"] == [{"pin": 1, "alive_before": True, "alive_after": True}]
    assert failed["before"]["pfn"] == failed["after"]["pfn"]
    assert failed["address"] == failed["iova"] == buffer.address
    assert released["was_alive"] is True
    assert released["checksum_before"] == released["checksum_after"]
    assert succeeded["errno"] is None
    assert succeeded["pins"] == []
    assert places(succeeded, "after") == ["ordinary"] * 8
    assert bench.backend.ranges == []
    assert bench.backend._device.open == 0


@pytest.mark.parametrize(
    ("change", "kind", "place", "errno_name"),
    [
        (Change("pin", "none"), "none", "cma", None),
        (Change("pin", "longterm"), "longterm", "cma", None),
        (Change("pin", "get"), "get", "cma", "ENOMEM"),
        (Change("place", "ordinary"), "pin", "ordinary", None),
        (None, "pin", "cma", "ENOMEM"),
    ],
)
def test_a_control_changes_one_variable(
    tmp_path: Path, change: Change | None, kind: str, place: str, errno_name: str | None
) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: n % 2), change)
    buffer = bench.stage.buffer(pages=4, place="unpinnable")
    bench.stage.pin(buffer)
    bench.stage.register(buffer)
    made, pinned, registered = bench.events("buffer", "pin", "register")
    assert places(made) == [place] * 4
    assert pinned["kind"] == kind
    assert registered["errno"] == errno_name


def test_releasing_no_pin_records_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeBackend(), Change("pin", "none"))
    pin = bench.stage.pin(bench.stage.buffer(pages=1))
    assert not pin
    pin.release()
    assert bench.events("release") == []
    assert bench.events("pin")[0]["owner"] == "none"


def test_a_refused_pin_is_data(bench: Bench) -> None:
    bench.backend.refuse["pin"] = errno.ENOMEM
    buffer = bench.stage.buffer(pages=2)
    pin = bench.stage.pin(buffer)
    assert not pin
    assert pin.errno == "ENOMEM"
    assert bench.stage.register(buffer)
    [event] = bench.events("pin")
    assert event["errno"] == "ENOMEM"


def test_a_pin_that_the_kernel_does_not_offer_is_unmet(bench: Bench) -> None:
    bench.backend.refuse["pin"] = errno.ENOSYS
    with pytest.raises(Unmet, match="process-vm"):
        bench.stage.pin(bench.stage.buffer(pages=2))
    assert bench.events("pin")[0]["errno"] == "ENOSYS"


def test_some_pages_are_pinned(bench: Bench) -> None:
    buffer = bench.stage.buffer(pages=8, place="unpinnable")
    bench.stage.pin(buffer, pages=[5, 2, 3])
    assert not bench.stage.register(buffer)
    pinned, failed = bench.events("pin", "register")
    assert pinned["ranges"] == [[2 * PAGE_SIZE, 2 * PAGE_SIZE], [5 * PAGE_SIZE, PAGE_SIZE]]
    moved = [
        before != after for before, after in zip(failed["before"]["pfn"], failed["after"]["pfn"], strict=True)
    ]
    assert moved == [index not in (2, 3, 5) for index in range(8)]


def test_two_pins_are_both_accounted_for(bench: Bench) -> None:
    buffer = bench.stage.buffer(pages=2, place="unpinnable")
    bench.stage.pin(buffer)
    second = bench.stage.pin(buffer, kind="get")
    bench.backend._device.register = lambda *a, **k: (
        second._held[0].release() or (_ for _ in ()).throw(OSError(errno.ENOMEM, ""))
    )
    bench.stage.register(buffer)
    [event] = bench.events("register")
    assert event["pins"] == [
        {"pin": 1, "alive_before": True, "alive_after": True},
        {"pin": 2, "alive_before": True, "alive_after": False},
    ]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: s.buffer(), "pages or length"),
        (lambda s: s.buffer(pages=1, length=1), "pages or length"),
        (lambda s: s.buffer(pages=0), "at least one page"),
        (lambda s: s.buffer(pages=1, place="kho"), "place='kho'"),
        (lambda s: s.buffer(pages=1, place={"unpinnable": [1]}), "page 1 is not in the buffer"),
        (lambda s: s.buffer(pages=1, place={"kho": [0]}), "is not known"),
        (lambda s: s.buffer(pages=1, place={"cma": 2}), "page 1 is not in the buffer"),
        (lambda s: s.buffer(pages=1, place={"cma": 0}), "asks for no page"),
        (lambda s: s.buffer(pages=1, backing="tape"), "backing='tape'"),
        (lambda s: s.pin(s.buffer(pages=1), kind="glue"), "kind='glue'"),
        (lambda s: s.pin(s.buffer(pages=1), pages=[1]), "page 1 is not in buffer 1"),
        (lambda s: s.pin(s.buffer(pages=1), pages=[]), "pins nothing"),
        (lambda s: s.buffer(pages=1).write(b"x" * PAGE_SIZE, 1), "are not in buffer 1"),
        (lambda s: s.step("x", seq=1), "cannot take the key 'seq'"),
        (lambda s: s.transfer(s.register(s.buffer(pages=1)), "SEND"), "opcode='SEND'"),
    ],
)
def test_mistakes_of_a_body(bench: Bench, call: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call(bench.stage)


def test_a_freed_buffer(bench: Bench) -> None:
    buffer = bench.stage.buffer(pages=1)
    bench.stage.pin(buffer)
    buffer.free()
    buffer.free()
    assert [event["event"] for event in bench.events()] == ["buffer", "pin", "release", "free"]
    with pytest.raises(UsageError, match="after it was freed"):
        buffer.read(1)


def test_bytes(bench: Bench) -> None:
    buffer = bench.stage.buffer(pages=1)
    before = buffer.checksum()
    buffer.write(b"abc", 10)
    assert buffer.read(3, 10) == b"abc"
    assert buffer.checksum() != before


def test_unmet_note_step(bench: Bench) -> None:
    bench.stage.note("two\nlines")
    bench.stage.step("measure", share=0.5)
    with pytest.raises(Unmet, match="because"):
        bench.stage.unmet("luck", "because", "try again")
    note, step = bench.events()
    assert note["text"] == "two lines"
    assert step["share"] == 0.5


def test_a_transfer_that_fails_is_data(bench: Bench) -> None:
    assert bench.stage.transfer(bench.stage.register(bench.stage.buffer(pages=1))) is False
    [event] = bench.events("transfer")
    assert (event["errno"], event["intact"]) == ("ETIMEDOUT", False)
    assert bench.backend._device.open == 1


def test_the_trace_goes_with_its_call(tmp_path: Path) -> None:
    calls: list[str] = []

    class Tracer:
        def begin(self, *, stack: bool = False) -> str:
            calls.append("begin")
            return "token"

        def end(self, token: str, *, succeeded: bool = False) -> dict[str, Any]:
            calls.append(f"end {token}")
            return {"status": "complete", "events": [len(calls)]}

    bench = Bench(tmp_path, FakeBackend(), tracer=Tracer())
    buffer = bench.stage.buffer(pages=1, place="unpinnable")
    bench.stage.pin(buffer)
    bench.stage.register(buffer)
    pinned, failed = bench.events("pin", "register")
    assert calls == ["begin", "end token"] * 2
    assert pinned["trace"]["events"] == [2]
    assert failed["trace"]["events"] == [4]


def test_what_the_kernel_counts_and_what_is_mapped_stand_beside_a_registration(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VmPin around the call; of a refused one its mappings, and whether the kernel refuses such files."""
    counted = iter(({"vmpin": 8192, "vmlck": 4096}, {"vmpin": 8192, "vmlck": 4096}, {"vmpin": 12288}))
    monkeypatch.setattr(own_process.Locked, "read", lambda _: dict(next(counted)))
    shared = ["7f0000000000-7f0000008000 rw-s 00000000 08:01 77 /data/file"]
    monkeypatch.setattr(bench.backend, "mappings", lambda address, length: shared)
    monkeypatch.setattr(own_process, "refuses_writable_files", lambda: True)
    buffer = bench.stage.buffer(pages=8)
    bench.stage.register(buffer)
    succeeded = bench.events("register")[-1]
    assert succeeded["limits"] == {"vmpin": 8192, "vmlck": 4096}
    assert "mappings" not in succeeded
    bench.backend._device.register = lambda *a, **k: (_ for _ in ()).throw(OSError(errno.EFAULT, ""))
    bench.stage.register(buffer)
    refused = bench.events("register")[-1]
    assert refused["limits"] == {"vmpin": 8192, "vmlck": 4096, "vmpin_after": 12288}
    assert refused["mappings"] == shared
    assert refused["refuses_writable_files"] is True


def test_what_a_refused_range_is_mapped_to(bench: Bench) -> None:
    """It is read when the call has returned; a success need not pay for it."""
    buffer, other = bench.stage.buffer(pages=2), bench.stage.buffer(pages=1)
    bench.stage.register(buffer).deregister()
    bench.backend._device.register = lambda *a, **k: (_ for _ in ()).throw(OSError(errno.EFAULT, ""))
    bench.stage.register(buffer)
    bench.stage.register(buffer, length=other.address + other.length - buffer.address)
    bench.stage.register(buffer, address=1 << 20, length=1)
    taken, refused, both, none = bench.events("register")
    assert "mappings" not in taken
    assert refused["mappings"] == [buffer._memory.vma()]
    assert both["mappings"] == [buffer._memory.vma(), other._memory.vma()]
    assert none["mappings"] == []
