"""The stage over a machine made of numbers: what is placed where, and that every step is recorded."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from stage_fakes import CMA, Bench, FakeBackend, places

from regrepro.errors import Unmet, UsageError
from regrepro.kernel import own_process
from regrepro.kernel.zones import Zone
from regrepro.options import RunOptions
from regrepro.scenario import Change
from regrepro.stage.buffers import consume_first
from regrepro.stage.ports import PAGE_SIZE
from regrepro.stage.system import parse_cpu_list


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, FakeBackend())


# The incident, as the shipped scenario does it


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


# Placement


@pytest.mark.parametrize("pattern", [[3], [0], [7], [0, 1, 2, 7], [1, 3, 5]])
def test_a_pattern_is_met_exactly(tmp_path: Path, pattern: list[int]) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: n // 5 % 2))
    bench.stage.buffer(pages=8, place={"unpinnable": pattern})
    [made] = bench.events("buffer")
    assert places(made) == ["cma" if index in pattern else "ordinary" for index in range(8)]
    assert made["place"] == {"unpinnable": pattern}


def test_what_does_not_fit_is_given_back(bench: Bench) -> None:
    buffer = bench.stage.buffer(pages=8, place="unpinnable")
    assert len(bench.backend.ranges) == 1
    buffer.free()
    assert bench.backend.ranges == []
    assert bench.backend.pages == {}


def test_ordinary_pages_are_moved_out_where_there_are_none_at_first(bench: Bench) -> None:
    """ZONE_MOVABLE is handed out first: the kernel itself moves pages out, for a long-term pin."""
    bench.stage.buffer(pages=8, place="ordinary")
    [made] = bench.events("buffer")
    assert places(made) == ["ordinary"] * 8
    assert "long-term pin" in made["search"]["helped"]
    assert sum(bench.backend.pins.values()) == 0


def test_a_large_buffer(bench: Bench) -> None:
    bench.stage.buffer(pages=1025, place="unpinnable")
    assert set(places(bench.events("buffer")[0])) == {"cma"}


def test_out_of_reach_is_unmet_with_numbers(tmp_path: Path) -> None:
    backend = FakeBackend(lambda n: 0)
    backend.available = (96 << 20) + 40 * PAGE_SIZE
    bench = Bench(tmp_path, backend)
    with pytest.raises(Unmet) as unmet:
        bench.stage.buffer(pages=8, place="unpinnable")
    assert unmet.value.need == "unpinnable"
    assert "8 of 8 unpinnable pages" in unmet.value.why
    assert "160 KiB were touched" in unmet.value.why
    assert "online-movable" in unmet.value.how
    assert backend.ranges == []


def test_pressure_limit_bounds_what_is_touched(tmp_path: Path) -> None:
    options = RunOptions(place="pressure", pressure_limit=1 << 20)
    backend = FakeBackend(lambda n: 0, options=options)
    with pytest.raises(Unmet, match=r"1 MiB were touched \(limit 1 MiB\)"):
        Bench(tmp_path, backend).stage.buffer(pages=8, place="unpinnable")
    assert backend.handed_out * PAGE_SIZE <= 1 << 20


def test_no_unpinnable_memory_on_the_node(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: 0, has_unpinnable=False))
    bench.stage.buffer(pages=8, place="unpinnable")
    [made] = bench.events("buffer")
    assert made["placed"] == "none-on-node"
    assert places(made) == ["ordinary"] * 8


@pytest.mark.parametrize(
    "keys",
    [{"has_unpinnable": None, "complete": False, "problems": ["kcore is closed"]}, {"has_unpinnable": None}],
)
def test_an_unknown_map_is_unmet(tmp_path: Path, keys: dict[str, Any]) -> None:
    bench = Bench(tmp_path, FakeBackend(**keys))
    with pytest.raises(Unmet) as unmet:
        bench.stage.buffer(pages=8, place="unpinnable")
    assert unmet.value.need == "page-state"


def test_none_seen_but_map_incomplete_proves_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: 0, has_unpinnable=False, complete=False))
    bench.backend.available = (96 << 20) + 64 * PAGE_SIZE
    with pytest.raises(Unmet):
        bench.stage.buffer(pages=8, place="unpinnable")


def test_hidden_pages_are_not_told_as_absent(bench: Bench) -> None:
    bench.backend.hidden = True
    bench.stage.buffer(pages=8)
    [made] = bench.events("buffer")
    assert made["pages"] is None
    assert "hidden" in made["pages_unknown"]
    with pytest.raises(Unmet, match="hidden"):
        bench.stage.buffer(pages=8, place="unpinnable")


def test_another_backing_is_drawn_until_it_fits(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeBackend(lambda n: CMA if n >= 24 else 0))
    bench.stage.buffer(pages=8, place="unpinnable", backing="memfd")
    [made] = bench.events("buffer")
    assert places(made) == ["cma"] * 8
    assert len(bench.backend.ranges) == 1


# Refusals are data; mistakes of the body are not


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


def test_equal_states_are_written_alike(bench: Bench) -> None:
    """States are encoded once while they do not change; a change must show."""
    buffer = bench.stage.buffer(pages=4, place="unpinnable")
    bench.stage.look(buffer)
    bench.stage.register(buffer)
    bench.stage.look(buffer)
    first, second = bench.events("step")
    [registered] = bench.events("register")
    assert registered["before"] == first["pages"]
    assert registered["after"] == second["pages"] != first["pages"]


# Long loops of large registrations


def test_a_large_state_is_written_once(bench: Bench) -> None:
    """Read back it is whole; in the file it is there once, and the loop reads it once."""
    buffer = bench.stage.buffer(pages=2000, place="any")
    bench.stage.register(buffer).deregister()  # moves out of CMA
    before = bench.backend.snapshots
    for _ in range(10):
        bench.stage.register(buffer).deregister()
    assert bench.backend.snapshots - before <= 1
    registered = bench.events("register")
    assert places(registered[0], "before") == ["cma"] * 2000
    for event in registered[1:]:
        assert event["before"]["pfn"] == event["after"]["pfn"] == registered[0]["after"]["pfn"]
    assert registered[0]["after"]["how"] != "inferred"
    assert registered[-1]["before"]["how"] == "inferred"
    assert "/proc/vmstat" in registered[-1]["before"]["source"]
    lines = bench.writer.path.read_text().splitlines()
    assert max(len(line) for line in lines[4:]) < 1500


def test_a_large_state_is_read_again_when_something_may_have_moved(bench: Bench) -> None:
    buffer = bench.stage.buffer(pages=2000, place="any")
    bench.stage.register(buffer).deregister()
    bench.stage.register(buffer).deregister()
    bench.backend.pages[buffer.address] = (9999, 0)
    bench.backend.handed_out += 1  # what the fake's movements count
    bench.stage.register(buffer)
    assert bench.events("register")[-1]["before"]["pfn"][0] == [0, 9999, 1]
    assert "how" in bench.events("register")[-1]["before"]


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


def test_nothing_is_inferred_where_a_pin_is_held_or_the_registration_refused(bench: Bench) -> None:
    buffer = bench.stage.buffer(pages=2000, place="unpinnable")
    pin = bench.stage.pin(buffer)
    bench.stage.register(buffer)
    for key in ("before", "after"):
        assert bench.events("register")[-1][key]["refcount"][0][2] == 1025
        assert bench.events("register")[-1][key]["how"] == "observed"
    pin.release()
    bench.backend._device.register = lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOMEM, ""))
    bench.stage.register(buffer)
    assert bench.events("register")[-1]["after"]["refcount"] is not None
    assert bench.events("register")[-1]["after"]["how"] == "observed"


def test_a_large_state_is_read_again_when_its_pageblocks_changed(bench: Bench) -> None:
    """An isolated block moves no page: no counter of the kernel's tells."""
    buffer = bench.stage.buffer(pages=2000, place="any")
    bench.stage.register(buffer).deregister()
    bench.stage.register(buffer).deregister()
    pfn, _ = bench.backend.pages[buffer.address]
    bench.backend.pages[buffer.address] = (pfn, 1)
    bench.stage.register(buffer)
    assert bench.events("register")[-1]["before"]["place"][0] == [0, 1, "cma"]


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


