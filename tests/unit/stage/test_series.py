"""Series of registrations: each its own line, the refusal tried again in full, all taken back."""

from __future__ import annotations

import pytest
from stage_fakes import Bench

from regrepro.errors import UsageError
from regrepro.stage.ports import PAGE_SIZE


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
