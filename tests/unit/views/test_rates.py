"""Rates of failure beside a checkpoint, and what CUDA told of the GPU: in a record, and in the views."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import record_builder

from regrepro import judge
from regrepro.report.commands import make
from regrepro.views import terminal
from regrepro.views.rates import Rate, as_text, rates


def step(setting: str, failed: Any, rounds: Any = 100, **more: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "name": "checkpoint-rate",
        "scenario": "checkpoint_fork",
        "variant": "default",
        "control": None,
        "setting": setting,
        "failed": failed,
        "rounds": rounds,
        "interval_95": [0.1334, 0.2888],
        "rounds_with_unpinnable_pages": 21,
        **more,
    }


KEY = ("checkpoint_fork", "default")


def test_the_rates_of_a_record_in_their_order() -> None:
    found = rates([step("without checkpoint", 20), step("registered after", 30)])[KEY]
    assert [rate.setting for rate in found] == ["without checkpoint", "registered after"]
    assert found[0].cells == ("without checkpoint", "20 of 100", "20%", "13.3% to 28.9%", "21")


@pytest.mark.parametrize(
    "event",
    [
        step("x", 1, 0),
        step("x", 2, 1),
        step("x", True),
        step("x", 1) | {"interval_95": None},
        step("x", 1) | {"interval_95": [0, 2]},
        step("x", 1) | {"control": "no-pin"},
        step("x", 1) | {"name": "look"},
    ],
)
def test_what_is_no_rate_is_left_out(event: dict[str, Any]) -> None:
    assert rates([event]) == {}


@pytest.mark.parametrize("width", [40, 76, 100])
def test_every_bar_lies_in_its_frame(width: int) -> None:
    found = [Rate("none", 0, 9, 0.0, 0.3, None), Rate("all of them", 9, 9, 0.7, 1.0, 9)]
    lines = as_text(found, width)
    assert len({len(line) for line in lines}) == 1 or width == 40
    assert all(len(line) <= max(width, 48) for line in lines)
    if width > 70:
        assert "|#" in lines[0]
        assert lines[1].endswith("#|")


def record_with(*events: dict[str, Any]) -> Any:
    """The record of a scenario that reproduces, with more events in the scenario's own pass."""
    record = copy.deepcopy(record_builder.reproduced_record())
    at = next(n for n, event in enumerate(record.events) if event["event"] == "scenario-end")
    place = record_builder.find(record, "scenario-begin")
    for event in reversed(events):
        keys = {key: place[key] for key in ("t", "scenario", "variant", "control") if key in place}
        record.events.insert(at, {**event, **keys})
    for number, event in enumerate(record.events, 1):
        event |= {"seq": number, "t": number / 100}
    return record


def written(directory: Path, record: Any) -> Path:
    lines = [record.header, *record.events]
    (directory / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "verdicts.json").write_text(json.dumps(judge.judge_record(record)))
    return directory


def test_every_view_shows_the_rates_as_a_table(tmp_path: Path) -> None:
    record = record_with(step("without checkpoint", 20), step("registered after", 31))
    out = io.StringIO()
    terminal.show(judge.judge_record(record), record, "runs/1", file=out, width=100)
    run = written(tmp_path, record)
    for shown in (out.getvalue(), make(run, "text"), make(run, "markdown"), make(run, "html")):
        rows = [line for line in shown.splitlines() if "31%" in line]
        assert rows, shown
        assert "registered after" in rows[0] and "31 of 100" in rows[0] and "13.3% to 28.9%" in rows[0]


GPU = {
    "event": "step",
    "name": "cuda-memory",
    "call": "cudaHostAlloc",
    "buffer": 1,
    "cuda_versions": {"runtime": "12.4", "driver": "12.2"},
    "gpu": {
        "name": "NVIDIA H100",
        "memory": 80 << 30,
        "compute_capability_major": 9,
        "compute_capability_minor": 0,
        "pci_domain_id": 0,
        "pci_bus_id": 0x1B,
        "pci_device_id": 0,
    },
    "gpu_sources": {
        "libcudart.so.12, by the C core": ["runtime"],
        "cuda-bindings 13.5.0, cuda.bindings.driver": ["driver", "name"],
    },
    "stand_in": None,
}


def test_a_report_tells_the_gpu_and_who_told_it(tmp_path: Path) -> None:
    text = " ".join(make(written(tmp_path, record_with(GPU)), "text").split())
    assert "NVIDIA H100, 80 GiB, compute capability 9.0, PCI 0000:1b:00, CUDA runtime 12.4" in text
    assert "told by libcudart.so.12, by the C core, and cuda-bindings 13.5.0, cuda.bindings.driver" in text


def test_what_cuda_refused_and_a_stand_in_s_gpu_are_no_properties(tmp_path: Path) -> None:
    refused = GPU | {"gpu": {"name": "CUDA_ERROR_NO_DEVICE", "memory": "ENOSYS"}, "gpu_sources": None}
    text = " ".join(make(written(tmp_path, record_with(refused)), "text").split())
    assert "CUDA_ERROR_NO_DEVICE, CUDA runtime 12.4, CUDA driver 12.2" in text
    stand_in = record_with(GPU | {"stand_in": "standin:pin"})
    assert "H100" not in make(written(tmp_path, stand_in), "text")