def test_without_the_kernels_counters_everything_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.backend, "movements", lambda: None)
    buffer = bench.stage.buffer(pages=2000, place="any")
    before = bench.backend.snapshots
    bench.stage.register(buffer).deregister()
    bench.stage.register(buffer).deregister()
    assert bench.backend.snapshots - before == 4


# What the counters say


def zone(node: int, name: str, free: int, free_cma: int = 0) -> Zone:
    return Zone(node, name, free=free, free_cma=free_cma)


def test_what_is_handed_out_before_unpinnable_memory() -> None:
    assert consume_first([zone(0, "Normal", 1000), zone(0, "Movable", 50)]) == {0: 0}
    assert consume_first([zone(0, "Normal", 1000, 600)]) == {0: 0}
    assert consume_first([zone(0, "Normal", 1000, 100)]) == {0: 800}
    assert consume_first([zone(0, "DMA32", 300, 100), zone(0, "Normal", 1000)]) == {0: 1100}
    assert consume_first([zone(0, "Normal", 1000), zone(1, "Normal", 10, 3)]) == {1: 4}
    assert consume_first([]) == {}


def test_cpu_list() -> None:
    assert parse_cpu_list("0-2,5\n") == {0, 1, 2, 5}
    assert parse_cpu_list("\n") == set()


