"""The JSON Schemas hold for records and verdicts, and refuse what is malformed."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import record_builder as build

from regrepro.judge import judge_record
from regrepro.record.events import EVENTS, CallTrace, Event, Header, PageRuns
from regrepro.record.schema import schema_text, with_tables

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[3]
RECORDS = {
    "reproduced": build.reproduced_record,
    "get": build.get_record,
    "partly-pinned": build.partly_pinned_record,
    "kernel": build.kernel_record,
    "longterm": build.longterm_record,
    "placement": build.placement_record,
    "no-pin": build.no_pin_record,
    "map-checked": build.map_checked_record,
}


def load(name: str) -> Any:
    return json.loads(resources.files("regrepro").joinpath("schema", name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def line_schema() -> Any:
    schema = load("record-2.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture(scope="module")
def verdicts_schema() -> Any:
    schema = load("verdicts-1.json")
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_schema_and_tables_are_made_from_the_classes() -> None:
    made = "python -m regrepro.record.schema . makes it anew"
    kept = resources.files("regrepro").joinpath("schema", "record-2.json").read_text(encoding="utf-8")
    assert kept == schema_text(), made
    page = (ROOT / "docs/record.md").read_text(encoding="utf-8")
    assert page.count("<!-- generated: ") == 4
    assert page == with_tables(page), made


def test_every_key_has_its_sentence() -> None:
    """Of the header and the events; what keys of nested values are, these sentences say."""
    for cls in (Header, PageRuns, CallTrace, *EVENTS.values()):
        own = [item for item in fields(cls) if item.name not in {item.name for item in fields(Event)}]
        assert cls.__doc__
        assert [item.name for item in own if not item.metadata.get("doc")] == [], cls


@pytest.mark.parametrize("name", RECORDS)
def test_records_and_their_verdicts_hold(name: str, line_schema: Any, verdicts_schema: Any) -> None:
    record = RECORDS[name]()
    for line in (record.header, *record.events):
        line_schema.validate(json.loads(json.dumps(line)))
    verdicts_schema.validate(json.loads(json.dumps(judge_record(record))))


def test_unknown_keys_and_event_types_are_allowed(line_schema: Any) -> None:
    line_schema.validate({"seq": 1, "t": 0.5, "event": "of-the-future", "what": 1})
    event = build.find(build.reproduced_record(), "register") | {"new": [1]}
    line_schema.validate(event)


@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("register", {"errno": 12}),
        ("register", {"errno": "Cannot allocate memory"}),
        ("register", {"before": {"pages": 8}}),
        ("register", {"address": "0x7f00"}),
        ("register", {"trace": {"status": "complete"}}),
        ("register", {"trace": {"status": "off"}}),
        ("register", {"trace": {"status": "fine", "why": ""}}),
        ("pin", {"kind": "gentle"}),
        ("buffer", {"place": "somewhere"}),
        ("scenario-end", {"outcome": "well"}),
        ("scenario-end", {"outcome": "killed"}),
        ("scenario-begin", {"contract": None}),
        ("memory-map", {"complete": "yes"}),
        ("memory-map", {"unpinnable_ranges": [[1, 2]]}),
        ("release", {"seq": 0}),
    ],
)
def test_malformed_events_are_refused(event: str, change: dict[str, Any], line_schema: Any) -> None:
    line = build.find(build.reproduced_record(), event) | change
    assert not line_schema.is_valid(line)


@pytest.mark.parametrize("event", sorted({item["event"] for item in build.reproduced_record().events}))
def test_every_listed_key_is_required(event: str, line_schema: Any) -> None:
    required = load("record-2.json")["$defs"][f"event-{event}"]
    keys = [key for part in required.get("allOf", [required]) for key in part.get("required", [])]
    assert keys or event == "note"
    for key in keys:
        line = dict(build.find(build.reproduced_record(), event))
        del line[key]
        assert not line_schema.is_valid(line), key


@pytest.mark.parametrize("key", ["schema", "version", "started", "run", "node", "lab", "stand_ins"])
def test_every_header_key_is_required(key: str, line_schema: Any) -> None:
    header = build.header()
    del header[key]
    # Without `schema` it is no header, and no event either.
    assert not line_schema.is_valid(header)


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "proven"},
        {"verdict": "not-reproduced"},
        {"layer": "memory"},
        {"layer": "mkey"},
        {"basis": "pin"},
        {"pin_owner": "cuda"},
        {"reason": ""},
        {"evidence": {"pages": {"value": 8, "how": "guessed", "source": ""}}},
    ],
)
def test_verdicts_that_contradict_themselves_are_refused(
    change: dict[str, Any], verdicts_schema: Any
) -> None:
    verdicts = judge_record(build.reproduced_record())
    verdicts["verdicts"][0] |= change
    assert not verdicts_schema.is_valid(verdicts)
