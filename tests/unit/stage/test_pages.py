"""The states of a pass' pages: what is read again, what is inferred, and that none is written twice."""

from __future__ import annotations

import errno

import pytest
from stage_fakes import Bench, places

from regrepro.errors import Unmet


def test_hidden_pages_are_not_told_as_absent(bench: Bench) -> None:
    bench.backend.hidden = True
    bench.stage.buffer(pages=8)
    [made] = bench.events("buffer")
    assert made["pages"] is None
    assert "hidden" in made["pages_unknown"]
    with pytest.raises(Unmet, match="hidden"):
        bench.stage.buffer(pages=8, place="unpinnable")


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


def test_without_the_kernels_counters_everything_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.backend, "movements", lambda: None)
    buffer = bench.stage.buffer(pages=2000, place="any")
    before = bench.backend.snapshots
    bench.stage.register(buffer).deregister()
    bench.stage.register(buffer).deregister()
    assert bench.backend.snapshots - before == 4