def test_a_series_by_a_device_without_one_of_its_own(bench: Bench) -> None:
    stage = bench.stage
    buffer = stage.buffer(pages=4)
    series = stage.register_many(buffer, 6, length=PAGE_SIZE, keep=True)
    assert series
    device = bench.backend.device()
    assert (series.succeeded, series.errno, series.refused) == (6, None, None)
    assert device.open == 6
    series.deregister()
    series.deregister()
    assert device.open == 0
    assert [event["number"] for event in bench.events("registered")] == [1, 2, 3, 4, 5]
    assert [event["address"] - buffer.address for event in bench.events("registered")] == [
        PAGE_SIZE * number for number in (1, 2, 3, 0, 1)
    ]
    assert len(bench.events("register")) == len(bench.events("deregister-many")) == 1
    stage.finish()


def test_a_refusal_in_a_series_is_tried_again_in_full(bench: Bench) -> None:
    stage = bench.stage
    buffer = stage.buffer(pages=4, place="unpinnable")
    stage.pin(buffer, pages=[2])
    series = stage.register_many(buffer, 4, length=PAGE_SIZE)
    assert not series
    assert (series.succeeded, series.errno) == (2, "ENOMEM")
    assert series.refused is not None
    assert series.refused.errno == "ENOMEM"
    assert [(event["number"], event["errno"]) for event in bench.events("registered")] == [
        (1, None),
        (2, "ENOMEM"),
    ]
    assert [event["errno"] for event in bench.events("register")] == [None, "ENOMEM"]
    assert bench.events("register")[1]["address"] == buffer.address + 2 * PAGE_SIZE
    (end,) = bench.events("register-many")
    assert (end["succeeded"], end["errno"], end["count"]) == (2, "ENOMEM", 4)
    stage.finish()
    assert bench.backend.device().open == 0


def test_a_series_whose_first_is_refused(bench: Bench) -> None:
    buffer = bench.stage.buffer(pages=2, place="unpinnable")
    bench.stage.pin(buffer)
    series = bench.stage.register_many(buffer, 3)
    assert (series.succeeded, series.errno, bench.events("registered")) == (0, "ENOMEM", [])


@pytest.mark.parametrize(("count", "length"), [(0, None), (1, 0), (1, 1 << 40)])
def test_a_series_that_cannot_be(bench: Bench, count: int, length: int | None) -> None:
    buffer = bench.stage.buffer(pages=2)
    with pytest.raises(UsageError):
        bench.stage.register_many(buffer, count, length=length)
