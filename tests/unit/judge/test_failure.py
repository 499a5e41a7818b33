"""Which batches of a registration were tried."""

from __future__ import annotations

import json

import pytest
import record_builder as build
from record_builder import PAGE, Builder, Record, state

from unit.judge.judging import judged


def batch_record(pages: int, pinned: int, moved_to: int, left: int = 1) -> Record:
    """`pages` unpinnable pages, one pinned; after the failure the pages before `moved_to` have moved."""
    builder = Builder()
    builder.memory_map()
    cma, out = [n + 1 for n in range(pages)], [n + 50000 for n in range(pages)]
    places = {"place": [[0, pages, "cma"]]}
    refs = [1025 if n == pinned else 1 for n in range(pages)]
    after = [out[n] if n < moved_to and n != pinned else cma[n] for n in range(pages)]
    mixed = {
        "place": build.runs(["ordinary" if pfn >= 50000 else "cma" for pfn in after]),
    }
    builder.begin(controls={"no-pin": "pin=none"})
    builder.buffer(state(cma, **places))
    builder.pin(state(cma, **places), state(cma, refs, **places), ranges=[[pinned * PAGE, PAGE]])
    before = state(cma, refs, **places)
    moved = sum(1 for pfn in after if pfn >= 50000)
    trace = build.failing_trace(left, moved=moved)
    builder.register(before, state(after, refs, **mixed), errno="ENOMEM", pins=[1], trace=trace)
    builder.release(state(after, **mixed))
    builder.register(state(after, **mixed), state(out, 1025), 2)
    builder.end()
    builder.begin(control="no-pin", contract="none", controls={"no-pin": "pin=none"})
    builder.buffer(state(cma, **places))
    builder.register(state(cma, **places), state(out, 1025))
    builder.end()
    return builder.done()


@pytest.mark.parametrize(
    ("pinned", "moved_to", "left", "due"),
    [
        (3, 512, 1, "reproduced"),  # the first batch of 512; what lies behind was never tried
        (600, 1024, 1, "reproduced"),  # the second batch
        (600, 1025, 1, "reproduced"),  # more moved than had to: no contradiction
        (1024, 1025, 1, "reproduced"),  # the last page, a batch of its own
        (3, 300, 213, "unmet"),  # pages of the batch that did not move, and no pin on them
        (600, 512, 512, "unmet"),
    ],
)
def test_only_batches_that_were_tried_count(pinned: int, moved_to: int, left: int, due: str) -> None:
    assert judged(batch_record(1025, pinned, moved_to, left))["verdict"] == due


def test_batches_are_as_long_as_a_page_holds_pointers() -> None:
    """With 64 KiB pages a batch is 8,192 pages: none of 1,025 lies behind it."""
    record = batch_record(1025, 3, 512, 514)
    text = json.dumps({"header": record.header, "events": record.events})
    scaled = json.loads(text)
    scaled["header"]["node"]["page_size"] = 65536
    for event in scaled["events"]:
        for key in ("length",):
            if key in event:
                event[key] *= 16
        if event.get("page_size"):
            event["page_size"] = 65536
        if "ranges" in event:
            event["ranges"] = [[offset * 16, length * 16] for offset, length in event["ranges"]]
    assert judged(Record(scaled["header"], scaled["events"]))["verdict"] == "unmet"
